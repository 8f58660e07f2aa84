"""Random programs: whatever is unsharded or recomputed, the numbers equal those of an unsharded model.

Each step draws a new plan, so that it has orders and overlaps that no earlier iteration had. Half of the programs
also train torch's engine. In these no block runs twice: torch's engine computes wrong gradients when one of the two
runs is checkpointed with reentrant autograd.
"""

import copy
import functools
import random
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.both_engines import APIS, CLOSE, call_setter
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.pairwise import quick
from tests.helpers.parity import assert_same_shards, average_grads
from tests.helpers.small_models import Block, adamw
from tests.helpers.unsharded_copy import DIM, data
from workbench.engine.fsdp_state import states_below, units_of

COUNT, STEPS = 5, 8
HOW = ("plainly", "plainly", "side by side", "reentrant", "not reentrant")


@dataclass(frozen=True)
class Plan:
    """The operations of a step.

    Attributes:
        regions: blocks that run together, and how.
        in_forward, in_backward: for a block, the block that its forward or backward also unshards, if any.
        ahead: for a block, its forward and backward prefetch lists.
        by_hand: units that are unsharded before the forward, and before the backward; 0 is the root.
        given_up: units that are resharded before the backward.
        num_forwards: forwards before the first backward.
        oldest_first: whether the backwards run in the order of their forwards.
    """

    regions: tuple[tuple[tuple[int, ...], str], ...]
    in_forward: dict[int, int]
    in_backward: dict[int, int]
    ahead: dict[int, tuple[list[int], list[int]]]
    by_hand: tuple[tuple[int, ...], tuple[int, ...]]
    given_up: tuple[int, ...]
    num_forwards: int
    oldest_first: bool


def drawn(chance: random.Random, *, repeats: bool) -> Plan:
    order = chance.sample(range(COUNT), chance.randint(2, COUNT))
    order += chance.choices(range(COUNT), k=chance.randint(0, 2)) if repeats else []
    regions = []
    while order:
        size = chance.randint(1, 3)
        regions.append((tuple(order[:size]), chance.choice(HOW)))
        order = order[size:]

    def some(what: range) -> tuple[int, ...]:
        return tuple(chance.sample(what, chance.randint(0, len(what)))) if chance.random() < 0.4 else ()

    blocks, units = range(COUNT), range(COUNT + 1)
    return Plan(
        tuple(regions),
        {block: chance.choice(blocks) for block in some(blocks)},
        {block: chance.choice(blocks) for block in some(blocks)},
        {block: (list(some(blocks)), list(some(blocks))) for block in some(blocks)},
        (some(units), some(units)),
        some(units),
        chance.choice((1, 1, 2, 3)),
        chance.random() < 0.5,
    )


class Wanderer(nn.Module):
    """Runs its blocks according to the plan."""

    plan: Plan

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for region, how in self.plan.regions:
            if how == "side by side":
                x = torch.stack([self._block(x, block) for block in region]).mean(0)
            elif how == "plainly":
                x = self._run(x, region)
            else:
                x = checkpoint(self._run, x, region, use_reentrant=how == "reentrant")
        return x

    def _run(self, x: torch.Tensor, region: tuple[int, ...]) -> torch.Tensor:
        return functools.reduce(self._block, region, x)

    def _block(self, x: torch.Tensor, index: int) -> torch.Tensor:
        beside = self.plan.in_forward.get(index)
        if beside is not None:
            call_setter(self.blocks[beside], "unshard")
        out = self.blocks[index](x)
        beside = self.plan.in_backward.get(index)
        if beside is not None and out.requires_grad:
            out.register_hook(lambda _: call_setter(self.blocks[beside], "unshard"))
        return out


def one_step(model: Wanderer, plan: Plan, step: int) -> torch.Tensor:
    """Run the plan's step; return the losses."""
    model.plan = plan
    units = (model, *model.blocks)
    for block, (forward, backward) in plan.ahead.items():
        if hasattr(model, "unshard"):
            model.blocks[block].set_modules_to_forward_prefetch([model.blocks[i] for i in forward])
            model.blocks[block].set_modules_to_backward_prefetch([model.blocks[i] for i in backward])
    for unit in plan.by_hand[0]:
        call_setter(units[unit], "unshard")
    losses = [model(data(10 * step + i).double()).square().mean() for i in range(plan.num_forwards)]
    values = torch.stack([loss.detach() for loss in losses])
    for unit in plan.given_up:
        call_setter(units[unit], "reshard")
    for unit in plan.by_hand[1]:
        call_setter(units[unit], "unshard")
    while losses:
        call_setter(model, "set_is_last_backward", len(losses) == 1)
        losses.pop(0 if plan.oldest_first else -1).backward()
    for unit in units:  # unsharded but never used: torch's engine would read stale values after the optimizer step
        call_setter(unit, "reshard")
    return values


def sharded_by(api: ModuleType, plain: Wanderer) -> Wanderer:
    model = copy.deepcopy(plain)
    for block in model.blocks:
        api.fully_shard(block)
    return api.fully_shard(model)


def program(seed: int, apis: tuple[ModuleType, ...]) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    plain = Wanderer().double()
    models = [sharded_by(api, plain) for api in apis]
    ours = models[0]
    optimizers = [adamw(m.parameters()) for m in (plain, *models)]
    for step in range(STEPS):
        plan = drawn(chance, repeats=len(apis) == 1)
        expected, *found = (one_step(m, plan, step) for m in (plain, *models))
        average_grads(plain)
        for model, losses in zip(models, found, strict=True):
            torch.testing.assert_close(losses, expected, **CLOSE)
            assert_same_shards(model, plain, **CLOSE)
        assert all(unit.is_sharded and not unit.is_unsharding for unit in units_of(states_below(ours)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("seed", quick(range(4), [0]))
def test_a_program_made_up_by_chance_trains_as_an_unsharded_model_and_torchs(seed):
    run_ranks(2, program, seed, APIS)


@pytest.mark.parametrize("seed", quick(range(4, 8), [4]))
def test_a_program_that_runs_blocks_twice_trains_as_an_unsharded_model(seed):
    run_ranks(2, program, seed, APIS[:1])
