"""Population training: ranks disagree on which of them is the best, and so on the source of a broadcast."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn


def main():
    seconds = float(os.environ.get("FIELD_TIMEOUT_S", "1800"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = nn.Linear(16, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for generation in range(4):
        x = torch.randn(8, 16)
        loss = net(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        scores = [torch.zeros(()) for _ in range(world)]
        dist.all_gather(scores, loss.detach())
        best = min(range(world), key=lambda r: scores[r].item())
        if rank == 2 and generation == 2:
            best = (best + 1) % world  # compares rounded scores, and breaks the tie otherwise
        for p in net.parameters():
            dist.broadcast(p.data, src=best)  # <- here
    dist.barrier()
    dist.destroy_process_group()


main()
