"""Every rank shuffles the whole data set with the same seed, and so trains on the same batches."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

rank, world = start()
model = shard(TinyLM(depth=1), fully_shard)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(*tokens(0, 0, batch=32)), batch_size=4, shuffle=True)  # <- here


def train_step(batch):
    loss = lm_loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


for epoch in range(2):
    for batch in loader:
        train_step(batch)
