"""Where a unit's full parameters lie while it is unsharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workbench.engine import probe
from workbench.engine._torch import allow_reading, forbid_reading
from workbench.engine.pages import Pages
from workbench.engine.pool import UnshardSlot
from workbench.engine.probe import Category


class UnshardMemory:
    """Memory of the unit's own, which exists only while it is used, or a slot that others use at other times.

    What autograd saved in forward points into it. So it is emptied and refilled, never replaced, except between
    iterations. What a user still holds of it (a view, ``detach()``) reads as NaN while memory of the unit's own is
    empty, or raises (CUDA); in a slot it reads what lies there by then.

    Attributes:
        full: ``[F * S]`` in the param dtype; the padded fulls one after another.
    """

    def __init__(self, unit: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._unit = unit
        self._numel, self._dtype, self._device = numel, dtype, device
        self._slot: UnshardSlot | None = None
        self._held = False
        self._make_own()

    def _make_own(self) -> None:
        self._pages = Pages(self._numel, self._dtype) if self._device.type == "cpu" else None
        if self._pages is not None:
            self.full = self._pages.tensor
        else:
            self.full = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        self._empty()

    @contextmanager
    def present(self) -> Iterator[torch.Tensor]:
        """Within the body views of :attr:`full` can be made; it stays empty otherwise."""
        if self._slot is None:
            self._fill()
        yield self.full
        if self._slot is None and not self._held:
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

    def use_slot(self, slot: UnshardSlot | None) -> bool:
        """Use ``slot`` from now on, None: memory of its own; returns False if that is so already.

        Only while the memory is not held.
        """
        if slot is self._slot:
            return False
        self._slot = slot
        if slot is None:
            self._make_own()
        else:
            self._pages = None
            self.full = slot.buffer[: self._numel * self._dtype.itemsize].view(self._dtype)
        return True

    @property
    def is_lent(self) -> bool:
        """True while another unit's parameters are in it."""
        return self._slot is not None and self._slot.owner not in {None, self._unit}

    def take(self) -> None:
        """Get ready to be written."""
        if self._held:
            return
        self._held = True
        if self._slot is None:
            self._fill()
        else:
            self._slot.use(self._unit, self.full.nbytes)
        probe.memory(Category.UNSHARDED_PARAMS, self._unit, self.full.nbytes)

    def give_back(self) -> bool:
        """Let go; returns False if it was not held."""
        if not self._held:
            return False
        self._held = False
        if self._slot is None:
            self._empty()
        else:
            self._slot.use(None, self.full.nbytes)
        probe.memory(Category.UNSHARDED_PARAMS, self._unit, -self.full.nbytes)
        return True
