"""The optimizer is made before the model is sharded, and holds the parameters of before."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = TinyLM(depth=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # <- here
shard(model, fully_shard)
losses = []


def train_step():
    optimizer.zero_grad()
    loss = lm_loss(model, tokens(len(losses), rank))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    return loss


if __name__ == "__main__":
    for _ in range(3):
        train_step()
