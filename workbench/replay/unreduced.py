"""Units whose gradients no reduction took before the optimizer stepped."""

from __future__ import annotations

import numpy as np

from workbench.events import MOVES, Category, Edge, Kind
from workbench.trace.columns import RankTrace, Trace

_REDUCTIONS = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


def unreduced_units(trace: Trace, step: int) -> dict[int, tuple[int, ...]]:
    """Return the units that had a backward and no reduction in a step, with the ranks on which this is so.

    Only ranks on which full gradients were still there when an optimizer stepped count: frozen units and units of other
    optimizers have none, and in an accumulation without reduction no optimizer steps.
    """
    found: dict[int, list[int]] = {}
    for part in trace.ranks:
        for unit in _of_rank(part, step):
            found.setdefault(unit, []).append(part.rank)
    return {unit: tuple(ranks) for unit, ranks in sorted(found.items())}


def _of_rank(part: RankTrace, step: int) -> list[int]:
    places = np.flatnonzero(part.rows["step"] == step)
    if not len(places):
        return []
    begin = int(places[0])
    rows = part.rows[begin : int(places[-1]) + 1]
    begins = rows["edge"] == Edge.BEGIN
    stepped = np.flatnonzero((rows["kind"] == Kind.OPTIMIZER) & begins)
    if not len(stepped):
        return []
    rows = rows[: stepped[-1]]
    is_grad = np.isin(rows["kind"], MOVES) & (rows["category"] == Category.UNSHARDED_GRADS)
    live = part.state_before(begin).bytes_by_category[Category.UNSHARDED_GRADS]
    if live + int(rows["num_bytes"][is_grad].sum()) <= 0:
        return []
    begins = rows["edge"] == Edge.BEGIN
    had_backward = set(rows["unit"][begins & (rows["kind"] == Kind.BACKWARD)].tolist())
    reduced = set(rows["unit"][begins & np.isin(rows["kind"], _REDUCTIONS)].tolist())
    return sorted(had_backward - reduced)
