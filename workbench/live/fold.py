"""The fold of one growing trace that all its live views share: each row is read once for all views.

A :class:`Fold` holds what the replay functions return for the trace so far: memory with its peak and unit states of
each rank, finished steps, groups of alike ranks, the cuts of the time axis, and the spans of the drawn ranks. A client
keeps only a cursor: what it has received (:mod:`workbench.live.feed`).

Rows may be missing: a rank that records faster than it is drained overwrites its oldest rows, and its trace starts
again at a later key frame. The fold continues there: bytes and unit states are those of the key frame, and peaks,
steps, groups and ended spans from before the gap stay known.

Memory and unit states are folded when they are asked for: of many ranks few are drawn. Times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.live.live_spans import SPAN_DTYPE, RankSpans
from workbench.live.live_steps import Steps
from workbench.live.rank_groups import RankGroups
from workbench.live.state_at import StateAt
from workbench.replay import memory, states
from workbench.replay.memory import MemoryState, Peak
from workbench.replay.paused_time import LEAST_IDLE_NS, Cuts, GrowingCuts
from workbench.replay.spans import has_steps, zero_ns
from workbench.replay.states import States
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import KeyFrame

MAX_RANKS = 8
"""Maximum number of ranks with tracks of their own."""

HISTORY_ROWS = 30_000
"""Rows of each rank that a view receives when it opens; the static views show older ones."""

AROUND = 2_000
"""Rows before and after a peak that are read to describe it."""


@dataclass(frozen=True, kw_only=True)
class FoldedRank:
    """A rank after its rows up to ``next_seq``: its live bytes and their peak, and the states of its units."""

    next_seq: int
    memory: MemoryState
    units: States


class Fold:
    """What is known of one trace that grows.

    Args:
        history_rows: rows of each rank that a client receives when it opens.

    Attributes:
        history_rows: likewise.
        trace: the trace so far.
        epoch: number of the trace: it changes when the trace is another one, or when time 0 moves.
        regrouped: how many times the groups have changed.
        origin_ns: time 0 of the axis, in displayed time: the begin of the first step.
        to_us: returns where the axis shows a time, in microseconds.
        moments: the states of all ranks at any time.
    """

    def __init__(self, history_rows: int = HISTORY_ROWS) -> None:
        self.history_rows = history_rows
        self._record = ""
        self.epoch = self.regrouped = 0
        self._forget()

    def _forget(self) -> None:
        self.trace, self._has_rows, self._has_steps = Trace.empty(), False, False
        self._job: tuple[object, ...] = ()
        self._ends: dict[int, int] = {}
        self._ranks: dict[int, FoldedRank] = {}
        self._peaks: dict[int, tuple[int, Peak]] = {}
        self._spans: dict[int, _SpanLog] = {}
        self._alike, self.steps, self._growing = RankGroups(), Steps(), GrowingCuts(LEAST_IDLE_NS)
        self._begin_at(0)

    def _begin_at(self, origin_ns: int) -> None:
        self.origin_ns = origin_ns
        self.to_us = partial(_to_us, self._growing, origin_ns)
        self.moments = StateAt(self.to_us)

    def update(self, trace: Trace, record: str = "") -> NDArray[np.void]:
        """Read the new rows of ``trace``, a later state of the last trace or another trace; return the new steps.

        Args:
            trace: the trace so far.
            record: name of the file that it was loaded from; empty: recorded by ranks.
        """
        begins = not self._has_steps and has_steps(trace)  # time 0 moves there
        if begins or record != self._record or not continues(trace, self._job, self._ends):
            self._forget()
            self.epoch += 1
            self._job, self._record, self._has_steps = job(trace), record, has_steps(trace)
        self.trace = trace
        self._growing.update(trace)
        if not self._has_rows:
            self._has_rows = trace.num_rows > 0
            self._begin_at(self.cuts.shown_at(zero_ns(trace)))
        new = self.steps.take(trace, self.cuts)
        if self._alike.update(trace):
            self.regrouped += 1
            self._spans = {}
        for rank in self.drawn:
            log = self._spans.setdefault(rank, _SpanLog(trace.rank(rank).end_seq - self.history_rows))
            log.read(trace, rank, self.cuts)
        self._ends = {rank_trace.rank: rank_trace.end_seq for rank_trace in trace.ranks}
        return new

    @property
    def cuts(self) -> Cuts:
        """What is cut out of the time axis."""
        return self._growing.cuts

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of alike ranks; the first of each is drawn for all."""
        return self._alike.groups

    @property
    def drawn(self) -> tuple[int, ...]:
        """Ranks with tracks: up to MAX_RANKS, the first of each group, then the lowest others."""
        order = [*(group[0] for group in self.groups), *sorted(rank for group in self.groups for rank in group[1:])]
        return tuple(sorted(order[:MAX_RANKS]))

    def spans(self, rank: int, after: int | None) -> tuple[NDArray[np.void], int]:
        """Return the ended spans of a drawn rank that follow the first ``after``, and the number of all so far.

        Args:
            rank: one of ``drawn``.
            after: spans received before; None: return those of the last rows only, as when a view opens.
        """
        log = self._spans[rank]
        first_seq = self.trace.rank(rank).end_seq - self.history_rows
        return log.recent(first_seq) if after is None else log.following(after), log.count

    def open_spans(self, rank: int) -> NDArray[np.void]:
        """Return the spans of a drawn rank that have not ended, of SPAN_DTYPE."""
        return self._spans[rank].reader.open

    def rank(self, rank: int) -> FoldedRank:
        """Return the state of a rank that is in the trace, after all its rows."""
        rank_trace = self.trace.rank(rank)
        state = self._ranks[rank] = advanced(self._ranks.get(rank), rank_trace)
        return state

    def frame(self, rank: int) -> KeyFrame:
        """Return the key frame of a rank after all its rows."""
        now = self.rank(rank)
        return KeyFrame(
            seq=now.next_seq,
            bytes_by_category=now.memory.bytes_by_category,
            unit_states=now.units.params,
            reducing=now.units.reducing,
        )

    def peak(self, rank: int) -> Peak:
        """Return the highest peak of a rank, also if the rows around it are no longer in the trace."""
        seq, known = self.rank(rank).memory.peak_seq, self._peaks.get(rank)
        if known is None or known[0] != seq:
            rank_trace = self.trace.rank(rank)
            first = max(seq - AROUND, rank_trace.start.seq)
            known = self._peaks[rank] = seq, memory.peak(rank_trace.cut(first, max(seq + AROUND, first)))
        return known[1]


class _SpanLog:
    """The ended spans of one rank, in the order they were read."""

    def __init__(self, from_seq: int) -> None:
        self.reader, self.count = RankSpans(from_seq), 0
        self._parts: list[tuple[int, int, NDArray[np.void]]] = []  # number of the first span, last row read, and spans

    def read(self, trace: Trace, rank: int, cuts: Cuts) -> None:
        rank_trace = trace.rank(rank)
        new = self.reader.take(rank_trace, header=trace.header, cuts=cuts)
        if len(new):
            self._parts.append((self.count, rank_trace.end_seq, new))
            self.count += len(new)
        self._parts = [part for part in self._parts if part[1] > rank_trace.start.seq]  # as long as rows are kept

    def following(self, after: int) -> NDArray[np.void]:
        return self._joined(part for first, _, part in self._parts if first >= after)

    def recent(self, first_seq: int) -> NDArray[np.void]:
        return self._joined(part for _, end_seq, part in self._parts if end_seq > first_seq)

    def _joined(self, parts: Any) -> NDArray[np.void]:  # noqa: ANN401 - any iterable of arrays
        return np.concatenate([np.empty(0, SPAN_DTYPE), *parts])


def advanced(before: FoldedRank | None, rank_trace: RankTrace) -> FoldedRank:
    """Return the state of a rank after all rows of ``rank_trace``.

    Args:
        before: its state after some earlier rows; None: unknown. If rows between are missing, the peak stays known.
        rank_trace: the rank's rows.
    """
    start = rank_trace.start
    held, units = memory.start(start), states.start(start)
    next_seq = start.seq
    if before is not None and before.next_seq >= start.seq:
        next_seq, held, units = before.next_seq, before.memory, before.units
    elif before is not None:
        held = memory.resume(before.memory, start)
    rows = rank_trace.rows[next_seq - start.seq :]
    return FoldedRank(next_seq=rank_trace.end_seq, memory=memory.advance(held, rows), units=states.advance(units, rows))


def _to_us(growing: GrowingCuts, origin_ns: int, t_ns: int) -> float:
    return (growing.cuts.shown_at(t_ns) - origin_ns) / 1e3


def continues(trace: Trace, known_job: tuple[object, ...], ends: Mapping[int, int]) -> bool:
    """Return whether ``trace`` is a later state of the known trace; rows between may be missing.

    Args:
        trace: the trace so far.
        known_job: :func:`job` of the known trace.
        ends: by rank, the number of the first unknown row.
    """
    now = {rank_trace.rank: rank_trace.end_seq for rank_trace in trace.ranks}
    return job(trace) == known_job and all(rank in now and end <= now[rank] for rank, end in ends.items())


def job(trace: Trace) -> tuple[object, ...]:
    """Return a key that differs between training jobs."""
    return tuple((info.rank, info.host, info.pid) for info in trace.header.ranks)
