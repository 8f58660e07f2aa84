"""A rank's rows with the times at which its device came to what they tell of, in the place of the host's.

The host hands work over and goes on, so its times say little of when the work was done; DEVICE rows, which come later,
say it (:mod:`workbench.events`). A device that runs behind has come to some rows and not to others: those up to the
first one that it has not come to are here, so that what is begun and not ended stays so, as in a hang. Memory is taken
and given by the host: its rows keep the host's time, as do holds at a gate, and what is logged.

Of what streams beside the compute stream do, only collectives are among the rows: a wait there keeps no compute
waiting, and a copy there is no compute. The copies are in :attr:`OnDevice.copies`.

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
    """Whose times are shown."""

    HOST = auto()
    """The host's, that did the work itself."""
    ENQUEUED = auto()
    """The host's, that handed the work to a device."""
    DEVICE = auto()
    """The device's, told on the host's clock."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceTimes:
    """What a device did of a part of a rank's trace.

    Attributes:
        part: rows with the device's times; their ``seq`` has gaps.
        copies: rows of copies in streams beside the compute stream.
        end_seq: the first row of the part that the device has not come to; if there is none, the one after the part.
    """

    part: RankTrace
    copies: Rows
    end_seq: int


def clock_of(header: Header) -> ClockSource:
    """Return whose times a growing trace will be shown with, once they are told."""
    if not header.is_enqueued:
        return ClockSource.HOST
    return ClockSource.DEVICE if any(info.device_error_ns for info in header.ranks) else ClockSource.ENQUEUED


def on_device(whole: RankTrace, part: RankTrace, header: Header) -> DeviceTimes | None:
    """Return what the device of a rank did of ``part``; None if nothing of that is told.

    Args:
        whole: all that is known of the rank; DEVICE rows may come long after what they tell of.
        part: some consecutive rows of it.
        header: of the trace.
    """
    rows = part.rows
    later = max(part.start.seq - whole.start.seq, 0)
    tells = whole.rows[later:][whole.kinds[later:] == Kind.DEVICE]
    if not len(tells):
        return None
    t_ns, stream = _told(tells, part.start.seq, len(rows))
    awaited = ~of_kind(rows, BESIDE)
    is_told = t_ns >= 0
    if not is_told.any():
        return None
    missing = np.flatnonzero(awaited & ~is_told)
    reached = np.arange(len(rows)) < (missing[0] if len(missing) else len(rows))
    in_compute = np.array([*(name == COMPUTE_STREAM for name in header.strings), False])[stream]
    shown = reached & (~awaited | in_compute | of_kind(rows, COLLECTIVES)) & (rows["kind"] != Kind.DEVICE)
    moved = rows.copy()
    moved["t_ns"] = np.where(is_told, t_ns, rows["t_ns"])
    return DeviceTimes(
        part=replace(part, rows=moved[shown]),
        copies=moved[reached & is_told & ~in_compute & of_kind(rows, COPIES)],
        end_seq=part.start.seq + int(missing[0] if len(missing) else len(rows)),
    )


def _told(tells: Rows, first_seq: int, count: int) -> tuple[Ints, Ints]:
    """Return when the device came to ``count`` rows from ``first_seq`` on, and in which stream; -1 if not told."""
    place = tells["value"].astype(np.int64) - first_seq
    inside = (place >= 0) & (place < count)
    t_ns, stream = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    t_ns[place[inside]] = tells["t_ns"][inside]
    stream[place[inside]] = tells["module"][inside]
    return t_ns, stream
