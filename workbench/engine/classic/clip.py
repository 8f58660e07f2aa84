"""Scaling the gradients of a model whose parameters lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import nn

from workbench.engine.backends import backend_of
from workbench.engine.errors import RanksDisagreeError
from workbench.engine.mesh import FSDPMeshInfo


@torch.no_grad()
def clip_grad_norm(
    params: Sequence[nn.Parameter],
    meshes: Mapping[nn.Parameter, FSDPMeshInfo],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    names: Mapping[nn.Parameter, str],
) -> torch.Tensor:
    """Scale gradients so that the norm of all is at most ``max_norm``; collective.

    Which ranks lack which gradient crosses with the norm, without a further collective. It is read where that does not
    make the host wait for a device.

    Args:
        params: all parameters.
        meshes: over which ranks one is split; those that are not here are the same on all ranks.
        max_norm: highest norm that is left as it is.
        norm_type: p of the p-norm; ``inf``: the largest element.
        device: on which the norm is computed.
        names: what messages call the parameters that are split.

    Returns:
        the norm before, a scalar; of the largest dtype of the gradients.

    Raises:
        RanksDisagreeError: on every rank that shares it: only some of those that hold a part of a parameter hold its
            gradient. No gradient is scaled then.
    """
    split: dict[FSDPMeshInfo, list[nn.Parameter]] = {}
    for param, info in meshes.items():  # in the same order on all ranks, whether or not there are gradients
        split.setdefault(info, []).append(param)
    by_mesh: dict[FSDPMeshInfo | None, list[torch.Tensor]] = {info: [] for info in split}
    for param in params:
        if param.grad is not None:
            by_mesh.setdefault(meshes.get(param), []).append(param.grad)
    found = [_norm(grads, norm_type, device, mesh, split.get(mesh, ())) for mesh, grads in by_mesh.items() if mesh]
    differing = [names[param] for _, params_of_mesh in found for param in params_of_mesh]
    if differing:
        more = f" and of {len(differing) - 1} more" if len(differing) > 1 else ""
        raise RanksDisagreeError(
            f"clip_grad_norm_: only some ranks hold the gradient of {differing[0]!r}{more}; a step that failed or was "
            "aborted left it: drop the gradients on every rank with model.zero_grad(), and run the backward again"
        )
    norms = torch.stack([*(norm for norm, _ in found), _local_norm(by_mesh.get(None, ()), norm_type, device)])
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


def _norm(
    grads: Sequence[torch.Tensor],
    norm_type: float,
    device: torch.device,
    mesh: FSDPMeshInfo,
    params: Sequence[nn.Parameter],
) -> tuple[torch.Tensor, list[nn.Parameter]]:
    """Return the norm of ``grads`` over the ranks that share one copy, and the parameters of which some lack theirs.

    A rank without elements of a parameter has no say in it.
    """
    norm = _local_norm(grads, norm_type, device)
    if mesh.shard_mesh_dim is None:
        return norm, []
    group = mesh.mesh.get_group(mesh.shard_mesh_dim)
    is_max = math.isinf(norm_type)
    own = norm if is_max else norm**norm_type
    if not backend_of(device).is_host:
        params = ()
    has = torch.tensor([bool(p.numel()) and p.grad is not None for p in params], dtype=norm.dtype, device=device)
    lacks = torch.tensor([bool(p.numel()) and p.grad is None for p in params], dtype=norm.dtype, device=device)
    shared = torch.cat([own.reshape(1), has, lacks])
    dist.all_reduce(shared, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    flags = (shared[1 : 1 + len(params)] * shared[1 + len(params) :]).tolist()
    differing = [param for param, flag in zip(params, flags, strict=True) if flag]
    return (shared[0] if is_max else shared[0] ** (1 / norm_type)), differing
