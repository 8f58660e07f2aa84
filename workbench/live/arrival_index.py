"""Arrival times of a rank's rows: the running maximum of the rows' times."""

from __future__ import annotations

import numpy as np

from workbench.replay.spans import Ints
from workbench.trace.columns import RankTrace

EVERY = 256
"""Rows per block; the latest time of each block is kept."""


class ArrivalIndex:
    """The arrival times in one state of a rank's trace, in nanoseconds of the rank's clock.

    Args:
        rank_trace: the rank's rows.
        before: index of an earlier state of the same trace; its blocks are reused.
    """

    def __init__(self, rank_trace: RankTrace, before: ArrivalIndex | None = None) -> None:
        self.rank_trace = rank_trace
        self._t_ns: Ints = rank_trace.rows["t_ns"]
        self._first = -(-rank_trace.start.seq // EVERY) * EVERY  # first row of the first whole block
        self._tops_ns = self._tops(before)
        self._head = min(self._first - rank_trace.start.seq, len(self._t_ns))  # rows before it
        start_ns = self._t_ns[: self._head].max(initial=np.iinfo(np.int64).min)
        self._until_ns = np.maximum.accumulate(np.concatenate([[start_ns], self._tops_ns]))  # before each block

    def _tops(self, before: ArrivalIndex | None) -> Ints:
        """Return the latest time in each whole block."""
        num_blocks = max(self.rank_trace.end_seq // EVERY - self._first // EVERY, 0)
        known = np.empty(0, np.int64)
        if before is not None and before._first <= self._first:
            known = before._tops_ns[(self._first - before._first) // EVERY :][:num_blocks]
        begin = self._first - self.rank_trace.start.seq
        rest = self._t_ns[begin + len(known) * EVERY : begin + num_blocks * EVERY]
        return np.concatenate([known, rest.reshape(-1, EVERY).max(axis=1, initial=np.iinfo(np.int64).min)])

    def count(self, t_ns: int) -> int:
        """Return how many leading rows had arrived by ``t_ns``."""
        block = int(np.searchsorted(self._until_ns, t_ns, side="right"))  # all rows before block - 1 had arrived
        begin = self._head + (block - 1) * EVERY if block else 0
        there = self._t_ns[begin : begin + EVERY if block else self._head] > t_ns
        return begin + (int(there.argmax()) if there.any() else len(there))

    def at(self, place: int) -> int:
        """Return the arrival time of the row at position ``place``."""
        block = (place - self._head) // EVERY
        if block < 0:
            return int(self._t_ns[: place + 1].max())
        begin = self._head + block * EVERY
        return max(int(self._until_ns[block]), int(self._t_ns[begin : place + 1].max()))
