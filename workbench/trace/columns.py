"""A trace in memory: a header and, per rank, the rows as one structured array with the state before them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from workbench.errors import TraceError
from workbench.events import Kind, UnitState
from workbench.trace.earlier_steps import NO_STEPS, EarlierSteps
from workbench.trace.header import join, translate
from workbench.trace.keyframe import advance, bytes_after, states_after
from workbench.trace.schema import ROW_DTYPE, Header, KeyFrame, Rows

KEPT_EVERY = 16_384
"""Rows between two states that a rank's trace caches."""

_NO_STEP = (0, 0)


@dataclass(frozen=True, eq=False)
class RankTrace:
    """The record of one rank. Equal by value (NaN equals NaN).

    Attributes:
        rank: global rank.
        rows: 1-D array of :data:`~workbench.trace.schema.ROW_DTYPE`, read-only; ``rows["seq"]`` counts up from
            ``start.seq`` without a gap.
        start: state of the rank just before ``rows[0]``.
        lost: rows that were overwritten on the rank before they could be read.
        earlier: steps of which the rows were dropped.

    It caches what many queries need: :attr:`kinds`, the steps of the rows, and the state at some of them. Reading one
    field of every row takes as long as reading all fields.

    Raises:
        TraceError: ``rows`` is not such an array.
    """

    rank: int
    rows: Rows
    start: KeyFrame = field(default_factory=KeyFrame)
    lost: int = 0
    earlier: EarlierSteps = field(default_factory=EarlierSteps)

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
        mine, theirs = ((r.rank, r.start, r.lost, r.earlier) for r in (self, other))
        return mine == theirs and np.array_equal(_raw(self.rows), _raw(other.rows))

    __hash__ = None  # type: ignore[assignment]

    @property
    def end_seq(self) -> int:
        """``seq`` of the next row."""
        return self.start.seq + len(self.rows)

    @cached_property
    def kinds(self) -> NDArray[np.uint8]:
        """The field ``kind`` of all rows as a contiguous array; ``[len(rows)]``, read-only."""
        found = np.ascontiguousarray(self.rows["kind"])
        found.flags.writeable = False
        return found

    @property
    def steps(self) -> NDArray[np.int32]:
        """The numbers of the training steps with rows, ascending."""
        found = np.unique(self._runs[0])
        return found[found >= 0]

    def cut(self, begin_seq: int, end_seq: int) -> RankTrace:
        """Return the rows with ``begin_seq <= seq < end_seq``, with the exact state before them.

        Earlier steps are kept if no row is cut off on the left.
        """
        begin = min(max(begin_seq - self.start.seq, 0), len(self.rows))
        end = max(end_seq - self.start.seq, begin)
        return self.part(begin, end, self.state_before(begin), NO_STEPS if begin else self.earlier)

    def part(self, begin: int, end: int, start: KeyFrame, earlier: EarlierSteps = NO_STEPS) -> RankTrace:
        """Return the rows from position ``begin`` up to ``end``, with the state before them and ``earlier`` steps."""
        found = RankTrace(self.rank, self.rows[begin:end], start, self.lost, earlier)
        if "kinds" in vars(self):
            vars(found)["kinds"] = self.kinds[begin:end]
        if "_runs" in vars(self):
            step, first, after = self._runs
            first, after = np.maximum(first, begin) - begin, np.minimum(after, end) - begin
            mine = after > first
            vars(found)["_runs"] = step[mine], first[mine], after[mine]
        return found

    def places_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the positions of the first row of some steps and after their last one; ``(0, 0)`` without rows.

        Args:
            first: number of the first step, at least 0.
            last: number of the last step, included.
        """
        step, begin, end = self._runs
        inside = np.flatnonzero((step >= first) & (step <= last))
        return (int(begin[inside[0]]), int(end[inside[-1]])) if len(inside) else _NO_STEP

    def place_after(self, last: int) -> int:
        """Return the position of the first row of a step after ``last``; the number of rows if there is none."""
        step, begin, _ = self._runs
        later = np.flatnonzero(step > last)
        return int(begin[later[0]]) if len(later) else len(self.rows)

    def state_before(self, place: int) -> KeyFrame:
        """Return the state just before the row at position ``place``."""
        begin, nearest = self._nearest(place)
        return nearest if begin == place else advance(nearest, self.rows[begin:place])

    def bytes_before(self, place: int) -> tuple[int, ...]:
        """Return the live bytes in :meth:`state_before`, faster."""
        begin, nearest = self._nearest(place)
        return bytes_after(nearest.bytes_by_category, self.rows[begin:place], self.kinds[begin:place])

    def unit_states_before(self, place: int) -> dict[int, UnitState]:
        """Return the unit states in :meth:`state_before`, faster."""
        begin, nearest = self._nearest(place)
        return states_after(nearest.unit_states, self.rows[begin:place], self.kinds[begin:place])

    def _nearest(self, place: int) -> tuple[int, KeyFrame]:
        """Return the last position up to ``place`` with a cached state before it, and that state."""
        states = self._states
        while len(states) * KEPT_EVERY <= place:
            begin = (len(states) - 1) * KEPT_EVERY
            states.append(advance(states[-1], self.rows[begin : begin + KEPT_EVERY]))
        return place // KEPT_EVERY * KEPT_EVERY, states[place // KEPT_EVERY]

    def prepare(self) -> None:
        """Fill the caches, so that the first query does not wait."""
        self.state_before(len(self.rows))
        self.places_of(0, 0)

    @cached_property
    def _states(self) -> list[KeyFrame]:
        """The states before every :data:`KEPT_EVERY`-th row, as far as they are cached."""
        return [advance(self.start, self.rows[:0])]

    @cached_property
    def _runs(self) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """Runs of rows of one step: its number, the first row, and the row after the last."""
        step = self.rows["step"]
        begin = np.flatnonzero(np.append(len(step) > 0, step[1:] != step[:-1]))
        return step[begin], begin, np.append(begin[1:], len(step))[: len(begin)]


@dataclass(frozen=True)
class Trace:
    """The record of a training job. Equal by value.

    Attributes:
        header: everything that is not a row.
        ranks: one entry per rank that recorded anything, in order of rank.

    Raises:
        TraceError: a rank appears twice.
    """

    header: Header
    ranks: tuple[RankTrace, ...] = ()

    def __post_init__(self) -> None:
        numbers = [r.rank for r in self.ranks]
        if len(set(numbers)) < len(numbers):
            raise TraceError(f"ranks must be distinct, got {numbers}")
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks, key=lambda r: r.rank)))

    @classmethod
    def empty(cls) -> Trace:
        """Return an empty trace."""
        return cls(Header())

    @property
    def num_rows(self) -> int:
        """Rows of all ranks together."""
        return sum(len(r.rows) for r in self.ranks)

    @property
    def num_dropped(self) -> int:
        """Rows of all ranks before the left edge, without lost ones; the trace has only the state after them."""
        return max(sum(r.start.seq - r.lost for r in self.ranks), 0)

    def rank(self, rank: int) -> RankTrace:
        """Return what ``rank`` recorded.

        Raises:
            TraceError: it recorded nothing.
        """
        found = self._by_rank.get(rank)
        if found is None:
            raise TraceError(f"the trace has no rank {rank}; it has {[r.rank for r in self.ranks] or 'none'}")
        return found

    @cached_property
    def _by_rank(self) -> dict[int, RankTrace]:
        return {entry.rank: entry for entry in self.ranks}

    def slice(self, *, step: int | None = None, first: int | None = None, last: int | None = None) -> Trace:
        """Return the rows of some training steps, each rank with the exact state before them.

        A rank's part is contiguous: from its first row of these steps to its last one, including rows outside all steps
        in between. An open side reaches to the trace's edge. Later DEVICE rows that refer to the part are appended,
        renumbered.

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
    """Return the numbers of the training steps with rows on any rank, ascending."""
    found = [r.steps for r in trace.ranks]
    return np.unique(np.concatenate(found)).tolist() if found else []


def merge(*traces: Trace) -> Trace:
    """Return one trace with the rows of all: other ranks of the same job, or later rows of the same ranks.

    Strings and groups are joined by name, so the parts may number them differently.

    Raises:
        TraceError: there is a gap between two parts of one rank.
    """
    return reduce(_merge_two, traces, Trace.empty())


def _raw(rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of ``rows``; comparing them instead of the fields makes NaN equal itself."""
    return np.ascontiguousarray(rows).view(np.uint8)


def _slice_steps(rank: RankTrace, first: int | None, last: int | None) -> RankTrace:
    high = np.iinfo(np.int32).max if last is None else last
    begin, end = rank.places_of(0 if first is None else max(first, 0), high)
    if begin == end:  # an empty part, at the right place
        begin = end = rank.place_after(high)
    begin = 0 if first is None else begin
    end = len(rank.rows) if last is None else end
    if first is None:
        part = rank.cut(rank.start.seq + begin, rank.start.seq + end)
    else:
        part = rank.part(begin, end, rank.state_before(begin))
    return _with_device(part, rank.rows[end:])


def _with_device(part: RankTrace, later: Rows) -> RankTrace:
    """Return a part of a rank with the DEVICE rows among ``later`` that refer to it appended, renumbered."""
    device_rows = later[later["kind"] == Kind.DEVICE]
    mine = (device_rows["value"] >= part.start.seq) & (device_rows["value"] < part.end_seq)
    if not mine.any():
        return part
    device_rows = device_rows[mine]
    device_rows["seq"], device_rows["step"] = part.end_seq + np.arange(len(device_rows)), -1
    return replace(part, rows=np.concatenate([part.rows, device_rows]))


def _merge_two(first: Trace, second: Trace) -> Trace:
    header = join(first.header, second.header)
    ranks = {r.rank: r for r in first.ranks}
    for part in second.ranks:
        rows, earlier = (translate(each, second.header, header) for each in (part.rows, part.earlier.rows))
        before = ranks.get(part.rank)
        if before is None:
            ranks[part.rank] = replace(part, rows=rows, earlier=replace(part.earlier, rows=earlier))
        elif before.end_seq == part.start.seq:
            rows = np.concatenate([before.rows, rows])
            ranks[part.rank] = replace(before, rows=rows, lost=before.lost + part.lost)
        else:
            raise TraceError(
                f"rank {part.rank}: rows from {part.start.seq} on do not follow rows up to {before.end_seq - 1}"
            )
    return Trace(header, tuple(ranks.values()))
