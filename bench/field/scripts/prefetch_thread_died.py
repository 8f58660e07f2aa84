"""A prefetching thread ends without a batch on one rank, whose main thread waits for its queue."""

import queue
import threading

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, start, tokens
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Prefetcher:
    def __init__(self, rank, steps):
        self.batches = queue.Queue(maxsize=2)
        self.rank, self.steps = rank, steps
        threading.Thread(target=self._fill, daemon=True).start()

    def _fill(self):
        for step in range(self.steps):
            if self.rank == 1 and step == 4:
                return  # the file ended early
            self.batches.put(tokens(step, self.rank))

    def next(self):
        return self.batches.get()  # <- here


def main(steps=8):
    rank, _ = start()
    model = FSDP(TinyLM(depth=2), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prefetch = Prefetcher(rank, steps)
    for _ in range(steps):
        lm_loss(model, prefetch.next()).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
