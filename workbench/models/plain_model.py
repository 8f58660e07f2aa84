"""A plain model that a command shards with an engine of torch, which changes nothing if it is refused."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.engine.module_names import named_params
from workbench.protocol.commands import Reshard, Shard
from workbench.protocol.policy import DTYPES, OFF, STRATEGIES, PrecisionNames


@dataclass(frozen=True)
class PlainModel:
    """A plain model, and what of it a command shards.

    Attributes:
        model: the plain model.
        inner: modules in it that become units, innermost first.
        ignored: parameters that stay whole.
        mesh: the mesh over which it is sharded.
        kept: the policy's ``param_dtype_override_fn``.
    """

    model: nn.Module
    inner: tuple[nn.Module, ...]
    ignored: tuple[nn.Parameter, ...]
    mesh: DeviceMesh
    kept: Callable[[nn.Parameter], torch.dtype | None] | None = None

    @property
    def ignored_names(self) -> set[str]:
        """Names of the ignored parameters in the model, while it is plain."""
        left_out = {id(param) for param in self.ignored}
        return {name for name, param in named_params(self.model, repeats=True) if id(param) in left_out}


@contextmanager
def unchanged_on_error(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """If the body raises, restore the modules, parameters and optimizers, which torch then leaves half changed."""
    modules = [
        (module, type(module), {name: (value, _copied(value)) for name, value in vars(module).items()})
        for module in model.modules()
    ]
    values = [(param, param.data) for param in model.parameters()]
    groups = [(group, list(group["params"])) for optimizer in optimizers for group in optimizer.param_groups]
    states = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
    try:
        yield
    except BaseException:
        for module, cls, attributes in modules:
            module.__class__ = cls
            vars(module).clear()
            for name, (value, content) in attributes.items():
                if isinstance(value, dict):  # the same object: handles of hooks refer to it
                    value.clear()
                    value.update(content)
                vars(module)[name] = value
        for param, data in values:
            param.data = data
        for group, params in groups:
            group["params"] = params
        for optimizer, state in states:
            optimizer.state.clear()
            optimizer.state.update(state)
        raise


def _copied(value: object) -> Any:  # noqa: ANN401 - a dict, or nothing
    return dict(value) if isinstance(value, dict) else None


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype of the user notation ``name``; None if it is empty."""
    return getattr(torch, DTYPES[name]) if name else None


_AFTER_FORWARD = {"auto": None, "true": True, "false": False}


def fully_shard_options(command: Shard | Reshard, api: Any, *pins: bool) -> dict[str, Any]:  # noqa: ANN401 - a module
    """Return the arguments of ``fully_shard`` that a command gives, precision and mesh left out.

    Args:
        command: the command.
        api: the module whose ``fully_shard`` it is, the workbench's or torch's.
        pins: whether pages of offloaded shards are pinned; the module's default without it.
    """
    found: dict[str, Any] = {}
    after = command.reshard_after_forward
    if after != type(command).reshard_after_forward:
        found["reshard_after_forward"] = _AFTER_FORWARD[after] if isinstance(after, str) else after
    if command.offload is not type(command).offload:
        found["offload_policy"] = api.CPUOffloadPolicy(*pins) if command.offload else api.OffloadPolicy()
    return found


def wrapper_options(command: Shard, api: Any) -> dict[str, Any]:  # noqa: ANN401 - a module
    """Return the arguments of ``FullyShardedDataParallel`` that a command gives, mesh left out; ``api`` as above."""
    found: dict[str, Any] = {}
    if command.strategy:
        found["sharding_strategy"] = api.ShardingStrategy[STRATEGIES[command.strategy]]
    if command.mp != OFF:
        dtypes = PrecisionNames.parse(command.mp)
        found["mixed_precision"] = api.MixedPrecision(dtype_of(dtypes.param), dtype_of(dtypes.reduce))
    if command.offload:
        found["cpu_offload"] = api.CPUOffload(offload_params=True)
    return found | {"forward_prefetch": bool(command.prefetch), "use_orig_params": command.orig_params}


@contextmanager
def warnings_in_plain_words() -> Iterator[None]:
    """Print the warnings of the body, each message once, without the source line of ours that triggered it."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for message in dict.fromkeys(str(each.message) for each in caught):
        sys.stderr.write(f"{message}\n")
