"""Why a unit is sharded or unsharded on a rank: the events that led to its state, read off the rank's rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from workbench.events import Edge, Kind, Phase, UnitState
from workbench.replay.spans import Ints, of_kind
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Rows


class UnitCause(Enum):
    """An event in the history of a unit's parameters."""

    BEFORE = "was so when the record begins"
    NEVER = "was never gathered in this record"
    FOR_FORWARD = "gathered for its forward"
    FOR_BACKWARD = "gathered for its backward"
    AHEAD_IN_FORWARD = "gathered ahead, in forward"
    AHEAD_IN_BACKWARD = "gathered ahead, in backward"
    BY_HAND = "gathered outside forward and backward"
    IN_FLIGHT = "its all-gather is in flight"
    IN_FORWARD = "its forward runs"
    IN_BACKWARD = "its backward runs"
    AWAITED = "its forward or backward has not begun"
    BEFORE_FORWARD = "its forward has not begun"
    BEFORE_BACKWARD = "its backward has not begun"
    KEPT_AFTER_FORWARD = "kept after forward"
    KEPT_AFTER_BACKWARD = "kept after backward"
    FREED_AFTER_FORWARD = "freed after forward"
    FREED_AFTER_BACKWARD = "freed after backward"
    FREED_BY_HAND = "freed outside forward and backward"
    ABORTED = "freed when its step was aborted"


_AWAITED = {Phase.FORWARD: UnitCause.BEFORE_FORWARD, Phase.BACKWARD: UnitCause.BEFORE_BACKWARD}
AWAITED = frozenset({UnitCause.AWAITED, *_AWAITED.values()})
"""A unit is unsharded, and has not run since."""


@dataclass(frozen=True, kw_only=True)
class UnitEvent:
    """One event of a unit's history.

    Attributes:
        cause: what happened.
        step: its step, -1 outside any.
        seq: the row; -1: none.
        t_ns: its time; -1 without a row.
        by_unit: the unit that gathered it ahead; -1: none.
    """

    cause: UnitCause
    step: int = -1
    seq: int = -1
    t_ns: int = -1
    by_unit: int = -1


@dataclass(frozen=True, kw_only=True)
class UnitHistory:
    """The state of a unit on a rank, and why.

    Attributes:
        state: state of its parameters.
        events: what led to it, the oldest first; at least one.
    """

    state: UnitState
    events: tuple[UnitEvent, ...]

    @property
    def last(self) -> UnitCause:
        """The newest event."""
        return self.events[-1].cause


_IS_USED = np.isin(
    np.arange(256), (Kind.UNSHARD, Kind.ALL_GATHER, Kind.RESHARD, Kind.RESET, Kind.FORWARD, Kind.BACKWARD)
)
_IS_PASS = np.isin(np.arange(256), (Kind.FORWARD, Kind.BACKWARD))
_IS_FORWARD = np.arange(256) == Phase.FORWARD
_FREES = (Kind.RESHARD, Kind.RESET)


def history(rank_trace: RankTrace, unit: int, seq: int | None = None) -> UnitHistory:
    """Return the history of a unit on a rank up to and including row ``seq``; None: all rows."""
    return histories(rank_trace, (unit,), seq)[unit]


def histories(rank_trace: RankTrace, units: tuple[int, ...], seq: int | None = None) -> dict[int, UnitHistory]:
    """Return the history of each of some units, as :func:`history`."""
    rows, is_used = rank_trace.rows, _IS_USED[rank_trace.kinds]
    count = len(rows) if seq is None else max(seq + 1 - rank_trace.start.seq, 0)
    places = np.flatnonzero(is_used[:count])
    of_unit = rows["unit"][places]
    before = rank_trace.start.unit_states
    return {unit: _of_unit(rank_trace, places[of_unit == unit], before.get(unit, UnitState.SHARDED)) for unit in units}


def _of_unit(rank_trace: RankTrace, mine: Ints, before: UnitState) -> UnitHistory:
    """Return the history of a unit in those of its rows that tell, at the places ``mine``."""
    rows = rank_trace.rows
    kind, edge = rows["kind"][mine], rows["edge"][mine]
    gathers = np.flatnonzero((kind == Kind.UNSHARD) & (edge == Edge.BEGIN))
    frees = np.flatnonzero(of_kind(rows[mine], _FREES))
    gathered, freed = (int(found[-1]) if len(found) else -1 for found in (gathers, frees))
    events = []
    if gathered >= 0:
        events.append(_gather(rank_trace, int(mine[gathered])))
    if freed > gathered:
        events.append(_freed(rows, mine, freed))
        return UnitHistory(state=UnitState.SHARDED, events=tuple(events))
    if gathered < 0:
        is_sharded = before == UnitState.SHARDED
        events.append(UnitEvent(cause=UnitCause.NEVER if is_sharded else UnitCause.BEFORE))
        if ((kind == Kind.UNSHARD) & (edge == Edge.END)).any():
            before = UnitState.UNSHARDED
        elif (kind == Kind.ALL_GATHER).any():
            before = UnitState.ALL_GATHER_IN_FLIGHT
        return UnitHistory(state=before, events=(*events, *(() if is_sharded else _since(rows, mine, 0))))
    if not ((kind[gathered:] == Kind.UNSHARD) & (edge[gathered:] == Edge.END)).any():
        events.append(_event(rows, int(mine[gathered]), UnitCause.IN_FLIGHT))
        return UnitHistory(state=UnitState.ALL_GATHER_IN_FLIGHT, events=tuple(events))
    return UnitHistory(state=UnitState.UNSHARDED, events=(*events, *_since(rows, mine, gathered)))


def _event(rows: Rows, place: int, cause: UnitCause, by_unit: int = -1) -> UnitEvent:
    row = rows[place]
    return UnitEvent(cause=cause, step=int(row["step"]), seq=int(row["seq"]), t_ns=int(row["t_ns"]), by_unit=by_unit)


def _gather(rank_trace: RankTrace, place: int) -> UnitEvent:
    """Return why a unit was gathered: for itself if its own forward or backward is the next to begin, else ahead.

    If none has begun since, the next is the unit that was requested first of those that have not run since.
    """
    rows, row = rank_trace.rows, rank_trace.rows[place]
    if row["phase"] in {Phase.IDLE, Phase.OPTIMIZER}:
        return _event(rows, place, UnitCause.BY_HAND)
    _, end = rank_trace.places_of(int(row["step"]), int(row["step"]))
    works = place + np.flatnonzero(_IS_PASS[rank_trace.kinds[place:end]])
    following = works[rows["edge"][works] == Edge.BEGIN]
    by_unit = int(rows["unit"][following[0]]) if len(following) else _first_pending(rank_trace, place)
    is_forward = row["phase"] == Phase.FORWARD
    if by_unit == row["unit"]:
        return _event(rows, place, UnitCause.FOR_FORWARD if is_forward else UnitCause.FOR_BACKWARD)
    return _event(rows, place, UnitCause.AHEAD_IN_FORWARD if is_forward else UnitCause.AHEAD_IN_BACKWARD, by_unit)


def _first_pending(rank_trace: RankTrace, place: int) -> int:
    """Return the unit that was requested first of those that have not run since, in forward or backward of a step."""
    step = int(rank_trace.rows["step"][place])
    begin, _ = rank_trace.places_of(step, step)
    here = rank_trace.rows[begin : place + 1]
    is_one = (_IS_FORWARD[here["phase"]] == _IS_FORWARD[here["phase"][-1]]) & (here["edge"] == Edge.BEGIN)
    here = here[is_one & (_IS_PASS[here["kind"]] | (here["kind"] == Kind.UNSHARD))]
    pending: dict[int, None] = {}
    for kind, unit in zip(here["kind"].tolist(), here["unit"].tolist(), strict=True):
        if kind == Kind.UNSHARD:
            pending.setdefault(unit)
        else:
            pending.pop(unit, None)
    return next(iter(pending))


def _freed(rows: Rows, mine: Ints, freed: int) -> UnitEvent:
    """Return why a unit was freed: after its forward or backward if that is what it did last."""
    place = int(mine[freed])
    if rows["kind"][place] == Kind.RESET:
        return _event(rows, place, UnitCause.ABORTED)
    before = mine[:freed]
    worked = before[of_kind(rows[before], (Kind.FORWARD, Kind.BACKWARD, Kind.UNSHARD))]
    last = rows["kind"][worked[-1]] if len(worked) else -1
    in_step = len(worked) > 0 and rows["step"][worked[-1]] == rows["step"][place]
    if last == Kind.UNSHARD or not in_step:
        return _event(rows, place, UnitCause.FREED_BY_HAND)
    after_forward = last == Kind.FORWARD
    return _event(rows, place, UnitCause.FREED_AFTER_FORWARD if after_forward else UnitCause.FREED_AFTER_BACKWARD)


def _since(rows: Rows, mine: Ints, first: int) -> tuple[UnitEvent, ...]:
    """Return what a unit that is unsharded has done since the event at ``first``."""
    later = mine[first:]
    worked = later[of_kind(rows[later], (Kind.FORWARD, Kind.BACKWARD))]
    if not len(worked):
        gathered_in = Phase(rows["phase"][later[0]]) if len(later) else Phase.IDLE
        return (UnitEvent(cause=_AWAITED.get(gathered_in, UnitCause.AWAITED)),)
    place = int(worked[-1])
    found = [_event(rows, place, _WORKED[Kind(rows["kind"][place]), Edge(rows["edge"][place])])]
    forwards = worked[(rows["kind"][worked] == Kind.FORWARD) & (rows["edge"][worked] == Edge.END)]
    if rows["kind"][place] == Kind.BACKWARD and len(forwards):
        found.insert(0, _event(rows, int(forwards[-1]), UnitCause.KEPT_AFTER_FORWARD))
    return tuple(found)


_WORKED = {
    (Kind.FORWARD, Edge.BEGIN): UnitCause.IN_FORWARD,
    (Kind.FORWARD, Edge.END): UnitCause.KEPT_AFTER_FORWARD,
    (Kind.BACKWARD, Edge.BEGIN): UnitCause.IN_BACKWARD,
    (Kind.BACKWARD, Edge.END): UnitCause.KEPT_AFTER_BACKWARD,
}
"""The newest event of an unsharded unit, by the row of its work that came last."""
