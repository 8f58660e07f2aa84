"""A tiny language model, its batches, and the start of a rank, as several scripts beside this file share them."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TIMEOUT = timedelta(seconds=float(os.environ.get("FIELD_TIMEOUT_S", "1800")))


def start():
    """Join the group and return (rank, number of ranks)."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    def __init__(self, dim, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class TinyLM(nn.Module):
    def __init__(self, vocab=61, dim=24, depth=3, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, dropout) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(model, fully_shard, **options):
    """Shard each block and the rest, and return the model."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def tokens(step, rank, batch=4, length=9, vocab=61):
    """Return inputs and targets of one step on one rank."""
    made = torch.Generator().manual_seed(7919 * step + rank)
    text = torch.randint(0, vocab, (batch, length + 1), generator=made)
    return text[:, :-1], text[:, 1:]


def lm_loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
