"""Memory that is used again: staging of collectives, and slots for full parameters.

On CPU the pages of a fresh buffer cost more than copying into it, so what the engine needs in every step is kept. A
byte that is kept and not used counts as RESERVED. On CUDA the caching allocator does all of this: nothing is pooled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from workbench.engine import probe
from workbench.events import Category, Probe

NO_UNIT = -1


class _Block:
    """One buffer of a pool; what of it is not used counts as RESERVED, until it dies or another probe listens."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._probe: Probe | None = None
        self._told = 0  # bytes that count as RESERVED for that probe

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.memory.numel()

    def used(self, num_bytes: int) -> None:
        """So many bytes of it are used from now on."""
        if self._probe is probe.active:
            self._tell(self.num_bytes - num_bytes)

    def unused(self) -> None:
        """None of it is used any more."""
        if self._probe is not probe.active:
            self._probe, self._told = probe.active, 0
        self._tell(self.num_bytes)

    def _tell(self, num_bytes: int) -> None:
        _reserve(num_bytes - self._told)
        self._told = num_bytes

    def __del__(self) -> None:
        if self._probe is probe.active:
            self._tell(0)


class BufferPool:
    """Staging buffers; a free one of at least the wanted size is given out again."""

    def __init__(self) -> None:
        self._free: list[_Block] = []
        self._taken: dict[int, _Block] = {}  # by address

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised buffer ``[numel]``; give it back with :meth:`give_back`."""
        num_bytes = numel * dtype.itemsize
        if device.type != "cpu" or not num_bytes:
            return torch.empty(numel, dtype=dtype, device=device)
        fitting = [block for block in self._free if block.num_bytes >= num_bytes]
        if fitting:
            block = min(fitting, key=lambda b: b.num_bytes)
            self._free.remove(block)
            block.used(num_bytes)
        else:
            self._drop_largest()  # the larger one takes its place: as many buffers as are ever used at once
            block = _Block(num_bytes, device)
        self._taken[block.memory.data_ptr()] = block
        return block.memory[:num_bytes].view(dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back that :meth:`take` gave out; its contents may change at once."""
        block = self._taken.pop(buffer.data_ptr(), None) if buffer.numel() else None
        if block is not None:
            self._free.append(block)
            block.unused()

    def release(self) -> None:
        """Free every buffer that is not used now."""
        while self._free:
            self._drop_largest()

    def forget_taken(self) -> None:
        """Let go of buffers that nobody will give back."""
        self._taken.clear()

    def _drop_largest(self) -> None:
        if self._free:
            block = max(self._free, key=lambda b: b.num_bytes)
            self._free.remove(block)


class Tenant(Protocol):
    """What a slot knows of the unit whose parameters are in it."""

    index: int

    def move_out(self) -> None:
        """Leave the slot to another unit for a while."""

    def move_back(self) -> None:
        """Return to it."""


class SlotUser(Protocol):
    """What who gives out slots knows of a unit."""

    index: int

    @property
    def full_nbytes(self) -> int:
        """Bytes of its full parameters."""

    @property
    def is_sharded(self) -> bool:
        """True while its shards are registered."""

    @property
    def is_unsharding(self) -> bool:
        """True while its all-gather is under way."""

    def use_slot(self, slot: UnshardSlot | None) -> None:
        """Keep full parameters in ``slot`` from now on, or in memory of its own."""


class UnshardSlot:
    """Memory for the full parameters of units that are never unsharded at the same time.

    Should they be once, the one whose graph points into the slot gets it, and the other moves out meanwhile.

    Attributes:
        buffer: uint8 ``[num_bytes]``.
        owner: the unit whose parameters are in it.
        moved_out: units that will move back, the next one last.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.owner: Tenant | None = None
        self.moved_out: list[Tenant] = []
        self._lease = probe.Lease(Category.RESERVED, NO_UNIT, num_bytes)

    def use(self, owner: Tenant | None, num_bytes: int) -> None:
        """Let ``owner`` use so many bytes of it; None: nobody uses them any more."""
        self.owner = owner
        if self._lease.is_told:
            _reserve(num_bytes if owner is None else -num_bytes)


class OverlapRecord:
    """Which units were unsharded at the same time; from it follows who can share a slot.

    Attributes:
        is_complete: a whole forward and backward was seen since units were added or their policies changed.
        is_settled: slots were assigned according to what is known.
    """

    def __init__(self) -> None:
        self._overlaps: dict[int, set[int]] = {}  # in the order of the first unshard
        self._holding: set[int] = set()
        self.is_complete = False
        self.is_settled = False

    def taken(self, unit: int) -> None:
        """Note that ``unit`` is unsharded from now on."""
        known = self._overlaps.setdefault(unit, set())
        for other in self._holding - known:
            known.add(other)
            self._overlaps[other].add(unit)
            self.is_settled = False
        self._holding.add(unit)

    def given_back(self, unit: int) -> None:
        """Note that it is not any more."""
        self._holding.discard(unit)

    def colour(self, units: Iterable[int]) -> list[list[int]]:
        """Group ``units`` so that no two of a group were ever unsharded together: greedy, in order of first unshard.

        Example: a root (0) kept all the time and blocks 1, 2, 3 each overlapping the next -> ``[[0], [1, 3], [2]]``.
        """
        wanted, groups = set(units), list[list[int]]()
        for unit in (u for u in self._overlaps if u in wanted):
            fitting = [g for g in groups if not self._overlaps[unit].intersection(g)]
            if fitting:
                fitting[0].append(unit)
            else:
                groups.append([unit])
        return groups


def make_slots(groups: Sequence[Sequence[SlotUser]], device: torch.device) -> list[UnshardSlot]:
    """Return a slot for each group, as large as its largest member."""
    return [UnshardSlot(max(unit.full_nbytes for unit in group), device) for group in groups]


def _reserve(num_bytes: int) -> None:
    probe.memory(Category.RESERVED, NO_UNIT, num_bytes)
