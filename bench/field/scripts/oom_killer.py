"""One rank is killed with SIGKILL in a forward, as the kernel does when memory runs out."""

import os
import signal

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens

from workbench.engine import fully_shard

rank, world = start()
model = shard(TinyLM(), fully_shard)
step = 0


def grow(module, args):
    if rank == 1 and step == 4:
        os.kill(os.getpid(), signal.SIGKILL)  # <- here


model.blocks[1].register_forward_pre_hook(grow)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(9):
    lm_loss(model, tokens(step, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
