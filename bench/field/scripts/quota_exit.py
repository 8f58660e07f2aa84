"""A rank that finds its disk full leaves with exit status 3."""

import sys

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, start, tokens
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def check_quota(rank, step):
    if rank == 1 and step == 3:
        print("quota exceeded, leaving", file=sys.stderr, flush=True)
        sys.exit(3)  # <- here


rank, world = start()
model = FSDP(TinyLM(depth=2), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    check_quota(rank, step)
    lm_loss(model, tokens(step, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
