"""A cursor over what was recorded: the trace as it was at a moment. Nothing that was computed is undone. Pure."""

from __future__ import annotations

import numpy as np

from workbench.replay.spans import of_kind
from workbench.session.places import event_words, unit_names
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Edge, Kind, Phase

NO_EVENTS = (Kind.ALLOC, Kind.FREE, Kind.GATE, Kind.METRIC, Kind.LOG, Kind.RESIDENT)
"""Kinds of rows that are no events of their own."""


def cut(trace: Trace, t_ns: int) -> Trace:
    """Return what was recorded up to ``t_ns``, a time of the ranks' clock in nanoseconds, that time included."""
    return Trace(trace.header, tuple(_cut(rank_trace, t_ns) for rank_trace in trace.ranks))


def _cut(rank_trace: RankTrace, t_ns: int) -> RankTrace:
    count = int(np.searchsorted(_times(rank_trace), t_ns, side="right"))
    return rank_trace.cut(rank_trace.start.seq, rank_trace.start.seq + count)


def _times(rank_trace: RankTrace) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """When each row was known, ``[N]`` ns, ascending: an END may bear an earlier time than the row before it."""
    times: np.ndarray[tuple[int], np.dtype[np.int64]] = np.maximum.accumulate(rank_trace.rows["t_ns"])
    return times


def back(trace: Trace, cursor: int | None, count: int) -> tuple[int | None, str]:
    """Return the cursor ``count`` events of the lowest rank earlier, and a sentence that says where that is.

    Args:
        trace: what happened.
        cursor: where it is, in nanoseconds of the ranks' clock; None: at the newest event.
        count: at least 1; the first event is not passed.
    """
    rank_trace = next((r for r in trace.ranks if (~of_kind(r.rows, NO_EVENTS)).any()), None)
    if rank_trace is None:
        return None, "nothing is recorded yet, so there is nothing to go back to"
    times = _times(rank_trace)[~of_kind(rank_trace.rows, NO_EVENTS)]
    distinct = np.unique(times)
    here = len(distinct) if cursor is None else int(np.searchsorted(distinct, cursor, side="right"))
    place = max(here - 1 - count, 0)
    t_ns = int(distinct[place])
    left = len(distinct) - 1 - place
    return t_ns, f"{_where(trace, rank_trace, t_ns)}: {left:,} events before the newest; %fsdp back 0 goes there"


def _where(trace: Trace, rank_trace: RankTrace, t_ns: int) -> str:
    rows = _cut(rank_trace, t_ns).rows
    row = rows[~of_kind(rows, NO_EVENTS)][-1]
    kind, edge = Kind(row["kind"]).name.lower(), Edge(row["edge"]).name.lower()
    what = event_words(kind, edge, unit_names(trace.header).get(int(row["unit"])))
    begins = "the begin of " if edge == "begin" else ""
    step = f", step {row['step']}" if row["step"] >= 0 else ""
    phase = Phase(row["phase"])
    during = f", {phase.name.lower().replace('_', '-')}" if phase != Phase.IDLE else ""
    return f"rank {rank_trace.rank} after {begins}{what}{step}{during}"
