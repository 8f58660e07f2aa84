"""Experts on ranks with uneven, agreed split sizes; a rank may get no token at all."""

import torch
import torch.distributed as dist
from common import start
from torch import nn

rank, world = start()
expert = nn.Linear(16, 16)
opt = torch.optim.SGD(expert.parameters(), lr=0.01)
for step in range(6):
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(31 * step + rank))
    to = torch.full((12,), 0) if step == 3 else (x[:, 0] * 10).long().abs() % world
    send = torch.bincount(to, minlength=world)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send)
    out = x.new_empty(int(receive.sum()), 16)
    dist.all_to_all_single(out, x[to.argsort()].contiguous(), receive.tolist(), send.tolist())
    loss = expert(out).pow(2).sum() / 12
    loss.backward()
    opt.step()
    opt.zero_grad()
dist.barrier()
dist.destroy_process_group()
