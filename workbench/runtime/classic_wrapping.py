"""Sharding with the classic wrapper: the part of ``shard`` that is specific to ``--api classic``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.engine import classic
from workbench.engine.classic import FullyShardedDataParallel, ShardingStrategy
from workbench.engine.classic.unwrapping import rewrap_optimizers, unwrap
from workbench.engine.classic.wrapper_state import wrapper_states_below
from workbench.models.plain_model import dtype_of, warnings_in_plain_words
from workbench.protocol.commands import Reshard, Shard
from workbench.protocol.policy import STRATEGIES, PrecisionNames, Strategy


def wrap(
    model: nn.Module,
    inner: Collection[nn.Module],
    mesh: DeviceMesh,
    optimizers: Sequence[torch.optim.Optimizer],
    options: dict[str, Any],
) -> FullyShardedDataParallel:
    """Return ``model`` in a wrapper, each of ``inner`` in its own; optimizers switch to the new parameters. Collective.

    Args:
        model: the model to wrap; changed in place.
        inner: modules in it that become units of their own.
        mesh: mesh over which it is sharded.
        optimizers: optimizers of its parameters.
        options: keyword arguments of the wrapper.

    Raises:
        TypeError, ValueError: the wrapper refuses, or an optimizer cannot switch; nothing is changed then.
    """
    chosen = frozenset(inner)
    policy = classic.CustomPolicy(lambda module: module in chosen)
    top: nn.Module = model
    try:
        with warnings_in_plain_words():
            top = wrapper = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_mesh=mesh, **options)
        rewrap_optimizers(wrapper, optimizers)
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        if wrapper_states_below(top):
            unwrap(top)
        raise
    return wrapper


def options_of(command: Shard | Reshard) -> dict[str, Any]:
    """Return the wrapper's arguments for a command; options at their default are left out."""
    found: dict[str, Any] = {}
    if command.strategy:
        found["sharding_strategy"] = ShardingStrategy[STRATEGIES[command.strategy]]
    if command.mp != type(command).mp:
        dtypes = PrecisionNames.parse(command.mp)
        found["mixed_precision"] = classic.MixedPrecision(dtype_of(dtypes.param), dtype_of(dtypes.reduce))
    if command.offload is not type(command).offload:
        found["cpu_offload"] = classic.CPUOffload(offload_params=bool(command.offload))
    if command.prefetch is not type(command).prefetch:
        found["forward_prefetch"] = bool(command.prefetch)
    if command.orig_params is not type(command).orig_params:
        found["use_orig_params"] = bool(command.orig_params)
    return found


def strategy_of(model: nn.Module) -> Strategy | Literal[""]:
    """Return the strategy of a wrapped model; empty: its units differ."""
    names = {state.strategy.name for state in wrapper_states_below(model) if state.unit is not None}
    words = [word for word, name in STRATEGIES.items() if names == {name}]
    return cast("Strategy", words[0]) if words else ""


def strategy_like(mesh: Sequence[int], reshard_after_forward: str | int) -> Strategy | Literal[""]:
    """Return the strategy equivalent to a ``fully_shard`` policy; empty: there is none."""
    if reshard_after_forward not in {"auto", "true", "false"}:
        return ""
    copies, size = (1, *mesh)[-2:]
    if size == 1 and copies > 1:
        return "none"
    keeps = reshard_after_forward == "false"
    return ("hybrid2" if keeps else "hybrid") if copies > 1 else ("grad" if keeps else "full")


def has_originals(model: nn.Module) -> bool:
    """Return whether optimizers hold pieces of the original parameters of a wrapped model."""
    flats = (state.flat for state in wrapper_states_below(model))
    return any(flat.use_orig_params for flat in flats if flat is not None)
