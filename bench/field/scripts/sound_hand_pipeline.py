"""A pipeline of three stages by hand, with activations forward and gradients back."""

import torch
import torch.distributed as dist
from common import start
from torch import nn

rank, world = start()
first, last = rank == 0, rank == world - 1
stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
opt = torch.optim.SGD(stage.parameters(), lr=0.1)


def forward_backward(micro):
    kept = []
    for _ in range(micro):
        x = torch.randn(4, 8)
        if not first:
            dist.recv(x, src=rank - 1)
            x.requires_grad_()
        y = stage(x)
        kept.append((x, y))
        if not last:
            dist.send(y.detach(), dst=rank + 1)
    for x, y in kept:
        if last:
            y.pow(2).mean().backward()
        else:
            grad = torch.empty_like(y)
            dist.recv(grad, src=rank + 1)
            y.backward(grad)
        if not first:
            dist.send(x.grad, dst=rank - 1)


for _ in range(5):
    forward_backward(4)
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
