"""How far times of ranks on different hosts may be from where they are drawn.

All times of a trace are on rank 0's clock, but those of ranks that read another clock were converted by what comparing
the two has found, give or take an error (:class:`~workbench.trace.schema.ClockReading`). Times of one rank, and of
ranks that read the same clock, have none: how long something took on a rank is as exact as its clock, and so is
who waited least, which says who came last. Only when something happened on one host and when on another is not known
better.

From one reading to the next a clock drifts at most as far as from the one offset to the other; before the first reading
and after the last one, two clocks are taken to drift apart by :data:`DRIFT` of the time.
"""

from __future__ import annotations

import math
from itertools import pairwise

from workbench.trace.columns import Trace
from workbench.trace.schema import HostClock

DRIFT = 50e-6
"""How fast two clocks drift apart that nobody sets: quartz oscillators are within some 20 parts in a million."""


def error_ns(trace: Trace) -> int:
    """Return by how much two times of a trace on different clocks may be wrong, one against the other.

    0: all ranks that recorded anything read one clock.
    """
    errors = sorted(_errors_of_clocks(trace).values())
    return sum(errors[-2:]) if len(errors) > 1 else 0


def errors_of_ranks(trace: Trace) -> dict[int, int]:
    """Return how far times of ranks may be off rank 0's clock, in ns, of those that read another one."""
    errors = _errors_of_clocks(trace).items()
    return {rank: error for clock, error in errors if clock is not None for rank in clock.ranks}


def _errors_of_clocks(trace: Trace) -> dict[HostClock | None, int]:
    """Return how far times of the clocks of a trace may be off rank 0's, None, in ns."""
    there = [rank_trace for rank_trace in trace.ranks if len(rank_trace.rows)]
    begin_ns = min((int(rank_trace.rows["t_ns"][0]) for rank_trace in there), default=0)
    end_ns = max((int(rank_trace.rows["t_ns"][-1]) for rank_trace in there), default=0)
    clock_of = {rank: clock for clock in trace.header.clocks for rank in clock.ranks}
    clocks = {clock_of.get(rank_trace.rank) for rank_trace in there}
    return {clock: 0 if clock is None else error_of(clock, begin_ns, end_ns) for clock in clocks}


def error_of(clock: HostClock, begin_ns: int, end_ns: int) -> int:
    """Return how far times of a clock, from ``begin_ns`` to ``end_ns`` on rank 0's, may be off rank 0's."""
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
