"""Gradients are clipped by the norm of the shards that a rank holds."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
batch = tokens(0, rank)


def clip(limit=0.05):
    grads = [p.grad.to_local() for p in model.parameters()]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    for g in grads:
        g.mul_(limit / (norm + 1e-6))  # <- here


def train_step():
    loss = lm_loss(model, batch)
    loss.backward()
    clip()
    optimizer.step()
    optimizer.zero_grad()
    return loss
