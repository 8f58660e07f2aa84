"""The wire form of an increment: plain data and one buffer of little-endian columns.

The columns of a table follow each other, each aligned to 8 bytes, with the order and types of :data:`COLUMNS`;
``static/unpack.js`` reads them in the same order. Times become microseconds from the view's origin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.events import Category, Kind
from workbench.live.feed import Increment
from workbench.live.messages import Counts, OpenSpan
from workbench.replay.paused_time import Cuts

COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {
    "spans": (
        ("start", "f8"),
        ("duration", "f4"),
        ("bytes", "f4"),
        ("before", "f4"),  # of a wait: time since the issue of its collective; NaN: unknown
        ("unit", "i2"),
        ("track", "u1"),
        ("kind", "u1"),
        ("exposed", "u1"),
    ),
    "memory": (("t", "f8"), ("bytes", "f4"), ("group", "u1")),
    "states": (("t", "f8"), ("unit", "i2"), ("group", "u1"), ("state", "u1")),
    "steps": (
        ("t", "f8"),
        ("step", "i4"),
        ("loss", "f4"),
        ("has_loss", "u1"),
        ("ms", "f4"),
        ("exposed", "f4"),
        ("model", "i4"),
    ),
}
WIDTHS = {("memory", "bytes"): len(Category)}
"""Numbers per entry of columns with more than one."""


def pack(increment: Increment, origin_ns: int) -> tuple[Counts, bytes]:
    """Return the number of entries in each table of an increment, and the tables in one buffer.

    Args:
        increment: the data to send.
        origin_ns: time 0 of the view.
    """
    spans, held, states, steps = increment.spans, increment.memory, increment.states, increment.steps
    tables: dict[str, dict[str, NDArray[Any]]] = {
        "spans": {
            "start": to_us(spans["begin_ns"], origin_ns),
            "duration": _rounded_down((spans["end_ns"] - spans["begin_ns"]) / 1e3),
            "bytes": spans["num_bytes"],
            "before": np.where(spans["issue_ns"] < 0, np.nan, (spans["begin_ns"] - spans["issue_ns"]) / 1e3),
            **{name: spans[name] for name in ("unit", "track", "kind", "exposed")},
        },
        "memory": {"t": to_us(held["t_ns"], origin_ns), "bytes": held["num_bytes"], "group": held["group"]},
        "states": {
            "t": to_us(states["t_ns"], origin_ns),
            **{name: states[name] for name in ("unit", "group", "state")},
        },
        "steps": {
            "t": to_us(steps["end_ns"], origin_ns),
            "ms": steps["step_ns"] / 1e6,
            **{name: steps[name] for name in ("step", "loss", "has_loss", "exposed", "model")},
        },
    }
    columns = [
        np.ascontiguousarray(tables[table][name], f"<{code}").tobytes()
        for table, wanted in COLUMNS.items()
        for name, code in wanted
    ]
    counts = Counts(spans=len(spans), memory=len(held), states=len(states), steps=len(steps))
    return counts, b"".join(column + bytes(-len(column) % 8) for column in columns)


def told_open(found: NDArray[np.void], origin_ns: int) -> tuple[OpenSpan, ...]:
    """Return open spans, of SPAN_DTYPE, as messages for the browser."""
    entries = found[["track", "kind", "unit", "begin_ns", "num_bytes"]].tolist()
    return tuple(
        OpenSpan(track=track, kind=Kind(kind), unit=unit, start=(begin_ns - origin_ns) / 1e3, bytes=num_bytes)
        for track, kind, unit, begin_ns, num_bytes in entries
    )


def told_holds(cuts: Cuts, origin_ns: int) -> tuple[tuple[float, ...], ...]:
    """Return the time cut out of the axis as ``[[at, length], ...]``, microseconds."""
    found = cuts.joined()
    places = to_us(found.shown(found.begin_ns), origin_ns).tolist()
    return tuple(zip(places, (found.lengths_ns / 1e3).tolist(), strict=True))


def to_us(t_ns: NDArray[np.int64], origin_ns: int) -> NDArray[np.float64]:
    """Return times as microseconds from the view's origin."""
    return np.asarray((t_ns - origin_ns) / 1e3)


def _rounded_down(us: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the durations in float32, rounded down: neighbours must not overlap."""
    near = us.astype(np.float32)
    return np.where(near >= us, np.nextafter(near, np.float32(0)), near)
