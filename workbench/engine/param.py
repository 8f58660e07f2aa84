"""One parameter of a unit, in its forms.

Words for tensors and bytes, used in the whole engine (see ``shard_layout.py`` for rows, slot and padded full):

- *full shape*     the shape of what this unit splits: the parameter's own, or a rank's part of it if tensor parallelism
                   has split it before.
- *shard*          a rank's own rows: the local tensor of ``sharded_param``, a view of the unit's *flat shard*.
- *unsharded*      the full tensor, a view of memory the unit lends while it is unsharded; a lone NaN while it is not.
- *orig dtype*     of the shard, its gradient and the optimizer; *param dtype* of the unsharded; *reduce dtype* of the
                   reduction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from workbench.engine._torch import set_parameter
from workbench.engine.backends.base import Grads
from workbench.engine.full_param import FullParam, FullView
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.shard_layout import ShardLayout
from workbench.events import Param, ParamTensors


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


class FSDPParam(ABC):
    """A managed parameter: its full form and its gradients. How it lies on the ranks, a subclass knows.

    Attributes:
        position: its place among the unit's parameters, in the order of the flat shard.
        fqn: name relative to the root; relative to the unit's module until the root is known.
        layout: how the full shape is split.
        post_forward: how it is split between forward and backward, if over fewer ranks.
        sharded_param: what this rank keeps of it, a parameter.
        fulls: what modules compute with.
        state: which form is registered.
    """

    computes_in_shard: ClassVar[bool] = False
    """Where one rank has all of it, modules compute with what the optimizer steps, and not with a copy."""

    sharded_param: nn.Parameter

    def __init__(
        self,
        info: ParamModuleInfo,
        layout: ShardLayout,
        mesh: FSDPMeshInfo,
        dtype: torch.dtype,
        fulls: Sequence[FullParam],
    ) -> None:
        self.position = 0
        self.info = info
        self.fqn = info.path
        self.mesh_info = mesh
        self.layout = layout
        self.post_forward: ShardLayout | None = None
        self.slot_numel = layout.slot_numel
        self.full_numel = layout.slot_numel * mesh.shard_mesh_size
        self.orig_dtype = dtype
        self.fulls = fulls
        self.state = ShardedState.SHARDED

    @property
    def trains(self) -> Sequence[bool]:
        """Which of the full forms take a gradient now."""
        return [self.trainable] * len(self.fulls)

    def take_names(self, full_name: Callable[[nn.Module, str], str]) -> None:
        """Be called, from now on, what ``full_name`` makes of a module and what this one calls it."""
        self.fqn = full_name(self.info.module, self.info.name)
        for full in self.fulls:
            full.fqn = self.fqn

    @property
    def infos(self) -> Sequence[ParamModuleInfo]:
        """Where each of the full forms is registered."""
        return [self.info]

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
        """True if tensor parallelism has split some of it before."""
        return any(full.tp_spec is not None for full in self.fulls)

    @property
    def meshes(self) -> Sequence[DeviceMesh]:
        """Meshes of all ranks that have some of it, if it is a DTensor, or tensor parallelism has split some of it."""
        return [param.device_mesh for param in self.owned if isinstance(param, DTensor)]

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
    def holders(self) -> Sequence[torch.Tensor]:
        """Tensors that keep the slot alive for whoever holds one of the parameters."""

    @abstractmethod
    def adopt(self, slot: torch.Tensor) -> None:
        """Make ``slot`` the storage of the registered parameter, keeping the values it has now.

        Needed after ``module.to(...)`` or a loader replaced the parameter or its data.
        """

    @abstractmethod
    def keep(self) -> None:
        """Take the registered parameter over where it lies: somebody may hold that memory."""

    @property
    @abstractmethod
    def local(self) -> torch.Tensor:
        """What this rank holds of ``sharded_param``."""

    @property
    def writes_back(self) -> bool:
        """Whether values that are put in the place of registered ones are copied to the slot, as torch does too."""
        return False

    @abstractmethod
    def register(self, form: nn.Parameter) -> None:
        """Put the sharded parameter, or one over fewer ranks, onto the modules."""

    @abstractmethod
    def register_full(self) -> None:
        """Put the full forms onto the modules."""

    @abstractmethod
    def post_forward_form(self, slot: torch.Tensor, mesh: FSDPMeshInfo) -> nn.Parameter:
        """Return the form over fewer ranks whose rows are in ``slot``, filled from the full parameter."""

    # ---- the full form

    def parts_of(self, full: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the full forms' memory as views of ``full``, all of it, in the full shape."""
        return (full,)

    def views_in(self, padded_full: torch.Tensor) -> list[FullView]:
        """Return what the full forms are in ``padded_full`` ``[>= numel]``, of the param dtype."""
        parts = zip(self.fulls, self.parts_of(self.layout.full_view(padded_full)), strict=True)
        return [full.view_of(part, requires_grad=self.trainable) for full, part in parts]

    def show(self, views: Sequence[FullView]) -> None:
        """Let the full forms be ``views`` from now on."""
        for full, view in zip(self.fulls, views, strict=True):
            full.show(view)

    def to_unsharded(self) -> None:
        """Register the full forms; their memory must be there."""
        for full, trains in zip(self.fulls, self.trains, strict=True):
            full.open(requires_grad=trains)
        self.register_full()
        self.state = ShardedState.UNSHARDED

    def to_rest(self) -> None:  # noqa: B027 - most need nothing
        """Nothing computes with the full forms for now, which may stay: :meth:`to_work` before something does."""

    def to_work(self) -> None:  # noqa: B027 - most need nothing
        """Undo :meth:`to_rest`."""

    def to_sharded(self, form: nn.Parameter | None = None) -> None:
        """Register the sharded parameter, or ``form``, one over fewer ranks; see :meth:`FullParam.close`."""
        for full in self.fulls:
            full.close()
        self.register(self.sharded_param if form is None else form)
        self.state = ShardedState.SHARDED if form is None else ShardedState.SHARDED_POST_FORWARD

    def expect_grad(self) -> None:
        """Let autograd hand gradients to the full forms although their values are not there."""
        for full in self.fulls:
            full.expect_grad()

    # ---- gradients

    @property
    def has_full_grad(self) -> bool:
        """True if there is a full gradient that was not reduced yet."""
        return any(full.has_grad for full in self.fulls)

    def grad_bytes(self) -> int:
        """Bytes of full gradients this rank holds; raises as :meth:`FullParam.grad_bytes`."""
        return sum(full.grad_bytes() for full in self.fulls)

    def accumulate_grad(self, dtype: torch.dtype) -> None:
        """Move full gradients to those that wait for a reduction, in its ``dtype``."""
        for full in self.fulls:
            full.accumulate_grad(dtype)

    @property
    def has_accumulated_grad(self) -> bool:
        """True if gradients of earlier micro-batches wait in the dtype of the reduction."""
        return any(full.accumulated_grad is not None for full in self.fulls)

    def count_as_zero(self) -> None:
        """Take gradients that did not come as zero."""
        if self.trainable:
            for full in self.fulls:
                full.count_as_zero()

    def take_grads(self) -> Grads:
        """Return the full gradient of each full form, None where there is none, and forget them."""
        return [full.take_grad() for full in self.fulls]

    def drop_grad(self) -> None:
        """Forget full gradients."""
        for full in self.fulls:
            full.drop_grad()

    def copy_in_pairs(
        self, grads: Grads, slots: torch.Tensor, first_rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (destination, source) that lay out what :meth:`take_grads` gave in ``slots`` ``[n, slot_numel]``.

        These are the slots of n ranks from ``first_rank`` on. What has no source is zeroed.
        """
        (grad,) = grads
        return self.layout.copy_in_pairs(cast("torch.Tensor", grad), slots, first_rank)

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

    @abstractmethod
    def tensors(self) -> Mapping[str, ParamTensors]:
        """Return what this rank has of it now, by names."""

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
            f"the parameters of one unit must share dtype and device: {said}; convert them, or shard by "
            "itself what differs"
        )
