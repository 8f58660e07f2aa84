"""Memory for a unit's full parameters while it is unsharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from workbench.engine import probe
from workbench.engine.backends.full_memory import FullMemory
from workbench.engine.backends.page_pool import SparePages
from workbench.engine.full_param import FullView
from workbench.engine.param import FSDPParam
from workbench.engine.shard_layout import rows_of
from workbench.engine.tensor_trees import unrecorded
from workbench.events import Category


class MemoryOfShards:
    """The shards of a single shard rank, used as memory for the full parameters.

    Attributes:
        tensor: ``[S]``.
    """

    def __init__(self, shards: torch.Tensor) -> None:
        self.tensor = shards

    def present(self) -> AbstractContextManager[None]:
        """Return a no-op context: views can always be made."""
        return nullcontext()

    def fill(self, _spare: SparePages) -> None:
        """No-op: the shards are the full parameters."""

    def empty(self, _spare: SparePages) -> None:
        """No-op: the shards stay."""


class UnshardMemory:
    """Memory for one unit's full parameters, allocated only while in use.

    Tensors that autograd saved in forward point into it, so it is emptied and refilled, never replaced. While it is
    empty, a view that the user still holds reads as NaN, or raises (on a device).

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
        """True if this is the memory of the shards: it is never empty and needs no copy."""
        return isinstance(self._memory, MemoryOfShards)

    @contextmanager
    def present(self) -> Iterator[torch.Tensor]:
        """Allow views of :attr:`full` within the body, though it is empty."""
        with self._memory.present():
            yield self.full

    @property
    def full_nbytes(self) -> int:
        """Bytes allocated for :attr:`full`; 0 if it is the shards."""
        return 0 if self.is_shards else self.full.numel() * self.full.itemsize

    @property
    def is_held(self) -> bool:
        """True between :meth:`take` and :meth:`give_back`."""
        return self._held

    def take(self, spare: SparePages) -> None:
        """Allocate the memory, from spare pages if there are any; no-op if held."""
        if self._held:
            return
        self._memory.fill(spare)
        probe.memory(Category.UNSHARDED_PARAMS, self._unit, self.full_nbytes)
        self._held = True  # last, as below: code that is out of stack raises anywhere, and a reset has to free it once

    def give_back(self, spare: SparePages) -> bool:
        """Free the memory; return False if it was not held."""
        if not self._held:
            return False
        self._memory.empty(spare)
        probe.memory(Category.UNSHARDED_PARAMS, self._unit, -self.full_nbytes)
        self._held = False
        return True


@dataclass(frozen=True, eq=False)
class BufferSet:
    """One unshard memory and a unit's parameters in it. The graph of a forward points into the set it ran in.

    Attributes:
        padded_fulls: the padded full of each parameter.
        by_rank: the same, as views by rank ``[F, ...]``.
        views: views of each parameter's full forms.
    """

    memory: UnshardMemory
    padded_fulls: Sequence[torch.Tensor]
    by_rank: Sequence[torch.Tensor]
    views: Sequence[Sequence[FullView]]
    _rows: dict[tuple[int, ...], list[Sequence[torch.Tensor]]] = field(default_factory=dict)

    def rows_of(self, num_ranks: Sequence[int]) -> list[Sequence[torch.Tensor]]:
        """Return :func:`workbench.engine.shard_layout.rows_of` of :attr:`by_rank`, cached."""
        key = tuple(num_ranks)
        if key not in self._rows:
            self._rows[key] = rows_of(self.by_rank, key)
        return self._rows[key]


def buffers_in(memory: UnshardMemory, params: Sequence[FSDPParam]) -> BufferSet:
    """Return the buffers of a unit's parameters in ``memory``."""
    with memory.present() as full:
        padded_fulls = full.split([p.full_numel for p in params])
        pairs = list(zip(params, padded_fulls, strict=True))
        by_rank = [rows for p, padded_full in pairs for rows in p.rows_in(padded_full)]
        return BufferSet(memory, padded_fulls, by_rank, [p.views_in(padded_full) for p, padded_full in pairs])


class UnitBuffers:
    """The buffers that a unit's full parameters are in: those of its policy, or those that a graph points into.

    Attributes:
        usual: buffers of the current policy.
        current: buffers that the full parameters point into, and a graph recorded now.
    """

    def __init__(self, params: Sequence[FSDPParam], usual: BufferSet) -> None:
        self._params = params
        self.usual = usual
        self._show(usual)

    def _show(self, buffers: BufferSet) -> None:
        self.current = buffers
        for fsdp_param, views in zip(self._params, buffers.views, strict=True):
            fsdp_param.show(views)

    def take(self, pages: SparePages) -> None:
        """Allocate the memory; no-op if held."""
        self.current.memory.take(pages)

    def give_back(self, pages: SparePages) -> None:
        """Free the memory; later forwards use the buffers of the current policy."""
        if self.current.memory.give_back(pages) and self.current is not self.usual:
            self._show(self.usual)

    @unrecorded
    def switch_to(self, buffers: BufferSet, pages: SparePages) -> None:
        """Switch to the buffers that the next graph points into, with the values; they may be of an earlier policy."""
        before = self.current
        if before is buffers:
            return
        if before.memory.is_held:
            buffers.memory.take(pages)
            buffers.memory.full.copy_(before.memory.full)
            before.memory.give_back(pages)
        self._show(buffers)
