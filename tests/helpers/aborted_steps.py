"""Traces with an aborted step, as the runtime records them: no END row, then a RESET of each unit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workbench.events import Edge, Kind, Phase
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE

IDLE_NS = 3_000_000_000
"""Time from the last row of an aborted step to the reset of its units."""


def aborted(trace: Trace, step: int, share: float) -> Trace:
    """Return the trace in which every rank aborts ``step`` after the given share of its rows.

    Later rows are kept, shifted by the time of the reset; the bytes that the step had allocated are not freed.
    """
    return Trace(trace.header, tuple(_aborted(r, step, share, len(trace.header.units)) for r in trace.ranks))


def _aborted(rank_trace: RankTrace, step: int, share: float, num_units: int) -> RankTrace:
    rows = rank_trace.rows
    first, last = (int(np.flatnonzero(rows["step"] == step)[place]) for place in (0, -1))
    until = first + 1 + int(share * (last - first - 1))
    done, later = rows[:until], rows[last + 1 :].copy()
    resets = np.zeros(num_units, ROW_DTYPE)
    resets["kind"], resets["edge"], resets["phase"] = Kind.RESET, Edge.INSTANT, Phase.IDLE
    resets["step"] = resets["comm_group"] = resets["comm_seq"] = resets["module"] = -1
    resets["unit"] = np.arange(num_units)
    resets["category"], resets["value"] = rows["category"][first], np.nan
    resets["t_ns"] = done["t_ns"].max() + IDLE_NS + np.arange(num_units)
    later["t_ns"] += IDLE_NS + num_units
    together = np.concatenate([done, resets, later])
    together["seq"] = rank_trace.start.seq + np.arange(len(together))
    return replace(rank_trace, rows=together)
