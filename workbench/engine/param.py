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

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine._torch import local_of, set_parameter, set_versions, waited
from workbench.engine.layout import ShardLayout
from workbench.engine.mesh import FSDPMeshInfo
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


class FSDPParam(ABC):
    """A managed parameter: its full form and its gradients. How it lies on the ranks, a subclass knows.

    Attributes:
        position: its place among the unit's parameters, in the order of the flat shard.
        fqn: name relative to the root; relative to the unit's module until the root is known.
        layout: how the full shape is split.
        post_forward: how it is split between forward and backward, if over fewer ranks.
        sharded_param: what this rank keeps of it, a parameter.
        unsharded_param: full parameter; plain, or a DTensor over the axes of tensor parallelism.
        accumulated_grad: full gradient in the reduce dtype, of micro-batches not reduced yet.
        state: which form is registered.
    """

    sharded_param: nn.Parameter
    unsharded_param: nn.Parameter
    _inner: torch.Tensor  # what the unsharded parameter holds: itself, or the local tensor of a DTensor
    _view: FullView  # what that is while it is unsharded
    _newest_version: int

    def __init__(self, info: ParamModuleInfo, layout: ShardLayout, mesh: FSDPMeshInfo, dtype: torch.dtype) -> None:
        self.position = 0
        self.info = info
        self.fqn = info.path
        self.mesh_info = mesh
        self.layout = layout
        self.post_forward: ShardLayout | None = None
        self.slot_numel = layout.slot_numel
        self.full_numel = layout.slot_numel * mesh.shard_mesh_size
        self.orig_dtype = dtype
        self.accumulated_grad: torch.Tensor | None = None
        self.state = ShardedState.SHARDED

    @property
    @abstractmethod
    def owned(self) -> Sequence[nn.Parameter]:
        """The parameters that an optimizer is given for it."""

    @property
    def trainable(self) -> bool:
        """True if it takes a gradient now (may change between iterations)."""
        return any(param.requires_grad for param in self.owned)

    @property
    def is_tensor_parallel(self) -> bool:
        """True if tensor parallelism has split it before."""
        return False

    def set_post_forward(self, mesh: FSDPMeshInfo | None) -> None:
        """Choose the ranks it is split over between forward and backward; None: the usual ones, or none."""
        layout = self.layout
        self.post_forward = None if mesh is None else ShardLayout(layout.shape, layout.dim, mesh.shard_mesh_size)

    # ---- the sharded form

    def local_view(self, slot: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows as a view of a slot ``[slot_numel]``."""
        return self.layout.local_view(slot, self.mesh_info.shard_mesh_rank)

    @property
    @abstractmethod
    def first(self) -> torch.Tensor:
        """What :meth:`shard_from` will copy, or a part of it: of the dtype of all, and where all is."""

    @abstractmethod
    def shard_from(self, slot: torch.Tensor) -> None:
        """Copy this rank's rows of the parameter that was given into ``slot``, and make ``sharded_param`` of it."""

    @property
    @abstractmethod
    def is_registered(self) -> bool:
        """True if what is registered on the modules is what is known here, and where it is."""

    @abstractmethod
    def registered(self) -> nn.Parameter:
        """Return the sharded parameter registered now (a loader or ``.to`` may have put a new one there).

        Raises:
            TypeError: something else was registered.
            ValueError: one of another shape was.
        """

    @abstractmethod
    def registered_local(self) -> torch.Tensor:
        """Return what this rank holds of :meth:`registered`; raises as that does."""

    @property
    @abstractmethod
    def local(self) -> torch.Tensor:
        """What this rank holds: a view of its slot."""

    @abstractmethod
    def adopt(self, slot: torch.Tensor) -> None:
        """Make ``slot`` the storage of the registered parameter, keeping the values it has now.

        Needed after ``module.to(...)`` or a loader replaced the parameter or its data.
        """

    @abstractmethod
    def move(self, slot: torch.Tensor) -> None:
        """Make ``slot`` the storage of the sharded parameter, whether it is registered now or not."""

    @abstractmethod
    def register(self, form: nn.Parameter) -> None:
        """Put one of its forms onto the modules."""

    @abstractmethod
    def post_forward_form(self, slot: torch.Tensor, mesh: FSDPMeshInfo) -> nn.Parameter:
        """Return the form over fewer ranks whose rows are in ``slot``, filled from the full parameter."""

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
        self.unsharded_param = nn.Parameter(self._as_full(full.data), requires_grad=self.trainable)
        self.unsharded_param.grad = None if had is None else had.to(self.unsharded_param)
        self._inner = local_tensor(self.unsharded_param)
        self._inner.data = self._nothing
        self._newest_version = self.unsharded_param._version

    def _as_full(self, data: torch.Tensor) -> torch.Tensor:
        """Return what the unsharded parameter is where this rank has ``data`` of it."""
        return data

    def to_unsharded(self) -> None:
        """Register the full parameter; its memory must be there."""
        param = self.unsharded_param
        self._inner.data = self._view.data
        if param.requires_grad != self.trainable:
            param.requires_grad_(self.trainable)
        set_versions((param,), (self._view.version,))
        self.register(param)
        self.state = ShardedState.UNSHARDED

    def to_sharded(self, form: nn.Parameter | None = None) -> None:
        """Register the sharded parameter, or ``form``, one over fewer ranks.

        The full one is emptied, so that whoever still holds it fails, or finds NaN rather than another unit's values;
        and its version is another one, so that a backward that was not preceded by an unshard fails instead of
        computing with them.
        """
        if self.state is ShardedState.UNSHARDED:
            self._inner.data = self._nothing
            self._view.version = self.unsharded_param._version  # the user may have written to it
            set_versions((self.unsharded_param,), (self._view.version + 1,))
        self.register(self.sharded_param if form is None else form)
        self.state = ShardedState.SHARDED if form is None else ShardedState.SHARDED_POST_FORWARD

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
        return waited(cast("torch.Tensor", self.unsharded_param.grad))

    @property
    def has_sharded_grad(self) -> bool:
        """True if one of those it owns has a gradient."""
        return any(param.grad is not None for param in self.owned)

    @abstractmethod
    def add_sharded_grad(self, local_grad: torch.Tensor, lease: object) -> None:
        """Accumulate ``local_grad`` (this rank's rows) into what it owns; ``lease`` lives as long as it is kept."""

    @property
    def global_shape(self) -> Sequence[int]:
        """Shape before tensor parallelism split it."""
        return self.layout.shape

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
