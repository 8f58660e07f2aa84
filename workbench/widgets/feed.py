"""The incremental feed of a live view: a growing trace and what the browser already has -> one small increment.

A :class:`Feed` tracks what one browser view has received. :meth:`Feed.take` returns what is new, thinned out to fit a
number of bytes; :mod:`workbench.widgets.packing` turns it into binary columns. Nothing is sent twice: the increments of
a trace taken in pieces add up to those of the trace taken at once. Thinning merges short spans (``count`` says how
many) and keeps the extremes and ends of memory and states.

Terms: a *group* is a set of ranks that behave alike, drawn as its first rank; a *track* is a row of the timeline, one
of :data:`~workbench.events.RANK_TRACKS` of a drawn rank. Times are nanoseconds of the displayed axis, without the
time in which ranks were held or idle (:mod:`workbench.replay.paused_time`). Arrays: ``N`` entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from workbench.events import Category
from workbench.replay import memory, states
from workbench.replay.paused_time import LEAST_IDLE_NS, Cuts, GrowingCuts
from workbench.trace import advance
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import KeyFrame
from workbench.widgets.live_spans import NUM_TRACKS, SPAN_DTYPE, RankSpans, thinned
from workbench.widgets.live_steps import Steps
from workbench.widgets.rank_groups import RankGroups

MAX_RANKS = 8
"""Maximum number of ranks with tracks of their own."""

HISTORY_ROWS = 30_000
"""Rows of each rank that a view receives when it opens; the static views show older ones."""

MEMORY_DTYPE = np.dtype([("group", "u1"), ("t_ns", "<i8"), ("num_bytes", "<i8", (len(Category),))])
STATE_DTYPE = np.dtype([("group", "u1"), ("state", "u1"), ("unit", "<i2"), ("t_ns", "<i8")])

SPAN_SIZE, MOMENT_SIZE, STATE_SIZE = 25, 9 + 4 * len(Category), 12
"""Bytes of one entry on the wire."""

_SHARES = {"spans": 0.6, "memory": 0.25, "states": 0.15}  # of an increment's bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Increment:
    """New data for a view; arrays are ``[N]``.

    Attributes:
        restart: drop everything received before, except the steps.
        is_another: the trace does not continue the last one: drop the steps as well.
        groups: groups of alike ranks; ``group`` in the arrays is an index into it.
        ranks: ranks with tracks; track ``NUM_TRACKS * i + j`` is track ``j`` of ``ranks[i]``.
        spans: of :data:`~workbench.widgets.live_spans.SPAN_DTYPE`; those of a track in the order they began.
        open: same dtype: spans that have not ended; replaces the last ``open``.
        memory: of MEMORY_DTYPE: live bytes by class from a time on.
        states: of STATE_DTYPE: the UnitState of a unit from a time on.
        is_exact: whether ``memory`` and ``states`` have every change.
        steps: of :data:`~workbench.widgets.live_steps.LEARNED_DTYPE`: finished steps.
    """

    restart: bool
    is_another: bool
    groups: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    spans: NDArray[np.void]
    open: NDArray[np.void]
    memory: NDArray[np.void]
    states: NDArray[np.void]
    is_exact: bool
    steps: NDArray[np.void]


class Feed:
    """What one browser view has received of a trace.

    Args:
        history_rows: rows of each rank that the view receives when it opens.
        least_spans: spans that an increment may have even if they exceed its bytes.
    """

    def __init__(self, history_rows: int = HISTORY_ROWS, least_spans: int = 0) -> None:
        self._history_rows, self._least_spans = history_rows, least_spans
        self._job: tuple[object, ...] = ()
        self._ends: dict[int, int] = {}
        self._known: dict[int, KeyFrame] = {}
        self._spans: dict[int, RankSpans] = {}
        self._alike, self._steps, self._growing = RankGroups(), Steps(), GrowingCuts(LEAST_IDLE_NS)

    @property
    def cuts(self) -> Cuts:
        """What is cut out of the time axis of the last trace."""
        return self._growing.cuts

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of alike ranks, as last sent to the view."""
        return self._alike.groups

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with tracks of their own, as last sent to the view."""
        return _drawn(self.groups)

    def take(self, trace: Trace, max_bytes: int = 1 << 20) -> Increment:
        """Return what is new to the view in ``trace``, a later state of the last trace or another trace.

        Args:
            trace: the trace so far.
            max_bytes: approximate limit on the increment's bytes on the wire, without its steps.
        """
        is_another = not continues(trace, self._job, self._ends)
        if is_another:
            self._forget()
            self._job = job(trace)
        cuts = self._growing.update(trace)
        steps = self._steps.take(trace, cuts)
        is_regrouped = self._alike.update(trace)
        if is_regrouped:
            self._forget_drawn()
        groups = self._alike.groups
        ranks = _drawn(groups)
        fresh = [self._fresh(trace, group[0]) for group in groups]
        told_memory, all_memory = memory_of(fresh, int(max_bytes * _SHARES["memory"]) // MOMENT_SIZE)
        limit = int(max_bytes * _SHARES["states"]) // STATE_SIZE
        told_states, all_states = states_of(fresh, len(trace.header.units), limit)
        most_spans = max(int(max_bytes * _SHARES["spans"]) // SPAN_SIZE, self._least_spans)
        found = Increment(
            restart=is_another or is_regrouped,
            is_another=is_another,
            groups=groups,
            ranks=ranks,
            spans=thinned(self._take_spans(trace, ranks), most_spans),
            open=np.concatenate([np.empty(0, SPAN_DTYPE), *(reader.open for reader in self._spans.values())]),
            memory=told_memory,
            states=told_states,
            is_exact=all_memory and all_states,
            steps=steps,
        )
        self._known |= {new.part.rank: advance(new.part.start, new.part.rows) for new in fresh}
        self._ends = {r.rank: r.end_seq for r in trace.ranks}
        return found

    def _forget(self) -> None:
        self._alike, self._steps, self._growing, self._ends = RankGroups(), Steps(), GrowingCuts(LEAST_IDLE_NS), {}
        self._forget_drawn()

    def _forget_drawn(self) -> None:
        self._known, self._spans = {}, {}

    def _fresh(self, trace: Trace, rank: int) -> FeedRows:
        rank_trace, before = trace.rank(rank), self._known.get(rank)
        if before is None:
            part = rank_trace.cut(rank_trace.end_seq - self._history_rows, rank_trace.end_seq)
        else:
            part = RankTrace(rank, rank_trace.rows[before.seq - rank_trace.start.seq :], before)
        return shown_part(part, self.cuts, is_first=before is None)

    def _take_spans(self, trace: Trace, ranks: Sequence[int]) -> NDArray[np.void]:
        parts = [np.empty(0, SPAN_DTYPE)]
        for place, rank in enumerate(ranks):
            rank_trace = trace.rank(rank)
            reader = self._spans.setdefault(rank, RankSpans(rank_trace.end_seq - self._history_rows))
            first_track = place * NUM_TRACKS
            parts.append(reader.take(rank_trace, header=trace.header, first_track=first_track, cuts=self.cuts))
        return np.concatenate(parts)


@dataclass(frozen=True, kw_only=True)
class FeedRows:
    """Rows of a group's first rank that are to be sent to a view.

    Attributes:
        part: rows that are new to the view, at their displayed times, with the state before them.
        is_first: whether the view lacks the state before them.
    """

    part: RankTrace
    is_first: bool


def shown_part(part: RankTrace, cuts: Cuts, *, is_first: bool) -> FeedRows:
    """Return a part of a rank's trace with its times on an axis without ``cuts``."""
    return FeedRows(part=replace(part, rows=cuts.rows(part.rows)), is_first=is_first)


def continues(trace: Trace, known_job: tuple[object, ...], ends: Mapping[int, int]) -> bool:
    """Return whether ``trace`` is a later state of the known trace, without a gap.

    Args:
        trace: the trace so far.
        known_job: :func:`job` of the known trace.
        ends: by rank, the number of the first unknown row.
    """
    places = {r.rank: (r.start.seq, r.end_seq) for r in trace.ranks}
    follow_on = (rank in places and places[rank][0] <= end <= places[rank][1] for rank, end in ends.items())
    return job(trace) == known_job and all(follow_on)


def job(trace: Trace) -> tuple[object, ...]:
    """Return a key that differs between training jobs."""
    return tuple((info.rank, info.host, info.pid) for info in trace.header.ranks)


def _drawn(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Choose up to MAX_RANKS ranks for the tracks: the first of each group, then the lowest others."""
    order = [*(group[0] for group in groups), *sorted(rank for group in groups for rank in group[1:])]
    return tuple(sorted(order[:MAX_RANKS]))


def memory_of(parts: Sequence[FeedRows], limit: int | None) -> tuple[NDArray[np.void], bool]:
    """Return the memory of each group's part, of MEMORY_DTYPE ``[N]``, and whether it has every change.

    Args:
        parts: one for each group.
        limit: about how many moments to return; None: all.
    """
    found, is_exact = [np.empty(0, MEMORY_DTYPE)], True
    for group, new in enumerate(parts):
        series = memory.series(new.part, None if limit is None else max(limit // len(parts), 4))
        begin = 0 if new.is_first else 1  # else the view has the state before
        told = np.empty(len(series.t_ns[begin:]), MEMORY_DTYPE)
        told["group"], told["num_bytes"] = group, series.num_bytes[begin:]
        told["t_ns"] = series.t_ns[begin:]
        found.append(told)
        is_exact = is_exact and series.is_exact
    return np.concatenate(found), is_exact


def states_of(parts: Sequence[FeedRows], num_units: int, limit: int | None) -> tuple[NDArray[np.void], bool]:
    """Return the states of all units in each group's part, of STATE_DTYPE ``[N]``, and whether it has every change.

    Args:
        parts: one for each group.
        num_units: number of units in the trace.
        limit: about how many entries to return; None: all.
    """
    found, is_exact = [np.empty(0, STATE_DTYPE)], True
    for group, new in enumerate(parts):
        spans = states.spans(new.part, range(max(num_units, 1)) if new.is_first else ())
        kept = spans.begin_seq >= (new.part.start.seq - 1 if new.is_first else new.part.start.seq)
        told = np.empty(int(kept.sum()), STATE_DTYPE)
        told["group"], told["unit"], told["state"] = group, spans.unit[kept], spans.state[kept]
        told["t_ns"] = spans.begin_ns[kept]
        found.append(told if limit is None else _last_of_bins(told, limit // (max(num_units, 1) * len(parts))))
        is_exact = is_exact and len(found[-1]) == len(told)
    return np.concatenate(found), is_exact


def _last_of_bins(found: NDArray[np.void], num_bins: int) -> NDArray[np.void]:
    """Return each unit's last entry in each of ``num_bins`` equal time bins; all if there are few enough."""
    num_bins = max(num_bins, 1)
    if not len(found) or len(found) <= num_bins * len(np.unique(found["unit"])):
        return found
    ran = found["t_ns"] - found["t_ns"].min()
    bins = ran * num_bins // (ran.max() + 1) + num_bins * found["unit"].astype(np.int64)
    return found[np.flatnonzero(np.append(bins[1:] != bins[:-1], True))]
