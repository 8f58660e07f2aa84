"""Wrapped models for the tests: ours and torch's by the same call, and what is compared of them."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TheirModuleWrapPolicy

from tests.engine.models import Block, adamw, batch, loss_of
from tests.engine.parity import average_grads
from workbench.engine import classic

OURS = SimpleNamespace(**{name: getattr(classic, name) for name in classic.__all__})
THEIRS = SimpleNamespace(**{**vars(theirs), "ModuleWrapPolicy": TheirModuleWrapPolicy})
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
    plain = make()
    wrapped = wrap(copy.deepcopy(plain))
    optimizers = [adamw(m.parameters()) for m in (plain, wrapped)]
    for step in range(steps):
        tokens = batch(dist.get_rank(), step)
        reference, loss = loss_of(plain, tokens), loss_of(wrapped, tokens)
        reference.backward()
        average_grads(plain)
        loss.backward()
        torch.testing.assert_close(loss, reference)
        if clip is not None:
            expected = nn.utils.clip_grad_norm_(plain.parameters(), clip)
            torch.testing.assert_close(wrapped.clip_grad_norm_(clip), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(wrapped, plain)


def assert_same_values(wrapped: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    """Names and whole values equal the plain model's."""
    torch.testing.assert_close(whole(wrapped), {name: p.detach() for name, p in plain.named_parameters()}, **tolerance)
