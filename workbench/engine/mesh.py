"""Which ranks share one copy of the parameters, and which hold copies of the same shard.

Words: *axis* is a dimension of a mesh. Parameters are split over the *shard axis* (F ranks) and repeated along the
*replicate axis* (R ranks).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate

from workbench.engine import groups
from workbench.engine.groups import CommGroup, group_of


@dataclass(frozen=True)
class DataParallelMeshInfo:
    """A mesh over whose axes data is parallel.

    Attributes:
        mesh: 1-D or 2-D DTensor mesh.
        shard_mesh_dim: index of its shard axis; None: parameters are not split.
        replicate_mesh_dim: index of its replicate axis; None: there is one copy.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None

    @property
    def device(self) -> torch.device:
        """The device this rank computes on."""
        kind = self.mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    @property
    def _coordinate(self) -> list[int]:
        """This rank's position along each axis."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh")
        return [int(c) for c in coordinate]

    def _group(self, axis: int | None) -> CommGroup | None:
        """Return the engine's own group of this rank's neighbours along ``axis``; None for one rank."""
        if axis is None or self.mesh.size(axis) == 1:
            return None
        along = [slice(None) if i == axis else c for i, c in enumerate(self._coordinate)]
        ranks = tuple(int(rank) for rank in self.mesh.mesh[tuple(along)].tolist())
        return group_of(ranks, self.mesh.device_type)

    @cached_property
    def shard_group(self) -> CommGroup | None:
        """The ranks that share one copy; None if that is one rank."""
        return self._group(self.shard_mesh_dim)

    @cached_property
    def replicate_group(self) -> CommGroup | None:
        """The ranks that hold the same shard; None if that is one rank."""
        return self._group(self.replicate_mesh_dim)

    @cached_property
    def shard_mesh_size(self) -> int:
        """Ranks that share one copy, F."""
        return 1 if self.shard_mesh_dim is None else int(self.mesh.size(self.shard_mesh_dim))

    @cached_property
    def shard_mesh_rank(self) -> int:
        """This rank's position among them."""
        return 0 if self.shard_mesh_dim is None else self._coordinate[self.shard_mesh_dim]

    @cached_property
    def replicate_mesh_size(self) -> int:
        """Copies of the parameters, R."""
        return 1 if self.replicate_mesh_dim is None else int(self.mesh.size(self.replicate_mesh_dim))

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different data, F * R."""
        return self.shard_mesh_size * self.replicate_mesh_size

    def placements(self, shard: Placement) -> tuple[Placement, ...]:
        """Return the DTensor placements on the mesh of a parameter that is split as ``shard`` says."""
        axes: list[Placement] = [Replicate()] * self.mesh.ndim
        if self.shard_mesh_dim is not None:
            axes[self.shard_mesh_dim] = shard
        return tuple(axes)


@dataclass(frozen=True)
class FSDPMeshInfo(DataParallelMeshInfo):
    """Parameters are split over ``shard_mesh_dim``.

    Raises:
        ValueError: no shard axis, or this rank is not in the mesh.
    """

    def __post_init__(self) -> None:
        """Make the engine's groups: all ranks of the mesh come here together."""
        if self.shard_mesh_dim is None:
            raise ValueError("FSDPMeshInfo needs shard_mesh_dim, the axis to shard over")
        _ = self.shard_group, self.replicate_group


@dataclass(frozen=True)
class DDPMeshInfo(DataParallelMeshInfo):
    """Parameters are repeated along ``replicate_mesh_dim``."""


@dataclass(frozen=True)
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """Parameters are split over one axis and repeated along the other."""


def _init_default_fully_shard_mesh() -> DeviceMesh:
    """Return a 1-D mesh over all ranks.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, and torchrun, which says how to, has not started this.
    """
    if not dist.is_initialized() and dist.is_torchelastic_launched():
        dist.init_process_group()
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: call torch.distributed.init_process_group first, or pass mesh="
        )
    device = "cuda" if "nccl" in dist.get_backend_config() and torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),))  # without names: equal to the one a user makes


def mesh_info(mesh: DeviceMesh | None) -> FSDPMeshInfo:
    """Check ``mesh`` (None: all ranks) and say which of its axes is which.

    Raises:
        TypeError: not a mesh.
        ValueError: a 2-D mesh without names, more than two axes, or this rank is not in the mesh.
        RuntimeError: no mesh, and ``torch.distributed`` is not initialised.
    """
    mesh = mesh if mesh is not None else _init_default_fully_shard_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh or None, got {type(mesh).__name__}")
    if mesh.ndim not in {1, 2}:
        raise ValueError(
            f"fully_shard got a {mesh.ndim}-D mesh of shape {tuple(mesh.shape)}; it takes a 1-D mesh (shard) or a "
            "2-D one (replicate, shard): pass the data-parallel axes only, e.g. mesh['replicate', 'shard']"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError(
            f"fully_shard got a 2-D mesh of shape {tuple(mesh.shape)} without names; name its axes, e.g. "
            "mesh_dim_names=('replicate', 'shard'): the first repeats parameters, the second shards them"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh, which holds ranks {mesh.mesh.tolist()}: call fully_shard "
            "only on the ranks of its mesh"
        )
    if mesh.ndim == 2:
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return FSDPMeshInfo(mesh, shard_mesh_dim=0)


def _get_post_forward_mesh_info(reshard_after_forward: bool | int, info: FSDPMeshInfo) -> FSDPMeshInfo | None:
    """Return where parameters lie between forward and backward; None: they stay full.

    Raises:
        TypeError: neither bool nor int.
        ValueError: an int that does not divide the shard axis.
    """
    if not isinstance(reshard_after_forward, int):
        raise TypeError(f"reshard_after_forward must be True, False, an int or None, got {reshard_after_forward!r}")
    if isinstance(reshard_after_forward, bool):
        return info if reshard_after_forward else None
    size = info.shard_mesh_size
    if reshard_after_forward < 1 or size % reshard_after_forward:
        factors = ", ".join(str(f) for f in range(1, size + 1) if size % f == 0)
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} does not divide the {size} ranks of the shard axis; "
            f"use one of {factors}, True or False"
        )
    if reshard_after_forward == 1:
        return None
    if reshard_after_forward == size:
        return info
    ranks = info.mesh.mesh.view(-1, reshard_after_forward)
    with groups.around_creation():  # a user may ask a parameter between forward and backward for its full tensor
        smaller = DeviceMesh(info.mesh.device_type, ranks)
    return FSDPMeshInfo(smaller, shard_mesh_dim=1)
