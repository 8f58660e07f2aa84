"""The mesh over which a wrapper shards and replicates, from process groups or a given mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workbench.engine import process_groups
from workbench.engine.backends import backend_of, usual_kind
from workbench.engine.classic.options import ShardingStrategy
from workbench.engine.mesh import FSDPMeshInfo, HSDPMeshInfo, ReplicatedMeshInfo, mesh_info

HYBRID = frozenset({ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2})

Route = Sequence[dist.ProcessGroup | None]
"""Groups for consecutive broadcasts, each from the group's first rank; None stands for the group of all ranks."""

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]


def mesh_for(
    strategy: ShardingStrategy,
    process_group: ProcessGroups | None,
    device_mesh: DeviceMesh | None,
    device: torch.device | None,
) -> FSDPMeshInfo:
    """Return the mesh with the ranks that share one copy and the ranks that hold copies; collective.

    Args:
        strategy: the sharding strategy; hybrid ones need two groups.
        process_group: the ranks to shard over; for hybrid strategies a pair (to shard over, to replicate over).
        device_mesh: a 1-D mesh, or for hybrid strategies 2-D (replicate, shard).
        device: the compute device; None: this process's default.

    Raises:
        TypeError: an argument is not a process group or a mesh.
        ValueError: both are given, or the number of groups or axes does not fit the strategy.
        RuntimeError: ``torch.distributed`` is not initialised.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("FullyShardedDataParallel takes process_group or device_mesh, not both: leave one out")
    if device_mesh is None:
        kind = usual_kind() if device is None else backend_of(device).kind
        device_mesh = _mesh_of(strategy, process_group, kind)
    elif not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a torch.distributed.device_mesh.DeviceMesh, got {device_mesh!r:.80}")
    wanted = 2 if strategy in HYBRID else 1
    if device_mesh.ndim != wanted:
        axes = "two axes (replicate, shard)" if wanted == 2 else "one axis"
        raise ValueError(f"{strategy.name} needs a mesh of {axes}; it got one of shape {tuple(device_mesh.shape)}")
    if strategy in HYBRID:
        return HSDPMeshInfo(device_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    if strategy is ShardingStrategy.NO_SHARD:
        return ReplicatedMeshInfo(device_mesh, replicate_mesh_dim=0)
    return mesh_info(device_mesh)


def route_over(mesh: DeviceMesh) -> Route:
    """Return the route from the first rank of a mesh to all ranks: within a copy, then from copy to copy."""
    return [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]


def _mesh_of(strategy: ShardingStrategy, given: object, kind: str) -> DeviceMesh:
    if strategy in HYBRID:
        return _of_hosts(kind) if given is None else _of_pair(strategy, given, kind)
    if given is None:
        return mesh_info(None).mesh if kind == usual_kind() else init_device_mesh(kind, (dist.get_world_size(),))
    if not isinstance(given, dist.ProcessGroup):
        pair = "; a pair of groups is for the hybrid strategies" if isinstance(given, tuple) else ""
        raise TypeError(f"process_group must be a process group for {strategy.name}, got {given!r:.80}{pair}")
    with process_groups.around_creation():
        return DeviceMesh.from_group(given, kind)


def _of_pair(strategy: ShardingStrategy, given: object, kind: str) -> DeviceMesh:
    """Return the mesh of a pair of groups, to shard over and to replicate over."""
    pair = given if isinstance(given, tuple) else ()
    if len(pair) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in pair):
        raise TypeError(
            f"process_group must be a pair for {strategy.name}: the shard group and the replicate group; got "
            f"{given!r:.80}"
        )
    shard, replicate = cast("tuple[dist.ProcessGroup, dist.ProcessGroup]", pair)
    rows: list[list[int] | None] = [None] * replicate.size()
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    with process_groups.around_creation():
        ranks = torch.tensor(rows)
        return DeviceMesh.from_group([replicate, shard], kind, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _of_hosts(kind: str) -> DeviceMesh:
    """Return the mesh that shards within each host and replicates over hosts."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or (torch.accelerator.device_count() if kind != "cpu" else 0)
    if not size or dist.get_world_size() % size:
        raise ValueError(
            "the number of ranks per host (LOCAL_WORLD_SIZE) is not known or does not divide the number of ranks: "
            "with a hybrid strategy pass process_group=(shard group, replicate group) or device_mesh="
        )
    with process_groups.around_creation():
        return init_device_mesh(kind, (dist.get_world_size() // size, size), mesh_dim_names=("replicate", "shard"))
