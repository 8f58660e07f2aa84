"""Units whose gradients no reduction took before the optimizer stepped."""

from __future__ import annotations

import numpy as np

from workbench.events import MOVES, Category, Edge, Kind
from workbench.trace.columns import RankTrace, Trace

_REDUCTIONS = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


def unreduced_units(trace: Trace, step: int) -> dict[int, tuple[int, ...]]:
    """Return the units that had a backward and no reduction in a step, with the ranks on which this is so.

    Only ranks on which full gradients of the unit were still there when an optimizer stepped count: frozen units and
    units of other optimizers have none, and in an accumulation without reduction no optimizer steps. A model in
    DistributedDataParallel is not judged: it has only gradients of its own, and its reductions may be invisible.
    """
    unknown = {unit.index for unit in trace.header.units if not unit.runner.splits}
    found: dict[int, list[int]] = {}
    for part in trace.ranks:
        for unit in _of_rank(part, step) - unknown:
            found.setdefault(unit, []).append(part.rank)
    return {unit: tuple(ranks) for unit, ranks in sorted(found.items())}


def _of_rank(part: RankTrace, step: int) -> set[int]:
    places = np.flatnonzero(part.rows["step"] == step)
    if not len(places):
        return set()
    rows = part.rows[int(places[0]) : int(places[-1]) + 1]
    begins = rows["edge"] == Edge.BEGIN
    stepped = np.flatnonzero((rows["kind"] == Kind.OPTIMIZER) & begins)
    if not len(stepped):
        return set()
    until = int(places[0]) + int(stepped[-1])
    rows, begins = rows[: stepped[-1]], begins[: stepped[-1]]
    had_backward = set(rows["unit"][begins & (rows["kind"] == Kind.BACKWARD)].tolist())
    reduced = set(rows["unit"][begins & np.isin(rows["kind"], _REDUCTIONS)].tolist())
    return {unit for unit in had_backward - reduced if _has_grads(part, unit, until)}


def _has_grads(part: RankTrace, unit: int, until: int) -> bool:
    """Return whether full gradients of a unit were there before a row; those before the trace belong to any unit."""
    rows = part.rows[:until]
    of_grads = np.isin(rows["kind"], MOVES) & (rows["category"] == Category.UNSHARDED_GRADS) & (rows["unit"] == unit)
    before = part.start.bytes_by_category[Category.UNSHARDED_GRADS]
    return before + int(rows["num_bytes"][of_grads].sum()) > 0
