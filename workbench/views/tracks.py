"""One rank's part of a timeline: compute, collectives and waits as rectangles on tracks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from workbench.events import COLLECTIVES, COPIES, NUMBERED, Kind, Track, on_track
from workbench.replay.arrivals import LastArrivals
from workbench.replay.collectives import Collectives, matches, table
from workbench.replay.spans import Ints, Spans, closed, durations_ns, last_ns, spans
from workbench.replay.tracks import NESTED, NUMBER, compute_pieces
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Rows
from workbench.views.span_shapes import Rectangles, joined, rectangles

_MESSAGES = tuple(kind for kind in NUMBERED if kind not in COLLECTIVES)

LANES = 3
"""Lanes of a track: the whole track, and its upper and lower half for collectives in flight at the same time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tracks:
    """One rank's part of a timeline; times are nanoseconds. Arrays: ``W`` waits.

    Attributes:
        rank: which rank.
        bars: rectangles; their lane is ``LANES * number of the track + lane of the track``.
        issued_lane: lane of the collective of each wait, -1 if that was issued before the rows, ``[W]``.
        issued_ns: when that was issued; -1 likewise, ``[W]``.
        waited_ns: when the wait began, ``[W]``.
        wait_ns: its duration without holds at a gate, ``[W]``.
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
        part: the rank's rows to draw. Collectives issued before them are left out.
        open_until_ns: end time for drawing running spans.
        last: last arrivals at its collectives; None: unknown.
        copies: for a device's rows, the copies on its streams other than compute.
        host: for a device's rows, the host's rows.
    """
    rows, found, waits = part.rows, table(part), spans(part.rows, (Kind.WAIT,))
    issued = closed(spans(rows, COLLECTIVES), rows)
    lane, place = _lanes(found, issued.end_ns), matches(issued, waits)
    waiting = _waits(waits, rows, np.where(place >= 0, np.append(found.kind, -1)[place], -1))
    parts = [_compute(part, open_until_ns), _collectives(found, lane, issued.end_ns, last), _messages(rows), waiting]
    if copies is not None:
        parts.append(_copies(copies))
    if host is not None:
        handed = _compute(host, last_ns(host.rows))
        parts.append(replace(handed, lane=handed.lane + LANES * NUMBER[Track.HOST]))
    bars = joined(parts)
    goes_on = (bars.ended == 0) & (bars.end_ns >= last_ns(rows))
    bars = replace(bars, end_ns=np.where(goes_on, open_until_ns, bars.end_ns))
    return Tracks(
        rank=part.rank,
        bars=bars[bars.end_ns > bars.begin_ns],
        issued_lane=np.where(place >= 0, np.append(lane, -1)[place], -1),
        issued_ns=np.where(place >= 0, np.append(found.issue_ns, -1)[place], -1),
        waited_ns=waits.begin_ns,
        wait_ns=waiting.duration_ns,
        total_ns=int(durations_ns(rows, rows["t_ns"][:1], np.array([last_ns(rows)]))[0]),
    )


def _compute(part: RankTrace, open_until_ns: int) -> Rectangles:
    found = spans(part.rows, NESTED)
    ends = closed(found, part.rows)
    goes_on = (found.end_seq < 0) & (ends.end_ns >= last_ns(part.rows))
    ends = replace(ends, end_ns=np.where(goes_on, open_until_ns, ends.end_ns))
    owner, begin_ns, end_ns, shown = compute_pieces(ends)
    owner, begin_ns, end_ns = owner[shown], begin_ns[shown], end_ns[shown]
    bars = rectangles(np.zeros_like(owner), found.kind[owner], begin_ns, end_ns, found.unit[owner])
    return replace(bars, num_bytes=found.num_bytes[owner], ended=(found.end_seq[owner] >= 0).astype(np.int64))


def _copies(rows: Rows) -> Rectangles:
    """Return the copies on streams other than compute; running ones are left out."""
    found = spans(rows, COPIES)
    lane = np.full(len(found), LANES * NUMBER[Track.COPIES])
    bars = rectangles(lane, found.kind, found.begin_ns, found.end_ns, found.unit)
    return replace(bars, num_bytes=found.num_bytes)


def _collectives(found: Collectives, lane: Ints, end_ns: Ints, last: LastArrivals | None) -> Rectangles:
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


def _messages(rows: Rows) -> Rectangles:
    """Return what is sent to one other rank, in the upper half of its track, and what is received, in the lower one."""
    found = spans(rows, _MESSAGES)
    lane = LANES * NUMBER[Track.OTHER] + np.where(found.kind == Kind.SEND, 1, 2)
    bars = rectangles(lane, found.kind, found.begin_ns, closed(found, rows).end_ns, found.unit)
    return replace(bars, num_bytes=found.num_bytes, ended=(found.end_seq >= 0).astype(np.int64))


def _waits(found: Spans, rows: Rows, waits_for: Ints) -> Rectangles:
    end_ns = closed(found, rows).end_ns
    lane = np.full(len(found), LANES * NUMBER[Track.WAIT])
    bars = rectangles(lane, found.kind, found.begin_ns, end_ns, found.unit)
    duration_ns = durations_ns(rows, found.begin_ns, end_ns)
    ended = (found.end_seq >= 0).astype(np.int64)
    return replace(bars, waits_for=waits_for, duration_ns=duration_ns, ended=ended)


def _lanes(found: Collectives, end_ns: Ints) -> Ints:
    """Return the lane of each collective: alternating halves of its track while several are in flight, else all."""
    lane = np.zeros(len(found), np.int64)
    for track, number in NUMBER.items():
        mine = np.flatnonzero(np.isin(found.kind, on_track(track)))
        free = np.append(True, found.issue_ns[mine][1:] >= np.maximum.accumulate(end_ns[mine])[:-1])[: len(mine)]
        first = np.flatnonzero(free)
        run = np.cumsum(free) - 1
        alone = np.diff(np.append(first, len(mine))) == 1
        lane[mine] = LANES * number + np.where(alone[run], 0, 1 + (np.arange(len(mine)) - first[run]) % 2)
    return lane
