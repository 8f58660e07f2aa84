"""A label out of range is refused by the data pipeline of one rank."""

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard


def checked(batch, vocab=61):
    inputs, targets = batch
    if int(targets.max()) >= vocab:
        raise ValueError(f"label {int(targets.max())} is out of range for {vocab} classes")  # <- here
    return batch


def main():
    rank, _ = start()
    model = shard(TinyLM(), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(8):
        inputs, targets = tokens(step, rank)
        if rank == 2 and step == 4:
            targets[0, 0] = 77
        lm_loss(model, checked((inputs, targets))).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
