"""Run one script on both engines, ours and torch's, and on a plain copy of the model.

A script takes ``api``, the module whose names it uses. Running on both shows that changing one import is enough.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from tests.helpers.expected_sizes import NET
from tests.helpers.parity import assert_same_shards, one_batch, train_beside
from tests.helpers.recording_probe import Recording, recording
from tests.helpers.small_models import Net, make_net
from workbench import engine

APIS = (engine, fsdp)
CLOSE = {"rtol": 1e-9, "atol": 1e-12}  # float64: the remaining difference is the order of summation
SAME = {"rtol": 0.0, "atol": 0.0}

Shard = Callable[[ModuleType, nn.Module], object]
Run = Callable[[nn.Module, int], object]


def double_net(**options: Any) -> Net:
    """Return a net in float64, where rounding cannot hide a wrong gradient."""
    return make_net(**(NET | options)).double()


def shard_net_with(api: ModuleType, model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        api.fully_shard(block, **options)
    return api.fully_shard(model, **options)


def call_setter(model: nn.Module, setter: str, *args: object, **kwargs: object) -> None:
    """Call a setter, unless the model is the plain one."""
    if hasattr(model, "_get_fsdp_state"):
        getattr(model, setter)(*args, **kwargs)


def train_all(
    make: Callable[[], nn.Module],
    shard: Shard,
    run: Run = one_batch,
    steps: int = 3,
    apis: tuple[ModuleType, ...] = APIS,
) -> Recording:
    """Train a plain copy, ours and torch's alike, in float64; returns our last step's record. See ``train_beside``."""
    plain = make()
    with recording() as record:
        models = [copy.deepcopy(plain) for _ in apis]
        for api, model in zip(apis, models, strict=True):
            shard(api, model)

        def run_recorded(model: nn.Module, step: int) -> object:
            if model is plain:  # the first one
                record.clear()
            return run(model, step)

        same = functools.partial(assert_same_shards, **CLOSE)
        train_beside(plain, models, steps, run_recorded, assert_same=same)
    return record


def units_below(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that fully_shard was applied to, parents first; none for a plain model."""
    return (m for m in model.modules() if hasattr(m, "_get_fsdp_state"))


def in_order(events: list[str], *wanted: str) -> bool:
    """Return whether the first occurrences of the wanted events are in this order."""
    return all(first < second for first, second in pairwise(events.index(event) for event in wanted))


def sharded(model: nn.Module) -> bool:
    """Return whether every registered parameter is a DTensor."""
    return all(isinstance(p, DTensor) for p in model.parameters())
