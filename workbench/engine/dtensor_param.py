"""A parameter sharded by rows as a DTensor, under its own name: the form that ``fully_shard`` gives to parameters."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from workbench.engine._spmd_types import annotation_of
from workbench.engine._torch import (
    REDUCES_IN_GRAD_DTYPE,
    Spec,
    dtensor_of,
    has_own_grad_dtype,
    joined_mesh,
    local_of,
    make_spec,
    parameter_of,
    set_local,
    shards_along,
    spec_of,
    splits,
    strided_shard,
    with_dtype,
)
from workbench.engine.backends.memory_aliasing import is_same_memory
from workbench.engine.full_param import FullParam, local_tensor
from workbench.engine.mesh import FSDPMeshInfo, names_of
from workbench.engine.param import FSDPParam, ParamModuleInfo
from workbench.engine.shard_layout import ShardLayout
from workbench.events import ParamTensors


def _sharded_spec(path: str, param: nn.Parameter, shard: Shard, mesh: FSDPMeshInfo) -> Spec:
    """Return the spec of the sharded parameter: data-parallel axes first, then those of tensor parallelism."""
    if mesh.spmd_mesh is not None:
        return _spmd_spec(path, param, shard, mesh, mesh.spmd_mesh)
    if not isinstance(param, DTensor):
        return make_spec(mesh.mesh, mesh.placements(shard), param)
    inner = spec_of(param)
    placement = strided_shard(shard.dim, shards_along(inner, shard.dim))
    joined = joined_with_tp(path, param, mesh)
    return make_spec(joined, (*mesh.placements(placement), *inner.placements), param)


def joined_with_tp(path: str, param: DTensor, mesh: FSDPMeshInfo) -> DeviceMesh:
    """Return the joined mesh of the data-parallel axes and the tensor-parallel axes of ``param``.

    Raises:
        ValueError: the two overlap, or are not from one mesh with named axes.
    """
    try:
        return mesh.joined_with(param.device_mesh)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"parameter {path!r} is a DTensor on mesh {param.device_mesh}, which cannot be combined with the mesh "
            f"{mesh.mesh} that parameters are sharded over: slice both from one DeviceMesh with named axes, e.g. "
            "world['dp'] and world['tp']"
        ) from error


def _spmd_spec(path: str, param: nn.Parameter, shard: Shard, mesh: FSDPMeshInfo, whole: DeviceMesh) -> Spec:
    """Return the spec of a sharded parameter whose full form is a DTensor on ``whole``; joins the sharded axes.

    Raises:
        ValueError: ``param`` is no such DTensor, or is not replicated on a data-parallel axis.
    """
    if not isinstance(param, DTensor) or param.device_mesh != whole:
        kind = f"a DTensor on {param.device_mesh}" if isinstance(param, DTensor) else f"a plain {type(param).__name__}"
        raise ValueError(
            f"with dp_mesh_dims, all parameters must be DTensors on the mesh passed to fully_shard, {whole}; "
            f"{path!r} is {kind}: create them with distribute_tensor or distribute_module first"
        )
    names, split, placements = names_of(whole), mesh.spmd_shard_axes, list(param.placements)
    for axis in (*split, *mesh.spmd_replicate_axes):
        if not placements[axis].is_replicate():
            raise ValueError(
                f"parameter {path!r} must be Replicate() on the data-parallel axis {names[axis]!r}, which fully_shard "
                f"splits; it is {placements[axis]}"
            )
    behind = [axis for axis in range(whole.ndim) if split and axis > split[-1] and splits(placements[axis], shard.dim)]
    placement = strided_shard(shard.dim, math.prod(whole.size(axis) for axis in behind))
    if len(split) < 2:
        for axis in split:
            placements[axis] = placement
        return make_spec(whole, placements, param)
    parts: dict[DeviceMesh, tuple[Placement, ...]] = {}
    for axis, name in enumerate(names):
        if axis == split[0]:
            parts[mesh.mesh] = mesh.placements(placement)
        elif axis not in (*split, *mesh.spmd_replicate_axes):
            parts[whole[name]] = (placements[axis],)
    return make_spec(joined_mesh(*parts), list(itertools.chain(*parts.values())), param)


class DTensorParam(FSDPParam):
    """A managed parameter whose shard is the local tensor of a DTensor.

    Attributes:
        full: the full parameter.
        spec: DTensor spec of the sharded parameter.
    """

    reduces_in_grad_dtype = REDUCES_IN_GRAD_DTYPE

    def __init__(self, param: nn.Parameter, info: ParamModuleInfo, shard: Shard, mesh: FSDPMeshInfo) -> None:
        self.info, self.layout = info, ShardLayout(local_tensor(param).shape, shard.dim, mesh.shard_mesh_size)
        annotation = annotation_of(info.path, param, mesh)
        stored = param if annotation is None else nn.Parameter(dtensor_of(param.detach(), annotation.spec))
        reduced_axes = (*mesh.spmd_shard_axes, *mesh.spmd_replicate_axes)
        self.full = self._make_full(spec_of(stored) if isinstance(stored, DTensor) else None, reduced_axes, annotation)
        super().__init__(info, self.layout, mesh, param.dtype, (self.full,))
        self._given: nn.Parameter | None = param
        self._own_grad_dtype = (param.grad_dtype,) if has_own_grad_dtype(param) else ()
        self._global_shape = stored.shape
        self.spec = _sharded_spec(info.path, stored, shard, mesh)

    def _make_full(self, *args: Any) -> FullParam:  # noqa: ANN401 - see FullParam
        return FullParam(self.info.path, *args)

    @property
    def owned(self) -> tuple[nn.Parameter, ...]:
        """The DTensor parameter."""
        return (self.sharded_param,)

    @property
    def trainable(self) -> bool:
        """True if it takes a gradient now (may change between iterations)."""
        return self.sharded_param.requires_grad

    @property
    def shard_grad_dtype(self) -> torch.dtype | None:
        """``grad_dtype`` of the parameter if it was set, where None allows any; otherwise the parameter's dtype."""
        return self._own_grad_dtype[0] if self._own_grad_dtype else self.orig_dtype

    def accumulate_in(self, grad_dtype: torch.dtype | None, param_dtype: torch.dtype) -> None:
        """Let autograd keep narrower gradients as they are, which saves a cast of each; otherwise it casts them.

        A wider dtype also applies to a reduction over tensor-parallel ranks.
        """
        if self.reduces_in_grad_dtype:
            widens = grad_dtype is not None and grad_dtype.itemsize > param_dtype.itemsize
            self.full.grad_dtype = (None if widens and not self.full.may_be_partial else grad_dtype,)

    def set_post_forward(self, mesh: FSDPMeshInfo | None) -> None:
        """Set the mesh it is split over between forward and backward; None: the usual mesh, or not split.

        Raises:
            NotImplementedError: tensor parallelism has split it.
        """
        if mesh is not None and self.is_tensor_parallel:
            raise NotImplementedError(
                f"parameter {self.fqn!r} is a DTensor of tensor parallelism; reshard_after_forward as a number of "
                "ranks needs plain parameters: use True or False"
            )
        super().set_post_forward(mesh)

    @property
    def global_shape(self) -> torch.Size:
        """Shape before tensor parallelism split it."""
        return self._global_shape

    # ---- the sharded form

    @property
    def first(self) -> torch.Tensor:
        """This rank's part of the original parameter."""
        return local_tensor(cast("nn.Parameter", self._given))

    def shard_from(self, slot: torch.Tensor) -> None:
        """Copy this rank's rows of the original parameter into ``slot`` and create ``sharded_param`` from it."""
        param, self._given = cast("nn.Parameter", self._given), None
        local = self.local_view(slot)
        if not param.is_meta:
            local.copy_(self.layout.shard_of(local_tensor(param).detach(), self.mesh_info.shard_mesh_rank))
        self.sharded_param = nn.Parameter(dtensor_of(local, self.spec), requires_grad=param.requires_grad)
        self.keep_grad_dtype()
        self._local = local_of(cast("DTensor", self.sharded_param))

    @property
    def holders(self) -> tuple[torch.Tensor, ...]:
        """The DTensor's local tensor."""
        return (self._local,)

    @property
    def is_registered(self) -> bool:
        """True if the module still holds the DTensor parameter known here, with the same local tensor."""
        param = parameter_of(self.info.module, self.info.name)
        return param is self.sharded_param and local_of(cast("DTensor", param)) is self._local

    def registered(self) -> nn.Parameter:
        """Return the DTensor parameter registered now (a loader or ``.to`` may have put a new one there).

        Raises:
            TypeError: the registered parameter is not a DTensor.
            ValueError: the registered DTensor has another shape.
        """
        param = getattr(self.info.module, self.info.name)
        if not isinstance(param, DTensor):
            raise TypeError(
                f"parameter {self.fqn!r} was replaced by a plain {type(param).__name__} after fully_shard; "
                "replace it before fully_shard, or copy values in with param.copy_(dtensor)"
            )
        if param.shape != self.global_shape:
            raise ValueError(
                f"parameter {self.fqn!r} of shape {list(self.global_shape)} was replaced by one of shape "
                f"{list(param.shape)} after fully_shard; replace it before fully_shard"
            )
        return cast("nn.Parameter", param)

    def registered_local(self) -> torch.Tensor:
        """Return this rank's part of :meth:`registered`."""
        return local_of(cast("DTensor", self.registered()))

    def register(self, form: nn.Parameter) -> None:
        """Register ``form`` at each of the parameter's places."""
        self.info.register(form)

    def register_full(self) -> None:
        """Register the full parameter at each of its places."""
        self.info.register(self.full.param)

    def adopt(self, slot: torch.Tensor) -> None:
        """Make ``slot`` the storage of the registered parameter, keeping the values it has now.

        Needed after ``module.to(...)`` or a loader replaced the parameter or its data.
        """
        param = cast("DTensor", self.registered())
        view = self.local_view(slot)
        if not param.is_meta and not is_same_memory(local_of(param), view):
            view.copy_(local_of(param))
        set_local(param, view)
        self.keep()

    def keep(self) -> None:
        """Adopt the registered parameter in its current memory."""
        self.sharded_param = self.registered()
        self.keep_grad_dtype()
        self._local = local_of(cast("DTensor", self.sharded_param))
        self.info.register(self.sharded_param)  # a loader replaces it at one place only
        self.orig_dtype = self._local.dtype
        self.spec = with_dtype(self.spec, self.orig_dtype)

    def keep_grad_dtype(self) -> None:
        """Adopt ``grad_dtype`` if it was set on the sharded parameter; else set it there as on the one before."""
        if has_own_grad_dtype(self.sharded_param):
            self._own_grad_dtype = (self.sharded_param.grad_dtype,)
        elif self._own_grad_dtype:
            self.sharded_param.grad_dtype = self._own_grad_dtype[0]

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        return self._local

    def post_forward_form(self, slot: torch.Tensor, mesh: FSDPMeshInfo) -> nn.Parameter:
        """Return the DTensor over fewer ranks, with its rows in ``slot``, filled from the full parameter."""
        layout = cast("ShardLayout", self.post_forward)
        local = layout.local_view(slot, mesh.shard_mesh_rank)
        local.copy_(layout.shard_of(self.full.data, mesh.shard_mesh_rank))
        spec = make_spec(mesh.mesh, mesh.placements(Shard(layout.dim)), self.full.data)
        return nn.Parameter(dtensor_of(local, spec), requires_grad=self.trainable)

    def add_sharded_grad(self, local_grad: torch.Tensor, handle: object) -> None:
        """Accumulate ``local_grad`` (this rank's rows) into the DTensor's gradient."""
        if self.sharded_param.grad is None:
            self.sharded_param.grad = dtensor_of(local_grad, with_dtype(self.spec, local_grad.dtype))
            self.sharded_param.grad._workbench_handle = handle  # type: ignore[attr-defined]
        else:
            local_of(cast("DTensor", self.sharded_param.grad)).add_(local_grad)

    def tensors(self) -> dict[str, ParamTensors]:
        """Return this rank's current tensors of the parameter, by its name."""
        known = ParamTensors(
            shard=self.sharded_param,
            shard_rank=self.mesh_info.shard_mesh_rank,
            full=local_tensor(self.full.param) if self.full.is_open else None,
            freed=self.full.freed,
            full_grads=self.full.grads,
            sharded_grad=self.sharded_param.grad,
            places=self.info.places,
        )
        return {self.fqn: known}
