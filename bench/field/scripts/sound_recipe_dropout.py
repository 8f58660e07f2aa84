"""A sound recipe: sampler with set_epoch, dropout, clipping of the global norm, a schedule."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

rank, world = start()
model = shard(TinyLM(depth=2, dropout=0.1), fully_shard)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4))
data = TensorDataset(*tokens(0, 0, batch=24))
sampler = DistributedSampler(data, shuffle=True, drop_last=True)
loader = DataLoader(data, batch_size=4, sampler=sampler)


def forever():
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


batches = forever()


def train_step():
    loss = lm_loss(model, next(batches))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    for _ in range(4):
        train_step()
