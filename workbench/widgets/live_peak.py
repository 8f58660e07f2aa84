"""The highest memory peak so far in a growing trace, with a description."""

from __future__ import annotations

from typing import Any

from workbench.replay import memory
from workbench.replay.memory import MemoryState
from workbench.trace.columns import RankTrace, Trace

AROUND = 2_000
"""Rows before and after a peak that are read to describe it."""


class Peaks:
    """Tracks the peak of each rank; describes a peak only once, when it is new."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[int, MemoryState]] = {}
        self._named: dict[int, tuple[int, dict[str, Any]]] = {}

    def of(self, trace: Trace, rank: int) -> dict[str, Any]:
        """Return the highest peak of ``rank``: ``num_bytes``, ``t_ns``, ``step``, ``text``."""
        rank_trace = trace.rank(rank)
        next_seq, state = self._states.get(rank, (rank_trace.start.seq, memory.start(rank_trace.start)))
        if not rank_trace.start.seq <= next_seq <= rank_trace.end_seq:  # the trace has restarted
            next_seq, state = rank_trace.start.seq, memory.start(rank_trace.start)
        state = memory.advance(state, rank_trace.rows[next_seq - rank_trace.start.seq :])
        self._states[rank] = rank_trace.end_seq, state
        known = self._named.get(rank)
        if known is None or known[0] != state.peak_seq:
            known = self._named[rank] = state.peak_seq, _named(trace, rank_trace, state.peak_seq)
        return known[1]

    def state(self, rank: int) -> MemoryState:
        """Return the live bytes of ``rank`` and its peak, by class, as of the last :meth:`of`."""
        return self._states[rank][1]


def _named(trace: Trace, rank_trace: RankTrace, peak_seq: int) -> dict[str, Any]:
    found = memory.peak(rank_trace.cut(max(peak_seq - AROUND, rank_trace.start.seq), peak_seq + AROUND))
    return {
        "num_bytes": found.num_bytes,
        "t_ns": found.t_ns,
        "step": found.step,
        "text": memory.describe_peak(trace.header, found),
    }
