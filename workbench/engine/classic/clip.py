"""Gradient clipping for a model with wrappers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine.classic.flat_param import FlatParam, TPGroups
from workbench.engine.full_param import local_tensor
from workbench.engine.mesh import FSDPMeshInfo


@torch.no_grad()
def clip_grad_norm(
    params: Sequence[nn.Parameter],
    flats: Mapping[nn.Parameter, FlatParam],
    max_norm: float,
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """Scale gradients so that the norm of the whole model's gradient is at most ``max_norm``; collective.

    Parameters that tensor parallelism has split count with all their parts, and those that its ranks hold in common
    count once. (torch's wrapper ignores the other tensor-parallel ranks, so each of them scales by a different norm.)
    The caller has checked that the ranks hold the same gradients.

    Args:
        params: all parameters.
        flats: the flat parameter that each parameter is, or is a piece of; parameters not in it are the same on all
            ranks, or DTensors.
        max_norm: maximum norm.
        norm_type: p of the p-norm; ``inf``: the largest element.
        device: the device to compute the norm on.

    Returns:
        The norm before scaling, a scalar of the widest dtype among the gradients.
    """
    # every rank needs the same order, with or without gradients
    by_mesh: dict[FSDPMeshInfo, dict[TPGroups, list[torch.Tensor]]] = {}
    for flat in dict.fromkeys(flats.values()):
        by_mesh.setdefault(flat.mesh_info, {}).update({part.tp_groups: [] for part in flat.parts})
    others: list[torch.Tensor] = []
    for param in params:
        if param.grad is not None and param not in flats:
            others.append(param.grad)
        elif param.grad is not None:
            for groups, piece in flats[param].grads_by_groups(param, param.grad):
                by_mesh[flats[param].mesh_info][groups].append(piece)
    split = [norm for mesh, grads in by_mesh.items() for norm in _norms(grads, norm_type, device, mesh)]
    norms = torch.stack([*split, _local_norm(others, norm_type, device)])
    total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    scaled = [local_tensor(param.grad) for param in params if param.grad is not None]
    for grad in scaled:
        grad.mul_(scale.to(grad.device, grad.dtype))
    if not scaled:
        return total
    dtype: torch.dtype = reduce(torch.promote_types, (grad.dtype for grad in scaled))
    return total.to(dtype)


def _local_norm(grads: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    norms = [
        _whole(torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32)).to(device)  # a DTensor's is global
        for grad in grads
    ]
    zero = torch.zeros((), device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([zero, *norms]), norm_type)
    return norm


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _norms(
    grads: Mapping[TPGroups, Sequence[torch.Tensor]], norm_type: float, device: torch.device, mesh: FSDPMeshInfo
) -> list[torch.Tensor]:
    """Return the norms of ``grads`` over the ranks that share one copy, one for each key; collective.

    A key is the set of groups over which tensor parallelism has split the gradients.
    """
    norms = torch.stack([_local_norm(each, norm_type, device) for each in grads.values()])
    is_max = math.isinf(norm_type)
    op, shares = (dist.ReduceOp.MAX, norms) if is_max else (dist.ReduceOp.SUM, norms**norm_type)
    if mesh.shard_mesh_dim is not None:
        dist.all_reduce(shares, op, group=mesh.mesh.get_group(mesh.shard_mesh_dim))
    elif not any(grads):
        return [*norms]
    for share, groups in zip(shares, grads, strict=True):
        for group in groups:
            dist.all_reduce(share, op, group=group)
    return [*(shares if is_max else shares ** (1 / norm_type))]
