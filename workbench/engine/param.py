"""One parameter of a unit, in its forms.

Words for tensors and bytes, used in the whole engine (see ``layout.py`` for rows, slot and padded full):

- *full shape*     the shape of what this unit splits: the parameter's own, or a rank's part of it if tensor parallelism
                   has split it before.
- *shard*          a rank's own rows: the local tensor of ``sharded_param``, a view of the unit's *flat shard*.
- *unsharded*      the full tensor, a view of memory the unit lends while it is unsharded; a lone NaN while it is not.
- *orig dtype*     of the shard, its gradient and the optimizer; *param dtype* of the unsharded; *reduce dtype* of the
                   reduction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from workbench.engine._torch import (
    Spec,
    dtensor_of,
    joined_mesh,
    local_of,
    make_spec,
    parameter_of,
    set_local,
    set_parameter,
    set_versions,
    shards_along,
    spec_of,
    splits,
    strided_shard,
    waited,
    with_dtype,
)
from workbench.engine.backends.addresses import is_same_memory
from workbench.engine.layout import ShardLayout
from workbench.engine.mesh import FSDPMeshInfo, names_of
from workbench.events import Param


class ShardedState(Enum):
    """Which form of a parameter is registered on its modules.

    SHARDED: the DTensor; only the shard is in memory. SHARDED_POST_FORWARD: a DTensor over fewer ranks, between forward
    and backward; its larger shard is in memory too. UNSHARDED: the full tensor; shard and padded full are.
    """

    SHARDED = "sharded"
    SHARDED_POST_FORWARD = "sharded post-forward"
    UNSHARDED = "unsharded"


@dataclass(frozen=True)
class ParamModuleInfo:
    """Where a parameter is registered: the first place, and every further one (tied weights, shared modules).

    ``path`` is the first place's name relative to the module that ``fully_shard`` was called on.
    """

    module: nn.Module
    name: str
    path: str
    shared: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def places(self) -> tuple[tuple[nn.Module, str], ...]:
        """Every place."""
        return ((self.module, self.name), *self.shared)

    def register(self, param: nn.Parameter) -> None:
        """Put ``param`` into every place."""
        set_parameter(self.module, self.name, param)
        for module, name in self.shared:
            set_parameter(module, name, param)


_VERSIONS = 2**10
"""How far apart the versions of one parameter in different memories are: room for writes of the user's."""


@dataclass
class FullView:
    """A full parameter in one memory.

    Attributes:
        data: of the full shape.
        version: what autograd's counter says while the parameter is this: a graph that saved it elsewhere must not
            compute with it.
    """

    data: torch.Tensor
    version: int


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a parameter: all of it unless tensor parallelism has split it."""
    return local_of(param) if isinstance(param, DTensor) else param


def _sharded_spec(path: str, param: nn.Parameter, shard: Shard, mesh: FSDPMeshInfo) -> Spec:
    """Describe the sharded parameter: data-parallel axes first, then those of tensor parallelism."""
    if mesh.spmd_mesh is not None:
        return _spmd_spec(path, param, shard, mesh, mesh.spmd_mesh)
    if not isinstance(param, DTensor):
        return make_spec(mesh.mesh, mesh.placements(shard), param)
    inner = spec_of(param)
    placement = strided_shard(shard.dim, shards_along(inner, shard.dim))
    try:
        joined = joined_mesh(mesh.mesh, inner.mesh)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"parameter {path!r} is a DTensor on mesh {inner.mesh}, which cannot be joined with fully_shard's mesh "
            f"{mesh.mesh}: take both from one DeviceMesh with named axes, e.g. world['dp'] and world['tp']"
        ) from error
    return make_spec(joined, (*mesh.placements(placement), *inner.placements), param)


def _spmd_spec(path: str, param: nn.Parameter, shard: Shard, mesh: FSDPMeshInfo, whole: DeviceMesh) -> Spec:
    """Describe the sharded parameter whose full form is a DTensor on the whole mesh: its axes, those split over joined.

    Raises:
        ValueError: it is no such DTensor, or is not whole on a data-parallel axis.
    """
    if not isinstance(param, DTensor) or param.device_mesh != whole:
        kind = f"a DTensor on {param.device_mesh}" if isinstance(param, DTensor) else f"a plain {type(param).__name__}"
        raise ValueError(
            f"with dp_mesh_dims, all parameters must be DTensors on the mesh that fully_shard is given, {whole}; "
            f"{path!r} is {kind}: make them with distribute_tensor or distribute_module first"
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


class FSDPParam:
    """A managed parameter.

    Attributes:
        position: its place among the unit's parameters, in the order of the flat shard.
        fqn: name relative to the root; relative to the unit's module until the root is known.
        layout: how the full shape is split.
        post_forward: how it is split between forward and backward, if over fewer ranks.
        sharded_param: DTensor parameter.
        unsharded_param: full parameter; plain, or a DTensor over the axes of tensor parallelism.
        accumulated_grad: full gradient in the reduce dtype, of micro-batches not reduced yet.
        state: which form is registered.
    """

    sharded_param: nn.Parameter
    unsharded_param: nn.Parameter
    _inner: torch.Tensor  # what the unsharded parameter holds: itself, or the local tensor of a DTensor
    _view: FullView  # what that is while it is unsharded
    _newest_version: int

    def __init__(self, param: nn.Parameter, info: ParamModuleInfo, shard: Shard, mesh: FSDPMeshInfo) -> None:
        self.position = 0
        self.info = info
        self.fqn = info.path
        self.mesh_info = mesh
        full = local_tensor(param)
        self.layout = ShardLayout(full.shape, shard.dim, mesh.shard_mesh_size)
        self.post_forward: ShardLayout | None = None
        self.slot_numel = self.layout.slot_numel
        self.full_numel = self.layout.slot_numel * mesh.shard_mesh_size
        self.orig_dtype = param.dtype
        self.global_shape = param.shape
        self.spec = _sharded_spec(info.path, param, shard, mesh)
        self._tp_spec = spec_of(param) if isinstance(param, DTensor) else None
        self.accumulated_grad: torch.Tensor | None = None
        self.state = ShardedState.SHARDED

    @property
    def trainable(self) -> bool:
        """True if it takes a gradient now (may change between iterations)."""
        return self.sharded_param.requires_grad

    def set_post_forward(self, mesh: FSDPMeshInfo | None) -> None:
        """Choose the ranks it is split over between forward and backward; None: the usual ones, or none.

        Raises:
            NotImplementedError: tensor parallelism has split it.
        """
        if mesh is not None and self._tp_spec is not None:
            raise NotImplementedError(
                f"parameter {self.fqn!r} is a DTensor of tensor parallelism; reshard_after_forward as a number of "
                "ranks is for plain parameters: use True or False"
            )
        layout = self.layout
        self.post_forward = None if mesh is None else ShardLayout(layout.shape, layout.dim, mesh.shard_mesh_size)

    # ---- the sharded form

    def local_view(self, slot: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows as a view of a slot ``[slot_numel]``."""
        return self.layout.local_view(slot, self.mesh_info.shard_mesh_rank)

    def shard_from(self, param: nn.Parameter, slot: torch.Tensor) -> None:
        """Copy this rank's rows of ``param`` into ``slot`` and make ``sharded_param`` of it."""
        local = self.local_view(slot)
        if not param.is_meta:
            local.copy_(self.layout.shard_of(local_tensor(param).detach(), self.mesh_info.shard_mesh_rank))
        self.sharded_param = nn.Parameter(dtensor_of(local, self.spec), requires_grad=param.requires_grad)
        self._local = local_of(cast("DTensor", self.sharded_param))

    @property
    def is_registered(self) -> bool:
        """True if the DTensor parameter on the module is the one known here, and wraps what it did."""
        param = parameter_of(self.info.module, self.info.name)
        return param is self.sharded_param and local_of(cast("DTensor", param)) is self._local

    def registered(self) -> DTensor:
        """Return the DTensor parameter registered now (a loader or ``.to`` may have put a new one there).

        Raises:
            TypeError: something else than a DTensor was registered.
            ValueError: a DTensor of another shape was.
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
        return param

    def adopt(self, slot: torch.Tensor) -> None:
        """Make ``slot`` the storage of the registered parameter, keeping the values it has now.

        Needed after ``module.to(...)`` or a loader replaced the parameter or its data.
        """
        param = self.registered()
        view = self.local_view(slot)
        if not param.is_meta and not is_same_memory(local_of(param), view):
            view.copy_(local_of(param))
        set_local(param, view)
        self._local = view
        self.sharded_param = cast("nn.Parameter", param)
        self.info.register(self.sharded_param)  # a loader exchanges one place only
        self.orig_dtype = view.dtype
        self.spec = with_dtype(self.spec, view.dtype)

    def move(self, slot: torch.Tensor) -> None:
        """Make ``slot`` the storage of the sharded parameter, whether it is registered now or not."""
        view = self.local_view(slot)
        param = cast("DTensor", self.sharded_param)
        view.copy_(local_of(param))
        set_local(param, view)
        self._local = view

    # ---- the full form

    def view_in(self, padded_full: torch.Tensor) -> FullView:
        """Return what the unsharded parameter is in ``padded_full`` ``[>= numel]``, of the param dtype."""
        full = self.layout.full_view(padded_full)
        if not hasattr(self, "unsharded_param") or self.unsharded_param.dtype != full.dtype:
            self._make_unsharded(full)
        self._newest_version += _VERSIONS
        return FullView(full, self._newest_version)

    def show(self, view: FullView) -> None:
        """Let the unsharded parameter be ``view`` from now on."""
        if self.state is ShardedState.UNSHARDED:
            self._view.version = self.unsharded_param._version
            self._inner.data = view.data
            set_versions((self.unsharded_param,), (view.version,))
        self._view = view

    def _make_unsharded(self, full: torch.Tensor) -> None:
        """Make the unsharded parameter, like ``full``, and empty for now.

        ``.data`` gives it a version counter of its own: copying a new unshard into the memory later must not look to
        autograd like a change of what it saved.
        """
        self._nothing = _unreadable(full)
        had = self.unsharded_param.grad if hasattr(self, "unsharded_param") else None
        data: torch.Tensor = full.data
        if self._tp_spec is not None:
            data = dtensor_of(data, with_dtype(self._tp_spec, data.dtype))
        self.unsharded_param = nn.Parameter(data, requires_grad=self.trainable)
        self.unsharded_param.grad = None if had is None else had.to(self.unsharded_param)
        self._inner = local_tensor(self.unsharded_param)
        self._inner.data = self._nothing
        self._newest_version = self.unsharded_param._version

    def to_unsharded(self) -> None:
        """Register the full parameter; its memory must be there."""
        param = self.unsharded_param
        self._inner.data = self._view.data
        if param.requires_grad != self.trainable:
            param.requires_grad_(self.trainable)
        set_versions((param,), (self._view.version,))
        self.info.register(param)
        self.state = ShardedState.UNSHARDED

    def to_sharded(self, form: nn.Parameter | None = None) -> None:
        """Register the DTensor parameter, or ``form``, one over fewer ranks.

        The full one is emptied, so that whoever still holds it fails, or finds NaN rather than another unit's values;
        and its version is another one, so that a backward that was not preceded by an unshard fails instead of
        computing with them.
        """
        if self.state is ShardedState.UNSHARDED:
            self._inner.data = self._nothing
            self._view.version = self.unsharded_param._version  # the user may have written to it
            set_versions((self.unsharded_param,), (self._view.version + 1,))
        self.info.register(self.sharded_param if form is None else form)
        self.state = ShardedState.SHARDED if form is None else ShardedState.SHARDED_POST_FORWARD

    def post_forward_form(self, slot: torch.Tensor, mesh: FSDPMeshInfo) -> nn.Parameter:
        """Return the DTensor over fewer ranks whose rows are in ``slot``, filled from the full parameter."""
        layout = cast("ShardLayout", self.post_forward)
        local = layout.local_view(slot, mesh.shard_mesh_rank)
        local.copy_(layout.shard_of(self._view.data, mesh.shard_mesh_rank))
        spec = make_spec(mesh.mesh, mesh.placements(Shard(layout.dim)), self._view.data)
        return nn.Parameter(dtensor_of(local, spec), requires_grad=self.trainable)

    def expect_grad(self) -> None:
        """Let autograd hand a gradient to the full parameter although its values are not there."""
        self._inner.data = self._view.data

    # ---- gradients

    @property
    def has_full_grad(self) -> bool:
        """True if there is a full gradient that was not reduced yet."""
        return self.unsharded_param.grad is not None or self.accumulated_grad is not None

    def grad_bytes(self) -> int:
        """Bytes of full gradients this rank holds.

        Raises:
            NotImplementedError: the gradient is sparse.
        """
        grads = (self.unsharded_param.grad, self.accumulated_grad)
        if grads[0] is not None and grads[0].layout is not torch.strided:
            raise NotImplementedError(
                f"parameter {self.fqn!r} got a sparse gradient, which cannot be reduced with those of its unit; make "
                "it dense (sparse=False), or leave it out with ignored_params"
            )
        return sum(local_tensor(g).nbytes for g in grads if g is not None)

    def accumulate_grad(self, dtype: torch.dtype) -> None:
        """Move the full gradient into ``accumulated_grad``, kept in the reduce dtype."""
        if self.unsharded_param.grad is None:
            return
        if self.accumulated_grad is not None:
            self.accumulated_grad += self._plain_grad()
        elif self.unsharded_param.grad.dtype != dtype:
            self.accumulated_grad = self._plain_grad().to(dtype)
        else:
            return  # autograd adds up by itself
        self.unsharded_param.grad = None

    def count_as_zero(self) -> None:
        """Take a gradient that did not come as zero."""
        if self.trainable and not self.has_full_grad:
            self.accumulated_grad = torch.zeros_like(self._view.data)

    def take_grad(self) -> torch.Tensor:
        """Return this rank's full gradient, full shape, which is there, and forget it."""
        grad = self._plain_grad() if self.accumulated_grad is None else self.accumulated_grad
        self.drop_grad()
        return grad

    def drop_grad(self) -> None:
        """Forget the full gradient."""
        self.accumulated_grad = self.unsharded_param.grad = None

    def _plain_grad(self) -> torch.Tensor:
        grad = cast("torch.Tensor", self.unsharded_param.grad)
        if isinstance(grad, DTensor):
            spec = cast("Spec", self._tp_spec)
            ours = (*self.mesh_info.spmd_shard_axes, *self.mesh_info.spmd_replicate_axes)  # reduced with the others'
            wanted = tuple((grad if axis in ours else spec).placements[axis] for axis in range(len(spec.placements)))
            if grad.placements != wanted:  # e.g. a norm's: partial sums over the tensor-parallel ranks
                grad = grad.redistribute(placements=wanted)
            grad = local_of(grad)
        return waited(grad)

    def add_sharded_grad(self, local_grad: torch.Tensor) -> DTensor:
        """Accumulate ``local_grad`` (this rank's rows) into ``sharded_param.grad`` and return that."""
        if self.sharded_param.grad is None:
            self.sharded_param.grad = dtensor_of(local_grad, self.spec)
        else:
            local_of(cast("DTensor", self.sharded_param.grad)).add_(local_grad)
        return cast("DTensor", self.sharded_param.grad)

    def describe(self) -> Param:
        """Return the probe's description."""
        layout = self.layout
        bounds = [layout.rows_of(r) for r in range(layout.num_shards)]
        return Param(
            fqn=self.fqn,
            shape=tuple(layout.shape),
            global_shape=tuple(self.global_shape),
            dtype=str(self.orig_dtype).removeprefix("torch."),
            itemsize=self.orig_dtype.itemsize,
            shard_dim=layout.dim,
            rows_per_rank=tuple(last - first for first, last in bounds),
            padded_rows=layout.padded_rows,
            trainable=self.trainable,
        )


def _unreadable(like: torch.Tensor) -> torch.Tensor:
    """Return what a full parameter holds while its memory is away: operations fail on it, or give NaN."""
    return like.new_full((), torch.nan) if like.is_floating_point() or like.is_complex() else like.new_empty(0)


def check_uniform(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check that parameters, given with their names, can travel in one buffer.

    Raises:
        ValueError: they differ in dtype or device.
    """
    kinds: dict[tuple[str, str], str] = {}
    for fqn, param in named:
        kinds.setdefault((str(param.dtype).removeprefix("torch."), str(param.device)), fqn)
    if len(kinds) > 1:
        said = ", ".join(f"{fqn!r} is {dtype} on {device}" for (dtype, device), fqn in kinds.items())
        raise ValueError(
            f"the parameters of one unit must share dtype and device: {said}; convert them, or call fully_shard on "
            "the submodules that differ"
        )
