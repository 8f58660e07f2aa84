"""The whole table: strategy x precision x offload x ``use_orig_params`` x accumulation, on 1, 2 and 4 ranks.

Torch's wrapper is the oracle, bit by bit, and in fp32 an unsharded copy as well. Torch's has no gaps in its flat
parameters while ``use_orig_params`` is off, and collectives are c10d's own here: each element lies where it does in
ours, and is summed over ranks in the same order.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.engine.classic.wrapped import OURS, SAME, THEIRS, adam, steps_of, whole, wrap_net
from tests.engine.models import make_net
from tests.engine.parity import average_grads
from tests.engine.ranks import run_ranks

BF16 = torch.bfloat16
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": BF16},
    "bf16, fp32 reduce": {"param_dtype": BF16, "reduce_dtype": torch.float32},
    "fp32, bf16 reduce": {"reduce_dtype": BF16},
    "root's inputs alone": {"param_dtype": BF16, "cast_forward_inputs": False, "cast_root_forward_inputs": True},
    "inputs cast": {"param_dtype": BF16, "cast_forward_inputs": True},
}
ACCUMULATIONS: dict[str, dict[str, Any]] = {
    "one batch a step": {"accumulate": 1},
    "two, the first in no_sync": {"accumulate": 2},
    "two, both reduced": {"accumulate": 2, "defers": False},
}
FORMS = [
    {"cpu_offload": OURS.CPUOffload(offload_params=offload), "use_orig_params": use_orig_params}
    for offload, use_orig_params in itertools.product((False, True), repeat=2)
]
FEW, TEN = (2,), (2, 8)
"""Steps of Adam from one look to the next. Where bits are equal two steps tell as much as ten: the second one has all
that one leaves to the next. Ten are run of each strategy in each precision, in one form after another."""
COARSE = {"rtol": 5e-2, "atol": 2e-2}  # of bf16
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

Look = tuple[list[torch.Tensor], dict[str, torch.Tensor]]
"""Losses of some steps, and whole parameters after them."""


def make() -> nn.Module:
    return make_net(dim=8, num_blocks=1)


@functools.cache
def copies_of_shards() -> DeviceMesh:
    """Made once on a rank; with one rank to shard over torch's leaves copies unreduced: there it is no oracle."""
    size = dist.get_world_size()
    return dist.init_device_mesh("cpu", (max(1, size // 2), min(size, 2)))


def wrap(api: SimpleNamespace, strategy: str, precision: dict[str, Any], **options: Any) -> nn.Module:
    if "HYBRID" in strategy:
        options["device_mesh"] = copies_of_shards()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its deprecated choices
        return wrap_net(api, make(), strategy, mixed_precision=api.MixedPrecision(**precision), **options)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def looks(
    model: nn.Module, counts: Sequence[int], see: Callable[[nn.Module], dict[str, torch.Tensor]] = whole, **how: Any
) -> list[Look]:
    """Train for so many steps each time, and look."""
    steps = steps_of(model, make_optimizer=adam, **how)
    return [(list(itertools.islice(steps, count)), see(model)) for count in counts]


def plain_looks(counts: Sequence[int], *, accumulate: int, defers: bool = True) -> list[Look]:
    """The same of a copy that no wrapper knows; its gradients are averaged over ranks by hand."""
    del defers
    return looks(make(), counts, values, accumulate=accumulate, defers=False, before_update=average_grads)


def like_torchs(strategy: str, precision: str, accumulation: str) -> tuple[str, dict[str, float]]:
    """Return the strategy of torch's wrapper that is the oracle of a cell, and how close the numbers must be."""
    if (precision, accumulation) == ("bf16, fp32 reduce", "two, the first in no_sync"):
        return strategy, COARSE  # torch's adds up in bf16 what it reduces in fp32
    if accumulation == "two, both reduced" and (strategy == "NO_SHARD" or dist.get_world_size() == 1):
        # where nothing is split torch's rounds what it has averaged already to the low precision, to average it again
        return "FULL_SHARD", SAME if dist.get_world_size() > 1 or precision == "fp32" else COARSE
    return strategy, SAME


def every_cell(strategy: str) -> int:
    """Run every cell of a strategy; an error says which one it was. Returns how many there were."""
    turns = itertools.cycle(range(len(FORMS)))
    num_cells = 0
    for (precision, dtypes), (accumulation, how) in itertools.product(PRECISIONS.items(), ACCUMULATIONS.items()):
        oracle, tolerance = like_torchs(strategy, precision, accumulation)
        runs_ten = how == {"accumulate": 1} and dist.get_world_size() < 4
        theirs = looks(wrap(THEIRS, oracle, dtypes), TEN if runs_ten else FEW, **how)
        if precision == "fp32":
            torch.testing.assert_close(theirs, plain_looks(TEN if runs_ten else FEW, **how), **CLOSE)
        runs_it = next(turns) if runs_ten else None
        for i, form in enumerate(FORMS):
            ours = looks(wrap(OURS, strategy, dtypes, **form), TEN if i == runs_it else FEW, **how)
            try:
                torch.testing.assert_close(ours, theirs[: len(ours)], **tolerance)
            except AssertionError as error:
                error.add_note(f"cell: {strategy}, {precision}, {accumulation}, {form}")
                raise
            num_cells += 1
    return num_cells


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_cell_trains_as_torchs_wrapper_does(world_size, strategy, monkeypatch):
    monkeypatch.setenv("WORKBENCH_COMM", "default")
    num_cells = len(PRECISIONS) * len(ACCUMULATIONS) * len(FORMS)
    assert run_ranks(world_size, every_cell, strategy) == [num_cells] * world_size
