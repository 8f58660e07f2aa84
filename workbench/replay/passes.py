"""Passes of a rank: the forwards and backwards of whole models and the steps of optimizers that it has begun, in order.

All ranks of a job run the same ones. Where collectives differ between ranks, the passes say why: a rank left out a
backward, or had fewer batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.events import Edge, Kind, Phase
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Header, Rows

_COUNTED = (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)
_IS_PASS = np.isin(np.arange(256), _COUNTED)  # indexed by the ``kind`` column
_PART_OF = {phase: phase.info.part for phase in Phase}


@dataclass(frozen=True, kw_only=True)
class BegunPass:
    """One forward or backward of a model, or a step of an optimizer.

    Attributes:
        kind: which of these.
        unit: the model's root unit; -1 for an optimizer.
        step: training step; -1: outside.
    """

    kind: Kind
    unit: int
    step: int


def passes_before(header: Header, part: RankTrace, seq: int | None = None) -> tuple[BegunPass, ...]:
    """Return the passes that a rank has begun before row ``seq``, in order; by default all.

    A pass has begun when its first parameters are gathered, which precedes its own row. A call of no unit begins none:
    it is the program's own, after the pass of its phase; nor does a reduction after a backward.

    Args:
        header: of the trace.
        part: the rank's rows.
        seq: of the row; a rank that is within it is in the pass of its phase.
    """
    end = len(part.rows) if seq is None else seq - part.start.seq
    own = _pass_rows(header, part, end)
    begun = own[own["edge"] == Edge.BEGIN]
    found = [
        BegunPass(kind=Kind(kind), unit=unit, step=step)
        for kind, unit, step in zip(*(begun[name].tolist() for name in ("kind", "unit", "step")), strict=True)
    ]
    at = part.rows[min(end, len(part.rows) - 1)] if len(part.rows) else None
    kind = None if at is None else _PART_OF[Phase(at["phase"])]
    is_open = bool(found) and not (own[own["seq"] > begun["seq"][-1]]["edge"] == Edge.END).any()
    if at is None or is_open or at["unit"] < 0 or at["phase"] == Phase.POST_BACKWARD:
        return tuple(found)
    if kind in (Kind.FORWARD, Kind.BACKWARD):
        found.append(BegunPass(kind=kind, unit=_root_of(header, int(at["unit"])), step=int(at["step"])))
    return tuple(found)


def _pass_rows(header: Header, part: RankTrace, end: int) -> Rows:
    """Return the rows that begin and end passes, of a rank's first ``end`` rows."""
    rows = part.rows[:end]
    is_root = np.array([*(unit.root in (unit.index, -1) for unit in header.units), False])  # the last is for index -1
    unit = rows["unit"]
    of_root = is_root[np.where(unit < len(header.units), unit, -1)] | (rows["kind"] == Kind.OPTIMIZER)
    found: Rows = rows[_IS_PASS[part.kinds[:end]] & of_root]
    return found


def passes_at(header: Header, part: RankTrace, seqs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return how many passes a rank had begun before each of its rows ``seqs``, ``[N]``, and whether none was open.

    A step of an optimizer counts as a pass, and is never open: it gathers nothing.

    Args:
        header: of the trace.
        part: the rank's rows.
        seqs: numbers of the rows, ascending.
    """
    own = _pass_rows(header, part, len(part.rows))
    is_begin = own["edge"] == Edge.BEGIN
    is_closed = np.array([True, *(~is_begin | (own["kind"] == Kind.OPTIMIZER))])  # the first: before all passes
    return np.searchsorted(own["seq"][is_begin], seqs), is_closed[np.searchsorted(own["seq"], seqs)]


def _root_of(header: Header, unit: int) -> int:
    """Return the root of a unit's model, of the first model in use if that is unknown; -1 without one."""
    root = header.units[unit].root if 0 <= unit < len(header.units) else -1
    roots = (each.index for each in header.units if each.in_use and each.root in (each.index, -1))
    return root if root >= 0 else next(roots, -1)


def counts(passes: Sequence[BegunPass]) -> tuple[int, int, int]:
    """Return the numbers of forwards and backwards of the model that has most of them, and of optimizer steps."""
    found = Counter((each.kind, each.unit) for each in passes)
    most = (max((n for (kind, _), n in found.items() if kind == each), default=0) for each in _COUNTED)
    forwards, backwards, steps = most
    return forwards, backwards, steps


def first_difference(first: Sequence[BegunPass], second: Sequence[BegunPass]) -> int:
    """Return the place of the first pass at which two ranks differ; the length of the shorter one if it is a part."""
    pairs = zip(first, second, strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if (one.kind, one.unit) != (other.kind, other.unit)),
        min(len(first), len(second)),
    )
