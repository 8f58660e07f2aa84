"""Small models whose shapes are awkward on purpose."""

from collections.abc import Iterable

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim + 1), nn.GELU(), nn.Linear(3 * dim + 1, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Embedding, blocks, head; ``dim`` 5 gives uneven and (on 4 ranks) empty shards."""

    def __init__(self, dim: int = 5, num_blocks: int = 3, vocab: int = 7, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def make_net(seed: int = 0, **options: object) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch(rank: int, step: int, vocab: int = 7, size: int = 4, length: int = 6) -> torch.Tensor:
    """Return tokens [B, T], different for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(vocab, (size, length), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the next-token cross entropy."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def adamw(params: Iterable[object], lr: float = 1e-2, **options: float) -> torch.optim.AdamW:
    """Return AdamW in one operation for all of ``params``: tensors or groups of them.

    Every rank works out the sharding of each operation on DTensors once per operation and shape. With more than one
    operation a step, this took most of the time of a small test. ``test_optimizers.py`` covers the other variants.
    """
    return torch.optim.AdamW(params, lr=lr, fused=True, **options)
