"""Where a unit's full parameters lie while it is unsharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from workbench.engine import probe
from workbench.engine._torch import allow_reading, forbid_reading
from workbench.engine.pages import Pages
from workbench.engine.param import FullView
from workbench.engine.pool import Tenant, UnshardSlot
from workbench.events import Category


class UnshardMemory:
    """Memory of the unit's own, which exists only while it is used, or a slot that others use at other times.

    What autograd saved in forward points into it. So it is emptied and refilled, never replaced. What a user still
    holds of it (a view, ``detach()``) reads as NaN while memory of the unit's own is empty, or raises (CUDA); in a slot
    it reads what lies there by then.

    Attributes:
        full: ``[F * S]`` in the param dtype; the padded fulls one after another.
        slot: what it is a part of; None: memory of its own.
    """

    def __init__(
        self, unit: Tenant, numel: int, dtype: torch.dtype, device: torch.device, slot: UnshardSlot | None
    ) -> None:
        self._unit = unit
        self._numel, self._dtype, self._device = numel, dtype, device
        self.slot = slot
        self._held = False
        self._pages = Pages(numel, dtype) if slot is None and device.type == "cpu" else None
        if slot is not None:
            self.full = slot.buffer[: numel * dtype.itemsize].view(dtype)
            return
        self.full = torch.empty(numel, dtype=dtype, device=device) if self._pages is None else self._pages.tensor
        self._empty()

    @contextmanager
    def present(self) -> Iterator[torch.Tensor]:
        """Within the body views of :attr:`full` can be made; it stays empty otherwise."""
        if self.slot is None:
            self._fill()
        yield self.full
        if self.slot is None and not self._held:
            self._empty()

    def _fill(self) -> None:
        if self._pages is not None:
            self._pages.fill()
        elif not self.full.is_meta:
            allow_reading(self.full)
            self.full.untyped_storage().resize_(self._numel * self._dtype.itemsize)

    def _empty(self) -> None:
        if self._pages is not None:
            self._pages.empty()
        elif not self.full.is_meta:
            self.full.untyped_storage().resize_(0)
            forbid_reading(self.full, "a full parameter was read after its unit was resharded")

    @property
    def tenant(self) -> Tenant | None:
        """The other unit whose parameters are in it."""
        owner = None if self.slot is None else self.slot.owner
        return None if owner is self._unit else owner

    @property
    def is_held(self) -> bool:
        """True between :meth:`take` and :meth:`give_back`."""
        return self._held

    def take(self) -> None:
        """Get ready to be written."""
        if self._held:
            return
        self._held = True
        if self.slot is None:
            self._fill()
        else:
            self.slot.use(self._unit, self.full.nbytes)
        probe.memory(Category.UNSHARDED_PARAMS, self._unit.index, self.full.nbytes)

    def give_back(self) -> bool:
        """Let go; returns False if it was not held."""
        if not self._held:
            return False
        self._held = False
        if self.slot is None:
            self._empty()
        else:
            self.slot.use(None, self.full.nbytes)
        probe.memory(Category.UNSHARDED_PARAMS, self._unit.index, -self.full.nbytes)
        return True


@dataclass(frozen=True, eq=False)
class Home:
    """One memory, and a unit's parameters in it. The graph of a forward points into the home it ran in.

    Attributes:
        padded_fulls: the padded full of each parameter.
        by_rank: the same, seen rank by rank ``[F, ...]``.
        views: what each unsharded parameter is there.
    """

    memory: UnshardMemory
    padded_fulls: Sequence[torch.Tensor]
    by_rank: Sequence[torch.Tensor]
    views: Sequence[FullView]
