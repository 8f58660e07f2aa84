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
    tables = {
        "spans": _spans(increment.spans, origin_ns),
        "memory": _memory(increment.memory, origin_ns),
        "states": _states(increment.states, origin_ns),
        "steps": _steps(increment.steps, origin_ns),
    }
    columns = [
        np.ascontiguousarray(tables[table][name], f"<{code}").tobytes()
        for table, wanted in COLUMNS.items()
        for name, code in wanted
    ]
    counts = Counts(**{name: len(table["t" if "t" in table else "start"]) for name, table in tables.items()})
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


def _spans(found: NDArray[np.void], origin_ns: int) -> dict[str, NDArray[Any]]:
    return {
        "start": to_us(found["begin_ns"], origin_ns),
        "duration": _rounded_down((found["end_ns"] - found["begin_ns"]) / 1e3),
        "bytes": found["num_bytes"],
        "before": np.where(found["issue_ns"] < 0, np.nan, (found["begin_ns"] - found["issue_ns"]) / 1e3),
        **{name: found[name] for name in ("unit", "track", "kind", "exposed")},
    }


def _rounded_down(us: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the durations in float32, rounded down: neighbours must not overlap."""
    near = us.astype(np.float32)
    return np.where(near >= us, np.nextafter(near, np.float32(0)), near)


def _memory(found: NDArray[np.void], origin_ns: int) -> dict[str, NDArray[Any]]:
    return {"t": to_us(found["t_ns"], origin_ns), "bytes": found["num_bytes"], "group": found["group"]}


def _states(found: NDArray[np.void], origin_ns: int) -> dict[str, NDArray[Any]]:
    return {"t": to_us(found["t_ns"], origin_ns), **{name: found[name] for name in ("unit", "group", "state")}}


def _steps(found: NDArray[np.void], origin_ns: int) -> dict[str, NDArray[Any]]:
    return {
        "t": to_us(found["end_ns"], origin_ns),
        "ms": found["step_ns"] / 1e6,
        **{name: found[name] for name in ("step", "loss", "has_loss", "exposed", "model")},
    }
