"""Stochastic depth with a seed of the rank: one rank drops a sharded block that the others run."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import TinyLM, shard, start, tokens
from torch.distributed.fsdp import fully_shard


class Dropping(TinyLM):
    def __init__(self, keep):
        super().__init__(depth=4)
        self.keep = keep

    def forward(self, ids):
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            if self.training and not self.keep(i):
                continue  # <- here
            x = block(x)  # <- here
        return self.head(x)


def main():
    rank, _ = start()
    step = 0
    drawn = {(1, 3, 2)}  # (rank, step, block): what the rank's generator draws
    model = shard(Dropping(lambda i: (rank, step, i) not in drawn), fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        inputs, targets = tokens(step, rank)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    done = torch.ones(1)
    dist.all_reduce(done)
    dist.destroy_process_group()


main()
