"""A rank's rows with device times instead of host times.

The host enqueues work and continues, so its times do not say when the work was done; DEVICE rows, which come later, do
(:mod:`workbench.events`). A device that runs behind has not reached all rows. The result holds the rows up to the first
one it has not reached, so that a span without an end stays open, as in a hang. The host allocates and frees memory: its
rows keep host times, as do holds at a gate and logs.

Of streams other than the compute stream, only collectives are among the rows: a wait there does not block compute, and
a copy there is not compute. The copies are in :attr:`DeviceTimes.copies`.

Example, times of the host -> of the device: forward 0..1, all-gather 1..3, wait 2..3 -> forward 5..20, all-gather
6..28, wait 20..28: compute waited 8 for the all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from workbench.events import BESIDE, COLLECTIVES, COMPUTE_STREAM, COPIES, Kind
from workbench.replay.spans import Ints, of_kind
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Header, Rows


class ClockSource(Enum):
    """The clock whose times are shown."""

    HOST = auto()
    """Times of the host, which did the work itself."""
    ENQUEUED = auto()
    """Times of the host, at which it enqueued work on a device."""
    DEVICE = auto()
    """Times of the device, converted to the host's clock."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceTimes:
    """A part of a rank's trace as its device executed it.

    Attributes:
        part: rows with the device's times; their ``seq`` has gaps.
        copies: rows of copies in streams other than the compute stream.
        end_seq: the first row of the part that the device has not reached; if there is none, the one after the part.
    """

    part: RankTrace
    copies: Rows
    end_seq: int


def clock_of(header: Header) -> ClockSource:
    """Return the clock that a growing trace is shown with once its times are known."""
    if not header.is_enqueued:
        return ClockSource.HOST
    return ClockSource.DEVICE if any(info.device_error_ns for info in header.ranks) else ClockSource.ENQUEUED


def on_device(whole: RankTrace, part: RankTrace, header: Header) -> DeviceTimes | None:
    """Return ``part`` as the rank's device executed it; None without device times for it.

    Args:
        whole: all rows of the rank; DEVICE rows may come long after the rows they refer to.
        part: some consecutive rows of it.
        header: of the trace.
    """
    rows = part.rows
    device_rows = whole.rows[whole.kinds == Kind.DEVICE]
    t_ns, stream = _device_times(device_rows, part.start.seq, len(rows))
    has_time = t_ns >= 0
    if not has_time.any():
        return None
    awaited = ~of_kind(rows, BESIDE)
    missing = np.flatnonzero(awaited & ~has_time)
    reached = np.arange(len(rows)) < (missing[0] if len(missing) else len(rows))
    in_compute = np.array([*(name == COMPUTE_STREAM for name in header.strings), False])[stream]
    shown = reached & (~awaited | in_compute | of_kind(rows, COLLECTIVES)) & (rows["kind"] != Kind.DEVICE)
    moved = rows.copy()
    moved["t_ns"] = np.where(has_time, t_ns, rows["t_ns"])
    return DeviceTimes(
        part=replace(part, rows=moved[shown]),
        copies=moved[reached & has_time & ~in_compute & of_kind(rows, COPIES)],
        end_seq=part.start.seq + int(missing[0] if len(missing) else len(rows)),
    )


def _device_times(device_rows: Rows, first_seq: int, count: int) -> tuple[Ints, Ints]:
    """Return when the device reached ``count`` rows from ``first_seq`` on, and in which stream; -1 if unknown."""
    place = device_rows["value"].astype(np.int64) - first_seq
    inside = (place >= 0) & (place < count)
    t_ns, stream = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    t_ns[place[inside]] = device_rows["t_ns"][inside]
    stream[place[inside]] = device_rows["module"][inside]
    return t_ns, stream
