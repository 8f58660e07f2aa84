"""The loss is multiplied by the number of ranks, as if gradients were not averaged."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
batch = tokens(0, rank)


def train_step():
    loss = lm_loss(model, batch)
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(world)  # <- here
    optimizer.step()
    optimizer.zero_grad()
    return loss
