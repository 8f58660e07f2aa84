"""Wrapped models for the tests: ours and torch's by the same call, and what is compared of them."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.wrap as their_policies
from torch import nn

from tests.engine import parity
from tests.engine.models import Block, adamw, batch, loss_of
from workbench.engine import classic

OURS = SimpleNamespace(**{name: getattr(classic, name) for name in classic.__all__})
THEIRS = SimpleNamespace(**{**vars(their_policies), **vars(theirs)})
"""Where a script takes names from: a test that is given both compares them."""

CPU = torch.device("cpu")


def wrap_net(api: SimpleNamespace, model: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> nn.Module:
    """One wrapper around each block and one around the whole."""
    return api.FullyShardedDataParallel(
        model,
        auto_wrap_policy=api.ModuleWrapPolicy({Block}),
        sharding_strategy=api.ShardingStrategy[strategy],
        **{"device_id": CPU, **options},
    )


def whole(wrapped: nn.Module, *, with_grads: bool = False) -> dict[str, torch.Tensor]:
    """Every whole parameter, or its gradient, by its name without wrappers; collective."""
    with type(wrapped).summon_full_params(wrapped, with_grads=with_grads):
        found = wrapped.named_parameters()
        return {name: (p.grad if with_grads else p).detach().clone() for name, p in found}


def check_parity(
    make: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    steps: int = 10,
    clip: float | None = None,
) -> None:
    """Train a wrapped model and a plain copy that sees every rank's data; their whole parameters stay equal."""
    parity.check_parity(
        make, wrap, steps, clip, clip_sharded=lambda m, norm: m.clip_grad_norm_(norm), assert_same=assert_same_values
    )


def assert_same_values(wrapped: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Names and whole values equal the plain model's."""
    torch.testing.assert_close(whole(wrapped), {name: p.detach() for name, p in plain.named_parameters()}, **tolerance)


def compare_with_torchs(
    make: Callable[[], nn.Module],
    wrap: Callable[[SimpleNamespace, nn.Module], nn.Module],
    *,
    steps: int = 10,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    accumulate: int = 1,
    ready: Callable[[SimpleNamespace, nn.Module], object] = lambda api, model: None,
    **tolerance: float,
) -> None:
    """Train the same with our wrapper and with torch's: losses and whole parameters stay equal.

    Args:
        make: the same model each time.
        wrap: called with :data:`OURS` or :data:`THEIRS`, and a model.
        steps: of Adam.
        loss: of a model and the tokens of a rank.
        accumulate: micro-batches a step, all but the last in ``no_sync``.
        ready: called with the API and the wrapped model before it is trained.
        tolerance: as of ``assert_close``; none: as for the dtype.
    """
    rank = dist.get_rank()
    with warnings.catch_warnings():  # torch's says that NO_SHARD is deprecated, and where it is taken for FULL_SHARD
        warnings.simplefilter("ignore")
        models = [wrap(api, make()) for api in (OURS, THEIRS)]
    for api, model in zip((OURS, THEIRS), models, strict=True):
        ready(api, model)
    optimizers = [adamw(model.parameters()) for model in models]
    for step in range(steps):
        found = []
        for model, optimizer in zip(models, optimizers, strict=True):
            for micro in range(accumulate):
                with nullcontext() if micro == accumulate - 1 else model.no_sync():
                    value = loss(model, batch(rank, accumulate * step + micro))
                    value.backward()
            found.append(value.detach())
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*found, **tolerance)
    torch.testing.assert_close(*map(whole, models), **tolerance)
