"""One parameter of a unit, in its sharded and full forms.

Terms used throughout the engine (see ``shard_layout.py`` for rows, slot and padded full):

- *full shape*     shape of the tensor that the unit splits: the parameter, or a rank's part of it if tensor parallelism
                   has already split it.
- *shard*          a rank's own rows: the local tensor of ``sharded_param``, a view of the unit's *flat shard*.
- *unsharded*      the full tensor, a view of the unit's memory while it is unsharded; a single NaN while it is not.
- *orig dtype*     of the shard and the optimizer; *grad dtype* of the shard's gradient, usually the same; *param dtype*
                   of the unsharded; *reduce dtype* of the reduction.
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
from workbench.engine.backends.copies import Grads
from workbench.engine.full_param import FullParam, FullView
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.shard_layout import ShardLayout
from workbench.events import Param, ParamTensors


class ShardedState(Enum):
    """The form of a parameter that is registered on its modules.

    SHARDED: the DTensor; only the shard is in memory. SHARDED_POST_FORWARD: a DTensor over fewer ranks, between forward
    and backward; its larger shard is in memory too. UNSHARDED: the full tensor; shard and padded full are in memory.
    """

    SHARDED = "sharded"
    SHARDED_POST_FORWARD = "sharded post-forward"
    UNSHARDED = "unsharded"


@dataclass(frozen=True)
class ParamModuleInfo:
    """Places where a parameter is registered: the first, and all others (tied weights, shared modules).

    ``path`` is the first place's name relative to the module that ``fully_shard`` was called on.
    """

    module: nn.Module
    name: str
    path: str
    shared: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def places(self) -> tuple[tuple[nn.Module, str], ...]:
        """All places."""
        return ((self.module, self.name), *self.shared)

    def register(self, param: nn.Parameter) -> None:
        """Register ``param`` at every place."""
        set_parameter(self.module, self.name, param)
        for module, name in self.shared:
            set_parameter(module, name, param)


class FSDPParam(ABC):
    """A managed parameter: its full form and gradients. Subclasses define the sharded form.

    Attributes:
        position: index among the unit's parameters, in flat shard order.
        fqn: name relative to the root; relative to the unit's module until the root is known.
        layout: how the full shape is split.
        post_forward: how it is split between forward and backward, if over fewer ranks.
        sharded_param: the parameter that this rank keeps.
        fulls: the full forms, which modules compute with.
        state: which form is registered.
    """

    reduces_in_grad_dtype: ClassVar[bool] = False
    """Without ``reduce_dtype`` its gradients are reduced in :attr:`shard_grad_dtype`, not in the param dtype."""

    computes_in_shard: ClassVar[bool] = False
    """With a single shard rank, modules compute with the optimizer's own parameters, not a copy."""

    has_own_memory: ClassVar[bool] = False
    """Its shard stays in memory of its own, outside of the unit's flat shard."""

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
        """For each full form, whether it takes a gradient now."""
        return [self.trainable] * len(self.fulls)

    def take_names(self, full_name: Callable[[nn.Module, str], str]) -> None:
        """Set the name to ``full_name(module, name)`` of the first place."""
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
        """The parameters that the user passes to an optimizer."""

    @property
    def trainable(self) -> bool:
        """True if it takes a gradient now (may change between iterations)."""
        return any(param.requires_grad for param in self.owned)

    @property
    def shard_grad_dtype(self) -> torch.dtype | None:
        """Dtype of its sharded gradient; None: that of the reduction."""
        return self.orig_dtype

    def keep_grad_dtype(self) -> None:  # noqa: B027
        """Adopt ``grad_dtype`` if it was set on the sharded parameter; else set it there as on the one before."""

    def accumulate_in(self, grad_dtype: torch.dtype | None, param_dtype: torch.dtype) -> None:  # noqa: B027
        """Set the dtype in which autograd is to accumulate full gradients (None: any), if it should not choose.

        Args:
            grad_dtype: dtype in which they are accumulated without sync and reduced; None: any.
            param_dtype: dtype of the full forms.
        """

    @property
    def is_tensor_parallel(self) -> bool:
        """True if tensor parallelism has already split one of its full forms."""
        return any(full.tp_spec is not None for full in self.fulls)

    @property
    def meshes(self) -> Sequence[DeviceMesh]:
        """Meshes of its DTensor parameters: all ranks that hold a part."""
        return [param.device_mesh for param in self.owned if isinstance(param, DTensor)]

    def set_post_forward(self, mesh: FSDPMeshInfo | None) -> None:
        """Set the mesh it is split over between forward and backward; None: the usual mesh, or not split."""
        layout = self.layout
        self.post_forward = None if mesh is None else ShardLayout(layout.shape, layout.dim, mesh.shard_mesh_size)

    # ---- the sharded form

    def local_view(self, slot: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows as a view of a slot ``[slot_numel]``."""
        return self.layout.local_view(slot, self.mesh_info.shard_mesh_rank)

    @property
    @abstractmethod
    def first(self) -> torch.Tensor:
        """The tensor that :meth:`shard_from` will copy, or a part of it; gives dtype and device of the whole."""

    @abstractmethod
    def shard_from(self, slot: torch.Tensor) -> None:
        """Copy this rank's rows of the original parameter into ``slot`` and create ``sharded_param`` from it."""

    @property
    @abstractmethod
    def is_registered(self) -> bool:
        """True if the modules still hold the parameter known here, in the same memory."""

    @abstractmethod
    def registered(self) -> nn.Parameter:
        """Return the sharded parameter registered now (a loader or ``.to`` may have put a new one there).

        Raises:
            TypeError: an object of another kind is registered.
            ValueError: a parameter of another shape is registered.
        """

    @abstractmethod
    def registered_local(self) -> torch.Tensor:
        """Return this rank's part of :meth:`registered`; raises as that does."""

    @property
    @abstractmethod
    def holders(self) -> Sequence[torch.Tensor]:
        """Tensors that keep the slot alive as long as one of the parameters is referenced."""

    @abstractmethod
    def adopt(self, slot: torch.Tensor) -> None:
        """Make ``slot`` the storage of the registered parameter, keeping the values it has now.

        Needed after ``module.to(...)`` or a loader replaced the parameter or its data.
        """

    @abstractmethod
    def keep(self) -> None:
        """Adopt the registered parameter in its current memory, which other objects may refer to."""

    @property
    @abstractmethod
    def local(self) -> torch.Tensor:
        """This rank's part of ``sharded_param``."""

    @property
    def writes_back(self) -> bool:
        """True if values that replace the registered ones are copied to the slot, as torch does."""
        return False

    @abstractmethod
    def register(self, form: nn.Parameter) -> None:
        """Register the sharded parameter, or one over fewer ranks, on the modules."""

    @abstractmethod
    def register_full(self) -> None:
        """Register the full forms on the modules."""

    @abstractmethod
    def post_forward_form(self, slot: torch.Tensor, mesh: FSDPMeshInfo) -> nn.Parameter:
        """Return the form over fewer ranks, with its rows in ``slot``, filled from the full parameter."""

    # ---- the full form

    def rows_in(self, padded_full: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return views ``[F, ...]`` of the parameter's part of the unit's memory, one for each tensor gathered."""
        return (self.layout.by_rank(padded_full),)

    def parts_of(self, full: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the memory of each full form as a view of ``full``, which has the full shape."""
        return (full,)

    def views_in(self, padded_full: torch.Tensor) -> list[FullView]:
        """Return the full forms' views in ``padded_full`` ``[>= numel]``, of the param dtype."""
        parts = zip(self.fulls, self.parts_of(self.layout.full_view(padded_full)), strict=True)
        return [full.view_of(part, requires_grad=self.trainable) for full, part in parts]

    def show(self, views: Sequence[FullView]) -> None:
        """Point the full forms to ``views``."""
        for full, view in zip(self.fulls, views, strict=True):
            full.show(view)

    def to_unsharded(self) -> None:
        """Register the full forms; their memory must be filled."""
        for full, trains in zip(self.fulls, self.trains, strict=True):
            full.open(requires_grad=trains)
        self.register_full()
        self.state = ShardedState.UNSHARDED

    def to_rest(self) -> None:  # noqa: B027 - most need nothing
        """Mark the full forms idle. They may stay allocated; call :meth:`to_work` before the next use."""

    def to_work(self) -> None:  # noqa: B027 - most need nothing
        """Undo :meth:`to_rest`."""

    def to_sharded(self, form: nn.Parameter | None = None) -> None:
        """Register the sharded parameter, or ``form``, one over fewer ranks; see :meth:`FullParam.close`."""
        for full in self.fulls:
            full.close()
        self.register(self.sharded_param if form is None else form)
        self.state = ShardedState.SHARDED if form is None else ShardedState.SHARDED_POST_FORWARD

    def expect_grad(self) -> None:
        """Let autograd accumulate gradients in the full forms although they hold no values."""
        for full in self.fulls:
            full.expect_grad()

    # ---- gradients

    @property
    def has_full_grad(self) -> bool:
        """True if there is a full gradient not yet reduced."""
        return any(full.has_grad for full in self.fulls)

    def grad_bytes(self) -> int:
        """Return the bytes of full gradients on this rank; raises as :meth:`FullParam.grad_bytes`."""
        return sum(full.grad_bytes() for full in self.fulls)

    def accumulate_grad(self, dtype: torch.dtype | None) -> None:
        """Add full gradients to those that wait for a reduction, in ``dtype``; None: any."""
        for full in self.fulls:
            full.accumulate_grad(dtype)

    @property
    def has_accumulated_grad(self) -> bool:
        """True if gradients of earlier micro-batches wait in the reduce dtype."""
        return any(full.accumulated_grad is not None for full in self.fulls)

    def count_as_zero(self) -> None:
        """Set missing gradients to zero, if trainable."""
        if self.trainable:
            for full in self.fulls:
                full.count_as_zero()

    def take_grads(self) -> Grads:
        """Return the full gradient of each full form, None for a missing one, and clear them."""
        return [full.take_grad() for full in self.fulls]

    def drop_grad(self) -> None:
        """Drop full gradients."""
        for full in self.fulls:
            full.drop_grad()

    def copy_in_pairs(
        self, grads: Grads, slots: torch.Tensor, first_rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (destination, source) pairs that copy the result of :meth:`take_grads` to ``slots``.

        ``slots`` ``[n, slot_numel]`` are those of n ranks from ``first_rank`` on. Elements without a source are zeroed.
        """
        (grad,) = grads
        return self.layout.copy_in_pairs(cast("torch.Tensor", grad), slots, first_rank)

    @property
    def has_sharded_grad(self) -> bool:
        """True if one of the :attr:`owned` parameters has a gradient."""
        return any(param.grad is not None for param in self.owned)

    @abstractmethod
    def add_sharded_grad(self, local_grad: torch.Tensor, handle: object) -> None:
        """Accumulate ``local_grad`` (this rank's rows) in the owned parameters; ``handle`` lives as long as it does."""

    @property
    def global_shape(self) -> Sequence[int]:
        """Shape before tensor parallelism split it."""
        return self.layout.shape

    @abstractmethod
    def tensors(self) -> Mapping[str, ParamTensors]:
        """Return this rank's current tensors of the parameter, by name."""

    def describe(self) -> Param:
        """Return the probe's description."""
        layout = self.layout
        return Param(
            fqn=self.fqn,
            shape=tuple(layout.shape),
            global_shape=tuple(self.global_shape),
            dtype=str(self.orig_dtype).removeprefix("torch."),
            itemsize=self.orig_dtype.itemsize,
            shard_dim=layout.dim,
            rows_per_rank=layout.rows_per_rank,
            padded_rows=layout.padded_rows,
            trainable=self.trainable,
        )


def check_uniform(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Check that the parameters in ``named`` fit in one communication buffer.

    Raises:
        ValueError: they differ in dtype or device.
    """
    kinds: dict[tuple[str, str], str] = {}
    for fqn, param in named:
        kinds.setdefault((str(param.dtype).removeprefix("torch."), str(param.device)), fqn)
    if len(kinds) > 1:
        texts = ", ".join(f"{fqn!r} is {dtype} on {device}" for (dtype, device), fqn in kinds.items())
        raise ValueError(
            f"the parameters of one unit must share dtype and device: {texts}; convert them, or shard them in "
            "separate units"
        )
