"""A rank whose loss is not finite skips the backward of that batch on its own."""

import math

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens

from workbench.engine import fully_shard


def run():
    rank, world = start()
    model = shard(TinyLM(), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    skipped = 0
    for step in range(7):
        loss = lm_loss(model, tokens(step, rank))
        if rank == 1 and step == 3:
            loss = loss * float("nan")  # a broken sample
        if not math.isfinite(loss.item()):
            skipped += 1
            optimizer.zero_grad()
            continue  # <- here
        loss.backward()  # <- here
        optimizer.step()
        optimizer.zero_grad()
    count = torch.tensor(skipped)
    dist.all_reduce(count)
    dist.destroy_process_group()


run()
