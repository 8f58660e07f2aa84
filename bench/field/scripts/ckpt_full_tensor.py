"""Rank 0 alone gathers the full tensors of a checkpoint, while the others wait in the barrier behind it."""

import os
import tempfile

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard


def save(model, path, rank):
    if rank == 0:
        state = {}
        for name, value in model.state_dict().items():
            state[name] = value.full_tensor().cpu()  # <- here
        torch.save(state, path)
    dist.barrier()


def main():
    rank, _ = start()
    model = shard(TinyLM(), fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = os.path.join(tempfile.gettempdir(), f"field_ckpt_{os.getpid()}.pt")
    for step in range(6):
        lm_loss(model, tokens(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            save(model, where, rank)
    dist.destroy_process_group()


main()
