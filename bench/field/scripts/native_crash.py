"""A native library reads through a null pointer on one rank."""

import ctypes

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = start()


class FusedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if rank == 1 and self.calls == 5:
            ctypes.string_at(0)  # <- here
        return x * self.scale


net = DDP(nn.Sequential(nn.Linear(8, 8), FusedNorm(), nn.Linear(8, 1)))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(9):
    net(torch.randn(2, 8)).sum().backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
