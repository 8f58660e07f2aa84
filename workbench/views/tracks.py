"""One rank's part of a timeline: compute, collectives and waits as rectangles on tracks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from workbench.events import COPIES, Kind, Track, on_track
from workbench.replay.arrivals import LastArrivals
from workbench.replay.collectives import Collectives, table
from workbench.replay.spans import Ints, closed, durations_ns, exclusive, last_ns, spans
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Rows
from workbench.views.span_shapes import Rectangles, joined, rectangles

HOST = "host"
"""Name of the track on which the host enqueues work, next to the device's tracks."""

COMPUTE = tuple(kind for kind in on_track(Track.COMPUTE) if kind is not Kind.STEP)
"""Kinds drawn as compute: the work of the rank's main thread. The innermost of nested spans is drawn."""

TRACKS: tuple[tuple[str, tuple[Kind, ...]], ...] = (
    *((track.value, COMPUTE if track is Track.COMPUTE else on_track(track)) for track in Track),
    ("copies", COPIES),
    (HOST, COMPUTE),
)
"""Name and kinds of each track of a rank, from the top. Only devices have separate copies and a host track."""

OTHER_TRACK, WAIT_TRACK = list(Track).index(Track.OTHER), list(Track).index(Track.WAIT)
COPY_TRACK, HOST_TRACK = len(Track), len(Track) + 1

LANES = 3
"""Lanes of a track: the whole track, and its upper and lower half for collectives in flight at the same time."""

MASKING = (Kind.STEP, Kind.WAIT)
"""Kinds that are not compute; spans around them do not compute in that time either."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tracks:
    """One rank's part of a timeline; times are nanoseconds. Arrays: ``W`` waits.

    Attributes:
        rank: which rank.
        bars: rectangles; their lane is ``LANES * track + lane of the track``.
        issued_lane: lane of the collective of each wait, ``[W]``.
        issued_ns: when that was issued, ``[W]``.
        waited_ns: when the wait began, ``[W]``.
        wait_ns: its duration, ``[W]``.
        total_ns: from the first row to the last, without holds at a gate.
    """

    rank: int
    bars: Rectangles
    issued_lane: Ints
    issued_ns: Ints
    waited_ns: Ints
    wait_ns: Ints
    total_ns: int


def tracks(
    part: RankTrace,
    open_until_ns: int,
    *,
    last: LastArrivals | None = None,
    copies: Rows | None = None,
    host: RankTrace | None = None,
) -> Tracks:
    """Return the tracks of a rank.

    Args:
        part: the rank's rows to draw. Collectives issued before them, and the waits for those, are left out.
        open_until_ns: end time for drawing running spans.
        last: last arrivals at its collectives; None: unknown.
        copies: for a device's rows, the copies on its streams other than compute.
        host: for a device's rows, the host's rows.
    """
    rows, found = part.rows, table(part)
    lane = _lanes(found)
    parts = [_compute(part, open_until_ns), _collectives(found, lane, last), _waits(found)]
    if copies is not None:
        parts.append(_copies(copies))
    if host is not None:
        handed = _compute(host, last_ns(host.rows))
        parts.append(replace(handed, lane=handed.lane + LANES * HOST_TRACK))
    bars = joined(parts)
    goes_on = (bars.ended == 0) & (bars.end_ns >= last_ns(rows))
    bars = replace(bars, end_ns=np.where(goes_on, open_until_ns, bars.end_ns))
    waited = found.wait_begin_ns >= 0
    return Tracks(
        rank=part.rank,
        bars=bars[bars.end_ns > bars.begin_ns],
        issued_lane=lane[waited],
        issued_ns=found.issue_ns[waited],
        waited_ns=found.wait_begin_ns[waited],
        wait_ns=found.wait_ns[waited],
        total_ns=int(durations_ns(rows, rows["t_ns"][:1], np.array([last_ns(rows)]))[0]),
    )


def _compute(part: RankTrace, open_until_ns: int) -> Rectangles:
    found = spans(part.rows, (*COMPUTE, *MASKING))
    ends = closed(found, part.rows)
    goes_on = (found.end_seq < 0) & (ends.end_ns >= last_ns(part.rows))
    owner, begin_ns, end_ns = exclusive(replace(ends, end_ns=np.where(goes_on, open_until_ns, ends.end_ns)))
    shown = ~np.isin(found.kind[owner], MASKING)
    owner, begin_ns, end_ns = owner[shown], begin_ns[shown], end_ns[shown]
    bars = rectangles(np.zeros_like(owner), found.kind[owner], begin_ns, end_ns, found.unit[owner])
    return replace(bars, num_bytes=found.num_bytes[owner], ended=(found.end_seq[owner] >= 0).astype(np.int64))


def _copies(rows: Rows) -> Rectangles:
    """Return the copies on streams other than compute; running ones are left out."""
    found = spans(rows, COPIES)
    lane = np.full(len(found), LANES * COPY_TRACK)
    bars = rectangles(lane, found.kind, found.begin_ns, found.end_ns, found.unit)
    return replace(bars, num_bytes=found.num_bytes)


def _collectives(found: Collectives, lane: Ints, last: LastArrivals | None) -> Rectangles:
    end_ns = np.where(found.end_ns >= 0, found.end_ns, found.issue_ns + found.time_ns)
    bars = rectangles(lane, found.kind, found.issue_ns, end_ns, found.unit)
    if last is not None:
        bars = replace(bars, last=last.rank, last_ns=last.after_ns)
    return replace(
        bars,
        num_bytes=found.num_bytes,
        exposed_ns=np.minimum(found.wait_ns, found.time_ns),  # compute wakes up after the last byte
        duration_ns=found.time_ns,
        ended=(found.end_ns >= 0).astype(np.int64),
    )


def _waits(found: Collectives) -> Rectangles:
    waited = np.flatnonzero(found.wait_begin_ns >= 0)
    begin_ns, end_ns = found.wait_begin_ns[waited], found.wait_end_ns[waited]
    until_ns = np.where(end_ns >= 0, end_ns, begin_ns + found.wait_ns[waited])
    kind = np.full(len(waited), int(Kind.WAIT))
    bars = rectangles(np.full(len(waited), LANES * WAIT_TRACK), kind, begin_ns, until_ns, found.unit[waited])
    return replace(
        bars,
        waits_for=found.kind[waited],
        duration_ns=found.wait_ns[waited],
        ended=(end_ns >= 0).astype(np.int64),
    )


def _lanes(found: Collectives) -> Ints:
    """Return the lane of each collective: alternating halves of its track while several are in flight, else all."""
    lane = np.zeros(len(found), np.int64)
    end_ns = np.where(found.end_ns >= 0, found.end_ns, found.issue_ns + found.time_ns)
    for track, (_, kinds) in enumerate(TRACKS):
        mine = np.flatnonzero(np.isin(found.kind, kinds))
        free = np.append(True, found.issue_ns[mine][1:] >= np.maximum.accumulate(end_ns[mine])[:-1])[: len(mine)]
        first = np.flatnonzero(free)
        run = np.cumsum(free) - 1
        alone = np.diff(np.append(first, len(mine))) == 1
        lane[mine] = LANES * track + np.where(alone[run], 0, 1 + (np.arange(len(mine)) - first[run]) % 2)
    return lane
