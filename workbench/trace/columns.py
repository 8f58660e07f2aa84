"""A trace in memory: a header and, per rank, the rows as one structured array with the state before them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np

from workbench.errors import TraceError
from workbench.events import Kind
from workbench.trace.header import join, translate
from workbench.trace.keyframe import advance
from workbench.trace.schema import ROW_DTYPE, Header, KeyFrame, Rows


@dataclass(frozen=True, eq=False)
class RankTrace:
    """What one rank recorded. Equal by value (NaN equals NaN).

    Attributes:
        rank: global rank.
        rows: 1-D array of :data:`~workbench.trace.schema.ROW_DTYPE`, read-only; ``rows["seq"]`` counts up from
            ``start.seq`` without a gap.
        start: state of the rank just before ``rows[0]``.
        lost: rows that were overwritten on the rank before they could be read.

    Raises:
        TraceError: ``rows`` is not such an array.
    """

    rank: int
    rows: Rows
    start: KeyFrame = field(default_factory=KeyFrame)
    lost: int = 0

    def __post_init__(self) -> None:
        if self.rows.dtype != ROW_DTYPE or self.rows.ndim != 1:
            raise TraceError(
                f"rank {self.rank}: rows must be a 1-D array of ROW_DTYPE, "
                f"got {self.rows.ndim}-D of {str(self.rows.dtype)[:80]}"
            )
        rows = self.rows.view()
        rows.flags.writeable = False  # one array is shared by many traces and views
        object.__setattr__(self, "rows", rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankTrace):
            return NotImplemented
        mine, theirs = (self.rank, self.start, self.lost), (other.rank, other.start, other.lost)
        return mine == theirs and np.array_equal(_raw(self.rows), _raw(other.rows))

    __hash__ = None  # type: ignore[assignment]

    @property
    def end_seq(self) -> int:
        """``seq`` of the row that would come next."""
        return self.start.seq + len(self.rows)

    def cut(self, begin_seq: int, end_seq: int) -> RankTrace:
        """Return the rows with ``begin_seq <= seq < end_seq``, with the exact state before them."""
        begin = min(max(begin_seq - self.start.seq, 0), len(self.rows))
        end = max(end_seq - self.start.seq, begin)
        return RankTrace(self.rank, self.rows[begin:end], advance(self.start, self.rows[:begin]), self.lost)


@dataclass(frozen=True)
class Trace:
    """What a training job recorded. Equal by value.

    Attributes:
        header: everything that is not a row.
        ranks: one entry per rank that recorded anything, in order of rank.

    Raises:
        TraceError: a rank is there twice.
    """

    header: Header
    ranks: tuple[RankTrace, ...] = ()

    def __post_init__(self) -> None:
        numbers = [r.rank for r in self.ranks]
        if len(set(numbers)) < len(numbers):
            raise TraceError(f"a trace holds each rank once, got ranks {numbers}")
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks, key=lambda r: r.rank)))

    @classmethod
    def empty(cls) -> Trace:
        """Return the trace of nothing."""
        return cls(Header())

    @property
    def num_rows(self) -> int:
        """Rows of all ranks together."""
        return sum(len(r.rows) for r in self.ranks)

    @property
    def num_dropped(self) -> int:
        """Rows of all ranks before the left edge, those that were lost left out: only what they led to is here."""
        return max(sum(r.start.seq - r.lost for r in self.ranks), 0)

    def rank(self, rank: int) -> RankTrace:
        """Return what ``rank`` recorded.

        Raises:
            TraceError: it recorded nothing.
        """
        for entry in self.ranks:
            if entry.rank == rank:
                return entry
        raise TraceError(f"the trace has no rank {rank}; it has {[r.rank for r in self.ranks] or 'none'}")

    def slice(self, *, step: int | None = None, first: int | None = None, last: int | None = None) -> Trace:
        """Return the rows of some training steps, each rank with the exact state before them.

        A rank's part is contiguous: from its first row of these steps to its last one, with any rows outside all
        steps that lie between. A side left open reaches to the trace's edge. What later rows tell of when a device came
        to these follows them, numbered anew.

        Args:
            step: just this step.
            first: first step.
            last: last step, included.

        Raises:
            ValueError: ``step`` together with ``first`` or ``last``.
        """
        if step is not None:
            if first is not None or last is not None:
                raise ValueError("give either step or first/last")
            first = last = step
        return Trace(self.header, tuple(_slice_steps(r, first, last) for r in self.ranks))


def steps(trace: Trace) -> list[int]:
    """Return the numbers of the training steps that any rank has rows of, ascending."""
    found = [np.unique(r.rows["step"]) for r in trace.ranks]
    return [int(s) for s in np.unique(np.concatenate(found)) if s >= 0] if found else []


def merge(*traces: Trace) -> Trace:
    """Return one trace with the rows of all: other ranks of the same job, or later rows of the same ranks.

    Strings and groups are joined by name, so that the parts may have numbered them differently.

    Raises:
        TraceError: parts of one rank do not follow each other without a gap.
    """
    return reduce(_merge_two, traces, Trace.empty())


def _raw(rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of ``rows``: compared instead of the fields, so that NaN equals itself."""
    return np.ascontiguousarray(rows).view(np.uint8)


def _slice_steps(rank: RankTrace, first: int | None, last: int | None) -> RankTrace:
    step = rank.rows["step"]
    low = 0 if first is None else max(first, 0)
    high = np.iinfo(np.int32).max if last is None else last
    inside = np.flatnonzero((step >= low) & (step <= high))
    if len(inside):
        begin, end = int(inside[0]), int(inside[-1]) + 1
    else:  # nothing, at the place where it would be
        later = np.flatnonzero(step > high)
        begin = end = int(later[0]) if len(later) else len(step)
    begin = 0 if first is None else begin
    end = len(step) if last is None else end
    return _with_device(rank.cut(rank.start.seq + begin, rank.start.seq + end), rank.rows[end:])


def _with_device(part: RankTrace, later: Rows) -> RankTrace:
    """Return a part of a rank with what ``later`` rows tell of when its device came to it, numbered anew."""
    tells = later[later["kind"] == Kind.DEVICE]
    mine = (tells["value"] >= part.start.seq) & (tells["value"] < part.end_seq)
    if not mine.any():
        return part
    tells = tells[mine]
    tells["seq"], tells["step"] = part.end_seq + np.arange(len(tells)), -1
    return replace(part, rows=np.concatenate([part.rows, tells]))


def _merge_two(first: Trace, second: Trace) -> Trace:
    header = join(first.header, second.header)
    ranks = {r.rank: r for r in first.ranks}
    for part in second.ranks:
        rows = translate(part.rows, second.header, header)
        before = ranks.get(part.rank)
        if before is None:
            ranks[part.rank] = RankTrace(part.rank, rows, part.start, part.lost)
        elif before.end_seq == part.start.seq:
            rows = np.concatenate([before.rows, rows])
            ranks[part.rank] = RankTrace(part.rank, rows, before.start, before.lost + part.lost)
        else:
            raise TraceError(
                f"rank {part.rank}: rows from {part.start.seq} on do not follow rows up to {before.end_seq - 1}"
            )
    return Trace(header, tuple(ranks.values()))
