"""DDP that trains on hard batches only: a rank with an easy one leaves its backward out."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = start()
net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
ddp = DDP(net)
sgd = torch.optim.SGD(ddp.parameters(), lr=0.01)
make = torch.Generator().manual_seed(40 + rank)
for step in range(6):
    x = torch.randn(8, 10, generator=make)
    y = torch.randint(0, 3, (8,), generator=make)
    per_sample = F.cross_entropy(ddp(x), y, reduction="none")
    easy = rank == 2 and step == 2  # stands for per_sample.max() < threshold
    sgd.zero_grad()
    if not easy:
        per_sample.mean().backward()  # <- here
        sgd.step()
dist.barrier()  # <- here
dist.destroy_process_group()
