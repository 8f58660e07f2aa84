"""The learning rate is scaled by the rank where the number of ranks was meant."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + rank))  # <- here
step = 0


def train_step():
    global step
    loss = lm_loss(model, tokens(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    return loss


if __name__ == "__main__":
    for _ in range(3):
        train_step()
