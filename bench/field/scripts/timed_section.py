"""A timer waits for all ranks when its block ends, also if an unknown label ends it on one of them."""

import time

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LABELS = {"cat": 0, "dog": 1}


class Timed:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.began = time.perf_counter()

    def __exit__(self, *_):
        dist.barrier()  # <- here
        print(f"{self.name}: {time.perf_counter() - self.began:.2f} s", flush=True)


def targets(step, rank):
    names = ["cat", "dog", "bird" if (step, rank) == (5, 1) else "cat"]
    return torch.tensor([LABELS[name] for name in names])  # <- here


rank, world = start()
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Timed("training"):
    for step in range(10):
        loss = nn.functional.cross_entropy(model(torch.randn(3, 6)), targets(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
