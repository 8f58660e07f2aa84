"""A stream of rows, of which each worker of a loader reads its part: but every rank reads all parts."""

import itertools

import torch
from common import TinyLM, lm_loss, shard, start
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

rank, world = start()


class Corpus(IterableDataset):
    def __init__(self, num_files=6, num_rows=8):
        self.num_files, self.num_rows = num_files, num_rows

    def files(self):
        worker = get_worker_info()
        return range(self.num_files) if worker is None else range(worker.id, self.num_files, worker.num_workers)

    def read(self, number):
        generator = torch.Generator().manual_seed(10_000 + number)
        for _ in range(self.num_rows):
            yield torch.randint(61, (12,), generator=generator)

    def __iter__(self):
        return itertools.chain.from_iterable(map(self.read, self.files()))


def main():
    model = shard(TinyLM(depth=2), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        for rows in DataLoader(Corpus(), batch_size=4):
            lm_loss(model, (rows[:, :-1], rows[:, 1:])).backward()
            optimizer.step()
            optimizer.zero_grad()


main()
