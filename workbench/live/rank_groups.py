"""Groups of ranks that behave alike so far: they share one panel until they differ."""

from __future__ import annotations

import numpy as np

from workbench.events import COLLECTIVES, Category, Edge, Kind
from workbench.replay.spans import of_kind
from workbench.replay.states import CHANGING_KINDS
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Rows

ALIKE = 0.02
"""Ranks are alike if no class of memory differs by more than this share of the total, as in the memory view."""


class RankGroups:
    """Groups of alike ranks. A group is only ever split, so what was drawn for it holds for all its ranks."""

    def __init__(self) -> None:
        self.groups: tuple[tuple[int, ...], ...] = ()
        self._seen: dict[int, int] = {}
        self._from_step = 0  # ranks that lack rows cannot be compared before it

    def update(self, trace: Trace) -> bool:
        """Compare the steps that all ranks have finished since the last call; return whether the groups changed."""
        known = {rank for group in self.groups for rank in group}
        ranks = [rank_trace for rank_trace in trace.ranks if len(rank_trace.rows) or rank_trace.rank in known]
        is_new = {r.rank for r in ranks} != known
        if is_new:
            self.groups = (tuple(r.rank for r in ranks),) if ranks else ()
            self._seen, self._from_step = {}, 0
        self._skip_gaps(ranks)
        return self._split(ranks) or is_new

    def _skip_gaps(self, ranks: list[RankTrace]) -> None:
        """Skip steps for which a rank has lost rows."""
        for rank_trace in ranks:
            if rank_trace.start.seq > self._seen.get(rank_trace.rank, 0) and len(rank_trace.steps):
                self._seen[rank_trace.rank] = rank_trace.start.seq
                self._from_step = max(self._from_step, int(min(rank_trace.steps)) + 1)

    def _split(self, ranks: list[RankTrace]) -> bool:
        marks = self._marks(ranks)
        found: list[list[int]] = []
        for group in self.groups:
            parts: list[list[int]] = []
            for rank in group:
                place = next((part for part in parts if _same(marks.get(part[0]), marks.get(rank))), None)
                if place is None:
                    parts.append([rank])
                else:
                    place.append(rank)
            found += parts
        before, self.groups = self.groups, tuple(map(tuple, found))
        return before != self.groups

    def _marks(self, ranks: list[RankTrace]) -> dict[int, tuple[bytes, np.ndarray]]:
        """Return each rank's signature over the steps that all finished since the last call; empty without any."""
        new = {r.rank: r.rows[max(self._seen.get(r.rank, 0) - r.start.seq, self._place(r)) :] for r in ranks}
        ends = {
            rank: np.flatnonzero((rows["kind"] == Kind.STEP) & (rows["edge"] == Edge.END)) for rank, rows in new.items()
        }
        common = min((len(found) for found in ends.values()), default=0)
        if not common:
            return {}
        cut = {rank: rows[: ends[rank][common - 1] + 1] for rank, rows in new.items()}
        self._seen |= {rank: int(rows["seq"][-1]) + 1 for rank, rows in cut.items()}
        return {rank: (_program(rows), _moved(rows)) for rank, rows in cut.items()}

    def _place(self, rank_trace: RankTrace) -> int:
        """Return the position of the first row that can be compared."""
        return rank_trace.place_after(self._from_step - 1) if self._from_step else 0


def _program(rows: Rows) -> bytes:
    """Return the events of units in program order; a collective's END is left out: the program does not time it."""
    places = np.flatnonzero(of_kind(rows, CHANGING_KINDS))
    kind, edge, unit = (rows[name][places] for name in ("kind", "edge", "unit"))  # three columns: less to copy
    did = ~(np.isin(kind, COLLECTIVES) & (edge == Edge.END))
    return b"".join(column[did].tobytes() for column in (kind, edge, unit))


def _moved(rows: Rows) -> np.ndarray:
    """Return the bytes allocated of each class. ``[C]``."""
    places = np.flatnonzero((rows["kind"] == Kind.ALLOC) & (rows["category"] < len(Category)))
    return np.bincount(rows["category"][places], rows["num_bytes"][places], len(Category))


def _same(first: tuple[bytes, np.ndarray] | None, second: tuple[bytes, np.ndarray] | None) -> bool:
    if first is None or second is None:
        return first is second
    return first[0] == second[0] and bool(np.abs(first[1] - second[1]).max() <= ALIKE * first[1].sum())
