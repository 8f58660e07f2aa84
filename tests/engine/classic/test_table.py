"""A table: strategy x precision x offload x ``use_orig_params`` x accumulation, on 1, 2 and 4 ranks.

Each cell trains in a run of four Adam steps. A run alternates the accumulations of a cell, so that each continues from
the others' state. Every test run covers all pairs of values; ``-m exhaustive`` covers all triples.

Torch's wrapper is the oracle, bit by bit; in fp32, so is an unsharded copy. Here torch's flat parameters have no gaps
(``use_orig_params`` is off) and collectives are c10d's own: each element has the same position as in ours, and is
summed over ranks in the same order.
"""

import itertools
import operator
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import NO_SHARD, ignoring_warnings
from tests.helpers.pairwise import pairs_and_triples, rows_of
from tests.helpers.parity import average_grads
from tests.helpers.small_models import make_net
from tests.helpers.wrapped_models import OURS, THEIRS, Way, adam, copies_of_shards, steps_of, whole, wrap_net

BF16 = torch.bfloat16
NUM_STEPS = 4
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": BF16},
    "bf16, fp32 reduce": {"param_dtype": BF16, "reduce_dtype": torch.float32},
    "fp32, bf16 reduce": {"reduce_dtype": BF16},
    "root's inputs alone": {"param_dtype": BF16, "cast_forward_inputs": False, "cast_root_forward_inputs": True},
    "inputs cast": {"param_dtype": BF16, "cast_forward_inputs": True},
}
ACCUMULATIONS: dict[str, Way] = {
    "one batch a step": (1, False),
    "two, the first in no_sync": (2, True),
    "two, both reduced": (2, False),
}
WORLD_SIZES = [1, 2, 4]
OFFLOADS = ORIG_PARAMS = [False, True]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

Found = tuple[list[torch.Tensor], dict[str, torch.Tensor]]
"""Losses of all steps, and whole parameters after them."""


class Oracle(NamedTuple):
    """The strategy for torch's wrapper, and the tolerance of the comparison; by default the same bits."""

    strategy: str
    rtol: float = 0.0
    atol: float = 0.0

    @classmethod
    def coarse(cls, strategy: str) -> "Oracle":
        """Return an oracle with the tolerance of bf16."""
        return cls(strategy, rtol=5e-2, atol=2e-2)


def make() -> nn.Module:
    return make_net(dim=8, num_blocks=1)


def wrap(api: SimpleNamespace, strategy: str, precision: dict[str, Any], **options: Any) -> nn.Module:
    if "HYBRID" in strategy:
        options["device_mesh"] = copies_of_shards()
    with ignoring_warnings(*NO_SHARD):
        return wrap_net(api, make(), strategy, mixed_precision=api.MixedPrecision(**precision), **options)


def trained(model: nn.Module, ways: list[Way]) -> Found:
    return list(itertools.islice(steps_of(model, make_optimizer=adam, ways=ways), NUM_STEPS)), whole(model)


def trained_plain(ways: list[Way]) -> Found:
    """Train an unwrapped copy whose gradients are averaged over ranks manually."""
    model, once = make(), [(accumulate, False) for accumulate, _ in ways]
    steps = steps_of(model, make_optimizer=adam, ways=once, before_update=average_grads)
    losses = list(itertools.islice(steps, NUM_STEPS))
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def oracle(strategy: str, precision: str, accumulation: str) -> Oracle:
    """Return a cell's oracle."""
    if (precision, accumulation) == ("bf16, fp32 reduce", "two, the first in no_sync"):
        return Oracle.coarse(strategy)  # torch's wrapper accumulates in bf16 what it reduces in fp32
    if accumulation == "two, both reduced" and (strategy == "NO_SHARD" or dist.get_world_size() == 1):
        # without sharding torch's wrapper rounds averaged gradients to the low precision and averages them again
        is_same = dist.get_world_size() > 1 or precision == "fp32"
        return Oracle("FULL_SHARD") if is_same else Oracle.coarse("FULL_SHARD")
    return Oracle(strategy)


def runs(strategy: str, precision: str) -> Iterator[tuple[Oracle, list[str]]]:
    """Yield each oracle with its accumulations, which alternate in one run, step by step."""
    requested: dict[Oracle, list[str]] = {}
    for accumulation in ACCUMULATIONS:
        requested.setdefault(oracle(strategy, precision, accumulation), []).append(accumulation)
    yield from requested.items()


def every_cell(strategy: str, cells: list[tuple[str, dict[str, Any]]]) -> int:
    """Run a strategy's cells and return their number; an error names its cell."""
    num_cells = 0
    for precision, forms in itertools.groupby(cells, key=operator.itemgetter(0)):
        num_cells += cells_of(strategy, precision, [form for _, form in forms])
    return num_cells


def cells_of(strategy: str, precision: str, forms: list[dict[str, Any]]) -> int:
    """Run the cells of one precision: all forms are compared with one oracle."""
    num_cells = 0
    for (of_theirs, *tolerance), accumulations in runs(strategy, precision):
        ways = [ACCUMULATIONS[accumulation] for accumulation in accumulations]
        theirs = trained(wrap(THEIRS, of_theirs, PRECISIONS[precision]), ways)
        if precision == "fp32":
            torch.testing.assert_close(theirs, trained_plain(ways), **CLOSE)
        for form in forms:
            ours = trained(wrap(OURS, strategy, PRECISIONS[precision], **form), ways)
            try:
                torch.testing.assert_close(ours, theirs, **dict(zip(("rtol", "atol"), tolerance, strict=True)))
            except AssertionError as error:
                error.add_note(f"cell: {strategy}, {precision}, {accumulations}, {form}")
                raise
            num_cells += len(accumulations)
    return num_cells


@pairs_and_triples
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_cell_trains_as_torchs_wrapper_does(world_size, strategy, part, environ):
    environ["WORKBENCH_COMM"] = "default"
    rows = rows_of(part, WORLD_SIZES, STRATEGIES, list(PRECISIONS), OFFLOADS, ORIG_PARAMS)
    cells = [
        (precision, {"cpu_offload": OURS.CPUOffload(offload_params=offload), "use_orig_params": use_orig_params})
        for *here, precision, offload, use_orig_params in rows
        if here == [world_size, strategy]
    ]
    assert run_ranks(world_size, every_cell, strategy, cells) == [len(cells) * len(ACCUMULATIONS)] * world_size
