"""Where a unit's full parameters lie while it is unsharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from workbench.engine import probe
from workbench.engine._torch import allow_reading, forbid_reading
from workbench.engine.pages import Pages, SparePages
from workbench.engine.param import FullView
from workbench.events import Category


class UnshardMemory:
    """Memory of one unit, which exists only while it is used.

    What autograd saved in forward points into it. So it is emptied and refilled, never replaced. What a user still
    holds of it (a view, ``detach()``) reads as NaN while it is empty, or raises (CUDA).

    Attributes:
        full: ``[F * S]`` in the param dtype; the padded fulls one after another.
    """

    def __init__(self, unit: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._unit = unit
        self._num_bytes = numel * dtype.itemsize
        self._held = False
        self._pages = Pages(numel, dtype) if device.type == "cpu" else None
        if self._pages is not None:
            self.full = self._pages.tensor
        else:
            self.full = torch.empty(numel, dtype=dtype, device=device)
            self._shrink()

    @contextmanager
    def present(self) -> Iterator[torch.Tensor]:
        """Within the body views of :attr:`full` can be made; it stays empty otherwise."""
        if self._pages is None:
            self._grow()
        yield self.full
        if self._pages is None and not self._held:
            self._shrink()

    def _grow(self) -> None:
        if not self.full.is_meta:
            allow_reading(self.full)
            self.full.untyped_storage().resize_(self._num_bytes)

    def _shrink(self) -> None:
        if not self.full.is_meta:
            self.full.untyped_storage().resize_(0)
            forbid_reading(self.full, "a full parameter was read after its unit was resharded")

    @property
    def is_held(self) -> bool:
        """True between :meth:`take` and :meth:`give_back`."""
        return self._held

    def take(self, spare: SparePages) -> None:
        """Get ready to be written, in spare pages if there are any."""
        if self._held:
            return
        self._held = True
        if self._pages is not None:
            self._pages.fill(spare)
        else:
            self._grow()
        probe.memory(Category.UNSHARDED_PARAMS, self._unit, self._num_bytes)

    def give_back(self, spare: SparePages) -> bool:
        """Let go; returns False if it was not held."""
        if not self._held:
            return False
        self._held = False
        if self._pages is not None:
            self._pages.empty(spare)
        else:
            self._shrink()
        probe.memory(Category.UNSHARDED_PARAMS, self._unit, -self._num_bytes)
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
