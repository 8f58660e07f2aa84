"""torch.distributed.pipelining with the 1F1B schedule."""

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank, world = start()
block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
stage = PipelineStage(block, rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
for _ in range(4):
    if rank == 0:
        schedule.step(torch.randn(8, 8))
    elif rank == world - 1:
        losses = []
        schedule.step(target=torch.zeros(8, 8), losses=losses)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
