"""The trace of a job of many ranks on many hosts, made of the rows of a few simulated ranks.

Three ranks are odd: one is always late, the record of one ends in the middle of the last step, and one holds half as
much again of unsharded parameters. ``WIDE`` has as many units as a large model, ``LONG`` as many steps as a longer run
of a small one. Both at once would be 600 M rows, 32 GB: no file holds more than a thirtieth of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from tests.helpers.long_trace import Repeated
from tests.helpers.simulated_job import Setup, make_header, simulate
from workbench.events import Category, Kind
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ClockReading, Header, HostClock, Rows

_PLAYED = 16
_APART_NS = 300  # between the clocks of ranks that are copies of the same simulated rank
_CLOCK_OFFSET_NS, _CLOCK_ERROR_NS = 10**13, 20_000


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of the job, and the odd ranks: late, ended early, with more memory. ``copies``: see Setup."""

    num_ranks: int = 512
    ranks_per_host: int = 8
    copies: int = 1
    num_units: int = 128
    width: int = 512
    steps: int = 2
    late: int = 300
    ended: int = 37
    larger: int = 417


WIDE = Scale()
LONG = Scale(copies=64, num_units=3, steps=200)


def trace_of(scale: Scale) -> Trace:
    """Return the trace; equal scales give equal traces."""
    played = min(_PLAYED, scale.num_ranks)
    setup = Setup(
        num_ranks=scale.num_ranks,
        copies=scale.copies,
        num_units=scale.num_units,
        width=scale.width,
        steps=3,
        played=played,
        late=played - 1,
    )
    found = [Repeated(rank_trace) for rank_trace in simulate(setup).ranks]
    for one in found:
        one.step_ns = max(other.step_ns for other in found)
    rows = [np.concatenate([one.before, one.copies(0, scale.steps - 1)]) for one in found]
    for one in rows:
        one["value"] = _losses(one)
    header = _on_hosts(make_header(setup), scale)
    groups = _groups(setup)
    return Trace(header, tuple(_rank(scale, rank, rows, groups[rank]) for rank in range(scale.num_ranks)))


def _rank(scale: Scale, rank: int, played: list[Rows], groups: np.ndarray) -> RankTrace:
    which = len(played) - 1 if rank == scale.late else rank % (len(played) - 1)
    rows = played[which].copy()
    rows["t_ns"] += _APART_NS * (rank // len(played))
    rows["comm_group"] = groups[rows["comm_group"]]
    if rank == scale.larger:
        whole = rows["category"] == Category.UNSHARDED_PARAMS
        rows["num_bytes"][whole] = rows["num_bytes"][whole] * 3 // 2
    if rank == scale.ended:
        rows = rows[: -len(np.flatnonzero(rows["step"] == scale.steps - 1)) // 2]
    return RankTrace(rank, rows)


def _losses(rows: Rows) -> np.ndarray:
    """Return the column ``value`` with a loss that falls over all steps."""
    losses = 1.5 + 3.0 * np.exp(-0.02 * rows["step"])
    return np.where(rows["kind"] == Kind.METRIC, losses, math.nan)


def _on_hosts(header: Header, scale: Scale) -> Header:
    infos = tuple(replace(info, host=f"node{info.rank // scale.ranks_per_host:02}") for info in header.ranks)
    readings = tuple(
        ClockReading(t_ns=t_ns, offset_ns=_CLOCK_OFFSET_NS, error_ns=_CLOCK_ERROR_NS)
        for t_ns in range(0, 10**10, 10**9)
    )
    hosts = [info.rank for info in infos[:: scale.ranks_per_host]]
    clocks = [HostClock(ranks=tuple(range(first, first + scale.ranks_per_host)), readings=readings) for first in hosts]
    return replace(header, ranks=infos, clocks=tuple(clocks[1:]))


def _groups(setup: Setup) -> np.ndarray:
    """Return per rank and simulated group the rank's own group of the same role; the last column is -1."""
    roles = [setup.ranks_of(role) for role in setup.roles]
    firsts = np.cumsum([0, *(len(groups) for groups in roles)])
    found = np.full((setup.num_ranks, firsts[-1] + 1), -1, np.int16)
    for groups, first, last in zip(roles, firsts, firsts[1:], strict=False):
        for number, ranks in enumerate(groups):
            found[list(ranks), first:last] = first + number
    return found
