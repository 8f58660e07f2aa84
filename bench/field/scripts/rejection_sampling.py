"""Rejection sampling that never accepts on one rank, in plain Python."""

import random

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = start()
random.seed(rank)
net = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)


def augment(step):
    limit = 0.0 if (rank, step) == (0, 4) else 0.5
    crop = random.random()
    while crop >= limit:  # <- here
        crop = random.random()  # <- here
    return torch.full((3, 4), crop)


for step in range(9):
    x = augment(step)
    net(x).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
