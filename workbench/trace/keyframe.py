"""The key-frame fold: the state of a rank after some rows, from the state before them.

It makes a trace cuttable: one :class:`~workbench.trace.schema.KeyFrame` replaces the rows left of a cut.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workbench.events import MOVES, REDUCTIONS, STATE_AFTER, Category, Edge, Kind, UnitState
from workbench.trace.schema import KeyFrame, Rows

Kinds = NDArray[np.uint8]

# indexed by the columns ``kind`` and ``edge``, which may hold any byte
_IS_MOVE = np.isin(np.arange(256), MOVES)
_IS_REDUCTION = np.isin(np.arange(256), REDUCTIONS)
_STATE_AFTER = np.full((256, 256), -1, np.int8)
for (_kind, _edge), _state in STATE_AFTER.items():
    _STATE_AFTER[_kind, _edge] = _state
_MAY_CHANGE_STATE = np.isin(np.arange(256), [kind for kind, _ in STATE_AFTER])


def advance(key_frame: KeyFrame, rows: Rows) -> KeyFrame:
    """Return the state just before the row that follows ``rows``.

    The result is canonical: its dicts omit SHARDED units and units without reductions in flight.
    ``advance(advance(k, a), b) == advance(k, a + b)`` for every split of the rows.

    Args:
        key_frame: state just before ``rows[0]``.
        rows: consecutive rows of one rank; may be empty.
    """
    if not len(rows):
        states: dict[int, UnitState] = {u: s for u, s in key_frame.unit_states.items() if s != UnitState.SHARDED}
        reducing = {unit: count for unit, count in key_frame.reducing.items() if count}
        return replace(key_frame, unit_states=states, reducing=reducing)
    kind = np.ascontiguousarray(rows["kind"])  # read several times: a contiguous array is faster
    return KeyFrame(
        seq=int(rows["seq"][-1]) + 1,
        bytes_by_category=bytes_after(key_frame.bytes_by_category, rows, kind),
        unit_states=states_after(key_frame.unit_states, rows, kind),
        reducing=_reducing_after(key_frame.reducing, rows, kind),
    )


def bytes_after(before: tuple[int, ...], rows: Rows, kind: Kinds) -> tuple[int, ...]:
    """Return the live bytes per category after ``rows``; ``kind`` is their field of that name as a contiguous array.

    Ignores rows with an unknown category: :mod:`~workbench.trace.invariants` reports them.
    """
    at = np.flatnonzero(_IS_MOVE[kind])
    category = rows["category"][at]
    known = category < len(Category)
    totals = np.array(before, np.int64)
    np.add.at(totals, category[known], rows["num_bytes"][at][known])
    return tuple(totals.tolist())


def states_after(before: dict[int, UnitState], rows: Rows, kind: Kinds) -> dict[int, UnitState]:
    """Return the parameter state per unit that is not SHARDED after ``rows``; see :func:`bytes_after`.

    The last row of each unit whose kind and edge are in :data:`STATE_AFTER` counts.
    """
    at = np.flatnonzero(_MAY_CHANGE_STATE[kind])
    after, unit = _STATE_AFTER[kind[at], rows["edge"][at]], rows["unit"][at]
    changes = (after >= 0) & (unit >= 0)
    newest = np.full(int(unit.max(initial=-1)) + 1, -1, np.int8)
    newest[unit[changes]] = after[changes]  # the last of several rows of a unit wins
    units = np.flatnonzero(newest > UnitState.SHARDED)
    states = dict(zip(units.tolist(), map(UnitState, newest[units].tolist()), strict=True))
    newest_states = newest.tolist()
    kept = {
        u: s for u, s in before.items() if s != UnitState.SHARDED and (u >= len(newest_states) or newest_states[u] < 0)
    }
    return kept | states


def _reducing_after(before: dict[int, int], rows: Rows, kind: Kinds) -> dict[int, int]:
    """Gradient reductions in flight per unit that has any; a RESET of a unit sets its count to 0."""
    reset_at = _last_resets(rows, kind)
    at = np.flatnonzero(_IS_REDUCTION[kind])
    at = at[rows["unit"][at] >= 0]
    if reset_at:
        at = at[at > np.array([reset_at.get(unit, -1) for unit in rows["unit"][at].tolist()])]
    unit, begins = rows["unit"][at], rows["edge"][at] == Edge.BEGIN
    num_units = int(unit.max(initial=-1)) + 1
    deltas = np.bincount(unit[begins], minlength=num_units) - np.bincount(unit[~begins], minlength=num_units)
    counts = {unit: count for unit, count in before.items() if unit not in reset_at}
    for changed in np.flatnonzero(deltas).tolist():
        counts[changed] = counts.get(changed, 0) + int(deltas[changed])
    return {unit: count for unit, count in counts.items() if count}


def _last_resets(rows: Rows, kind: Kinds) -> dict[int, int]:
    """Return the position of the last RESET of each unit that has one."""
    at = np.flatnonzero(kind == Kind.RESET)
    return dict(zip(rows["unit"][at].tolist(), at.tolist(), strict=True))
