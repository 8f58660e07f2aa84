"""Every change in a window of time: what a view draws while it holds still.

The feed has only extremes of memory and states, and nothing of the distant past. Drawn under a cursor, these would
contradict the numbers of :class:`~workbench.live.state_at.StateAt` there. This module reads the same rows from the
same key frames, so the picture agrees with those numbers at any time of the window. Times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workbench.events import MOVES
from workbench.live.feed import Increment, memory_of, states_of
from workbench.live.fold import Fold
from workbench.live.live_spans import NUM_TRACKS, SPAN_DTYPE, RankSpans, thinned
from workbench.live.live_steps import LEARNED_DTYPE
from workbench.replay import states
from workbench.replay.spans import of_kind
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Rows

MOST = 2_000
"""Memory moves, and unit changes, of one group that are sent in full; of more only extremes, as in the feed."""

MOST_SPANS = 10_000
"""Spans of all ranks together that are sent; of more the narrowest are merged."""

ROLL_ROWS = 20_000
"""Rows of the same step that are read before and after those of the window: spans may reach into it."""


def window(fold: Fold, begin_ns: int, end_ns: int) -> Increment:
    """Return spans, memory and states from ``begin_ns`` to ``end_ns``, at displayed times, the state there first."""
    trace, groups, ranks = fold.trace, fold.groups, fold.drawn
    recorded = {rank_trace.rank for rank_trace in trace.ranks if len(rank_trace.rows)}
    drawn = groups if recorded.issuperset(group[0] for group in groups) else ()  # else the next feed restarts the view
    found = [fold.moments.part(trace, group[0], begin_ns, end_ns) for group in drawn]
    parts = [(replace(part, rows=fold.cuts.rows(part.rows)), True) for part in found]
    limit = None if all(map(_is_few, found)) else MOST * len(parts)
    told_memory, all_memory = memory_of(parts, limit)
    told_states, all_states = states_of(parts, len(trace.header.units), limit)
    every = _spans(fold, ranks if recorded.issuperset(ranks) else (), (begin_ns, end_ns))
    return Increment(
        restart=False,
        is_another=False,
        groups=groups,
        ranks=ranks,
        spans=thinned(every, MOST_SPANS),
        open=np.empty(0, SPAN_DTYPE),
        memory=told_memory,
        states=told_states,
        is_exact=len(drawn) == len(groups) and all_memory and all_states and len(every) <= MOST_SPANS,
        steps=np.empty(0, LEARNED_DTYPE),
    )


def _spans(fold: Fold, ranks: Sequence[int], between_ns: tuple[int, int]) -> NDArray[np.void]:
    """Return the spans, of SPAN_DTYPE, that reach into a window; those still open are left to the feed."""
    parts = [np.empty(0, SPAN_DTYPE)]
    for place, rank in enumerate(ranks):
        rank_trace = fold.trace.rank(rank)
        first, last = _rolled(rank_trace.rows, *fold.moments.between(fold.trace, rank, *between_ns))
        first_seq, until_seq = rank_trace.start.seq + first, rank_trace.start.seq + last
        reader = RankSpans(first_seq)
        parts.append(reader.take(rank_trace, header=fold.trace.header, cuts=fold.cuts, until_seq=until_seq))
        if until_seq < rank_trace.end_seq:
            parts[-1] = np.concatenate([parts[-1], reader.open])
        parts[-1]["track"] += place * NUM_TRACKS
    every = np.concatenate(parts)
    begin_ns, end_ns = (fold.cuts.shown_at(t_ns) for t_ns in between_ns)
    return every[(every["end_ns"] >= begin_ns) & (every["begin_ns"] <= end_ns)]


def _rolled(rows: Rows, begin: int, end: int) -> tuple[int, int]:
    """Return the positions moved out to the begin and end of their steps, by at most ROLL_ROWS."""
    if not len(rows):
        return 0, 0
    begin, end = min(begin, len(rows) - 1), min(max(end, 1), len(rows))
    before, after = rows["step"][max(begin - ROLL_ROWS, 0) : begin], rows["step"][end : end + ROLL_ROWS]
    others = np.flatnonzero(before != rows["step"][begin])
    first = begin - len(before) + (int(others[-1]) + 1 if len(others) else 0)
    others = np.flatnonzero(after != rows["step"][end - 1])
    return first, end + (int(others[0]) if len(others) else len(after))


def _is_few(part: RankTrace) -> bool:
    kinds = (MOVES, states.CHANGING_KINDS)
    return all(int(of_kind(part.rows, wanted).sum()) <= MOST for wanted in kinds)
