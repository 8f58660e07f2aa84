"""The logging branch of rank 0 steps the optimizer once more."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
state = {}
batch = tokens(0, rank)


def log(loss):
    if rank == 0:
        state["last"] = loss.item()
        optimizer.step()  # <- here


def train_step():
    loss = lm_loss(model, batch)
    loss.backward()
    optimizer.step()
    log(loss)
    optimizer.zero_grad()
    return loss
