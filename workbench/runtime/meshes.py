"""Meshes of copies x shards whose process groups can be built anew.

A DeviceMesh knows its groups by name, and c10d gives every new group another name. So a mesh made here knows names of
its own, which after a failure are registered for the new groups: parameters, optimizers and the user's collectives
that refer to the mesh go on working.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _register_process_group  # type: ignore[attr-defined]

AXES = ("replicate", "shard")


def make_mesh(device_type: str, shape: tuple[int, int]) -> DeviceMesh:
    """Return the mesh of all ranks with axes :data:`AXES`; collective.

    Args:
        device_type: ``cpu`` or ``cuda``.
        shape: copies, and ranks that share one; their product is the number of ranks.
    """
    groups = _new_groups(shape)
    mesh = DeviceMesh.from_group(groups, device_type, mesh=_ranks(shape), mesh_dim_names=AXES)
    mesh._dim_group_names = _names(shape)
    return mesh


def rebuild_groups(shape: tuple[int, int]) -> None:
    """Give the mesh of ``shape`` new process groups, after all old ones were destroyed; collective."""
    _new_groups(shape)


def _new_groups(shape: tuple[int, int]) -> list[dist.ProcessGroup]:
    """Make this rank's group on each axis, and register it under the mesh's name for it."""
    ranks = _ranks(shape)
    copy, place = divmod(dist.get_rank(), shape[1])
    members = ranks[:, place].tolist(), ranks[copy].tolist()
    groups = [dist.new_group(own, use_local_synchronization=len(own) < ranks.numel()) for own in members]
    for name, group in zip(_names(shape), groups, strict=True):
        _register_process_group(name, group)
    return groups


def _ranks(shape: tuple[int, int]) -> torch.Tensor:
    """Global ranks ``[copies, shards]``, those of a copy next to each other."""
    return torch.arange(shape[0] * shape[1]).view(shape)


def _names(shape: tuple[int, int]) -> list[GroupName]:
    return [GroupName(f"workbench mesh {shape[0]}x{shape[1]} {axis}") for axis in AXES]
