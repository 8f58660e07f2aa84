"""Offsets and errors of host clocks against rank 0's, as text."""

from __future__ import annotations

from workbench.base.text_formats import format_duration
from workbench.replay.clock_error import errors_of_ranks
from workbench.trace.columns import Trace
from workbench.trace.schema import HostClock


def clock_words(clock: HostClock) -> str:
    """Return the offset of a clock from rank 0's, and its error, at their last comparison, as text."""
    found = clock.readings[-1]
    ahead = "ahead of" if found.offset_ns >= 0 else "behind"
    apart, error = format_duration(abs(found.offset_ns)), format_duration(found.error_ns)
    return f"its clock is {apart} {ahead} rank 0's, ± {error}"


def exactness(trace: Trace) -> dict[int, str]:
    """Return the clock error, as text, of each rank that does not read rank 0's clock."""
    return {
        rank: f"times within {format_duration(error_ns)} of rank 0's"
        for rank, error_ns in errors_of_ranks(trace).items()
    }
