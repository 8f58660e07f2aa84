"""Scaling the gradients of a model whose parameters lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import nn

from workbench.engine.mesh import FSDPMeshInfo


@torch.no_grad()
def clip_grad_norm(
    params: Sequence[nn.Parameter],
    meshes: Mapping[nn.Parameter, FSDPMeshInfo],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """Scale gradients so that the norm of all is at most ``max_norm``; collective.

    The ranks have agreed before that they hold the same gradients.

    Args:
        params: all parameters.
        meshes: over which ranks one is split; those that are not here are the same on all ranks.
        max_norm: highest norm that is left as it is.
        norm_type: p of the p-norm; ``inf``: the largest element.
        device: on which the norm is computed.

    Returns:
        the norm before, a scalar; of the largest dtype of the gradients.
    """
    # in the same order on all ranks, whether or not there are gradients
    by_mesh: dict[FSDPMeshInfo | None, list[torch.Tensor]] = {info: [] for info in meshes.values()}
    for param in params:
        if param.grad is not None:
            by_mesh.setdefault(meshes.get(param), []).append(param.grad)
    split = [_norm(grads, norm_type, device, mesh) for mesh, grads in by_mesh.items() if mesh]
    norms = torch.stack([*split, _local_norm(by_mesh.get(None, ()), norm_type, device)])
    total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    scaled = [grad for grads in by_mesh.values() for grad in grads]
    for grad in scaled:
        grad.mul_(scale.to(grad.device, grad.dtype))
    if not scaled:
        return total
    dtype: torch.dtype = reduce(torch.promote_types, (grad.dtype for grad in scaled))
    return total.to(dtype)


def _local_norm(grads: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32).to(device) for grad in grads]
    zero = torch.zeros((), device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([zero, *norms]), norm_type)
    return norm


def _norm(grads: Sequence[torch.Tensor], norm_type: float, device: torch.device, mesh: FSDPMeshInfo) -> torch.Tensor:
    """Return the norm of ``grads`` over the ranks that share one copy; collective."""
    norm = _local_norm(grads, norm_type, device)
    if mesh.shard_mesh_dim is None:
        return norm
    group = mesh.mesh.get_group(mesh.shard_mesh_dim)
    if math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    powers = norm**norm_type
    dist.all_reduce(powers, group=group)
    total: torch.Tensor = powers ** (1 / norm_type)
    return total
