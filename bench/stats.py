"""Statistics of samples, and the order in which samples are taken."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median with its quartiles, in the unit of the samples."""

    median: float
    lower: float
    upper: float
    count: int

    def as_dict(self) -> dict[str, float]:
        """Return the fields, for JSON."""
        return asdict(self)


def spread(values: Sequence[float]) -> Spread:
    """Summarise at least one value."""
    low, mid, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(median=mid, lower=low, upper=high, count=len(values))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the true median in 95 of 100 cases: the values at ranks n / 2 -+ sqrt(n) from below."""
    ordered, half = sorted(values), len(values) / 2
    apart = math.sqrt(len(values))
    return ordered[max(0, math.floor(half - apart))], ordered[min(len(values) - 1, math.ceil(half + apart))]


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the names rotated by ``number``, so that none always follows the same one."""
    at = number % len(names)
    return [*names[at:], *names[:at]]
