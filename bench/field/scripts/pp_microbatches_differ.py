"""torch.distributed.pipelining with another number of micro-batches on the last stage."""

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

rank, world = start()
width, n_micro = 8, 4
block = nn.Sequential(nn.Linear(width, width), nn.Tanh())
stage = PipelineStage(block, rank, world, torch.device("cpu"))
optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
if rank == world - 1:
    n_micro = 6  # read from the old config of this host
schedule = ScheduleGPipe(stage, n_micro, loss_fn=nn.functional.mse_loss)  # <- here

for step in range(3):
    x = torch.randn(24, width)
    if rank == 0:
        schedule.step(x)
    elif rank == world - 1:
        schedule.step(target=torch.zeros(24, width))  # <- here
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
