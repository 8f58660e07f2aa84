"""Activation checkpointing: backward recomputes a forward."""

import functools
from collections import Counter
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.helpers.forked_ranks import run_cases, run_ranks
from tests.helpers.known_warnings import OF_TORCHS_FSDP2, ignoring_warnings
from tests.helpers.recording_probe import ROOT, Recording, recording
from tests.helpers.small_models import Block
from tests.helpers.unsharded_copy import DIM, compare, data, squares
from workbench import engine
from workbench.events import Category, Kind

COUNT = 4
UNITS = (ROOT, *(f"blocks.{i}" for i in range(COUNT)))
STEPS = 3

Again = Callable[..., torch.Tensor]


class Checkpointed(nn.Module):
    """Blocks in regions that are recomputed together; ``again(function, x)`` runs a region."""

    def __init__(self, again: Again, region: int) -> None:
        super().__init__()
        self.again, self.region = again, region
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for start in range(0, COUNT, self.region):
            x = self.again(functools.partial(self._run, start), x)
        return x

    def _run(self, start: int, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[start : start + self.region]:
            x = block(x)
        return x


class InnerCheckpoint(nn.Module):
    """A block that recomputes its own middle."""

    def __init__(self, again: Again) -> None:
        super().__init__()
        self.again, self.block = again, Block(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.again(self.block.mlp, self.block.norm(x))


def directly(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(x)


def shard_blocks(api: ModuleType, model: Checkpointed) -> None:
    for block in model.blocks:
        api.fully_shard(block)
    api.fully_shard(model)


def inside(reentrant: bool) -> nn.Module:
    model = Checkpointed(directly, 1)
    again = functools.partial(checkpoint, use_reentrant=reentrant)
    model.blocks = nn.ModuleList(InnerCheckpoint(again) for _ in range(COUNT))
    return model


def regions(size: int, reentrant: bool) -> nn.Module:
    return Checkpointed(functools.partial(checkpoint, use_reentrant=reentrant), size)


def plain(_reentrant: bool) -> nn.Module:
    return Checkpointed(directly, 1)


def wrap(model: Checkpointed, reentrant: bool) -> None:
    implementation = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=implementation)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: m in set(model.blocks))


def wrapped_outside(api: ModuleType, model: Checkpointed, reentrant: bool) -> None:
    """The wrapper recomputes the unit."""
    for block in model.blocks:
        api.fully_shard(block)
    wrap(model, reentrant)
    api.fully_shard(model)


def wrapped_inside(api: ModuleType, model: Checkpointed, reentrant: bool) -> None:
    """The unit is the wrapper."""
    wrap(model, reentrant)
    shard_blocks(api, model)


def as_it_is(api: ModuleType, model: Checkpointed, _reentrant: bool) -> None:
    shard_blocks(api, model)


KINDS = {
    "inside of units": (inside, as_it_is),
    "one unit": (functools.partial(regions, 1), as_it_is),
    "two units": (functools.partial(regions, 2), as_it_is),
    "three units and one": (functools.partial(regions, 3), as_it_is),
    "all units": (functools.partial(regions, COUNT), as_it_is),
    "wrapper outside": (plain, wrapped_outside),
    "wrapper inside": (plain, wrapped_inside),
}


@ignoring_warnings(*OF_TORCHS_FSDP2)
def beside_torchs(kind: str, reentrant: bool) -> Recording:
    """Train on both engines and compare bits and collectives; return the record of our last step."""
    make, shard = KINDS[kind]
    steps: list[list[tuple[Counter[object], list[torch.Tensor]]]] = []
    with recording() as record:
        for api in (fsdp, engine):
            torch.manual_seed(0)
            model = make(reentrant)
            shard(api, model, reentrant)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            steps.append([])
            for step in range(STEPS):
                record.clear()
                with CommDebugMode() as comms:
                    loss = squares(model, step)
                    loss.backward()
                grads = [p.grad.to_local().clone() for p in model.parameters()]
                steps[-1].append((Counter(comms.get_comm_counts()), [loss.detach(), *grads]))
                optimizer.step()
                optimizer.zero_grad()
    for step, (theirs, ours) in enumerate(zip(*steps, strict=True)):
        if step > 0:  # before the first forward our ranks compare their units
            assert ours[0] == theirs[0]
        assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    return record


@pytest.mark.thorough
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_recomputation_gathers_as_often_as_in_torch(reentrant, environ):
    environ["WORKBENCH_COMM"] = "default"  # the c10d calls that torch's engine makes
    cases = {kind: functools.partial(beside_torchs, kind, reentrant) for kind in KINDS}
    for found in run_cases(2, cases):
        for kind, record in found.items():
            assert record.count(Kind.ALL_GATHER) == dict.fromkeys(UNITS, 2) | {ROOT: 1}, kind
            assert record.count(Kind.REDUCE_SCATTER) == dict.fromkeys(UNITS, 1), kind
            assert set(record.alive) == {Category.SHARDED_PARAMS}, kind  # zero_grad has freed the gradients


def order_of_gathers(reentrant: bool) -> list[str]:
    """Return the starts of all-gathers and backwards in the third step's backward."""
    with recording() as record:
        model = regions(1, reentrant)
        shard_blocks(engine, model)
        for step in range(3):
            loss = squares(model, step)
            record.clear()
            loss.backward()
    return [event for event in record.events if event.startswith(("ALL_GATHER BEGIN", "BACKWARD BEGIN"))]


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_the_block_before_is_gathered_ahead_of_it(reentrant):
    events = run_ranks(2, order_of_gathers, reentrant)[0]
    events.remove("BACKWARD BEGIN root")
    expected = [f"ALL_GATHER BEGIN blocks.{COUNT - 1}"]  # during the root's own backward
    for i in reversed(range(1, COUNT)):
        expected += [f"ALL_GATHER BEGIN blocks.{i - 1}", f"BACKWARD BEGIN blocks.{i}"]
    assert events == [*expected, "BACKWARD BEGIN blocks.0"]


class ByUnits(nn.Module):
    """Recomputes regions that contain more than a unit, as in training with a loss around each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(lambda t, block=block: torch.sin(block(torch.sin(t))), x, use_reentrant=False)
        return x


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_region_that_is_more_than_a_unit(world_size):
    record = run_ranks(world_size, compare, ByUnits, functools.partial(shard_blocks, engine), squares, 3)[0]
    if world_size > 1:
        assert record.count(Kind.ALL_GATHER).total() == 4
        assert record.count(Kind.REDUCE_SCATTER).total() == 2


def whole_model_again() -> Counter[str]:
    """Only the model itself is in the graph: its first hook runs in the nested backward."""
    with recording() as record:
        torch.manual_seed(0)
        model = plain(True)
        reference = plain(True)
        reference.load_state_dict(model.state_dict())
        shard_blocks(engine, model)
        for step in range(3):
            x = data(step).requires_grad_()
            record.clear()
            checkpoint(model, x, use_reentrant=True).square().mean().backward()
        model.zero_grad()
        checkpoint(model, x, use_reentrant=True).square().mean().backward()
        reference(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(theirs.grad)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad / dist.get_world_size())
    return record.count(Kind.REDUCE_SCATTER)


def test_a_model_recomputed_as_a_whole():
    assert run_ranks(2, whole_model_again) == [dict.fromkeys(UNITS, 2)] * 2


def whole_recomputation() -> dict[str, int]:
    with set_checkpoint_early_stop(False):  # recompute the whole forward
        record = compare(functools.partial(regions, 1, False), functools.partial(shard_blocks, engine), squares)
    return dict(record.count(Kind.FORWARD))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_recomputed_forward_does_not_count_as_a_forward(world_size):
    assert run_ranks(world_size, whole_recomputation)[0] == dict.fromkeys(UNITS, 1)
