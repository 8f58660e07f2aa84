"""What clocks of hosts have to do with rank 0's, in words."""

from __future__ import annotations

from workbench.replay.clock_error import errors_of_ranks
from workbench.trace.columns import Trace
from workbench.trace.schema import HostClock
from workbench.views.theme import format_duration


def clock_words(clock: HostClock) -> str:
    """Say by what a clock was found to differ from rank 0's when they were compared last."""
    found = clock.readings[-1]
    ahead = "ahead of" if found.offset_ns >= 0 else "behind"
    apart, error = format_duration(abs(found.offset_ns)), format_duration(found.error_ns)
    return f"its clock is {apart} {ahead} rank 0's, give or take {error}"


def exactness(trace: Trace) -> dict[int, str]:
    """Say how exact the times of ranks are, of those that read another clock than rank 0's."""
    return {
        rank: f"times within {format_duration(error_ns)} of rank 0's"
        for rank, error_ns in errors_of_ranks(trace).items()
    }
