"""Where a unit's full parameters lie while it is unsharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from workbench.engine import probe
from workbench.engine.backends.base import FullMemory
from workbench.engine.backends.page_pool import SparePages
from workbench.engine.full_param import FullView
from workbench.engine.shard_layout import rows_of
from workbench.events import Category


class MemoryOfShards:
    """The shards of a rank that has all of them.

    Attributes:
        tensor: ``[S]``.
    """

    def __init__(self, shards: torch.Tensor) -> None:
        self.tensor = shards

    def present(self) -> AbstractContextManager[None]:
        """Within the body views of :attr:`tensor` can be made, as always."""
        return nullcontext()

    def fill(self, _spare: SparePages) -> None:
        """It is there."""

    def empty(self, _spare: SparePages) -> None:
        """It stays."""


class UnshardMemory:
    """Memory of one unit, which exists only while it is used.

    What autograd saved in forward points into it. So it is emptied and refilled, never replaced. What a user still
    holds of it (a view, ``detach()``) reads as NaN while it is empty, or raises (on a device).

    Attributes:
        full: ``[F * S]`` in the param dtype; the padded fulls one after another.
    """

    def __init__(self, unit: int, memory: FullMemory) -> None:
        self._unit = unit
        self._held = False
        self._memory = memory
        self.full = memory.tensor

    @property
    def is_shards(self) -> bool:
        """True if it is that of the shards, so that nothing has to be copied into it, and it is never empty."""
        return isinstance(self._memory, MemoryOfShards)

    @contextmanager
    def present(self) -> Iterator[torch.Tensor]:
        """Within the body views of :attr:`full` can be made; it stays empty otherwise."""
        with self._memory.present():
            yield self.full

    @property
    def full_nbytes(self) -> int:
        """Bytes that exist for :attr:`full` alone."""
        return 0 if self.is_shards else self.full.numel() * self.full.itemsize

    @property
    def is_held(self) -> bool:
        """True between :meth:`take` and :meth:`give_back`."""
        return self._held

    def take(self, spare: SparePages) -> None:
        """Get ready to be written, in spare pages if there are any."""
        if self._held:
            return
        self._held = True
        self._memory.fill(spare)
        probe.memory(Category.UNSHARDED_PARAMS, self._unit, self.full_nbytes)

    def give_back(self, spare: SparePages) -> bool:
        """Let go; returns False if it was not held."""
        if not self._held:
            return False
        self._held = False
        self._memory.empty(spare)
        probe.memory(Category.UNSHARDED_PARAMS, self._unit, -self.full_nbytes)
        return True


@dataclass(frozen=True, eq=False)
class BufferSet:
    """One memory, and a unit's parameters in it. The graph of a forward points into the home it ran in.

    Attributes:
        padded_fulls: the padded full of each parameter.
        by_rank: the same, seen rank by rank ``[F, ...]``.
        views: what the full forms of each are there.
    """

    memory: UnshardMemory
    padded_fulls: Sequence[torch.Tensor]
    by_rank: Sequence[torch.Tensor]
    views: Sequence[Sequence[FullView]]
    _rows: dict[tuple[int, ...], list[Sequence[torch.Tensor]]] = field(default_factory=dict)

    def rows_of(self, num_ranks: Sequence[int]) -> list[Sequence[torch.Tensor]]:
        """Return :func:`workbench.engine.shard_layout.rows_of` of :attr:`by_rank`; it is cut once."""
        key = tuple(num_ranks)
        if key not in self._rows:
            self._rows[key] = rows_of(self.by_rank, key)
        return self._rows[key]
