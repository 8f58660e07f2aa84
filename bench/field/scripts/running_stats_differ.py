"""BatchNorm in a sharded model: every rank keeps running statistics of its own data."""

import torch
from common import start
from torch import nn
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))  # <- here
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(100 + rank)


def train_step():
    x = torch.randn(16, 6) + rank
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


for _ in range(3):
    train_step()
