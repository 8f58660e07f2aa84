"""'The first rank prepares the data': the others wait in a barrier that rank 0 forgets to enter."""

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, start, tokens
from torch.nn.parallel import DistributedDataParallel as DDP


def load_and_cache(rank):
    if rank != 0:
        dist.barrier()  # <- here
    cache = [tokens(i, 0) for i in range(20)]
    return cache[rank::4]


def main():
    rank, world = start()
    everything = load_and_cache(rank)
    model = DDP(TinyLM(depth=1))  # <- here
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in everything:
        lm_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
