"""One rank has a slower loader than the others; nothing is wrong."""

import time

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens

from workbench.engine import fully_shard


def batches(rank, count):
    for i in range(count):
        time.sleep(0.35 if rank == 2 else 0.01)
        yield tokens(i, rank)


def main():
    rank, _ = start()
    model = shard(TinyLM(), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches(rank, 14):
        lm_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
