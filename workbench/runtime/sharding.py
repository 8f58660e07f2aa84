"""The commands ``shard`` and ``unshard`` on a rank."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.commands import Shard, Unshard
from workbench.engine import FSDPModule, fully_shard, unshard_module
from workbench.engine.api import remap_optimizer
from workbench.engine.mesh import mesh_info
from workbench.engine.signature import check_same_lines
from workbench.engine.state import state_of
from workbench.errors import UsageError
from workbench.runtime.namespace import find_module, optimizers_of

_POLICY = {"auto": None, "true": True, "false": False}


def shard(command: Shard, mesh: DeviceMesh) -> dict[str, Any]:
    """Apply ``fully_shard`` to each wrapped module and to the model itself; collective.

    Optimizers that were made before go on with the sharded parameters, their state sharded too.

    Raises:
        UsageError: no such model, already sharded, an unknown class to wrap, or a pattern without a match.
        RanksDisagreeError: the ranks' models differ; nothing was sharded.
    """
    model = find_module(command.model)
    if isinstance(model, FSDPModule):
        raise UsageError(f"{command.model!r} is sharded already; undo it first: %fsdp unshard {command.model}")
    inner = _modules_to_wrap(model, command.wrap)
    ignored = _ignored(model, command.ignore)
    check_same_model(model, inner, mesh)
    num_params, num_elements, num_bytes = _size(model)
    optimizers, before = optimizers_of(model), dict(model.named_parameters())
    _apply(model, inner, ignored, command, mesh)
    mapping = {before.pop(name): param for name, param in model.named_parameters()}
    for optimizer in optimizers:
        remap_optimizer(optimizer, mapping)
    return {
        "model": command.model,
        "units": _unit_names(model),
        "num_params": num_params,
        "num_elements": num_elements,
        "bytes_unsharded": num_bytes,
        "bytes_at_rest": _bytes_at_rest(model),
        "optimizers": len(optimizers),
    }


def unshard(command: Unshard) -> dict[str, Any]:
    """Undo :func:`shard`; collective.

    Raises:
        UsageError: no such model, or not sharded.
    """
    model = find_module(command.model)
    if not isinstance(model, FSDPModule):
        raise UsageError(f"{command.model!r} is not sharded; shard it first: %fsdp shard {command.model}")
    optimizers = optimizers_of(model)
    mapping = unshard_module(model, optimizers)
    return {"model": command.model, "num_params": len(mapping), "optimizers": len(optimizers)}


def check_same_model(model: nn.Module, inner: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Compare the plain model and what will be wrapped across ranks, before anything is changed.

    Raises:
        RanksDisagreeError: on every rank.
    """
    info = mesh_info(mesh)
    if info.group is None:
        return
    names = {id(m): name for name, m in model.named_modules()}
    lines = [f"{name} {list(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    lines += [f"unit {names[id(m)]}" for m in inner]
    check_same_lines(lines, info.group, torch.device(mesh.device_type))


def _apply(
    model: nn.Module, inner: Sequence[nn.Module], ignored: list[nn.Parameter], command: Shard, mesh: DeviceMesh
) -> None:
    """Shard inner modules first; if one refuses, the model is as it was."""
    policy = _POLICY[command.reshard_after_forward]
    try:
        for module in [*inner, model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=policy, ignored_params=ignored)
    except (TypeError, ValueError, NotImplementedError):
        if any(state_of(m) is not None for m in model.modules()):
            unshard_module(model)
        raise
    if isinstance(model, FSDPModule) and not any(p.is_meta for p in model.parameters()):
        model._get_fsdp_state()._lazy_init()  # units have their names at once


def _modules_to_wrap(model: nn.Module, wrap: Sequence[str]) -> list[nn.Module]:
    """Return the modules that become units of their own, innermost first.

    Raises:
        UsageError: a class in ``wrap`` occurs nowhere in the model.
    """
    names = set(wrap) or _repeated_class(model)
    counts = Counter(type(m).__name__ for m in model.modules() if m is not model)
    unknown = names - counts.keys()
    if unknown:
        there = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        raise UsageError(f"the model holds no {', '.join(sorted(unknown))}; its classes are: {there}")
    # named_modules lists parents before children
    found = [m for _, m in model.named_modules() if m is not model and type(m).__name__ in names]
    return list(reversed(found))


def _repeated_class(model: nn.Module) -> set[str]:
    """Return the class of the longest list of equal children, which is what a model repeats; maybe none."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    equal = [m for m in lists if len({type(child) for child in m}) == 1]
    best = max(equal, key=len, default=None)
    return {type(best[0]).__name__} if best is not None else set()


def _ignored(model: nn.Module, patterns: Sequence[str]) -> list[nn.Parameter]:
    """Return the parameters whose names match a glob pattern.

    Raises:
        UsageError: a pattern matches none.
    """
    params = dict(model.named_parameters())
    matches = {pattern: fnmatch.filter(params, pattern) for pattern in patterns}
    for pattern, names in matches.items():
        if not names:
            raise UsageError(f"--ignore {pattern} matches no parameter; there are: {', '.join(params)}")
    return [params[name] for names in matches.values() for name in names]


def _size(model: nn.Module) -> tuple[int, int, int]:
    """Return the number of parameters, of their elements and of their bytes."""
    params = list(model.parameters())
    return len(params), sum(p.numel() for p in params), sum(math.prod(p.shape) * p.itemsize for p in params)


def _unit_names(model: nn.Module) -> list[str]:
    """Return the paths of the units, ``(root)`` for the model's own; a call that found no parameters made none."""
    states = ((name, state_of(module)) for name, module in model.named_modules())
    return [name or "(root)" for name, s in states if s is not None and s._fsdp_param_group is not None]


def _bytes_at_rest(model: nn.Module) -> int:
    """Return the bytes of this rank's shards, with padding."""
    states = {id(s): s for m in model.modules() if (s := state_of(m)) is not None}
    units = [s._fsdp_param_group for s in states.values()]
    return sum(u.flat_shard.nbytes for u in units if u is not None)
