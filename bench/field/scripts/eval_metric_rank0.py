"""A Trainer class whose evaluation reduces its metric on rank 0 alone."""

import argparse

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard


class Trainer:
    def __init__(self, args):
        self.rank, self.world = start()
        self.model = shard(TinyLM(), fully_shard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.args = args
        self.history = []

    def train_epoch(self, epoch):
        for i in range(self.args.steps):
            loss = lm_loss(self.model, tokens(100 * epoch + i, self.rank))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self):
        total = torch.zeros(1)
        for i in range(2):
            total += lm_loss(self.model, tokens(9000 + i, self.rank))
        if self.rank == 0:
            dist.all_reduce(total)  # <- here
            self.history.append(total.item() / self.world)
            print(f"val loss {self.history[-1]:.3f}", flush=True)

    def fit(self):
        for epoch in range(self.args.epochs):
            self.train_epoch(epoch)
            self.evaluate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    Trainer(parser.parse_args()).fit()
    dist.destroy_process_group()
