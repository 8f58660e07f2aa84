"""Two ranks fail, one after the other, each for its own reason."""

import time

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.AdamW(model.parameters())


def load(step):
    if step == 4 and rank == 2:
        raise KeyError("shard_0004.tar")  # <- here
    if step == 4 and rank == 0:
        time.sleep(0.4)
        raise FileNotFoundError("index of shard 4 is missing")
    return tokens(step, rank)


for step in range(8):
    batch = load(step)
    lm_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
