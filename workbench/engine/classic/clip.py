"""Scaling the gradients of a model whose parameters lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine.backends import backend_of
from workbench.engine.classic.flat_param import FlatParam
from workbench.engine.errors import RanksDisagreeError
from workbench.engine.full_param import local_tensor
from workbench.engine.mesh import FSDPMeshInfo

Groups = tuple[dist.ProcessGroup, ...]
"""Of ranks that tensor parallelism has given different elements; none where it has split nothing."""


@torch.no_grad()
def clip_grad_norm(
    params: Sequence[nn.Parameter],
    flats: Mapping[nn.Parameter, FlatParam],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    names: Mapping[nn.Parameter, str],
) -> torch.Tensor:
    """Scale gradients so that the norm of all is at most ``max_norm``; collective.

    It is the norm of the whole model's gradient. What tensor parallelism has split counts with all its parts, and what
    its ranks have alike counts once; torch's wrapper leaves out what other ranks of tensor parallelism have, and each
    of them scales by another norm.

    Which ranks lack which gradient crosses with the norm, without a further collective. It is read where that does not
    make the host wait for a device.

    Args:
        params: all parameters.
        flats: of which flat parameter one is all or a piece; those that are not here are the same on all ranks, or
            DTensors.
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
    grads: dict[FSDPMeshInfo, dict[Groups, list[torch.Tensor]]] = {}
    for param, flat in flats.items():  # in the same order on all ranks, whether or not there are gradients
        split.setdefault(flat.mesh_info, []).append(param)
        grads.setdefault(flat.mesh_info, {}).update({part.tp_groups: [] for part in flat.parts})
    unsplit: list[torch.Tensor] = []
    for param in params:
        if param.grad is None:
            continue
        if param not in flats:
            unsplit.append(param.grad)
            continue
        of_mesh = grads[flats[param].mesh_info]
        for groups, piece in flats[param].grads_by_groups(param, param.grad):
            of_mesh[groups].append(piece)
    found = [_norms(grads[mesh], norm_type, device, mesh, split[mesh]) for mesh in split]
    differing = [names[param] for _, params_of_mesh, _ in found for param in params_of_mesh]
    if differing or any(is_elsewhere for *_, is_elsewhere in found):
        more = f" and of {len(differing) - 1} more" if len(differing) > 1 else ""
        which = f"the gradient of {differing[0]!r}{more}" if differing else "a gradient, of another part of the model,"
        raise RanksDisagreeError(
            f"clip_grad_norm_: only some ranks hold {which}; a step that failed or was aborted left it: drop the "
            "gradients on every rank with model.zero_grad(), and run the backward again"
        )
    norms = torch.stack([*(norm for norms, *_ in found for norm in norms), _local_norm(unsplit, norm_type, device)])
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
        _whole(torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32)).to(device)  # of a DTensor that of all
        for grad in grads
    ]
    zero = torch.zeros((), device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([zero, *norms]), norm_type)
    return norm


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _norms(
    grads: Mapping[Groups, Sequence[torch.Tensor]],
    norm_type: float,
    device: torch.device,
    mesh: FSDPMeshInfo,
    params: Sequence[nn.Parameter],
) -> tuple[list[torch.Tensor], list[nn.Parameter], bool]:
    """Return the norms of ``grads`` over the ranks that share one copy; collective.

    There is one for each set of groups that tensor parallelism has split gradients over.

    Returns:
        the norms; the parameters of which some ranks lack the gradient; whether any rank of tensor parallelism has
        found such a parameter. A rank without elements of a parameter has no say in it.
    """
    is_max = math.isinf(norm_type)
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    norms = [_local_norm(each, norm_type, device) for each in grads.values()]
    if mesh.shard_mesh_dim is None and not any(grads):
        return norms, [], False
    if mesh.shard_mesh_dim is None or not backend_of(device).is_host:
        params = ()
    dtype = norms[0].dtype
    has = torch.tensor([bool(p.numel()) and p.grad is not None for p in params], dtype=dtype, device=device)
    lacks = torch.tensor([bool(p.numel()) and p.grad is None for p in params], dtype=dtype, device=device)
    shared = torch.cat([torch.stack(norms if is_max else [norm**norm_type for norm in norms]), has, lacks])
    if mesh.shard_mesh_dim is not None:
        dist.all_reduce(shared, op, group=mesh.mesh.get_group(mesh.shard_mesh_dim))
    own, has, lacks = shared.split([len(norms), len(params), len(params)])
    flags = (has * lacks).tolist()
    differing = [param for param, flag in zip(params, flags, strict=True) if flag]
    others = torch.tensor(float(bool(differing)), dtype=dtype, device=device)
    shares = []
    for share, groups in zip(own, grads, strict=True):
        both = torch.stack([share, others])
        for group in groups:
            dist.all_reduce(both, op, group=group)
        shares.append(both[0])
        others = both[1] if groups else others
    is_elsewhere = bool(params) and bool(others)
    return (shares if is_max else [share ** (1 / norm_type) for share in shares]), differing, is_elsewhere
