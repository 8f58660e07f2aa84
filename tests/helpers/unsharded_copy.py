"""Modules made of blocks, trained beside an unsharded copy, and what the engine announced of it."""

import copy
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.parity import one_batch, train_beside
from tests.helpers.recording_probe import Recording, recording
from tests.helpers.small_models import Block, adamw
from workbench.engine import fully_shard

DIM = 5


def data(step: int) -> torch.Tensor:
    """Return an input [4, DIM], different for every rank and step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, DIM, generator=generator)


def compare(
    make: Callable[[], nn.Module],
    shard: Callable[[nn.Module], object],
    loss: Callable[[nn.Module, int], torch.Tensor],
    steps: int = 2,
) -> Recording:
    """Train a plain and a sharded copy alike; returns the last step's record."""
    torch.manual_seed(0)
    plain = make()
    sharded = copy.deepcopy(plain)

    def run(model: nn.Module, step: int) -> torch.Tensor:
        record.clear()
        value = loss(model, step)
        value.backward()
        return value.detach()

    with recording() as record:
        shard(sharded)
        train_beside(
            plain,
            [sharded],
            steps,
            run,
            make_optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        )
    return record


def train_both(plain: nn.Module, sharded: nn.Module, steps: int = 3, before=lambda model, step: None) -> None:
    """Train both alike, with weight decay; ``before(model, step)`` is called before each step. See ``train_beside``."""

    def run(model: nn.Module, step: int) -> torch.Tensor:
        before(model, step)
        return one_batch(model, step)

    train_beside(plain, [sharded], steps, run, make_optimizer=functools.partial(adamw, weight_decay=0.1))


def blocks(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Block(DIM) for _ in range(count)))


def shard_each(model: nn.Module) -> nn.Module:
    for child in model.children():
        fully_shard(child)
    return fully_shard(model)


def squares(model: nn.Module, step: int) -> torch.Tensor:
    return model(data(step)).square().mean()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.ModuleList(UsesInner() for _ in range(2))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for middle in self.middle:
            x = middle(x)
        return self.out(x)


class UsesInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(DIM, DIM), Block(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x)))
