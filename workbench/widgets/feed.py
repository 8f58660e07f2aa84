"""What a live view still has to be told: a growing trace and what the browser knows -> one small increment.

A :class:`Feed` remembers what one browser view was sent. :meth:`Feed.take` returns what is new, thinned out until it
fits a number of bytes; :mod:`workbench.widgets.packing` turns it into binary columns. Nothing is sent twice: the
increments of a trace that was taken in any pieces add up to those of the trace taken at once. Where they must be
thinned out, short spans are merged (their ``count`` says of how many), and of memory and states the extremes and the
ends are kept.

Words: a *group* is ranks that behave alike, and the first of them is drawn for all; a *track* is a lane of the
timeline, :data:`TRACKS` of them per drawn rank. Times are nanoseconds, as they are shown: without the time in which
ranks were held or idle (:mod:`workbench.replay.paused_time`). Arrays: ``N`` entries.
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
from workbench.widgets.live_spans import SPAN_DTYPE, TRACKS, RankSpans, thinned
from workbench.widgets.live_steps import Steps
from workbench.widgets.rank_groups import RankGroups

MAX_RANKS = 8
"""Ranks with tracks of their own."""

HISTORY_ROWS = 30_000
"""Rows of each rank that a view is told of when it opens; older ones are left to the static views."""

MEMORY_DTYPE = np.dtype([("group", "u1"), ("t_ns", "<i8"), ("num_bytes", "<i8", (len(Category),))])
STATE_DTYPE = np.dtype([("group", "u1"), ("state", "u1"), ("unit", "<i2"), ("t_ns", "<i8")])

SPAN_SIZE, MOMENT_SIZE, STATE_SIZE = 25, 9 + 4 * len(Category), 12
"""Bytes of one entry on the wire."""

_SHARES = {"spans": 0.6, "memory": 0.25, "states": 0.15}  # of an increment's bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Increment:
    """What is new; arrays are ``[N]``.

    Attributes:
        restart: forget what was sent before, but for the steps.
        is_another: these are other ranks than before: forget the steps as well.
        groups: ranks, alike ones together; ``group`` in the arrays is a position in it.
        ranks: those with tracks; track ``len(TRACKS) * i + j`` is track ``j`` of ``ranks[i]``.
        spans: of :data:`~workbench.widgets.live_spans.SPAN_DTYPE`; each track's in the order they began.
        open: of the same: what has not ended, instead of what was said to be so before.
        memory: of MEMORY_DTYPE: live bytes by class from a moment on.
        states: of STATE_DTYPE: the UnitState of a unit from a moment on.
        is_exact: whether every change is in both.
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
    """What one view of the browser knows of a trace.

    Args:
        history_rows: of each rank that it is told of when it opens.
        least_spans: that are told at once, whatever they take.
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
        """What is cut out of the time axis of the trace that was taken last."""
        return self._growing.cuts

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that behave alike, as the view was told last."""
        return self._alike.groups

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with tracks of their own, as the view was told last."""
        return _drawn(self.groups)

    def take(self, trace: Trace, max_bytes: int = 1 << 20) -> Increment:
        """Return what the view does not know of ``trace``, a later state of the same one or another one.

        Args:
            trace: what happened so far.
            max_bytes: about how many bytes the increment may have on the wire, its steps not counted.
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
            first_track = place * len(TRACKS)
            parts.append(reader.take(rank_trace, header=trace.header, first_track=first_track, cuts=self.cuts))
        return np.concatenate(parts)


@dataclass(frozen=True, kw_only=True)
class FeedRows:
    """Some of the rows of a group's first rank, to be told to a view.

    Attributes:
        part: rows that the view does not know, at the times at which they are shown, with the state before them.
        is_first: the view knows nothing of the state before them.
    """

    part: RankTrace
    is_first: bool


def shown_part(part: RankTrace, cuts: Cuts, *, is_first: bool) -> FeedRows:
    """Return a part of a rank's trace as it is told to a view whose axis leaves out ``cuts``."""
    return FeedRows(part=replace(part, rows=cuts.rows(part.rows)), is_first=is_first)


def continues(trace: Trace, known_job: tuple[object, ...], ends: Mapping[int, int]) -> bool:
    """Tell whether ``trace`` is a later state, without a gap, of what is known.

    Args:
        trace: what happened so far.
        known_job: :func:`job` of what is known.
        ends: by rank, the number of the first row that is not known.
    """
    places = {r.rank: (r.start.seq, r.end_seq) for r in trace.ranks}
    follow_on = (rank in places and places[rank][0] <= end <= places[rank][1] for rank, end in ends.items())
    return job(trace) == known_job and all(follow_on)


def job(trace: Trace) -> tuple[object, ...]:
    """Return what another training job does not have in common with this one."""
    return tuple((info.rank, info.host, info.pid) for info in trace.header.ranks)


def _drawn(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks with tracks: one of each group first, then the others, lowest first."""
    order = [*(group[0] for group in groups), *sorted(rank for group in groups for rank in group[1:])]
    return tuple(sorted(order[:MAX_RANKS]))


def memory_of(parts: Sequence[FeedRows], limit: int | None) -> tuple[NDArray[np.void], bool]:
    """Return the memory of each group's part, of MEMORY_DTYPE ``[N]``, and whether that is every change.

    Args:
        parts: of each group.
        limit: about how many moments to return; None: all.
    """
    found, is_exact = [np.empty(0, MEMORY_DTYPE)], True
    for group, new in enumerate(parts):
        series = memory.series(new.part, None if limit is None else max(limit // len(parts), 4))
        begin = 0 if new.is_first else 1  # else the state before is known
        told = np.empty(len(series.t_ns[begin:]), MEMORY_DTYPE)
        told["group"], told["num_bytes"] = group, series.num_bytes[begin:]
        told["t_ns"] = series.t_ns[begin:]
        found.append(told)
        is_exact = is_exact and series.is_exact
    return np.concatenate(found), is_exact


def states_of(parts: Sequence[FeedRows], num_units: int, limit: int | None) -> tuple[NDArray[np.void], bool]:
    """Return the states of all units in each group's part, of STATE_DTYPE ``[N]``, and whether that is every change.

    Args:
        parts: of each group.
        num_units: of the trace.
        limit: about how many to return; None: all.
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
    """Of each unit, if there are more than ``num_bins`` entries a unit, the last one in each equal bin of time."""
    num_bins = max(num_bins, 1)
    if not len(found) or len(found) <= num_bins * len(np.unique(found["unit"])):
        return found
    ran = found["t_ns"] - found["t_ns"].min()
    bins = ran * num_bins // (ran.max() + 1) + num_bins * found["unit"].astype(np.int64)
    return found[np.flatnonzero(np.append(bins[1:] != bins[:-1], True))]
