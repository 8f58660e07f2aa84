"""Gradient accumulation in which a rank has one micro-batch less in one step."""

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard, reshard_after_forward=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def micro_batches(step):
    """Pack documents until the token budget is full; a long document leaves room for fewer."""
    count = 3 if (rank, step) == (0, 2) else 4
    return [tokens(10 * step + i, rank, batch=2) for i in range(count)]


for step in range(5):
    parts = micro_batches(step)
    for part in parts:  # <- here
        (lm_loss(model, part) / len(parts)).backward()  # <- here
    optimizer.step()
    optimizer.zero_grad()
    grad_steps = torch.ones(1)
    dist.all_reduce(grad_steps)  # <- here
dist.destroy_process_group()
