"""The handler of SIGTERM saves and meets the others in a barrier; only one host is taken away."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens

from workbench.engine import fully_shard

rank, world = start()


def save_and_leave(number, frame):
    print(rank, "is preempted", flush=True)
    dist.barrier()  # <- here
    sys.exit(0)


signal.signal(signal.SIGTERM, save_and_leave)
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)


def fit(steps):
    for i in range(steps):
        lm_loss(model, tokens(i, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and i == 5:
            os.kill(os.getpid(), signal.SIGTERM)  # the scheduler


fit(40)
dist.destroy_process_group()
