"""Which ranks share one copy of the parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workbench.engine.groups import CommGroup, group_for


@dataclass(frozen=True)
class FSDPMeshInfo:
    """A 1-D mesh over whose only axis parameters are sharded.

    Attributes:
        mesh: the DTensor mesh.
        group: the engine's own communication group over the same ranks; None when there is only one rank.
    """

    mesh: DeviceMesh
    group: CommGroup | None

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy, F."""
        return self.mesh.size()

    @property
    def shard_rank(self) -> int:
        """This rank's position among them."""
        return int(self.mesh.get_local_rank())


def _init_default_fully_shard_mesh() -> DeviceMesh:
    """Return a 1-D mesh over all ranks.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: call torch.distributed.init_process_group first, or pass mesh="
        )
    device = "cuda" if "nccl" in str(dist.get_backend()) and torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))


def mesh_info(mesh: DeviceMesh | None) -> FSDPMeshInfo:
    """Check ``mesh`` (None: all ranks) and pair it with the engine's communication group.

    Raises:
        TypeError: not a mesh.
        NotImplementedError: the mesh is not 1-D.
        ValueError: this rank is not in the mesh.
        RuntimeError: no mesh, and ``torch.distributed`` is not initialised.
    """
    mesh = mesh if mesh is not None else _init_default_fully_shard_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh or None, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise NotImplementedError(
            f"fully_shard got a {mesh.ndim}-D mesh of shape {tuple(mesh.shape)}; only 1-D meshes are supported: "
            "pass one of its axes, e.g. mesh['shard']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh, which holds ranks {mesh.mesh.tolist()}: call fully_shard "
            "only on the ranks of its mesh"
        )
    return FSDPMeshInfo(mesh=mesh, group=group_for(mesh) if mesh.size() > 1 else None)
