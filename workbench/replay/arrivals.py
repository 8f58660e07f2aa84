"""The rank that issues a collective last: the others wait for it, whether or not that shows in their compute.

On one clock, any difference in time decides. Across clocks, a rank counts as last only if it is later than all ranks
on other clocks by more than the clock error (:mod:`workbench.replay.clock_error`).

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
"""A rank is late if others wait longer than it by more than this fraction of a step."""

UNTOLD, TOO_CLOSE = -1, -2
_NEVER = -(2**62)


@dataclass(frozen=True, kw_only=True, eq=False)
class LastArrivals:
    """Last rank to issue each collective of a rank; arrays are ``[N]``.

    Attributes:
        rank: the rank; UNTOLD if not all participants are known, TOO_CLOSE if it is within the clock error.
        after_ns: how long after the previous rank; 0 where ``rank`` is UNTOLD or TOO_CLOSE.
        issue_ns: when it issued the collective; the smallest int64 where ``rank`` is UNTOLD or TOO_CLOSE.
    """

    rank: Ints
    after_ns: Ints
    issue_ns: Ints


def last_to_come(header: Header, found: Mapping[int, Collectives], error_ns: int) -> dict[int, LastArrivals]:
    """Return, by rank, the last rank to issue each of its collectives.

    Args:
        header: its communication groups and clocks.
        found: collectives by the rank that issued them.
        error_ns: maximum error between times on different clocks.
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
    is_complete = (known >= 0) & ((issued > _NEVER).sum(axis=0) == _sizes(header)[known >> 32]) & (before_ns > _NEVER)
    named = np.where(last_ns - rival_ns > error_ns, np.array([*found, UNTOLD, UNTOLD])[last], TOO_CLOSE)
    last_rank = np.where(is_complete, named, UNTOLD)
    after_ns = np.where(last_rank >= 0, last_ns - before_ns, 0)
    issue_ns = np.where(last_rank >= 0, last_ns, np.iinfo(np.int64).min)
    return {
        rank: LastArrivals(rank=last_rank[mine], after_ns=after_ns[mine], issue_ns=issue_ns[mine])
        for rank, mine in place.items()
    }


def _keys(table: Collectives) -> Ints:
    """One number per collective, the same on all participating ranks; -1 where it is unknown. ``[N]``."""
    is_known = (table.comm_seq >= 0) & (table.comm_group >= 0)
    return np.where(is_known, table.comm_group << 32 | table.comm_seq, -1)


def _sizes(header: Header) -> Ints:
    """Number of ranks of each group; the last entry is for index -1."""
    return np.array([*(len(group.ranks) for group in header.comm_groups), 0])


def _clocks(header: Header, ranks: Iterable[int]) -> list[int]:
    """Number of the clock that each rank reads; 0 is rank 0's. ``[R]``."""
    of_rank = {rank: number for number, clock in enumerate(header.clocks, start=1) for rank in clock.ranks}
    return [of_rank.get(rank, 0) for rank in ranks]


def waits_least(waited_ns: Mapping[int, int], whole_ns: int) -> tuple[int, int] | None:
    """Return the rank that waits least, and how much longer another one waits, in ns; None if not notably longer.

    A fact of these steps alone. Whether the rank is slow, step after step, says
    :func:`~workbench.replay.step_parts.slow_rank`.

    Args:
        waited_ns: how long compute of each rank waited for collectives.
        whole_ns: the total time in which it waited.
    """
    if not waited_ns:
        return None
    least = min(waited_ns, key=lambda rank: (waited_ns[rank], rank))
    longer_ns = max(waited_ns.values()) - waited_ns[least]
    return (least, longer_ns) if longer_ns > LATE * whole_ns else None
