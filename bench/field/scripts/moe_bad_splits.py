"""Experts on ranks: one rank expects fewer tokens than its peers send."""

import torch
import torch.distributed as dist
from common import start
from torch import nn

rank, world = start()
expert = nn.Linear(256, 256)
gate = nn.Linear(256, world)
opt = torch.optim.SGD(list(expert.parameters()) + list(gate.parameters()), lr=0.01)


def dispatch(x, step):
    to = gate(x).argmax(-1)
    order = to.argsort()
    send = torch.bincount(to, minlength=world)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send)
    if rank == 1 and step == 2:
        receive.clamp_(max=8)  # the capacity of this expert limits what comes, and not what is sent
    out = x.new_empty(int(receive.sum()), 256)
    with torch.no_grad():
        dist.all_to_all_single(  # <- here
            out, x[order].contiguous(), output_split_sizes=receive.tolist(), input_split_sizes=send.tolist()
        )
    return out


for step in range(4):
    x = torch.randn(96, 256)
    expert(dispatch(x, step)).pow(2).mean().backward()
    for p in expert.parameters():
        p.grad /= world
    opt.step()
    opt.zero_grad()
    dist.barrier()
dist.destroy_process_group()
