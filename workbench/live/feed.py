"""The feed of one client: the fold of a growing trace, and what the client has received -> one small increment.

A :class:`Feed` is a cursor. :meth:`Feed.take` returns what is new, thinned out to fit a number of bytes;
:mod:`workbench.live.packing` turns it into binary columns. Nothing is sent twice: the increments of
a trace taken in pieces add up to those of the trace taken at once. Thinning merges short spans (``count`` says how
many) and keeps the extremes and ends of memory and states.

Terms: a *group* is a set of ranks that behave alike, drawn as its first rank; a *track* is a row of the timeline, one
of :data:`~workbench.events.RANK_TRACKS` of a drawn rank. Times are nanoseconds of the displayed axis, without the
time in which ranks were held or idle (:mod:`workbench.replay.paused_time`). Arrays: ``N`` entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from workbench.events import Category
from workbench.live.fold import Fold
from workbench.live.live_spans import NUM_TRACKS, SPAN_DTYPE, thinned
from workbench.replay import memory, states
from workbench.trace.columns import RankTrace
from workbench.trace.schema import KeyFrame

MEMORY_DTYPE = np.dtype([("group", "u1"), ("t_ns", "<i8"), ("num_bytes", "<i8", (len(Category),))])
STATE_DTYPE = np.dtype([("group", "u1"), ("state", "u1"), ("unit", "<i2"), ("t_ns", "<i8")])

SPAN_SIZE, MOMENT_SIZE, STATE_SIZE = 25, 9 + 4 * len(Category), 12
"""Bytes of one entry on the wire."""

FeedRows = tuple[RankTrace, bool]
"""Rows of a group's first rank at displayed times, with the state before them, and whether the view lacks that."""

_SHARES = {"spans": 0.6, "memory": 0.25, "states": 0.15}  # of an increment's bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Increment:
    """New data for a view; arrays are ``[N]``.

    Attributes:
        restart: drop everything received before, except the steps.
        is_another: the trace does not continue the last one: drop the steps as well.
        groups: groups of alike ranks; ``group`` in the arrays is an index into it.
        ranks: ranks with tracks; track ``NUM_TRACKS * i + j`` is track ``j`` of ``ranks[i]``.
        spans: of :data:`~workbench.live.live_spans.SPAN_DTYPE`; those of a track in the order they began.
        open: same dtype: spans that have not ended; replaces the last ``open``.
        memory: of MEMORY_DTYPE: live bytes by class from a time on.
        states: of STATE_DTYPE: the UnitState of a unit from a time on.
        is_exact: whether ``memory`` and ``states`` have every change.
        steps: of :data:`~workbench.live.live_steps.LEARNED_DTYPE`: finished steps.
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
    """The part of a fold that one client has received.

    Args:
        least_spans: spans that an increment may have even if they exceed its bytes.
    """

    def __init__(self, least_spans: int = 0) -> None:
        self._least_spans = least_spans
        self._epoch = self._regrouped = -1
        self._num_steps = 0
        self._frames: dict[int, KeyFrame] = {}  # by drawn group's first rank, the end of the rows received
        self._num_spans: dict[int, int] = {}

    def take(self, fold: Fold, max_bytes: int = 1 << 20) -> Increment:
        """Return what is new to the client.

        Args:
            fold: of the trace, at a later state than at the last call.
            max_bytes: approximate limit on the increment's bytes on the wire, without its steps.
        """
        is_another, is_regrouped = fold.epoch != self._epoch, fold.regrouped != self._regrouped
        self._epoch, self._regrouped = fold.epoch, fold.regrouped
        if is_another:
            self._num_steps = 0
        if is_another or is_regrouped:
            self._frames, self._num_spans = {}, {}
        fresh = [self._fresh(fold, group[0]) for group in fold.groups]
        told_memory, all_memory = memory_of(fresh, int(max_bytes * _SHARES["memory"]) // MOMENT_SIZE)
        limit = int(max_bytes * _SHARES["states"]) // STATE_SIZE
        told_states, all_states = states_of(fresh, len(fold.trace.header.units), limit)
        most_spans = max(int(max_bytes * _SHARES["spans"]) // SPAN_SIZE, self._least_spans)
        steps, self._num_steps = fold.steps.following(self._num_steps), fold.steps.count
        ended, still_open = self._take_spans(fold)
        return Increment(
            restart=is_another or is_regrouped,
            is_another=is_another,
            groups=fold.groups,
            ranks=fold.drawn,
            spans=thinned(ended, most_spans),
            open=still_open,
            memory=told_memory,
            states=told_states,
            is_exact=all_memory and all_states,
            steps=steps,
        )

    def _fresh(self, fold: Fold, rank: int) -> FeedRows:
        rank_trace, before = fold.trace.rank(rank), self._frames.get(rank)
        if len(rank_trace.rows):
            self._frames[rank] = fold.frame(rank)
        if before is None:
            part = rank_trace.cut(rank_trace.end_seq - fold.history_rows, rank_trace.end_seq)
        elif before.seq < rank_trace.start.seq:  # rows between are missing
            part, before = rank_trace, None
        else:
            part = RankTrace(rank, rank_trace.rows[before.seq - rank_trace.start.seq :], before)
        return replace(part, rows=fold.cuts.rows(part.rows)), before is None

    def _take_spans(self, fold: Fold) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Return the new spans that have ended, and all that have not."""
        ended, still_open = [np.empty(0, SPAN_DTYPE)], [np.empty(0, SPAN_DTYPE)]
        for place, rank in enumerate(fold.drawn):
            new, self._num_spans[rank] = fold.spans(rank, self._num_spans.get(rank))
            for parts, found in ((ended, new), (still_open, fold.open_spans(rank))):
                parts.append(found.copy())
                parts[-1]["track"] += place * NUM_TRACKS
        return np.concatenate(ended), np.concatenate(still_open)


def memory_of(parts: Sequence[FeedRows], limit: int | None) -> tuple[NDArray[np.void], bool]:
    """Return the memory of each group's part, of MEMORY_DTYPE ``[N]``, and whether it has every change.

    Args:
        parts: one for each group.
        limit: approximate number of moments to return; None for all.
    """
    found, is_exact = [np.empty(0, MEMORY_DTYPE)], True
    for group, (part, is_first) in enumerate(parts):
        series = memory.series(part, None if limit is None else max(limit // len(parts), 4))
        begin = 0 if is_first else 1  # else the view has the state before
        sent = np.empty(len(series.t_ns[begin:]), MEMORY_DTYPE)
        sent["group"], sent["num_bytes"] = group, series.num_bytes[begin:]
        sent["t_ns"] = series.t_ns[begin:]
        found.append(sent)
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
    for group, (part, is_first) in enumerate(parts):
        spans = states.spans(part, range(max(num_units, 1)) if is_first else ())
        kept = spans.begin_seq >= (part.start.seq - 1 if is_first else part.start.seq)
        sent = np.empty(int(kept.sum()), STATE_DTYPE)
        sent["group"], sent["unit"], sent["state"] = group, spans.unit[kept], spans.state[kept]
        sent["t_ns"] = spans.begin_ns[kept]
        found.append(sent if limit is None else _last_of_bins(sent, limit // (max(num_units, 1) * len(parts))))
        is_exact = is_exact and len(found[-1]) == len(sent)
    return np.concatenate(found), is_exact


def _last_of_bins(found: NDArray[np.void], num_bins: int) -> NDArray[np.void]:
    """Return each unit's last entry in each of ``num_bins`` equal time bins; all if there are few enough."""
    num_bins = max(num_bins, 1)
    if not len(found) or len(found) <= num_bins * len(np.unique(found["unit"])):
        return found
    ran = found["t_ns"] - found["t_ns"].min()
    bins = ran * num_bins // (ran.max() + 1) + num_bins * found["unit"].astype(np.int64)
    return found[np.flatnonzero(np.append(bins[1:] != bins[:-1], True))]
