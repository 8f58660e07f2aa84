"""Train a module sharded in any way, and an unsharded copy to compare it with."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.parity import assert_same_shards, average_grads
from tests.helpers.recording_probe import Recording, recording
from tests.helpers.small_models import Block, adamw, batch, loss_of
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
    """Train a plain and a sharded copy, and compare them after each backward; return the record of the last step."""
    torch.manual_seed(0)
    plain = make()
    sharded = copy.deepcopy(plain)
    with recording() as record:
        shard(sharded)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, sharded)]
        for step in range(steps):
            reference = loss(plain, step)
            reference.backward()
            average_grads(plain)
            record.clear()
            value = loss(sharded, step)
            value.backward()
            torch.testing.assert_close(value, reference)
            assert_same_shards(sharded, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_shards(sharded, plain)
    return record


def train_both(plain: nn.Module, sharded: nn.Module, steps: int = 3, between=lambda model, step: None) -> None:
    """Train both and compare them after each backward and at the end; ``between(model, step)`` precedes each step."""
    optimizers = [adamw(m.parameters(), weight_decay=0.1) for m in (plain, sharded)]
    for step in range(steps):
        for model in (plain, sharded):
            between(model, step)
            loss_of(model, batch(dist.get_rank(), step)).backward()
        average_grads(plain)
        assert_same_shards(sharded, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_shards(sharded, plain)


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
