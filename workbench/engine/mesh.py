"""The ranks that share one copy of the parameters, and those that hold copies of the same shard.

Terms: an *axis* is a dimension of a mesh. Parameters are split over the *shard axis* (F ranks) and replicated along the
*replicate axis* (R ranks).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate

from workbench.engine import process_groups
from workbench.engine._torch import flattened_mesh, joined_mesh, without_fakes
from workbench.engine.backends import device_here, usual_kind
from workbench.engine.process_groups import CommGroup, group_of

Axes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The data-parallel axes of a named mesh on which the parameters already are DTensors.

    Attributes:
        shard: name of the axis that parameters are split over, or names of adjacent axes, which count as one; None:
            they are not split.
        replicate: name or names of the axes along which parameters are replicated; None: there is one copy.

    Raises:
        TypeError: neither a name nor a tuple of names.
        ValueError: no name at all.
    """

    shard: Axes = None
    replicate: Axes = None

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for invalid or missing names."""
        for field_name in ("shard", "replicate"):
            names = _as_names(getattr(self, field_name))
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise TypeError(f"DataParallelMeshDims: {field_name} takes a name or a tuple of names, got {names!r}")
        if not (self.shard_names or self.replicate_names):
            raise ValueError("DataParallelMeshDims needs shard, replicate or both: the names of the mesh's axes")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the axes that parameters are split over."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names of the axes along which parameters are replicated."""
        return _as_names(self.replicate)


def _as_names(axes: Axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


@dataclass(frozen=True)
class DataParallelMeshInfo:
    """A mesh with its data-parallel axes.

    Attributes:
        mesh: 1-D or 2-D DTensor mesh.
        shard_mesh_dim: index of its shard axis; None: parameters are not split.
        replicate_mesh_dim: index of its replicate axis; None: there is one copy.
        dp_mesh_dims: the axes of ``spmd_mesh`` that are joined in ``mesh``; None: parameters need not be DTensors.
        spmd_mesh: the whole mesh that parameters are DTensors on.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)

    @property
    def device(self) -> torch.device:
        """The device this rank computes on."""
        return device_here(self.mesh.device_type)

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
        with without_fakes():
            ranks = tuple(int(rank) for rank in self.mesh.mesh[tuple(along)].tolist())
        return group_of(ranks, self.mesh.device_type)

    @cached_property
    def shard_group(self) -> CommGroup | None:
        """The ranks that share one copy; None if there is only one."""
        return self._group(self.shard_mesh_dim)

    @cached_property
    def replicate_group(self) -> CommGroup | None:
        """The ranks that hold the same shard; None if there is only one."""
        return self._group(self.replicate_mesh_dim)

    @cached_property
    def shard_mesh_size(self) -> int:
        """Number of ranks that share one copy, F."""
        return 1 if self.shard_mesh_dim is None else int(self.mesh.size(self.shard_mesh_dim))

    @cached_property
    def shard_mesh_rank(self) -> int:
        """This rank's position along the shard axis."""
        return 0 if self.shard_mesh_dim is None else self._coordinate[self.shard_mesh_dim]

    @cached_property
    def replicate_mesh_size(self) -> int:
        """Number of copies of the parameters, R."""
        return 1 if self.replicate_mesh_dim is None else int(self.mesh.size(self.replicate_mesh_dim))

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different data, F * R."""
        return self.shard_mesh_size * self.replicate_mesh_size

    @cached_property
    def spmd_shard_axes(self) -> tuple[int, ...]:
        """Indices of the axes of ``spmd_mesh`` that parameters are split over."""
        return self._spmd_axes(self.dp_mesh_dims.shard_names) if self.dp_mesh_dims else ()

    @cached_property
    def spmd_replicate_axes(self) -> tuple[int, ...]:
        """Indices of the axes of ``spmd_mesh`` along which parameters are replicated."""
        return self._spmd_axes(self.dp_mesh_dims.replicate_names) if self.dp_mesh_dims else ()

    def _spmd_axes(self, names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(axis for axis, name in enumerate(names_of(self.spmd_mesh)) if name in names)

    @cached_property
    def _joined(self) -> dict[DeviceMesh, DeviceMesh]:
        return {}

    def joined_with(self, tp: DeviceMesh) -> DeviceMesh:
        """Return the mesh of these axes and those of ``tp``: one object for all parameters, as making one is slow.

        Raises:
            RuntimeError, TypeError: as :func:`joined_mesh`.
        """
        if tp not in self._joined:
            self._joined[tp] = joined_mesh(self.mesh, tp)
        return self._joined[tp]

    def placements(self, shard: Placement) -> tuple[Placement, ...]:
        """Return the DTensor placements on the mesh for a parameter split by ``shard``."""
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
        """Create the engine's groups; all ranks of the mesh must call this together."""
        if self.shard_mesh_dim is None:
            raise ValueError("FSDPMeshInfo needs shard_mesh_dim, the axis to shard over")
        _ = self.shard_group, self.replicate_group


@dataclass(frozen=True)
class DDPMeshInfo(DataParallelMeshInfo):
    """Parameters are replicated along ``replicate_mesh_dim``."""


@dataclass(frozen=True)
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """Parameters are split over one axis and replicated along the other."""


@dataclass(frozen=True)
class ReplicatedMeshInfo(HSDPMeshInfo):
    """Parameters are replicated and not split: the shard axis has one rank."""

    def __post_init__(self) -> None:
        """Create the engine's group, as :meth:`FSDPMeshInfo.__post_init__` does."""
        _ = self.replicate_group


def names_of(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Return the names of the axes; empty if they have none."""
    return tuple(mesh.mesh_dim_names or ()) if mesh is not None else ()


def _init_default_fully_shard_mesh() -> DeviceMesh:
    """Return a 1-D mesh over all ranks.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, and torchrun did not launch this process.
    """
    if not dist.is_initialized() and dist.is_torchelastic_launched():
        dist.init_process_group()
    if not dist.is_initialized():
        raise RuntimeError(
            "sharding needs a process group: call torch.distributed.init_process_group first, or pass a device mesh"
        )
    return init_device_mesh(usual_kind(), (dist.get_world_size(),))  # without names: equal to the mesh a user makes


def mesh_info(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> FSDPMeshInfo:
    """Check ``mesh`` (None: all ranks) and return the info with its shard and replicate axes.

    Args:
        mesh: 1-D or 2-D; any number of axes with ``dims``.
        dims: its data-parallel axes; this creates groups, so all ranks of the mesh must call this together.

    Raises:
        TypeError: not a mesh; ``dims`` of another type.
        ValueError: a 2-D mesh without names, more than two axes, this rank is not in the mesh, or ``dims`` names axes
            that the mesh does not have, one axis twice, or axes to join that are not adjacent.
        RuntimeError: no mesh, and ``torch.distributed`` is not initialised.
    """
    mesh = mesh if mesh is not None else _init_default_fully_shard_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh or None, got {type(mesh).__name__}")
    if dims is not None:
        _check_dims(mesh, dims)
    elif mesh.ndim not in {1, 2}:
        raise ValueError(
            f"fully_shard got a {mesh.ndim}-D mesh of shape {tuple(mesh.shape)}; it takes a 1-D mesh (shard) or a "
            "2-D one (replicate, shard): pass the data-parallel axes only, e.g. mesh['replicate', 'shard'], or name "
            "them with dp_mesh_dims if the parameters are DTensors on the whole mesh"
        )
    elif mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError(
            f"fully_shard got a 2-D mesh of shape {tuple(mesh.shape)} without names; name its axes, e.g. "
            "mesh_dim_names=('replicate', 'shard'): the first replicates parameters, the second shards them"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh, which holds ranks {mesh.mesh.tolist()}: shard only on "
            "the ranks of the mesh"
        )
    if dims is not None:
        return _spmd_mesh_info(mesh, dims)
    if mesh.ndim == 2:
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return FSDPMeshInfo(mesh, shard_mesh_dim=0)


def replicated_mesh_info(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> FSDPMeshInfo:
    """Check ``mesh`` (None: all ranks), 1-D or with ``dims``, and return the info of copies that are not split.

    Raises:
        TypeError, ValueError: as :func:`mesh_info`; a mesh of more axes; ``dims`` with an axis to shard over.
    """
    info = mesh_info(mesh, dims)
    if dims is None and info.mesh.ndim == 1:
        return ReplicatedMeshInfo(info.mesh, replicate_mesh_dim=0)
    if dims is None or dims.shard is not None:
        given = f"a mesh of shape {tuple(info.mesh.shape)}" if dims is None else f"dp_mesh_dims, shard={dims.shard!r}"
        raise ValueError(
            f"replicate got {given}; it takes a 1-D mesh, or dp_mesh_dims=DataParallelMeshDims(replicate=...): to "
            "split parameters too, call fully_shard with a mesh of (replicate, shard)"
        )
    return info


def _check_dims(mesh: DeviceMesh, dims: object) -> None:
    """Raise TypeError or ValueError for axes that cannot be the data-parallel ones of ``mesh``."""
    if not isinstance(dims, DataParallelMeshDims):
        kind = f"{type(dims).__module__}.{type(dims).__qualname__}"
        raise TypeError(
            f"dp_mesh_dims must be a workbench.engine.DataParallelMeshDims, got {dims!r:.80} of type {kind}"
        )
    there, wanted = names_of(mesh), (*dims.replicate_names, *dims.shard_names)
    unknown = [name for name in wanted if name not in there]
    if unknown:
        axes = ", ".join(map(repr, there)) if there else "no names: set mesh_dim_names"
        raise ValueError(f"dp_mesh_dims names {unknown[0]!r}; the axes of the mesh have {axes}")
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"dp_mesh_dims names an axis twice: shard {dims.shard!r}, replicate {dims.replicate!r}")
    for names in (dims.shard_names, dims.replicate_names):
        first = there.index(names[0]) if names else 0
        if there[first : first + len(names)] != names:
            raise ValueError(
                f"dp_mesh_dims joins the axes {', '.join(map(repr, names))}, which must be adjacent and in this "
                f"order in the mesh; it has {', '.join(map(repr, there))}"
            )


def _spmd_mesh_info(mesh: DeviceMesh, dims: DataParallelMeshDims) -> FSDPMeshInfo:
    """Return the info of the data-parallel part of ``mesh``, with axes of one kind joined."""
    shard, replicate = (_part(mesh, names) for names in (dims.shard_names, dims.replicate_names))
    whole: dict[str, Any] = {"dp_mesh_dims": dims, "spmd_mesh": mesh}
    if shard is None:
        return ReplicatedMeshInfo(cast("DeviceMesh", replicate), replicate_mesh_dim=0, **whole)
    if replicate is None:
        return FSDPMeshInfo(shard, shard_mesh_dim=0, **whole)
    return HSDPMeshInfo(joined_mesh(replicate, shard), shard_mesh_dim=1, replicate_mesh_dim=0, **whole)


def _part(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    """Return the 1-D mesh of these axes; None without names."""
    if len(names) < 2:
        return mesh[names[0]] if names else None
    with process_groups.around_creation():
        return flattened_mesh(mesh[names], "_".join(names))


def _get_post_forward_mesh_info(reshard_after_forward: bool | int, info: FSDPMeshInfo) -> FSDPMeshInfo | None:
    """Return the mesh info for parameters between forward and backward; None: they stay full.

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
    with without_fakes():
        ranks = info.mesh.mesh.view(-1, reshard_after_forward)
    # a DTensor mesh: a user may call full_tensor() on a parameter between forward and backward
    with process_groups.around_creation():
        smaller = DeviceMesh(info.mesh.device_type, ranks)
    return FSDPMeshInfo(smaller, shard_mesh_dim=1)
