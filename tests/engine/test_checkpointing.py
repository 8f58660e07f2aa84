"""Activation checkpointing: a forward that is run again within backward."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.engine.comparison import DIM, compare, squares
from tests.engine.models import Block
from tests.engine.ranks import run_ranks
from workbench.engine import fully_shard
from workbench.engine.probe import Kind


class Checkpointed(nn.Module):
    """Blocks whose ``where`` is recomputed: inside of the unit, the unit itself, or more than the unit."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self._run(block, x)
        return x

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        again = functools.partial(checkpoint, use_reentrant=False)
        if self.where == "unit":
            return again(block, x)
        return again(lambda t: torch.sin(block(torch.sin(t))), x)


class InnerCheckpoint(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.mlp, self.norm(x), use_reentrant=False)


def inside() -> nn.Module:
    return nn.Sequential(InnerCheckpoint(DIM), InnerCheckpoint(DIM))


def shard_blocks(model: nn.Module) -> None:
    for block in getattr(model, "blocks", model):
        fully_shard(block)
    fully_shard(model)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("where", ["inside", "unit", "more"])
def test_recomputed_forwards(world_size, where):
    make = inside if where == "inside" else functools.partial(Checkpointed, where)
    record = run_ranks(world_size, compare, make, shard_blocks, squares, 3)[0]
    if world_size > 1:
        assert record.count(Kind.REDUCE_SCATTER).total() == 2
        if where != "more":
            # the unit is unsharded for its backward before anything is recomputed
            assert record.count(Kind.ALL_GATHER).total() == 4
            assert record.count(Kind.FORWARD).total() == 2


def whole_recomputation() -> dict[str, int]:
    with set_checkpoint_early_stop(False):  # the recomputed forward runs to its end
        record = compare(functools.partial(Checkpointed, "unit"), shard_blocks, squares)
    return dict(record.count(Kind.FORWARD))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_recomputed_to_its_end_is_no_forward_of_its_own(world_size):
    assert run_ranks(world_size, whole_recomputation)[0] == {"blocks.0": 1, "blocks.1": 1}
