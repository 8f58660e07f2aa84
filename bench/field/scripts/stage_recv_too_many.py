"""A hand-written pipeline: the last stage expects one micro-batch more than the stage before sends."""

import argparse

import torch
import torch.distributed as dist
from common import start
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--micro", type=int, default=4)
args = parser.parse_args()
rank, world = start()
stage = nn.Linear(8, 8)
opt = torch.optim.SGD(stage.parameters(), lr=0.1)
n_micro = args.batch // args.micro
if rank == world - 1:
    n_micro = -(-(args.batch + 1) // args.micro)  # counts the padding sample too

for step in range(3):
    outputs = []
    count = n_micro if step == 2 else args.batch // args.micro
    for _ in range(count):
        x = torch.randn(args.micro, 8)
        if rank > 0:
            dist.recv(x, src=rank - 1)  # <- here
        y = stage(x)
        outputs.append(y)
        if rank < world - 1:
            dist.send(y.detach(), dst=rank + 1)
    torch.stack(outputs).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
    dist.barrier()
dist.destroy_process_group()
