"""Text formats of numbers and times, and the colour of error text, for reports, figures and pages."""

from __future__ import annotations

import math

ERROR_TEXT = (
    "color-mix(in srgb, var(--jp-error-color1, var(--vscode-errorForeground, #d32f2f)) 75%, "
    "var(--jp-ui-font-color1, currentcolor))"
)
"""CSS colour of error text. JupyterLab's own red is legible on light pages only."""

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400  # seconds
_LONG_UNITS = ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s"))
_TIME_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"))
UNITS = (*_BYTE_UNITS, *(unit for _, unit in _TIME_UNITS), "d", "h", "min")
"""Units of what this module formats."""


def byte_unit(largest: float) -> tuple[int, str]:
    """Return ``(divisor, unit)`` for an axis up to ``largest`` bytes: ``2e6`` -> ``(2**20, "MiB")``."""
    power = 0
    while abs(largest) >= 1024 ** (power + 1) and power < len(_BYTE_UNITS) - 1:
        power += 1
    return 1024**power, _BYTE_UNITS[power]


def time_unit(largest_ns: float) -> tuple[int, str]:
    """Return ``(divisor, unit)`` for an axis up to ``largest_ns``: ``3e6`` -> ``(10**6, "ms")``."""
    for divisor, unit in _TIME_UNITS:
        if abs(largest_ns) >= divisor:
            return divisor, unit
    return 1_000, "µs"


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes with three digits: ``7414784`` -> ``"7.07 MiB"``, ``512`` -> ``"512 B"``."""
    divisor, unit = byte_unit(num_bytes)
    return f"{num_bytes:.0f} B" if divisor == 1 else f"{_three_digits(num_bytes / divisor)} {unit}"


def format_duration(duration_ns: float) -> str:
    """Return a duration in nanoseconds with three digits: ``1234567`` -> ``"1.23 ms"``."""
    divisor, unit = time_unit(duration_ns)
    return f"{_three_digits(duration_ns / divisor)} {unit}"


def format_long(duration_ns: float) -> str:
    """Return a duration in nanoseconds as text, from a minute on in whole units: ``20789e9`` -> ``"5 h 46 min"``."""
    seconds = round(duration_ns / 1e9)
    if seconds < _MINUTE:
        return format_duration(duration_ns)
    size, unit, part, part_unit = next(each for each in _LONG_UNITS if seconds >= each[0])
    whole, rest = divmod(seconds, size)
    return f"{whole:,} {unit} {rest // part} {part_unit}" if rest >= part else f"{whole:,} {unit}"


def format_loss(loss: float, spec: str = ".4g") -> str:
    """Return a loss as text, ``NaN`` as in the dashboard and the panel; ``spec`` formats a number."""
    return "NaN" if math.isnan(loss) else format(loss, spec)


def format_share(part: float, digits: int = 0) -> str:
    """Return a fraction in per cent, with ``digits`` decimals: ``0.41`` -> ``"41%"``."""
    return f"{part:.{digits}%}"


def _three_digits(number: float) -> str:
    size = abs(number)
    return f"{number:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


def plural(count: int, noun: str) -> str:
    """Return ``"1 rank"``, ``"4 ranks"``, ``"12,000 events"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
