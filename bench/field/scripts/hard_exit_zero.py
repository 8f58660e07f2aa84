"""A rank ends with os._exit(0) in the middle, as a C library or a watchdog would."""

import os

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = start()
net = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
opt = torch.optim.Adam(net.parameters())
budget = 4 if rank == 0 else 100
for step in range(12):
    if step == budget:
        os._exit(0)  # <- here
    net(torch.randn(3, 8)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
