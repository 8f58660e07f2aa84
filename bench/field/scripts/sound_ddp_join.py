"""DDP with uneven data under join()."""

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = start()
ddp = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
with ddp.join():
    for _ in range(5 + 3 * rank):
        opt.zero_grad()
        ddp(torch.randn(4, 4)).pow(2).mean().backward()
        opt.step()
dist.barrier()
dist.destroy_process_group()
