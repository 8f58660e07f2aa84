"""The dim and mesh that each parameter is split over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import Shard

from workbench.engine.extended_param import gathers_itself
from workbench.engine.full_param import local_tensor
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.param import ParamModuleInfo, check_uniform
from workbench.engine.policies import MixedPrecisionPolicy


@dataclass(frozen=True)
class ShardPlacementResult:
    """Result of a ``shard_placement_fn`` that gives a dim and a separate mesh (experts on fewer ranks).

    Attributes:
        placement: the dim to split; None: dim 0.
        mesh_info: the mesh to split over.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


ShardPlacementFn = Callable[[nn.Parameter], "Shard | ShardPlacementResult | None"]
Placed = tuple[nn.Parameter, ParamModuleInfo, Shard]
PlacedUnit = tuple[FSDPMeshInfo, bool, bool, list[Placed]]
"""Of one unit: its mesh; whether it computes in its own dtype; whether its parameters define their own all-gather."""


def place(
    infos: Sequence[tuple[nn.Parameter, ParamModuleInfo]],
    fn: ShardPlacementFn | None,
    default: FSDPMeshInfo,
    precision: MixedPrecisionPolicy,
) -> list[PlacedUnit]:
    """Group parameters, each with its dim, into units by the mesh they are split over and the dtype they compute in.

    Frozen parameters whose dtype differs from that of the trained ones (quantised weights with adapters) form separate
    units, after the others; so do parameters that define their own all-gather.

    Raises:
        TypeError: ``fn`` is not callable or returned a value of another type.
        ValueError: a dim out of range, or one that does not divide evenly; trained parameters of one mesh differ in
            dtype; parameters of one mesh differ in device; see :meth:`MixedPrecisionPolicy.keeps_dtype`.
    """
    if fn is not None and not callable(fn):
        raise TypeError(f"shard_placement_fn must be a function of a parameter, got {fn!r}; use lambda param: {fn!r}")
    by_key: dict[tuple[FSDPMeshInfo, bool, bool], list[Placed]] = {}
    for param, info in infos:
        shard, mesh = _resolve(info.path, fn(param) if fn is not None else None, default)
        key = mesh, precision.keeps_dtype(info.path, param), gathers_itself(param)
        by_key.setdefault(key, []).append((param, info, _checked(info.path, param, shard, mesh)))
    units = [(*key, unit) for key, placed in by_key.items() for unit in _by_dtype(placed)]
    for *_, unit in units:
        check_uniform([(info.path, param) for param, info, _ in unit])
    return units


def _by_dtype(placed: Sequence[Placed]) -> list[list[Placed]]:
    """Return the trained parameters with the frozen ones of their dtype, then the other frozen ones by dtype."""
    trained = {param.dtype for param, _, _ in placed if param.requires_grad} or {placed[0][0].dtype}
    first = [part for part in placed if part[0].dtype in trained]
    others: dict[torch.dtype, list[Placed]] = {}
    for part in placed:
        if part[0].dtype not in trained:
            others.setdefault(part[0].dtype, []).append(part)
    return [first, *others.values()]


def _resolve(path: str, result: object, default: FSDPMeshInfo) -> tuple[Shard, FSDPMeshInfo]:
    mesh = default
    if isinstance(result, ShardPlacementResult):
        mesh, result = result.mesh_info, result.placement
    if not isinstance(mesh, FSDPMeshInfo):
        raise TypeError(
            f"shard_placement_fn gave parameter {path!r} a mesh_info of type {type(mesh).__name__}; it must be an "
            "FSDPMeshInfo"
        )
    if result is None:
        return Shard(0), mesh
    if not isinstance(result, Shard):
        raise TypeError(
            f"shard_placement_fn returned {result!r} for parameter {path!r}; it may return None, Shard(dim) or "
            "ShardPlacementResult(Shard(dim), mesh_info)"
        )
    return result, mesh


def _checked(path: str, param: nn.Parameter, shard: Shard, mesh: FSDPMeshInfo) -> Shard:
    """Return ``shard`` with its dim counted from the front."""
    shape, num_shards = tuple(local_tensor(param).shape), mesh.shard_mesh_size
    if not -len(shape) <= shard.dim < len(shape):
        raise ValueError(
            f"shard_placement_fn returned Shard({shard.dim}) for parameter {path!r} of shape {list(shape)}; its dims "
            f"are 0 to {len(shape) - 1}"
        )
    dim = shard.dim % len(shape)
    if dim and shape[dim] % num_shards:
        raise ValueError(
            f"parameter {path!r} of shape {list(shape)} cannot be split along dim {dim}: {shape[dim]} rows do not "
            f"divide by {num_shards} ranks, and only dim 0 may be uneven; return Shard(0) for it"
        )
    return Shard(dim)
