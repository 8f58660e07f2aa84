"""Wrapped models for the tests: ours and torch's by the same call, and comparisons of them."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.wrap as their_policies
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.helpers import parity
from tests.helpers.known_warnings import NO_SHARD, ignoring_warnings
from tests.helpers.small_models import Block, adamw, batch, loss_of
from workbench.engine import classic
from workbench.engine._torch import gather_old_shards, is_of_old_shards

OURS = SimpleNamespace(**{name: getattr(classic, name) for name in classic.__all__})
THEIRS = SimpleNamespace(**{**vars(their_policies), **vars(theirs)})
"""The modules that a script may take names from: a test that gets both compares them."""

Way = tuple[int, bool]
"""A step: the number of micro-batches, and whether all but the last of them are in ``no_sync``."""

CPU = torch.device("cpu")
SAME = {"rtol": 0.0, "atol": 0.0}
"""A tolerance: the same bits."""


def kept(value: Any) -> Any:
    """Return a copy that no later step changes, with sharded values gathered; collective if there are any."""
    if isinstance(value, Mapping):
        return {key: kept(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [kept(each) for each in value]
    if isinstance(value, DTensor):
        value = value.full_tensor()
    elif is_of_old_shards(value):
        value = gather_old_shards(value, CPU)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def assert_same_tree(ours: Any, theirs: Any) -> None:
    """Check that both trees have the same keys, lengths and leaf values, with tensors equal bit by bit."""
    differ = list(differences(ours, theirs, ""))
    assert not differ, "\n".join(differ[:20])


def differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    """Yield the differences of two trees."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            yield f"{path}: keys {list(ours)}, torch's {list(theirs)}"
        for key in (key for key in ours if key in theirs):
            yield from differences(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(mine, other, f"{path}[{i}]")
    elif isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        try:
            torch.testing.assert_close(ours, theirs, **SAME)
        except AssertionError as error:
            yield f"{path}: {error}"
    elif type(ours) is not type(theirs) or ours != theirs:
        yield f"{path}: {ours!r:.200}, torch's {theirs!r:.200}"


def adam(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer that, unlike a fused one, computes the same however elements are spread over tensors."""
    return torch.optim.AdamW(params, lr=1e-2, foreach=True)


@functools.cache
def copies_of_shards() -> DeviceMesh:
    """Return the mesh of copies, cached; with one shard rank, torch leaves copies unreduced and is no oracle."""
    size = dist.get_world_size()
    return dist.init_device_mesh("cpu", (max(1, size // 2), min(size, 2)))


def wrap_net(api: SimpleNamespace, model: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> nn.Module:
    """Wrap each block, and the whole."""
    return api.FullyShardedDataParallel(
        model,
        auto_wrap_policy=api.ModuleWrapPolicy({Block}),
        sharding_strategy=api.ShardingStrategy[strategy],
        **{"device_id": CPU, **options},
    )


def whole(wrapped: nn.Module, *, with_grads: bool = False) -> dict[str, torch.Tensor]:
    """Return every unsharded parameter, or its gradient, by its name without wrappers; collective."""
    with type(wrapped).summon_full_params(wrapped, with_grads=with_grads):
        found = wrapped.named_parameters()
        return {name: (p.grad if with_grads else p).detach().clone() for name, p in found}


def check_parity(
    make: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    steps: int = 10,
    clip: float | None = None,
) -> None:
    """Train a wrapped model and a plain copy that gets every rank's data; their unsharded parameters stay equal."""
    parity.check_parity(
        make, wrap, steps, clip, clip_sharded=lambda m, norm: m.clip_grad_norm_(norm), assert_same=assert_same_values
    )


def assert_same_values(wrapped: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Check that names and unsharded values equal the plain model's."""
    values, wanted = whole(wrapped), dict(plain.named_parameters())
    assert values.keys() == wanted.keys()
    parity.assert_all_close({name: (value, wanted[name]) for name, value in values.items()}, **tolerance)


def steps_of(
    model: nn.Module,
    *,
    ways: Sequence[Way] = ((1, False),),
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
    before_update: Callable[[nn.Module], object] = lambda model: None,
) -> Iterator[torch.Tensor]:
    """Train a model forever; yield this rank's losses of each step, one per micro-batch.

    Args:
        model: wrapped by ours or by torch's, or plain.
        ways: of consecutive steps, repeated forever.
        loss: of a model and the tokens of a rank.
        make_optimizer: of parameters.
        before_update: called when the gradients of a step are complete.
    """
    optimizer = make_optimizer(model.parameters())
    number = itertools.count()
    for accumulate, defers in itertools.cycle(ways):
        losses = []
        for micro in range(accumulate):
            with model.no_sync() if defers and micro + 1 < accumulate else nullcontext():
                losses.append(loss(model, batch(dist.get_rank(), next(number))))
                losses[-1].backward()
        before_update(model)
        optimizer.step()
        optimizer.zero_grad()
        yield torch.stack(losses).detach()


def compare_with_torchs(
    make: Callable[[], nn.Module],
    wrap: Callable[[SimpleNamespace, nn.Module], nn.Module],
    *,
    steps: int = 10,
    ready: Callable[[SimpleNamespace, nn.Module], object] = lambda api, model: None,
    tolerance: Mapping[str, float] = MappingProxyType({}),
    **how: Any,
) -> None:
    """Train the same model with our wrapper and with torch's: losses and unsharded parameters stay equal.

    Args:
        make: returns the same model each time.
        wrap: called with :data:`OURS` or :data:`THEIRS`, and a model.
        steps: of Adam.
        ready: called with the API and the wrapped model before training.
        tolerance: as in ``assert_close``; by default, that of the dtype.
        how: as in :func:`steps_of`.
    """
    runs = []
    for api in (OURS, THEIRS):
        with ignoring_warnings(*NO_SHARD):
            model = wrap(api, make())
        ready(api, model)
        runs.append((list(itertools.islice(steps_of(model, **how), steps)), whole(model)))
    torch.testing.assert_close(*runs, **tolerance)
