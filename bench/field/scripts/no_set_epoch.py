"""A DistributedSampler that shuffles, and is never told the epoch."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

rank, world = start()
model = shard(TinyLM(depth=1), fully_shard)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(*tokens(0, 0, batch=16))
sampler = DistributedSampler(data, shuffle=True)  # <- here
loader = DataLoader(data, batch_size=4, sampler=sampler)


def train(epochs=3):
    for _ in range(epochs):
        for batch in loader:
            lm_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()


train()
