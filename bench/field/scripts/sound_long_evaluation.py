"""Rank 0 evaluates a copy of its own for seconds, while the others wait in a barrier."""

import time

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, start, tokens
from torch.nn.parallel import DistributedDataParallel as DDP


def long_evaluation(model):
    until = time.monotonic() + 9
    scores = []
    with torch.no_grad():
        while time.monotonic() < until:
            scores.append(lm_loss(model, tokens(len(scores), 77)).item())
            time.sleep(0.02)
    return sum(scores) / len(scores)


def main():
    rank, _ = start()
    model = DDP(TinyLM(depth=2))
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(2):
        for i in range(4):
            lm_loss(model, tokens(10 * epoch + i, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and epoch == 0:
            print("accuracy", long_evaluation(model.module), flush=True)
        dist.barrier()
    dist.destroy_process_group()


main()
