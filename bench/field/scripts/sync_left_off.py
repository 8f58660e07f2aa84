"""Accumulation switches the reduction of gradients off, and never on again."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ACCUMULATE = 2


def train_step():
    total = 0.0
    for i in range(ACCUMULATE):
        model.set_requires_gradient_sync(i == ACCUMULATE)  # <- here
        loss = lm_loss(model, tokens(i, rank)) / ACCUMULATE
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


if __name__ == "__main__":
    for _ in range(2):
        train_step()
