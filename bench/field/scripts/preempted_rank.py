"""The scheduler takes one host away: its rank gets SIGTERM."""

import os
import signal

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard


class Loop:
    def __init__(self):
        self.rank, self.world = start()
        self.model = shard(TinyLM(depth=2), fully_shard)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, i):
        if self.rank == 0 and i == 4:
            os.kill(os.getpid(), signal.SIGTERM)  # <- here
        lm_loss(self.model, tokens(i, self.rank)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


loop = Loop()
for i in range(9):
    loop.step(i)
dist.destroy_process_group()
