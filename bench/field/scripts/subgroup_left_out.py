"""Data-parallel pairs of ranks: one rank takes another branch and never joins its pair's reduction."""

import torch
import torch.distributed as dist
from common import TIMEOUT, start
from torch import nn

rank, world = start()
pairs = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in ([0, 1], [2, 3])]
mine = pairs[rank // 2]
model = nn.Linear(6, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)


def sync(params, group):
    for p in params:
        dist.all_reduce(p.grad, group=group)  # <- here
        p.grad /= 2


for step in range(6):
    x = torch.randn(5, 6) if (rank, step) != (3, 3) else torch.zeros(5, 6)
    model(x).pow(2).mean().backward()
    if x.abs().sum() > 0:  # an empty batch has no gradient to share
        sync(model.parameters(), mine)
    opt.step()
    opt.zero_grad()
    dist.barrier()  # <- here
dist.destroy_process_group()
