"""The state of each unit: sharded, all-gather in flight, unsharded, or gradients being reduced.

The fold is that of the key frame (:func:`workbench.trace.keyframe.advance`). This module merges its parameter states
and reduction counts into the one state that a picture shows: a reduction in flight wins over the parameter state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from workbench.events import REDUCTIONS, STATE_AFTER, Edge, Kind, UnitState
from workbench.replay.spans import Ints, last_ns, of_kind
from workbench.trace.columns import RankTrace
from workbench.trace.keyframe import advance as advance_key_frame
from workbench.trace.schema import ROW_DTYPE, KeyFrame, Rows

CHANGING_KINDS = (*(kind for kind, _ in STATE_AFTER), *REDUCTIONS)
"""The kinds of rows that can change a unit's state."""


@dataclass(frozen=True)
class States:
    """The units of one rank at one moment; a unit in neither dict is SHARDED.

    Attributes:
        params: parameter state per unit (never REDUCING).
        reducing: gradient reductions in flight per unit.
    """

    params: dict[int, UnitState]
    reducing: dict[int, int]

    def __getitem__(self, unit: int) -> UnitState:
        """The state of ``unit``; REDUCING wins."""
        if self.reducing.get(unit, 0) > 0:
            return UnitState.REDUCING
        return self.params.get(unit, UnitState.SHARDED)

    def units_in(self, state: UnitState) -> tuple[int, ...]:
        """The units whose *parameters* are in ``state``, ascending; for REDUCING those with a reduction in flight."""
        if state == UnitState.REDUCING:
            return tuple(sorted(unit for unit, count in self.reducing.items() if count > 0))
        return tuple(sorted(unit for unit, found in self.params.items() if found == state))


def start(key_frame: KeyFrame) -> States:
    """Return the states in ``key_frame``, without units that are SHARDED and not reducing."""
    return advance(States(key_frame.unit_states, key_frame.reducing), np.empty(0, ROW_DTYPE))


def advance(states: States, rows: Rows) -> States:
    """Return the states after ``rows``; splitting the rows into several calls gives the same states."""
    before = KeyFrame(unit_states=states.params, reducing=states.reducing)
    after = advance_key_frame(before, rows)
    return States(after.unit_states, after.reducing)


def at(rank_trace: RankTrace, seq: int) -> States:
    """Return the states just after row ``seq``; before the trace's first row, those of its key frame."""
    count = max(seq + 1 - rank_trace.start.seq, 0)
    return advance(start(rank_trace.start), rank_trace.rows[:count])


@dataclass(frozen=True, kw_only=True, eq=False)
class StateSpans:
    """Time spans of the states of each unit; arrays are ``[N]``, unit by unit, each unit's spans without a gap.

    Attributes:
        unit: unit index.
        state: UnitState.
        begin_ns: when the state began; if it began before the trace, the trace's first time.
        end_ns: when the next one began; for a unit's last span, the trace's last time.
        begin_seq: the row that began it; the key frame's ``seq - 1`` if it began before the trace.
    """

    unit: Ints
    state: Ints
    begin_ns: Ints
    end_ns: Ints
    begin_seq: Ints


def spans(rank_trace: RankTrace, units: Iterable[int] = ()) -> StateSpans:
    """Return the state spans of every unit the rank used, and of ``units``.

    A state begins at the time of its row, but never before the unit's previous state: a reduction may end earlier than
    the reshard recorded before it.
    """
    changes = _changes(rank_trace, units)
    state = _states_after(changes)
    keep = changes["is_first"] | (state != np.roll(state, 1))
    begin_ns = _times(changes)[keep]
    is_last = np.append(changes["is_first"][keep][1:], True)[: len(begin_ns)]
    return StateSpans(
        unit=changes["unit"][keep],
        state=state[keep],
        begin_ns=begin_ns,
        end_ns=np.where(is_last, last_ns(rank_trace.rows), np.roll(begin_ns, -1)),
        begin_seq=changes["seq"][keep],
    )


_CHANGE_DTYPE = np.dtype(
    [
        ("unit", "<i8"),
        ("params", "<i8"),  # UnitState of the parameters from this row on; -1: unchanged
        ("reducing", "<i8"),  # change of the number of reductions in flight; for an anchor the number itself
        ("t_ns", "<i8"),
        ("seq", "<i8"),
        ("is_first", "?"),  # the unit's entry for the key frame
        ("is_anchor", "?"),  # key frame or RESET: reductions count from here
    ]
)


def _changes(rank_trace: RankTrace, units: Iterable[int]) -> Rows:
    """The changes of each unit, unit by unit, each unit's key frame first; of ``_CHANGE_DTYPE``."""
    before, rows = rank_trace.start, rank_trace.rows
    rows = rows[of_kind(rows, CHANGING_KINDS) & (rows["unit"] >= 0)]
    known = sorted({*units, *np.unique(rows["unit"]).tolist(), *before.unit_states, *before.reducing})
    begin_ns = int(rank_trace.rows["t_ns"][0]) if len(rank_trace.rows) else 0
    states = start(before)
    firsts = [
        (
            unit,
            states.params.get(unit, UnitState.SHARDED),
            states.reducing.get(unit, 0),
            begin_ns,
            before.seq - 1,
            True,
            True,
        )
        for unit in known
    ]
    changes = np.concatenate([np.array(firsts, _CHANGE_DTYPE), _changes_of(rows)])
    return changes[np.argsort(changes["unit"], kind="stable")]


def _changes_of(rows: Rows) -> Rows:
    changes = np.empty(len(rows), _CHANGE_DTYPE)
    for name in ("unit", "t_ns", "seq"):
        changes[name] = rows[name]
    changes["is_first"], changes["params"], changes["is_anchor"] = False, -1, rows["kind"] == Kind.RESET
    for (kind, edge), state in STATE_AFTER.items():
        changes["params"][(rows["kind"] == kind) & (rows["edge"] == edge)] = state
    steps = np.where(rows["edge"] == Edge.BEGIN, 1, -1)
    changes["reducing"] = np.where(of_kind(rows, REDUCTIONS), steps, 0)
    return changes


def _states_after(changes: Rows) -> Ints:
    """The UnitState after each change."""
    here = np.arange(len(changes))
    latest = np.maximum.accumulate(np.where(changes["params"] >= 0, here, 0))  # a unit's first entry always has one
    anchor = np.maximum.accumulate(np.where(changes["is_anchor"], here, 0))
    total = np.cumsum(changes["reducing"])
    reducing = total - total[anchor] + changes["reducing"][anchor]
    return np.where(reducing > 0, int(UnitState.REDUCING), changes["params"][latest])


def _times(changes: Rows) -> Ints:
    """The time of each change, raised to that of the unit's previous change where it is earlier."""
    t_ns = changes["t_ns"] - changes["t_ns"].min(initial=0)
    lift = np.cumsum(changes["is_first"]) * (t_ns.max(initial=0) + 1)  # keeps each unit above the previous one
    raised: Ints = np.maximum.accumulate(t_ns + lift) - lift + changes["t_ns"].min(initial=0)
    return raised
