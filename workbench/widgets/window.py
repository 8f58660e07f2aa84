"""What happened in a part of time, every change of it: what a view draws when somebody looks closely.

The feed keeps only extremes of memory and states; drawn under a cursor they would contradict the numbers that
:class:`~workbench.widgets.moments.Moments` gives for it. Here the same rows are read from the same key frames, so at
any time of the window what is drawn is what those numbers say. Times are nanoseconds of rank 0's clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.events import MOVES
from workbench.replay import states
from workbench.replay.holds import Cuts
from workbench.replay.spans import of_kind
from workbench.trace.columns import RankTrace, Trace
from workbench.widgets.feed import Increment, memory_of, shown_part, states_of
from workbench.widgets.moments import Moments
from workbench.widgets.spans import SPAN_DTYPE
from workbench.widgets.steps import LEARNED_DTYPE

MOST = 2_000
"""Moments of memory, and changes of units, of one group that are told; of more only extremes, as the feed does."""

MOST_ROWS = 100_000
"""Rows of all groups together that are looked at; of more nothing is told, and the feed's picture has to do."""


def window(
    trace: Trace,
    moments: Moments,
    groups: Sequence[tuple[int, ...]],
    begin_ns: int,
    end_ns: int,
    cuts: Cuts | None = None,
) -> Increment:
    """Return memory and states from ``begin_ns`` to ``end_ns``, the state at its begin first.

    Args:
        trace: what happened so far.
        moments: knows key frames of the trace.
        groups: ranks that are drawn as one; the first of each is read.
        begin_ns: a time.
        end_ns: a later time.
        cuts: what is cut out of the time axis; times in the answer are those at which things are shown.
    """
    told = groups if _is_told(trace, moments, [group[0] for group in groups], begin_ns, end_ns) else ()
    parts = [
        shown_part(moments.part(trace, group[0], begin_ns, end_ns), trace, cuts or Cuts(), is_first=True)
        for group in told
    ]
    limit = None if all(_is_few(new.part) for new in parts) else MOST * len(parts)
    told_memory, all_memory = memory_of(parts, limit)
    told_states, all_states = states_of(parts, len(trace.header.units), limit)
    is_exact = len(told) == len(groups) and all_memory and all_states
    return Increment(
        restart=False,
        is_another=False,
        groups=tuple(groups),
        ranks=(),
        spans=np.empty(0, SPAN_DTYPE),
        open=np.empty(0, SPAN_DTYPE),
        memory=told_memory,
        states=told_states,
        is_exact=is_exact,
        steps=np.empty(0, LEARNED_DTYPE),
    )


def _is_told(trace: Trace, moments: Moments, ranks: Sequence[int], begin_ns: int, end_ns: int) -> bool:
    recorded = {rank_trace.rank for rank_trace in trace.ranks if len(rank_trace.rows)}
    if not recorded.issuperset(ranks):  # the view is about to be told of another job
        return False
    return sum(moments.num_rows(trace, rank, begin_ns, end_ns) for rank in ranks) <= MOST_ROWS


def _is_few(part: RankTrace) -> bool:
    kinds = (MOVES, states.CHANGING_KINDS)
    return all(int(of_kind(part.rows, wanted).sum()) <= MOST for wanted in kinds)
