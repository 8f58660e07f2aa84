"""Gradients are clipped by a norm that the program sums over the ranks by itself, which is right."""

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
numbers = iter(range(1000))


def clip(max_norm):
    grads = [param.grad for param in model.parameters()]
    own = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    total = torch.stack([grad.square().sum() for grad in own]).sum()
    dist.all_reduce(total)
    scale = (max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for grad in own:
        grad.mul_(scale)


def train_step():
    loss = lm_loss(model, tokens(next(numbers), rank))
    loss.backward()
    clip(0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


for _ in range(4):
    train_step()
