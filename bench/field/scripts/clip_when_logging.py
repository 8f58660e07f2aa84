"""Rank 0 alone computes and clips the norm of the gradients, in the step that it logs."""

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
is_main = rank == 0
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    loss = lm_loss(model, tokens(step, rank))
    loss.backward()
    if is_main and step % 4 == 3:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- here
        print(step, loss.item(), norm.full_tensor().item(), flush=True)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
