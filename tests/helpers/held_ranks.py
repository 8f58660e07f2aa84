"""Stops in a trace, as the runtime records them: every rank is held before the same event, for a given time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from workbench.events import Edge, Kind, Phase
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import NO_CATEGORY

HOLD_NS = 17_900_000_000


def stopped(trace: Trace, places: Mapping[int, int], hold_ns: int = HOLD_NS) -> Trace:
    """Return the trace of ranks that were held before some rows and released together.

    Args:
        trace: of ranks that were never stopped.
        places: by rank, the position of the row that it was held before.
        hold_ns: from the last arrival on.
    """
    arrivals_ns = {rank: _arrival_ns(trace.rank(rank), place) for rank, place in places.items()}
    go_ns = max(arrivals_ns.values()) + hold_ns
    ranks = (_held(r, places[r.rank], arrivals_ns[r.rank], go_ns) if r.rank in places else r for r in trace.ranks)
    return Trace(trace.header, tuple(ranks))


def stopped_before(
    trace: Trace, kind: Kind, edge: Edge = Edge.BEGIN, *, number: int = 0, hold_ns: int = HOLD_NS
) -> Trace:
    """Return the trace of ranks that were all held before the ``number``-th such event, counted from 0."""
    places = {r.rank: _place(r, kind, edge, number) for r in trace.ranks}
    return stopped(trace, places, hold_ns)


def _place(rank_trace: RankTrace, kind: Kind, edge: Edge, number: int) -> int:
    rows = rank_trace.rows
    return int(np.flatnonzero((rows["kind"] == kind) & (rows["edge"] == edge))[number])


def _arrival_ns(rank_trace: RankTrace, place: int) -> int:
    return int(rank_trace.rows["t_ns"][: place + 1].max())


def _held(rank_trace: RankTrace, place: int, arrival_ns: int, go_ns: int) -> RankTrace:
    rows = rank_trace.rows
    gate = np.repeat(rows[place : place + 1], 2)
    gate["kind"], gate["edge"], gate["num_bytes"] = Kind.GATE, (Edge.BEGIN, Edge.END), 0
    gate["comm_seq"] = gate["comm_group"] = -1
    gate["t_ns"] = arrival_ns, go_ns
    later = rows[place:].copy()
    later["t_ns"] += go_ns - arrival_ns
    together = np.concatenate([rows[:place], gate, later])
    together["seq"] = rank_trace.start.seq + np.arange(len(together))
    return replace(rank_trace, rows=together)


def aborted(trace: Trace, step: int, part: float, idle_ns: int = HOLD_NS) -> Trace:
    """Return the trace of ranks that aborted a step midway, were idle, and continued with the step after it.

    Args:
        trace: of ranks that were never stopped; it has ``step``.
        step: the step that is aborted.
        part: share of the step's rows that each rank keeps, 0 to 1; the first row is always kept.
        idle_ns: from the last row of any rank to the reset of all units.
    """
    kept = {}
    for rank_trace in trace.ranks:
        begin, end = rank_trace.places_of(step, step)
        kept[rank_trace.rank] = begin + 1 + int(part * (end - begin - 2)), end
    reset_ns = idle_ns + max(int(r.rows["t_ns"][: kept[r.rank][0]].max()) for r in trace.ranks)
    ranks = (_aborted(r, *kept[r.rank], len(trace.header.units), reset_ns) for r in trace.ranks)
    return Trace(trace.header, tuple(ranks))


def _aborted(rank_trace: RankTrace, place: int, end: int, num_units: int, reset_ns: int) -> RankTrace:
    rows = rank_trace.rows
    resets = np.repeat(rows[place - 1 : place], num_units)
    for name in ("comm_seq", "comm_group", "step", "module"):
        resets[name] = -1
    resets["kind"], resets["edge"], resets["phase"] = Kind.RESET, Edge.INSTANT, Phase.IDLE
    resets["num_bytes"], resets["value"], resets["category"] = 0, np.nan, NO_CATEGORY
    resets["unit"], resets["t_ns"] = np.arange(num_units), reset_ns
    later = rows[end:].copy()
    later["t_ns"] += reset_ns - (int(rows["t_ns"][end:].min()) if len(later) else 0) + 1
    together = np.concatenate([rows[:place], resets, later])
    together["seq"] = rank_trace.start.seq + np.arange(len(together))
    return replace(rank_trace, rows=together)
