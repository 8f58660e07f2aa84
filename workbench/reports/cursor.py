"""A cursor over the recorded trace: the trace as it was at an earlier moment. It undoes no computation. Pure.

A moment is a logical event, the same on all ranks (:mod:`workbench.replay.alignment`), not a time: ranks that stopped
at the same event recorded it at slightly different times. On the lowest rank the moment is a time as well: rows that
were recorded together (an arrival has an earlier time than the row before it) stay together, so pictures over time
agree with the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from workbench.base.text_formats import plural
from workbench.events import BESIDE, Edge, Kind, Phase
from workbench.replay import training
from workbench.replay.alignment import same_events
from workbench.replay.grouping import label
from workbench.replay.spans import Ints, of_kind
from workbench.reports.event_text import event_words, unit_names
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.step_names import step_name


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The end of the shown part of each rank's trace.

    Attributes:
        t_ns: time of the end on the lowest rank, in nanoseconds: where pictures over time draw a line.
        ends: by rank, ``seq`` of its first row that is not shown.
        events_back: events of the lowest rank from there to the newest when the cursor was set.
    """

    t_ns: int
    ends: Mapping[int, int]
    events_back: int = 0


def cut(trace: Trace, cursor: Cursor) -> Trace:
    """Return the trace up to ``cursor``, without rows of ranks that the cursor does not have."""
    ranks = (r.cut(r.start.seq, cursor.ends.get(r.rank, r.start.seq)) for r in trace.ranks)
    return Trace(trace.header, tuple(ranks))


def back(trace: Trace, cursor: Cursor | None, count: int) -> tuple[Cursor | None, str]:
    """Return the cursor moved back by ``count`` events of the lowest rank, and a sentence on its position.

    All ranks are cut just after that event. A rank without that event is cut by time, between the nearest events that
    it shares with the lowest rank.

    Args:
        trace: the whole trace.
        cursor: the current position; None: at the newest event.
        count: at least 1; the cursor stops at the first event.
    """
    lead = next((r for r in trace.ranks if (~of_kind(r.rows, BESIDE)).any()), None)
    if lead is None:
        return None, "cannot go back: nothing is recorded yet"
    events, times = np.flatnonzero(~of_kind(lead.rows, BESIDE)), _times(lead)
    events = events[np.append(np.diff(times[events]) > 0, True)]  # the last of the events at one time
    shown = len(lead.rows) if cursor is None else cursor.ends.get(lead.rank, lead.end_seq) - lead.start.seq
    here = int(np.searchsorted(events, shown))
    number = max(here - 1 - count, 0)
    place = int(events[number])
    ends = {r.rank: _end(lead, times, place, r) for r in trace.ranks}
    left = len(events) - 1 - number
    found = Cursor(
        t_ns=int(times[place]),
        ends={rank: trace.rank(rank).start.seq + end for rank, (end, _) in ends.items()},
        events_back=left,
    )
    there = [rank for rank, (_, is_same) in ends.items() if is_same]
    others = "".join(f"; {label([rank])} has no such event" for rank in ends if rank not in there)
    where = f"{label(there)} after {_event_text(trace, lead.rows[place])}{_of_model(trace, lead, place)}{others}"
    return found, f"{where}: {plural(left, 'event')} before the newest; %fsdp back 0 returns to it"


def _end(lead: RankTrace, times: Ints, place: int, other: RankTrace) -> tuple[int, bool]:
    """Number of rows of ``other`` up to the event at ``place`` of ``lead``, and whether ``other`` has that event.

    ``times`` are the arrival times of the rows of ``lead``, ``[N]`` ns.
    """
    now_ns = times[place]
    if other is lead:
        return int(np.searchsorted(times, now_ns, side="right")), True
    mine, theirs = same_events(lead, other)
    passed = int(np.searchsorted(mine, place, side="right"))
    low = int(theirs[passed - 1]) + 1 if passed else 0
    if passed and mine[passed - 1] == place:
        return low, True
    high = int(theirs[passed]) if passed < len(theirs) else len(other.rows)
    by_time = int(np.searchsorted(_times(other), now_ns, side="right"))
    return min(max(by_time, low), max(low, high)), False


def _times(rank_trace: RankTrace) -> Ints:
    """Arrival time of each row, ``[N]`` ns: running maximum of the row times.

    An END may have an earlier time than the row before it.
    """
    times: Ints = np.maximum.accumulate(rank_trace.rows["t_ns"])
    return times


def _of_model(trace: Trace, lead: RankTrace, place: int) -> str:
    """Return a note if the step at ``place`` trained another model than the newest step, else empty."""
    found = training.model_of_steps(trace.header, [training.fold(lead)])
    here = found["unit"][found["step"] == lead.rows["step"][place]]
    return ", of an earlier model" if len(here) and here[0] != found["unit"][-1] else ""


def _event_text(trace: Trace, row: np.void) -> str:
    kind, edge = Kind(row["kind"]), Edge(row["edge"])
    what = event_words(kind, edge, unit_names(trace.header).get(int(row["unit"])))
    begins = "the start of " if edge is Edge.BEGIN else ""
    step = f", {step_name(int(row['step']))}" if row["step"] >= 0 else ""
    phase = Phase(row["phase"])
    during = f", {phase.words}" if phase != Phase.IDLE else ""
    return f"{begins}{what}{step}{during}"
