"""Who came last to a collective: the others wait for it, whether or not that shows in their compute.

Ranks that read one clock are told apart however close they come. Of ranks of different clocks nobody is named unless
it came later than all the others by more than the clocks may be wrong (:mod:`workbench.replay.clock_error`).

Arrays: ``R`` ranks, ``K`` collectives; times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from workbench.replay.collectives import Collectives
from workbench.replay.spans import Ints
from workbench.trace.schema import Header

LATE = 0.1
"""A rank is late if others wait this part of a step longer than it."""

UNTOLD, TOO_CLOSE = -1, -2
_NEVER = -(2**62)


@dataclass(frozen=True, kw_only=True, eq=False)
class LastArrivals:
    """Who came last to each collective of a rank; arrays are ``[N]``.

    Attributes:
        rank: which rank; UNTOLD if not all that take part are known, TOO_CLOSE if clocks do not tell.
        after_ns: how long after the rank before it; 0 where it is not told.
    """

    rank: Ints
    after_ns: Ints


def last_to_come(header: Header, found: Mapping[int, Collectives], error_ns: int) -> dict[int, LastArrivals]:
    """Return who came last to the collectives of each rank.

    Args:
        header: says who takes part in what, and who reads which clock.
        found: by rank, what it issued.
        error_ns: by how much times on different clocks may be wrong, one against the other.
    """
    keys = {rank: _keys(table) for rank, table in found.items()}
    known = np.unique(np.concatenate([np.array([-1]), *keys.values()]))
    place = {rank: np.searchsorted(known, key) for rank, key in keys.items()}
    issued = np.full((max(len(found), 2), len(known)), _NEVER)  # [R, K]
    for row, (rank, table) in zip(issued, found.items(), strict=False):
        row[place[rank]] = table.issue_ns
    before, last = np.argsort(issued, axis=0, kind="stable")[-2:]
    last_ns, before_ns = (np.take_along_axis(issued, rows[None], axis=0)[0] for rows in (last, before))
    clock = np.array([*_clocks(header, found), -1, -1])[: len(issued)]
    rival_ns = np.where(clock[:, None] != clock[last], issued, _NEVER).max(axis=0)
    is_told = (known >= 0) & ((issued > _NEVER).sum(axis=0) == _sizes(header)[known >> 32]) & (before_ns > _NEVER)
    named = np.where(last_ns - rival_ns > error_ns, np.array([*found, UNTOLD, UNTOLD])[last], TOO_CLOSE)
    told = np.where(is_told, named, UNTOLD)
    after_ns = np.where(told >= 0, last_ns - before_ns, 0)
    return {rank: LastArrivals(rank=told[mine], after_ns=after_ns[mine]) for rank, mine in place.items()}


def _keys(table: Collectives) -> Ints:
    """One number per collective, the same on all ranks that take part; -1 where that is not known. ``[N]``."""
    is_known = (table.comm_seq >= 0) & (table.comm_group >= 0)
    return np.where(is_known, table.comm_group << 32 | table.comm_seq, -1)


def _sizes(header: Header) -> Ints:
    """How many ranks take part in the collectives of each group; the last is where -1 looks."""
    return np.array([*(len(group.ranks) for group in header.comm_groups), 0])


def _clocks(header: Header, ranks: Iterable[int]) -> list[int]:
    """Number the clocks that ranks read; 0 is rank 0's. ``[R]``."""
    of_rank = {rank: number for number, clock in enumerate(header.clocks, start=1) for rank in clock.ranks}
    return [of_rank.get(rank, 0) for rank in ranks]


def straggler(waited_ns: Mapping[int, int], whole_ns: int) -> tuple[int, int] | None:
    """Return the rank that the others wait for, and how much longer they wait, in ns; None if there is none.

    Args:
        waited_ns: how long compute of each rank waited for collectives.
        whole_ns: the time in which it did.
    """
    least = min(waited_ns, key=lambda rank: (waited_ns[rank], rank), default=-1)
    longer_ns = max(waited_ns.values(), default=0) - waited_ns.get(least, 0)
    return (least, longer_ns) if longer_ns > LATE * whole_ns else None
