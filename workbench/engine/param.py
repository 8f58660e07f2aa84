"""One parameter of a unit, in its two forms.

Words for tensors and bytes, used in the whole engine:

- *full shape*   the parameter's own shape ``[d0, *rest]``; ``rest_numel = prod(rest)``.
- *rows*         slices of dim 0. Each of the F shard ranks has storage for ``c = ceil(d0 / F)`` *padded rows*; rank r
                 really holds rows ``[r*c, min(d0, (r+1)*c))``, which may be none (torch.chunk's split).
- *shard*        a rank's own rows: the local tensor of ``sharded_param``, a view of the unit's *flat shard*.
- *slot*         the ``c * rest_numel`` elements of the flat shard that belong to this parameter.
- *padded full*  ``[F * c, *rest]``: all slots of the parameter one below the other; its first d0 rows are the
                 parameter, which is what ``unsharded_param`` shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from workbench.engine._torch import dtensor_like, local_of, parameter_of, set_local, set_parameter
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.probe import ParamInfo


class ShardedState(Enum):
    """Which form of a parameter is registered on its modules.

    SHARDED: the DTensor; only the shard is in memory. UNSHARDED: the plain full tensor; shard and padded full are.
    """

    SHARDED = "sharded"
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


class FSDPParam:
    """A managed parameter.

    Attributes:
        fqn: name relative to the root; relative to the unit's module until the root is known.
        full_shape: ``[d0, *rest]``.
        padded_rows: c.
        slot_numel: ``c * rest_numel``.
        sharded_param: DTensor parameter, Shard(0).
        unsharded_param: plain parameter ``[d0, *rest]``, a view of the padded full; ``[0]`` while sharded. Exists once
            storage was bound.
        state: which of the two is registered.
    """

    sharded_param: nn.Parameter
    unsharded_param: nn.Parameter

    def __init__(self, param: nn.Parameter, info: ParamModuleInfo, mesh: FSDPMeshInfo) -> None:
        self.info = info
        self.fqn = info.path
        self.full_shape = param.shape
        self.stride = param.stride()
        self.dtype = param.dtype
        self._mesh = mesh
        self.padded_rows = -(-param.shape[0] // mesh.shard_size)
        self.rest_numel = math.prod(param.shape[1:])
        self.slot_numel = self.padded_rows * self.rest_numel
        self.state = ShardedState.SHARDED

    def rows_of(self, shard_rank: int) -> tuple[int, int]:
        """Return the first row and the row after the last that ``shard_rank`` holds."""
        rows = self.full_shape[0]
        return min(shard_rank * self.padded_rows, rows), min((shard_rank + 1) * self.padded_rows, rows)

    @property
    def is_even(self) -> bool:
        """True if no rank has padding."""
        return self.padded_rows * self._mesh.shard_size == self.full_shape[0]

    @property
    def trainable(self) -> bool:
        """True if it takes a gradient now (may change between iterations)."""
        return self.sharded_param.requires_grad

    def local_view(self, slot: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows ``[rows, *rest]`` as a view of a slot ``[c * rest_numel]``."""
        first, last = self.rows_of(self._mesh.shard_rank)
        return slot[: (last - first) * self.rest_numel].view(last - first, *self.full_shape[1:])

    def shard_from(self, full: torch.Tensor, slot: torch.Tensor, *, requires_grad: bool) -> None:
        """Copy this rank's rows of ``full`` into ``slot`` and make ``sharded_param`` of it."""
        first, last = self.rows_of(self._mesh.shard_rank)
        local = self.local_view(slot)
        if not full.is_meta:
            local.copy_(full.detach()[first:last])
        dtensor = DTensor.from_local(
            local,
            self._mesh.mesh,
            [Shard(0)],
            run_check=False,
            shape=self.full_shape,
            stride=self.stride,
        )
        self.sharded_param = nn.Parameter(dtensor, requires_grad=requires_grad)
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
        """
        param = getattr(self.info.module, self.info.name)
        if not isinstance(param, DTensor):
            raise TypeError(
                f"parameter {self.fqn!r} was replaced by a plain {type(param).__name__} after fully_shard; "
                "replace it before fully_shard, or copy values in with param.copy_(dtensor)"
            )
        return param

    def adopt(self, slot: torch.Tensor) -> None:
        """Make ``slot`` the storage of the registered parameter, keeping the values it has now.

        Needed after ``module.to(...)`` or a loader replaced the parameter or its data.
        """
        param = self.registered()
        view = self.local_view(slot)
        if not param.is_meta:
            view.copy_(local_of(param))
        set_local(param, view)
        self._local = view
        self.sharded_param = cast("nn.Parameter", param)
        self.dtype = view.dtype

    def bind(self, padded_full: torch.Tensor) -> None:
        """Make ``unsharded_param`` a view of ``padded_full`` ``[F * c * rest_numel]``.

        ``.data`` gives it a version counter of its own: copying a new unshard into the storage later must not look
        to autograd like a change of what it saved.
        """
        self._full = padded_full[: math.prod(self.full_shape)].view(self.full_shape)
        self._nothing = padded_full.new_empty(0)
        full = nn.Parameter(self._full.data, requires_grad=self.trainable)
        grad = self.unsharded_param.grad if hasattr(self, "unsharded_param") else None
        full.grad = grad.to(full) if grad is not None else None
        full.data = self._nothing
        self.unsharded_param = full

    @property
    def has_full_grad(self) -> bool:
        """True if there is a full gradient that was not reduced yet."""
        return self.unsharded_param.grad is not None

    def to_unsharded(self) -> None:
        """Register the full parameter; its storage must be there."""
        self.unsharded_param.data = self._full
        if self.unsharded_param.requires_grad != self.trainable:
            self.unsharded_param.requires_grad_(self.trainable)
        self.info.register(self.unsharded_param)
        self.state = ShardedState.UNSHARDED

    def to_sharded(self) -> None:
        """Register the DTensor parameter.

        The full one is emptied, so that whoever still holds it finds nothing in it rather than freed memory.
        """
        self.unsharded_param.data = self._nothing
        self.info.register(self.sharded_param)
        self.state = ShardedState.SHARDED

    def add_sharded_grad(self, local_grad: torch.Tensor) -> DTensor:
        """Accumulate ``local_grad`` ``[rows, *rest]`` into ``sharded_param.grad`` and return that."""
        if self.sharded_param.grad is None:
            self.sharded_param.grad = dtensor_like(cast("DTensor", self.sharded_param), local_grad)
        else:
            local_of(cast("DTensor", self.sharded_param.grad)).add_(local_grad)
        return cast("DTensor", self.sharded_param.grad)

    def describe(self) -> ParamInfo:
        """Return the probe's description."""
        bounds = [self.rows_of(r) for r in range(self._mesh.shard_size)]
        return ParamInfo(
            fqn=self.fqn,
            shape=tuple(self.full_shape),
            dtype=str(self.dtype).removeprefix("torch."),
            itemsize=self.dtype.itemsize,
            rows_per_rank=tuple(last - first for first, last in bounds),
            padded_rows=self.padded_rows,
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
            f"the parameters of one unit must share dtype and device: {said}; convert them, or call fully_shard on "
            "the submodules that differ"
        )
