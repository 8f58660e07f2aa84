"""Error bounds for times of ranks on different hosts.

All times of a trace are on rank 0's clock. Times of ranks that read another clock were converted by an offset measured
with an error (:class:`~workbench.trace.schema.ClockReading`). Times of one rank, or of ranks on the same clock, have no
such error. So durations on a rank are exact, and so is the comparison of which rank waited least, that is, which rank
was last. Only the order of events on different hosts is uncertain.

Between two readings a clock drifts at most by the difference of their offsets. Before the first reading and after the
last one, two clocks are assumed to drift apart by :data:`DRIFT` of the time.
"""

from __future__ import annotations

import math
from itertools import pairwise

from workbench.trace.columns import Trace
from workbench.trace.schema import HostClock

DRIFT = 50e-6
"""Drift rate between two free-running clocks: quartz oscillators are within some 20 parts in a million."""


def error_ns(trace: Trace) -> int:
    """Return the maximum error between two times of a trace on different clocks, in ns.

    0 if all ranks that recorded anything read one clock.
    """
    errors = sorted(_errors_of_clocks(trace).values())
    return sum(errors[-2:]) if len(errors) > 1 else 0


def errors_of_ranks(trace: Trace) -> dict[int, int]:
    """Return the maximum error against rank 0's clock, in ns, for each rank that reads another one."""
    errors = _errors_of_clocks(trace).items()
    return {rank: error for clock, error in errors if clock is not None for rank in clock.ranks}


def _errors_of_clocks(trace: Trace) -> dict[HostClock | None, int]:
    """Return the maximum error of each clock of a trace against rank 0's, in ns; the key of rank 0's clock is None."""
    there = [rank_trace for rank_trace in trace.ranks if len(rank_trace.rows)]
    if not there:
        return {}
    begin_ns = min(int(rank_trace.rows["t_ns"][0]) for rank_trace in there)
    end_ns = max(int(rank_trace.rows["t_ns"][-1]) for rank_trace in there)
    clock_of = {rank: clock for clock in trace.header.clocks for rank in clock.ranks}
    clocks = {clock_of.get(rank_trace.rank) for rank_trace in there}
    return {clock: 0 if clock is None else error_of(clock, begin_ns, end_ns) for clock in clocks}


def error_of(clock: HostClock, begin_ns: int, end_ns: int) -> int:
    """Return the maximum error of a clock against rank 0's from ``begin_ns`` to ``end_ns`` (on rank 0's), in ns."""
    first, last = clock.readings[0], clock.readings[-1]
    found = [
        max(this.error_ns, following.error_ns + abs(following.offset_ns - this.offset_ns))
        for this, following in pairwise(clock.readings)
        if this.t_ns <= end_ns and following.t_ns > begin_ns
    ]
    if begin_ns < first.t_ns:
        found.append(first.error_ns + _drift_ns(first.t_ns - begin_ns))
    if end_ns >= last.t_ns:
        found.append(last.error_ns + _drift_ns(end_ns - last.t_ns))
    return max(found)


def _drift_ns(duration_ns: int) -> int:
    return math.ceil(DRIFT * duration_ns)
