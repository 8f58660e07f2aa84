"""A worker process of a DataLoader fails on a sample of one rank."""

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset


class Records(Dataset):
    def __init__(self, rank):
        self.rank = rank
        self.rows = [{"text": i, "lang": "en"} for i in range(24)]
        if rank == 0:
            self.rows[14].pop("lang")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        if row["lang"] != "en":  # <- here
            index = 0
        inputs, targets = tokens(index, self.rank, batch=1)
        return inputs[0], targets[0]


def main():
    rank, _ = start()
    model = shard(TinyLM(depth=2), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in DataLoader(Records(rank), batch_size=4, num_workers=1):  # <- here
        lm_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
