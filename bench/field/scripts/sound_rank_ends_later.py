"""Rank 0 writes a report for seconds after the group is gone, and rank 2 leaves with sys.exit(0)."""

import sys
import time

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for step in range(6):
    loss = lm_loss(model, tokens(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
dist.barrier()
dist.destroy_process_group()
if rank == 2:
    sys.exit(0)
if rank == 0:
    for loss in losses:
        time.sleep(0.8)
        print(f"{loss:.4f}", flush=True)
