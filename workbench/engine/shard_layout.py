"""Geometry of one tensor split over ranks, without communication.

Terms:

- *rows*         slices of the tensor's *shard dim*. Each of the F ranks has storage for ``c = ceil(rows / F)`` *padded
                 rows*; rank r holds rows ``[r*c, min(rows, (r+1)*c))``, which may be empty: torch.chunk's split.
- *slot*         the ``c * row_numel`` elements of a flat buffer that belong to the tensor on one rank.
- *padded full*  ``[F * slot_numel]``: for dim 0 all slots one after another, so that it begins with the tensor.

Only dim 0 may be uneven: along another dim, padding would be between the tensor's own elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class ShardLayout:
    """A tensor of ``shape`` split along ``dim`` over ``num_shards`` ranks, F.

    Example: ``ShardLayout(torch.Size([7, 5]), 0, 4)`` -> 2 padded rows, slots of 10 elements; ranks 0, 1, 2 hold two
    rows, rank 3 holds one and one row of padding.
    """

    shape: torch.Size
    dim: int
    num_shards: int

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def row_numel(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[: self.dim]) * math.prod(self.shape[self.dim + 1 :])

    @cached_property
    def padded_rows(self) -> int:
        """Rows every rank has storage for, c."""
        return -(-self.shape[self.dim] // self.num_shards)

    @cached_property
    def slot_numel(self) -> int:
        """Elements of one rank's slot, padding included."""
        return self.padded_rows * self.row_numel

    @cached_property
    def is_even(self) -> bool:
        """True if no rank has padding."""
        return self.padded_rows * self.num_shards == self.shape[self.dim]

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Return the first row of ``rank`` and the row after its last."""
        rows = self.shape[self.dim]
        return min(rank * self.padded_rows, rows), min((rank + 1) * self.padded_rows, rows)

    @cached_property
    def rows_per_rank(self) -> tuple[int, ...]:
        """Number of rows of each rank, without padding."""
        bounds = (self.rows_of(rank) for rank in range(self.num_shards))
        return tuple(last - first for first, last in bounds)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the rows of ``rank``."""
        first, last = self.rows_of(rank)
        return (*self.shape[: self.dim], last - first, *self.shape[self.dim + 1 :])

    def local_view(self, slot: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the rows of ``rank`` as a view of its slot ``[slot_numel]``."""
        shape = self.local_shape(rank)
        numel = math.prod(shape)
        return (slot if numel == slot.numel() else slot[:numel]).view(shape)

    def shard_of(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the rows of ``rank`` as a view of the whole tensor."""
        first, last = self.rows_of(rank)
        return full.narrow(self.dim, first, last - first)

    def full_view(self, padded_full: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor as a view of its padded full ``[>= numel]``."""
        return padded_full[: self.numel].view(self.shape)

    def by_rank(self, padded_full: torch.Tensor) -> torch.Tensor:
        """Return a view ``[F, ...]`` of ``padded_full`` ``[>= F * slot_numel]`` whose part r is that of rank r."""
        if self.dim == 0:
            return padded_full[: self.num_shards * self.slot_numel].view(self.num_shards, self.slot_numel)
        return self._parts(self.full_view(padded_full))

    def _parts(self, full: torch.Tensor) -> torch.Tensor:
        """Return an evenly split ``full`` as a view with the ranks as first dim."""
        parts: torch.Tensor = full.unflatten(self.dim, (self.num_shards, self.padded_rows))
        return parts.movedim(self.dim, 0)

    def copy_in_pairs(
        self, full: torch.Tensor, slots: torch.Tensor, first_rank: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (destination, source) pairs that copy the rows of n ranks from ``full`` to ``slots``.

        ``slots`` ``[n, slot_numel]`` are those of the ranks from ``first_rank`` on. Padding is zeroed.
        """
        if self.is_even and self.dim == 0:
            yield slots, full.reshape(self.num_shards, self.slot_numel).narrow(0, first_rank, len(slots))
        elif self.is_even:
            parts = self._parts(full).narrow(0, first_rank, len(slots))
            yield slots.view(parts.shape), parts
        else:
            yield from self._uneven_pairs(full, slots, first_rank)

    def _uneven_pairs(
        self, full: torch.Tensor, slots: torch.Tensor, first_rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield at most two pairs: of the ranks without padding, and of the one that has rows and padding."""
        rows, num_full = self.padded_rows, self.shape[0] // self.padded_rows
        until = min(max(num_full - first_rank, 0), len(slots))
        if until and self.row_numel:
            shape = (rows, *self.shape[1:])
            yield (
                slots[:until].unflatten(1, shape),
                full.narrow(0, first_rank * rows, until * rows).unflatten(0, (-1, rows)),
            )
        if until == len(slots):
            return
        first, last = self.rows_of(first_rank + until)
        numel = (last - first) * self.row_numel
        slots[until][numel:].zero_()
        slots[until + 1 :].zero_()
        if numel:
            yield slots[until][:numel], full[first:last].reshape(-1)


def rows_of(by_rank: Sequence[torch.Tensor], num_ranks: Sequence[int]) -> list[Sequence[torch.Tensor]]:
    """Split each :meth:`ShardLayout.by_rank` view into runs of ``num_ranks`` consecutive ranks; return run by run."""
    if len(num_ranks) == 1:
        return [by_rank]
    return list(zip(*(each.split_with_sizes(list(num_ranks)) for each in by_rank), strict=True))
