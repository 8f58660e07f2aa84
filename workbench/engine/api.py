"""``fully_shard``, ``replicate``, ``register_fsdp_forward_method`` and ``share_comm_ctx``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.engine._spmd_types import no_checks, tell_checker
from workbench.engine._torch import tell_pipelining
from workbench.engine.backends import is_of_kind
from workbench.engine.dtensor_param import DTensorParam
from workbench.engine.extended_param import ExtendedParam, ExtendedParamGroup
from workbench.engine.fsdp_module import FSDPModule, sharded_class
from workbench.engine.fsdp_state import FSDPState, RegisterPostBackwardFunction, attach, state_of
from workbench.engine.managed_params import (
    _get_managed_modules,
    _get_managed_states,
    _get_param_module_infos,
    mark_taken,
)
from workbench.engine.mesh import (
    DataParallelMeshDims,
    FSDPMeshInfo,
    _get_post_forward_mesh_info,
    mesh_info,
    replicated_mesh_info,
)
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.policies import MixedPrecisionPolicy, OffloadPolicy, UnitPolicy
from workbench.engine.shard_placement import PlacedUnit, ShardPlacementFn, place
from workbench.engine.unsharding import plain_copy, remap_optimizer, unshard_module

M = TypeVar("M", bound=nn.Module)
L = TypeVar("L", bound="list[Any] | tuple[Any, ...]")  # of modules

_REGISTERED = "_workbench_fsdp_forward_method"


@overload
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> M: ...


@overload
def fully_shard(
    module: L,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> L: ...


def fully_shard(  # noqa: PLR0913 - the arguments are torch's
    module: M | L,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M | L:
    """Shard the parameters of a module (or of a list of modules, as one unit) over the ranks of ``mesh``.

    It manages the parameters below ``module`` that no earlier ``fully_shard`` call took. They become DTensors,
    ``Shard(0)`` with torch.chunk's split, under the same names; one all-gather makes them full before the module's
    forward and backward, and one reduce-scatter averages their gradients. Call it on the inner modules first. Frozen
    parameters whose dtype differs from that of the trained ones (quantised weights with adapters) have a separate
    all-gather, and so have tensor subclasses with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

    Args:
        module: the module, or modules that always run in the same iteration.
        mesh: 1-D mesh to shard over, or a named 2-D one (replicate, shard); None: all ranks.
        reshard_after_forward: True frees the full parameters between forward and backward (one more all-gather);
            False keeps them; an int keeps them split over groups of that many ranks; None means True, except for the
            root, which backward needs again at once.
        shard_placement_fn: returns for a parameter the dim to split, and optionally the mesh to split over.
        mp_policy: dtypes of compute, reduction and output.
        offload_policy: :class:`~workbench.engine.CPUOffloadPolicy` keeps shards, gradients, optimizer state on the CPU.
        ignored_params: parameters to leave unsharded.
        dp_mesh_dims: the data-parallel axes of ``mesh``, which may have more than two axes; all parameters must be
            DTensors on it, ``Replicate()`` on these axes, or plain parameters with types of ``spmd_types``.

    Returns:
        ``module``, whose class is now a subclass with :class:`FSDPModule` mixed in.

    Raises:
        TypeError: not a module; an argument of a wrong type.
        ValueError: already sharded, a container without forward, a module of the list inside another, a scalar or
            non-contiguous parameter, trained parameters of several dtypes, parameters on several devices, a parameter
            tied to one in another unit, a mesh without this rank or with other axes, a dim that cannot be split, an
            int that does not divide the ranks, a dtype of ``param_dtype_override_fn`` that is not allowed.
        NotImplementedError: an int with ``dp_mesh_dims``, or for parameters that tensor parallelism has split; an int
            or another dim than 0 for parameters that define their own all-gather.
        RuntimeError: no process group.

    The module is unchanged if the call raises.
    """
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    _check_modules(modules)
    policy = _policy(reshard_after_forward, mp_policy, offload_policy)
    ignored = _ids_of(() if ignored_params is None else ignored_params)
    info = mesh_info(mesh, dp_mesh_dims)
    if dp_mesh_dims is not None and not isinstance(policy.reshard_after_forward, bool):
        raise NotImplementedError("with dp_mesh_dims, reshard_after_forward takes True, False or None, not an int")
    _get_post_forward_mesh_info(policy.reshard_after_forward, info)
    _shard(modules, info, policy, ignored, shard_placement_fn, auto_reshard=reshard_after_forward is None)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def replicate(
    module: M | L,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M | L:
    """Keep the parameters of a module whole on every rank of ``mesh``, and average their gradients in one all-reduce.

    As :func:`fully_shard`, with one copy per rank: parameters become ``Replicate()`` DTensors, and the methods of
    :class:`FSDPModule` work.

    Args:
        module: as for :func:`fully_shard`, like all that is not named here.
        mesh: 1-D mesh of the ranks; None: all ranks.
        mp_policy: dtypes of compute, reduction and output.
        offload_policy: keeps parameters and gradients on the CPU.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: the data-parallel axes of a mesh of more axes; only ``replicate``.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as :func:`fully_shard`; a mesh with other axes.
    """
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    _check_modules(modules)
    policy = _policy(None, mp_policy, offload_policy)
    ignored = _ids_of(() if ignored_params is None else ignored_params)
    _shard(modules, replicated_mesh_info(mesh, dp_mesh_dims), policy, ignored, None, auto_reshard=True)
    return module


def _shard(
    modules: tuple[nn.Module, ...],
    info: FSDPMeshInfo,
    policy: UnitPolicy,
    ignored: frozenset[int],
    shard_placement_fn: ShardPlacementFn | None,
    *,
    auto_reshard: bool,
) -> None:
    tell_pipelining(FSDPModule, state_of)
    tell_checker(RegisterPostBackwardFunction)
    mp_policy = policy.mp_policy
    managed = _get_managed_modules(modules)
    infos = _get_param_module_infos(managed, ignored)
    with no_checks():
        _move_to(info.device, *_get_managed_states(managed, ignored))
        groups = _make_groups(place(infos, shard_placement_fn, info, mp_policy), policy)
    state = FSDPState(modules, groups, device=info.device, auto_reshard=auto_reshard, mp_policy=mp_policy)
    mark_taken(infos, ", ".join(type(m).__name__ for m in modules), FSDPState)
    for m in modules:
        attach(m, state)
        m.__class__ = sharded_class(type(m))
    state.name_units()


def _check_modules(modules: Sequence[nn.Module]) -> None:
    """Raise TypeError or ValueError for modules that cannot become a unit."""
    if not modules:
        raise ValueError("fully_shard got an empty list; pass at least one module")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, got {type(module).__name__}")
        name = type(module).__name__
        if type(module).forward is nn.Module.forward and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(f"fully_shard cannot hook a {name}: it has no forward; call it on each of its children")
        if state_of(module) is not None:
            raise ValueError(f"fully_shard was already called on this {name}; undo it with unshard_module first")
    inner = [m for m in modules for other in modules if other is not m and m in set(other.modules())]
    if inner or len(set(modules)) < len(modules):
        what = f"a {type(inner[0]).__name__} inside another module of the list" if inner else "a module twice"
        raise ValueError(f"the list passed to fully_shard contains {what}; pass each part of the model once")


def _policy(reshard_after_forward: object, mp_policy: object, offload_policy: object) -> UnitPolicy:
    """Return the unit policy; raise TypeError for values of other types."""
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
        raise TypeError(f"reshard_after_forward must be True, False, an int or None, got {reshard_after_forward!r}")
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy must be a workbench.engine.MixedPrecisionPolicy, got {_typed(mp_policy)}")
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"offload_policy must be a workbench.engine.OffloadPolicy, got {_typed(offload_policy)}")
    reshard = True if reshard_after_forward is None else reshard_after_forward
    return UnitPolicy(reshard_after_forward=reshard, mp_policy=mp_policy, offload_policy=offload_policy)


def _typed(value: object) -> str:
    """Return a value and the full name of its type as text: torch has policies of the same names."""
    return f"{value!r:.60} of type {type(value).__module__}.{type(value).__qualname__}"


def _ids_of(ignored_params: Iterable[object]) -> frozenset[int]:
    """Return the ids of the ignored parameters."""
    if isinstance(ignored_params, torch.Tensor) or not isinstance(ignored_params, Iterable):
        raise TypeError(f"ignored_params takes a set of parameters, got {_typed(ignored_params)}: put it into {{...}}")
    params = list(ignored_params)
    for param in params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(
                f"ignored_params contains a {type(param).__name__} ({param!r:.40}); pass the parameters themselves, "
                f"e.g. {{model.embed.weight}}"
            )
    return frozenset(map(id, params))


def _move_to(device: torch.device, params: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor]) -> None:
    """Move parameters and buffers to the compute device, except those on the meta device."""
    for tensor in (*params, *buffers):
        if not (tensor.is_meta or is_of_kind(tensor, device)):
            tensor.data = tensor.data.to(device)


def _make_groups(placed: Sequence[PlacedUnit], policy: UnitPolicy) -> list[FSDPParamGroup]:
    """Create the units; if one of them cannot be created, the modules keep their parameters."""
    try:
        return [_make_group(unit, policy) for unit in placed]
    except (TypeError, ValueError, NotImplementedError):
        for *_, params in placed:
            for param, where, _ in params:
                where.register(param)
        raise


def _make_group(placed: PlacedUnit, policy: UnitPolicy) -> FSDPParamGroup:
    info, keeps_dtype, is_extended, params = placed
    group, kind = (ExtendedParamGroup, ExtendedParam) if is_extended else (FSDPParamGroup, DTensorParam)
    return group([kind(*one, info) for one in params], info, policy, keeps_dtype=keeps_dtype)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method other than ``forward`` unshard and reshard as forward does (``generate``, ``encode`` ...).

    Args:
        module: an FSDP module; no-op for any other, so that a script runs with and without sharding.
        method_name: name of the method, which is replaced on this object.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r} to register")  # noqa: TRY004

    if getattr(method, _REGISTERED, None) is module:  # a wrapper may expose an inner module's registered method
        return

    def call(*args: object, **kwargs: object) -> object:
        state = state_of(module)
        if state is None:  # fully_shard was undone
            return method(*args, **kwargs)
        args, kwargs = state.pre_forward(module, args, kwargs)
        return state.post_forward(module, args, method(*args, **kwargs))

    setattr(call, _REGISTERED, module)
    setattr(module, method_name, call)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let several roots (pipeline stages on one rank) share streams, staging and prefetch order.

    Call it before their first forward.

    Raises:
        TypeError: one of ``modules`` is not an FSDP module.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise TypeError(f"share_comm_ctx takes modules that fully_shard was called on, got {type(module).__name__}")
    states = [module._get_fsdp_state() for module in modules]
    for state in states[1:]:
        state.use_comm_ctx(states[0].comm_ctx)


__all__ = [
    "FSDPModule",
    "fully_shard",
    "plain_copy",
    "register_fsdp_forward_method",
    "remap_optimizer",
    "replicate",
    "share_comm_ctx",
    "unshard_module",
]
