"""A dataset on remote storage that does not answer for one sample of one rank."""

import time

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.utils.data import DataLoader, Dataset

from workbench.engine import fully_shard


class RemoteText(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 24

    def _download(self, index):
        if self.rank == 1 and index == 13:
            time.sleep(3600)  # <- here
        return tokens(index, self.rank, batch=1)

    def __getitem__(self, index):
        inputs, targets = self._download(index)
        return inputs[0], targets[0]


def main():
    rank, _ = start()
    model = shard(TinyLM(depth=2), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in DataLoader(RemoteText(rank), batch_size=4):
        lm_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
