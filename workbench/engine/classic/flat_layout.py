"""Geometry of a flat parameter: where each of its parameters lies in every rank's slot, without communication.

Terms, with F ranks and c = ceil(numel / F)::

    flat          [numel]    all parameters of a unit, one after another, in the order of their definition
    padded flat   [F * c]    with zeros at the end; rank r holds [r * c, (r + 1) * c), its slot
    piece         [k]        the part of one parameter in a rank's slot: all of it, some, or nothing; with one rank
                             all of it, in its own shape
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch

from workbench.events import within


@dataclass(frozen=True)
class PartSpan:
    """The place of one parameter in a flat parameter.

    Attributes:
        first: index of its first element.
        shape: its shape there; with tensor parallelism that of this rank's part.
    """

    first: int
    shape: torch.Size

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def within(self, begin: int, end: int) -> tuple[int, int]:
        """Return its elements among ``[begin, end)`` of the flat parameter, as (first, last); may be empty."""
        return within(self.first, self.first + self.numel, begin, end)


@dataclass(frozen=True)
class FlatLayout:
    """A flat parameter split over ``num_shards`` ranks, F, as ``rank`` sees it.

    Example: shapes (2, 3) and (4,) on 3 ranks -> numel 10, slots of 4; rank 1 holds elements 4 and 5 of the first
    parameter and 0 and 1 of the second; rank 2 the rest of the second and 2 elements of padding.

    Attributes:
        spans: of the parameters, in order, without gaps.
    """

    spans: tuple[PartSpan, ...]
    num_shards: int
    rank: int

    @classmethod
    def of(cls, shapes: Sequence[torch.Size], num_shards: int, rank: int) -> Self:
        """Return the layout of parameters with these shapes."""
        firsts = itertools.accumulate((shape.numel() for shape in shapes), initial=0)
        return cls(tuple(PartSpan(*span) for span in zip(firsts, shapes, strict=False)), num_shards, rank)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(span.numel for span in self.spans)

    @cached_property
    def slot_numel(self) -> int:
        """Elements of a slot, c."""
        return -(-self.numel // self.num_shards)

    @property
    def is_whole(self) -> bool:
        """True if one rank has the whole flat parameter."""
        return self.num_shards == 1

    def bounds_of(self, rank: int) -> tuple[int, int]:
        """Return (begin, end) of a rank's slot in the padded flat parameter."""
        return rank * self.slot_numel, (rank + 1) * self.slot_numel

    @property
    def bounds(self) -> tuple[int, int]:
        """(begin, end) of this rank's slot in the padded flat parameter."""
        return self.bounds_of(self.rank)

    @property
    def own_numel(self) -> int:
        """Number of elements in this rank's slot, without padding."""
        begin, end = self.bounds
        return max(0, min(end, self.numel) - begin)

    def num_held(self, index: int, rank: int) -> int:
        """Return how many elements of a parameter a rank's slot has."""
        first, last = self.spans[index].within(*self.bounds_of(rank))
        return max(0, last - first)

    def pieces_of(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Return the piece of each part in this rank's ``slot`` ``[c]``: views ``[k]``; on one rank in their shapes."""
        if self.is_whole:
            return self.parts_of(slot)
        begin, end = self.bounds
        bounds = (span.within(begin, end) for span in self.spans)
        return [slot[first - begin : last - begin] if first < last else slot[:0] for first, last in bounds]

    def piece_of_full(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of a whole parameter; a view if ``full`` is contiguous."""
        if self.is_whole:
            return full
        span = self.spans[index]
        first, last = span.within(*self.bounds)
        return full.reshape(-1)[first - span.first : max(first, last) - span.first]

    def parts_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts as views of ``full`` ``[numel]``, each in its shape."""
        flat = full.split([span.numel for span in self.spans])
        return [piece.view(span.shape) for span, piece in zip(self.spans, flat, strict=True)]

    def copy_in_pairs(
        self, grads: Sequence[torch.Tensor | None], slots: torch.Tensor, first_rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (destination, source) copies that lay out gradients in ``slots`` ``[n, c]``; set the rest to zero.

        The slots are those of n ranks from ``first_rank`` on.
        """
        flat, begin = slots.view(-1), first_rank * self.slot_numel
        for span, grad in zip(self.spans, grads, strict=True):
            first, last = span.within(begin, begin + len(flat))
            if first >= last:
                continue
            if grad is None:
                flat[first - begin : last - begin].zero_()
            else:
                yield flat[first - begin : last - begin], grad.reshape(-1)[first - span.first : last - span.first]
        flat[max(0, self.numel - begin) :].zero_()
