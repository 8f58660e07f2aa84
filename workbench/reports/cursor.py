"""A cursor over what was recorded: the trace as it was at a moment. Nothing that was computed is undone. Pure.

A moment is a logical event, the same on all ranks (:mod:`workbench.replay.alignment`), and not a time: of ranks that
stopped at the same event one had recorded it a little later than the other. On the lowest rank it is a time as well:
what was known together (an arrival bears an earlier time than the row before it) is not cut apart, so that what is
drawn over time is what is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from workbench.events import BESIDE, Edge, Kind, Phase
from workbench.replay import training
from workbench.replay.alignment import same_events
from workbench.replay.grouping import label
from workbench.replay.spans import Ints, of_kind
from workbench.reports.stop_positions import event_words, unit_names
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.step_names import step_name


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Up to where each rank's record is shown.

    Attributes:
        t_ns: when that was on the lowest rank, in nanoseconds of its clock: where a line over time is drawn.
        ends: by rank, ``seq`` of its first row that is not shown.
    """

    t_ns: int
    ends: Mapping[int, int]


def cut(trace: Trace, cursor: Cursor) -> Trace:
    """Return what was recorded up to ``cursor``; of a rank that it does not know, nothing."""
    ranks = (r.cut(r.start.seq, cursor.ends.get(r.rank, r.start.seq)) for r in trace.ranks)
    return Trace(trace.header, tuple(ranks))


def back(trace: Trace, cursor: Cursor | None, count: int) -> tuple[Cursor | None, str]:
    """Return the cursor ``count`` events of the lowest rank earlier, and a sentence that says where that is.

    All ranks are cut just after that event. One that has no such event is cut by time, between the nearest events that
    it has in common with the lowest rank.

    Args:
        trace: what happened.
        cursor: where it is; None: at the newest event.
        count: at least 1; the first event is not passed.
    """
    lead = next((r for r in trace.ranks if (~of_kind(r.rows, BESIDE)).any()), None)
    if lead is None:
        return None, "nothing is recorded yet, so there is nothing to go back to"
    events, times = np.flatnonzero(~of_kind(lead.rows, BESIDE)), _times(lead)
    events = events[np.append(np.diff(times[events]) > 0, True)]  # the last one of those known together
    shown = len(lead.rows) if cursor is None else cursor.ends.get(lead.rank, lead.end_seq) - lead.start.seq
    here = int(np.searchsorted(events, shown))
    number = max(here - 1 - count, 0)
    place = int(events[number])
    ends = {r.rank: _end(lead, times, place, r) for r in trace.ranks}
    found = Cursor(
        t_ns=int(times[place]), ends={rank: trace.rank(rank).start.seq + end for rank, (end, _) in ends.items()}
    )
    there = [rank for rank, (_, is_same) in ends.items() if is_same]
    others = "".join(f"; {label([rank])} has no such event" for rank in ends if rank not in there)
    left = len(events) - 1 - number
    where = f"{label(there)} after {_said(trace, lead.rows[place])}{_of_model(trace, lead, place)}{others}"
    return found, f"{where}: {left:,} events before the newest; %fsdp back 0 returns to it"


def _end(lead: RankTrace, times: Ints, place: int, other: RankTrace) -> tuple[int, bool]:
    """How many rows of ``other`` there are up to the event at ``place`` of ``lead``, and whether it has that event.

    ``times`` is when the rows of ``lead`` were known, ``[N]`` ns.
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
    """When each row was known, ``[N]`` ns, ascending: an END may bear an earlier time than the row before it."""
    times: Ints = np.maximum.accumulate(rank_trace.rows["t_ns"])
    return times


def _of_model(trace: Trace, lead: RankTrace, place: int) -> str:
    """Say so if the step at ``place`` trained another model than the newest step."""
    found = training.model_of_steps(trace.header, [training.fold(lead)])
    here = found["unit"][found["step"] == lead.rows["step"][place]]
    return ", of an earlier model" if len(here) and here[0] != found["unit"][-1] else ""


def _said(trace: Trace, row: np.void) -> str:
    kind, edge = Kind(row["kind"]), Edge(row["edge"])
    what = event_words(kind, edge, unit_names(trace.header).get(int(row["unit"])))
    begins = "the start of " if edge is Edge.BEGIN else ""
    step = f", {step_name(int(row['step']))}" if row["step"] >= 0 else ""
    phase = Phase(row["phase"])
    during = f", {phase.words}" if phase != Phase.IDLE else ""
    return f"{begins}{what}{step}{during}"
