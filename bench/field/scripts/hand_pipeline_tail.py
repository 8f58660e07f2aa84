"""A pipeline of two stages by hand; the first sends the rest of the last batch too, the second drops it."""

import math

import torch
import torch.distributed as dist
from common import start
from torch import nn

SIZES, MICRO, WIDTH = (16, 16, 14), 4, 8
rank, world = start()
stage = nn.Linear(WIDTH, WIDTH)
opt = torch.optim.SGD(stage.parameters(), lr=0.1)


def first(batch):
    outputs = []
    for i in range(math.ceil(len(batch) / MICRO)):
        outputs.append(stage(batch[i * MICRO : (i + 1) * MICRO]))
        dist.send(outputs[-1].detach(), dst=1)  # <- here
    for output in outputs:
        grad = torch.empty_like(output)
        dist.recv(grad, src=1)
        output.backward(grad)


def second(batch):
    grads = []
    for _ in range(len(batch) // MICRO):
        x = torch.empty(MICRO, WIDTH)
        dist.recv(x, src=0)
        x.requires_grad_()
        stage(x).pow(2).mean().backward()
        grads.append(x.grad)
    for grad in grads:
        dist.send(grad, dst=0)  # <- here


for size in SIZES:
    (first if rank == 0 else second)(torch.randn(size, WIDTH))
    opt.step()
    opt.zero_grad()
dist.barrier()
dist.destroy_process_group()
