"""``fully_shard`` and its inverse."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from workbench.engine.managed import _get_managed_modules, _get_param_module_infos, mark_taken
from workbench.engine.mesh import mesh_info
from workbench.engine.module import FSDPModule, sharded_class
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.state import FSDPState, attach, detach, roots, state_of, states_below, units_of

M = TypeVar("M", bound=nn.Module)


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
) -> M: ...


@overload
def fully_shard(
    module: list[M],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | None = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
) -> list[M]: ...


def fully_shard(
    module: M | list[M],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> M | list[M]:
    """Shard the parameters of a module (or of a list of modules, as one unit) over the ranks of ``mesh``.

    Managed are the parameters below ``module`` that no earlier ``fully_shard`` call took. They become DTensors,
    ``Shard(0)`` with torch.chunk's split, under the same names; one all-gather makes them full before the module's
    forward and backward, one reduce-scatter averages their gradients. Call it on the inner modules first.

    Args:
        module: the module, or modules that always run in the same iteration.
        mesh: 1-D mesh to shard over; None: all ranks.
        reshard_after_forward: True frees the full parameters between forward and backward (one more all-gather);
            False keeps them; None means True, except for the root, which is needed again at once in backward.
        ignored_params: parameters that are left alone.

    Returns:
        ``module``, whose class is now a subclass with :class:`FSDPModule` mixed in.

    Raises:
        TypeError: not a module; an argument of another type than it takes.
        ValueError: already sharded, a container without forward, a module of the list inside of another, a scalar or
            non-contiguous parameter, mixed dtypes or devices, a parameter tied to one in another unit, or a mesh
            without this rank.
        NotImplementedError: a mesh of more than one axis.
        RuntimeError: no process group.

    The module is left as it was if the call raises.
    """
    modules = tuple(module) if isinstance(module, list) else (module,)
    _check_modules(modules)
    _check_policy(reshard_after_forward)
    ignored = _ids_of(ignored_params or ())
    info = mesh_info(mesh)
    infos = _get_param_module_infos(_get_managed_modules(modules), ignored)
    reshard = True if reshard_after_forward is None else reshard_after_forward
    group = FSDPParamGroup(infos, info, reshard) if infos else None
    state = FSDPState(modules, group, auto_reshard=reshard_after_forward is None)
    mark_taken(infos, ", ".join(type(m).__name__ for m in modules))
    for m in modules:
        attach(m, state)
        m.__class__ = cast("type[M]", sharded_class(type(m)))
    return module


def _check_modules(modules: Sequence[nn.Module]) -> None:
    """Raise TypeError or ValueError for modules that cannot become a unit."""
    if not modules:
        raise ValueError("fully_shard got an empty list; give it at least one module")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, got {type(module).__name__}")
        name = type(module).__name__
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(  # noqa: TRY004 - the type is a module; its lack of forward is the problem
                f"fully_shard cannot hook a {name}: it has no forward; call it on each of its children"
            )
        if state_of(module) is not None:
            raise ValueError(f"fully_shard was already called on this {name}; undo it with unshard_module first")
    inner = [m for m in modules for other in modules if other is not m and m in set(other.modules())]
    if inner or len(set(modules)) < len(modules):
        what = f"a {type(inner[0]).__name__} that lies inside of another" if inner else "a module twice"
        raise ValueError(f"the list given to fully_shard holds {what}; give each part of the model once")


def _check_policy(reshard_after_forward: object) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise TypeError(f"reshard_after_forward must be True, False or None, got {reshard_after_forward!r}")


def _ids_of(ignored_params: Iterable[object]) -> frozenset[int]:
    """Return the ids of the parameters to leave alone."""
    params = list(ignored_params)
    for param in params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"ignored_params holds a {type(param).__name__} ({param!r:.40}); it takes the parameters themselves, "
                "e.g. {model.embed.weight}"
            )
    return frozenset(map(id, params))


@torch.no_grad()
def unshard_module(
    module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> dict[nn.Parameter, nn.Parameter]:
    """Undo every ``fully_shard`` call in ``module``'s tree; collective: all ranks must call it.

    Parameters and gradients keep their values and become plain tensors, in place; hooks and classes go back to what
    they were. Optimizers that hold the sharded parameters go on with the plain ones, their state gathered.

    Args:
        module: the root of the tree.
        optimizers: optimizers to carry along.

    Returns:
        plain parameter for each sharded parameter.

    Raises:
        ValueError: nothing in the tree is sharded, or ``module`` is only a part of what one root shards.
        RuntimeError: gradients were accumulated without sync and not reduced since.
    """
    states = states_below(module)
    _check_undoable(module, states)
    mapping: dict[nn.Parameter, nn.Parameter] = {}
    for unit in units_of(states):
        mapping.update(_unshard_unit(unit))
    for state in states:
        _undo(state)
    for optimizer in optimizers:
        remap_optimizer(optimizer, mapping)
    return mapping


def _check_undoable(module: nn.Module, states: Sequence[FSDPState]) -> None:
    """Raise as :func:`unshard_module` does, before anything is changed."""
    name = type(module).__name__
    if not states:
        raise ValueError(f"{name} holds no module that fully_shard was called on")
    part_of = [type(root.modules[0]).__name__ for root in roots if root not in states and root.overlaps(states)]
    if part_of:
        raise ValueError(f"{name} is only a part of the FSDP root {part_of[0]}; call unshard_module on the root")
    held = [p.fqn for unit in units_of(states) for p in unit.fsdp_params if p.has_full_grad]
    if held:
        raise RuntimeError(
            f"{name} holds gradients that were accumulated without sync and not reduced yet, of {', '.join(held)}; "
            "run a backward after set_requires_gradient_sync(True), or drop them with reset_iter_state()"
        )


def _unshard_unit(unit: FSDPParamGroup) -> dict[nn.Parameter, nn.Parameter]:
    unit.reshard()
    mapping = {}
    for param in unit.fsdp_params:
        sharded = param.sharded_param
        plain = nn.Parameter(full_tensor(sharded), requires_grad=sharded.requires_grad)
        if sharded.grad is not None:
            plain.grad = full_tensor(sharded.grad)
        param.info.register(plain)
        mapping[sharded] = plain
    unit.retire()
    return mapping


@torch.no_grad()
def plain_copy(module: M, memo: dict[int, Any]) -> M:
    """Return an unsharded deep copy of ``module``, values and gradients gathered; collective.

    Args:
        module: the root of a sharded tree; it is left as it was.
        memo: filled as :func:`copy.deepcopy` does, with the copy of every object by the id of its original.
    """
    states = states_below(module)
    for unit in units_of(states):
        unit.reshard()
    for param in module.parameters():
        if isinstance(param, DTensor):
            memo[id(param)] = plain = nn.Parameter(full_tensor(param), requires_grad=param.requires_grad)
            if param.grad is not None:
                plain.grad = full_tensor(param.grad)
    memo.update((id(state), None) for state in states)
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(state.plain_modules())
        return copy.deepcopy(module, memo)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` whole and plain: gathered if it is a DTensor (collective), copied if not."""
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def _undo(state: FSDPState) -> None:
    roots.discard(state)
    state.remove_hooks()
    for module, cls in zip(state.modules, state.original_classes, strict=True):
        detach(module)
        module.__class__ = cls


def remap_optimizer(optimizer: torch.optim.Optimizer, mapping: dict[nn.Parameter, nn.Parameter]) -> None:
    """Make ``optimizer`` go on with other parameters, in place.

    State follows its parameter: gathered when the new one is plain (collective), split when it is a DTensor.

    Args:
        optimizer: holds some of the old parameters.
        mapping: new parameter for each old one, of the same full shape.
    """
    for group in optimizer.param_groups:
        group["params"] = [mapping.get(p, p) for p in group["params"]]
    for old, new in mapping.items():
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {key: _state_like(new, value) for key, value in state.items()}


def _state_like(param: nn.Parameter, value: Any) -> Any:  # noqa: ANN401 - optimizer state holds anything
    """Return a value of optimizer state in the form its parameter has now; what is not of its shape stays."""
    if isinstance(value, DTensor):
        value = full_tensor(value)
    if isinstance(value, torch.Tensor) and isinstance(param, DTensor) and value.shape == param.shape:
        return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    return value


__all__ = ["FSDPModule", "fully_shard", "remap_optimizer", "unshard_module"]
