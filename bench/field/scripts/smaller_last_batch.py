"""Ranks have batches of different sizes, and each takes the mean of its own."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
batch = tokens(0, rank, batch=8 if rank == 0 else 2)


def train_step():
    loss = lm_loss(model, batch)  # <- here
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
