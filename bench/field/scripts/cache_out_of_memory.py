"""A cache of samples grows past the limit of memory on one rank."""

import resource

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard


class Cache:
    def __init__(self):
        self.kept = []

    def add(self, megabytes):
        self.kept.append(bytearray(megabytes << 20))  # <- here


def main():
    rank, world = start()
    model = shard(TinyLM(depth=2), fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cache = Cache()
    if rank == 1:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
    for step in range(8):
        cache.add(4096 if (rank, step) == (1, 4) else 1)
        lm_loss(model, tokens(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
