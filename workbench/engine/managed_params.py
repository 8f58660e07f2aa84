"""The parameters that a sharding call manages, and checks that it can shard them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine._torch import is_replicated
from workbench.engine.extended_param import check_extension
from workbench.engine.fsdp_state import FSDPState, state_of
from workbench.engine.full_param import local_tensor
from workbench.engine.param import ParamModuleInfo

_TAKEN = "_workbench_unit_param"


def _has_state(module: nn.Module) -> bool:
    return state_of(module) is not None


def _get_managed_modules(
    roots: Sequence[nn.Module], is_taken: Callable[[nn.Module], bool] = _has_state
) -> list[tuple[str, nn.Module]]:
    """Return every module below ``roots`` that no earlier call took, with its path, each once, in definition order.

    Modules under torch's ``replicate`` are skipped, with all below them. ``is_taken`` returns whether an earlier call
    took a module.
    """
    seen: set[int] = set()
    return [pair for root in roots for pair in _walk(root, "", seen, is_taken)]


def _walk(
    module: nn.Module, path: str, seen: set[int], is_taken: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen or is_replicated(module):
        return
    seen.add(id(module))
    yield path, module
    for name, child in module.named_children():
        if not is_taken(child):
            yield from _walk(child, f"{path}.{name}" if path else name, seen, is_taken)


def _get_param_module_infos(
    modules: Sequence[tuple[str, nn.Module]], ignored: frozenset[int]
) -> list[tuple[nn.Parameter, ParamModuleInfo]]:
    """Return each managed parameter with all places it is registered at; check that it can be sharded.

    Raises:
        ValueError, NotImplementedError: see :func:`_check_param`.
    """
    infos: dict[int, tuple[nn.Parameter, ParamModuleInfo]] = {}
    for path, module in modules:
        for name, param in module._parameters.items():
            if param is None or id(param) in ignored:
                continue
            if id(param) in infos:
                infos[id(param)][1].shared.append((module, name))
                continue
            fqn = f"{path}.{name}" if path else name
            _check_param(fqn, param)
            infos[id(param)] = (param, ParamModuleInfo(module, name, fqn))
    return list(infos.values())


def _get_managed_states(
    modules: Sequence[tuple[str, nn.Module]], ignored: frozenset[int]
) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """Return the parameters and buffers of ``modules``, each once."""
    params = {id(p): p for _, m in modules for p in m.parameters(recurse=False) if id(p) not in ignored}
    buffers = {id(b): b for _, m in modules for b in m.buffers(recurse=False)}
    return list(params.values()), list(buffers.values())


@dataclass(frozen=True)
class _ManagedParam:
    """Where a parameter was when a call took it, as text, and which API made the call."""

    place: str
    by: type[FSDPState]


def mark_taken(infos: Sequence[tuple[nn.Parameter, ParamModuleInfo]], owner: str, by: type[FSDPState]) -> None:
    """Mark both forms of parameters as taken by ``owner``, for the error message of a later call."""
    for param, info in infos:
        taken = _ManagedParam(f"{info.path!r} of {owner}", by)
        setattr(param, _TAKEN, taken)
        setattr(getattr(info.module, info.name), _TAKEN, taken)


def forget_taken(params: Iterable[nn.Parameter]) -> None:
    """Remove the marks of :func:`mark_taken`."""
    for param in params:
        vars(param).pop(_TAKEN, None)


def _check_param(fqn: str, param: nn.Parameter) -> None:
    taken: _ManagedParam | None = getattr(param, _TAKEN, None)
    if taken is not None and isinstance(param, DTensor):
        raise ValueError(
            f"parameter {fqn!r} is sharded already, as {taken.place}; call {taken.by.made_by} on inner modules before "
            f"outer ones, and put a module that two parents share into one unit: {taken.by.joined_by}"
        )
    if taken is not None:
        raise ValueError(
            f"parameter {fqn!r} is tied to {taken.place}, which an earlier {taken.by.made_by} call sharded; put both "
            f"into one unit: {taken.by.joined_by}"
        )
    check_extension(fqn, param)
    if param.ndim == 0:
        raise ValueError(f"parameter {fqn!r} is a scalar, which has no dim 0 to shard; make it 1-D: shape [1]")
    if not local_tensor(param).is_contiguous():
        raise ValueError(
            f"parameter {fqn!r} of shape {list(param.shape)} and stride {param.stride()} is not contiguous; "
            "assign param.data = param.data.contiguous() first"
        )
