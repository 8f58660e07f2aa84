"""The spans of a rank in a growing trace: the rectangles of the live timeline.

A span is returned once, after it has ended or was aborted; those of a track come in the order they began. Each stretch
of nested compute belongs to the innermost span, as in the static timeline. Arrays: ``N`` spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from workbench.events import COLLECTIVES, RANK_TRACKS, Kind, Track, on_track
from workbench.replay.collectives import first_of, matches
from workbench.replay.device import ClockSource, clock_of, on_device
from workbench.replay.paused_time import Cuts
from workbench.replay.spans import Ints, Spans, closed, end_aborted, spans
from workbench.replay.tracks import NESTED, NUMBER, compute_pieces, is_compute
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Header, KeyFrame, Rows

NUM_TRACKS = len(RANK_TRACKS)
"""Tracks of each drawn rank. A device's copies and its host's track are in the static timeline only."""

SPAN_DTYPE = np.dtype(
    [
        ("track", "u1"),
        ("kind", "u1"),
        ("exposed", "u1"),  # compute waited for it, or it is a wait
        ("unit", "<i2"),  # -1 none or several
        ("count", "<i4"),  # spans merged into it
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("issue_ns", "<i8"),  # of a wait: when its collective was issued; -1 if unknown, and for other kinds
        ("num_bytes", "<i8"),
    ]
)

NO_HEADER = Header()

_READ = (*NESTED, *COLLECTIVES)


_Parts = tuple[NDArray[np.void], NDArray[np.void]]  # ended since the last call, and open


class RankSpans:
    """Reads the spans of one rank, each once.

    Args:
        from_seq: the first row to read; spans begun before it are left out.

    Attributes:
        open: spans that have begun and not ended as of the last row read, of SPAN_DTYPE.
    """

    def __init__(self, from_seq: int = 0) -> None:
        self._from_seq = from_seq  # rows before this one are no longer needed
        self._end_seq = from_seq
        self._last_seq = dict.fromkeys(range(1, NUM_TRACKS), -1)  # BEGIN row of the last span returned
        self._until_ns = np.iinfo(np.int64).min  # compute has been returned up to here
        self.open = np.empty(0, SPAN_DTYPE)

    def take(
        self,
        rank_trace: RankTrace,
        *,
        header: Header = NO_HEADER,
        cuts: Cuts | None = None,
        until_seq: int | None = None,
    ) -> NDArray[np.void]:
        """Return the spans that have ended since the last call, of SPAN_DTYPE.

        Args:
            rank_trace: a later state of the same trace.
            header: header of the trace. If its clock is the devices', spans have device times and are returned once
                the device has reached their end.
            cuts: what is cut out of the time axis; the result has displayed times.
            until_seq: the row before which to stop; None: read all.
        """
        end_seq = until_seq = rank_trace.end_seq if until_seq is None else until_seq
        if until_seq <= self._end_seq:
            return np.empty(0, SPAN_DTYPE)
        first_seq = max(self._from_seq, rank_trace.start.seq)
        rows = rank_trace.rows[first_seq - rank_trace.start.seq : until_seq - rank_trace.start.seq]
        if clock_of(header) is ClockSource.DEVICE:
            rows, end_seq = _of_device(rank_trace, RankTrace(rank_trace.rank, rows, KeyFrame(seq=first_seq)), header)
        rows = rows if cuts is None else cuts.rows(rows)
        every = end_aborted(spans(rows, _READ), rows)  # computed once: this dominates the time
        parts = [self._compute(rows, every), *(self._whole(rows, every, track) for track in self._last_seq)]
        oldest_open = int(every.begin_seq[every.end_seq < 0].min(initial=end_seq))
        self._from_seq, self._end_seq = oldest_open, until_seq
        ended, self.open = (np.concatenate(found) for found in zip(*parts, strict=True))
        return ended

    def _compute(self, rows: Rows, every: Spans) -> _Parts:
        found = _of_kinds(every, NESTED)
        owner, begin_ns, end_ns, shown = compute_pieces(closed(found, rows))
        innermost = np.flatnonzero(found.end_seq < 0)[-1:]
        fresh = begin_ns >= self._until_ns
        goes_on = np.zeros_like(fresh)
        goes_on[-1:] = np.isin(owner[-1:], innermost)
        ended = np.flatnonzero(fresh & ~goes_on)
        self._until_ns = int(end_ns[ended[-1]]) if len(ended) else self._until_ns
        table = _table(found, owner, 0, begin_ns, end_ns)
        if not len(innermost) or innermost[0] in owner[-1:]:
            return table[fresh & ~goes_on & shown], table[goes_on & shown]
        now_ns = found.begin_ns[innermost]  # it began with the last row and owns no time yet
        just_begun = _table(found, innermost, 0, now_ns, now_ns)
        return table[fresh & ~goes_on & shown], just_begun[is_compute(found)[innermost]]

    def _whole(self, rows: Rows, every: Spans, track: int) -> _Parts:
        """Return collectives or waits; unlike compute, these may overlap."""
        found = _of_kinds(every, on_track(RANK_TRACKS[track]))
        mine = np.flatnonzero(found.begin_seq > self._last_seq[track])
        waits_on = np.flatnonzero(found.end_seq[mine] < 0)
        count = int(waits_on[0]) if len(waits_on) else len(mine)  # in the order they began: up to the first open one
        if count:
            self._last_seq[track] = int(found.begin_seq[mine[count - 1]])
        table = _table(found, mine, track, found.begin_ns[mine], closed(found, rows).end_ns[mine])
        if track == NUMBER[Track.WAIT]:
            table["exposed"], table["issue_ns"] = 1, _issued_ns(every, found)[mine]
        else:
            table["exposed"] = _was_waited_for(every, found)[mine]
        return table[:count], table[waits_on]


def _of_device(whole: RankTrace, part: RankTrace, header: Header) -> tuple[Rows, int]:
    """Return a part of a rank's trace at device times, and the first row that the device has not reached."""
    moved = on_device(whole, part, header)
    return (part.rows[:0], part.start.seq) if moved is None else (moved.part.rows, moved.end_seq)


def _table(found: Spans, which: Ints, track: int, begin_ns: Ints, end_ns: Ints) -> NDArray[np.void]:
    table = np.empty(len(which), SPAN_DTYPE)
    table["track"], table["exposed"], table["count"], table["issue_ns"] = track, 0, 1, -1
    table["kind"], table["unit"], table["num_bytes"] = found.kind[which], found.unit[which], found.num_bytes[which]
    table["begin_ns"], table["end_ns"] = begin_ns, end_ns
    return table


def _of_kinds(found: Spans, kinds: Iterable[Kind]) -> Spans:
    """Return the spans of some kinds."""
    wanted = np.zeros(256, np.bool_)  # quicker than np.isin on few spans
    wanted[list(kinds)] = True
    mine = wanted[found.kind]
    return Spans(**{column.name: getattr(found, column.name)[mine] for column in fields(Spans)})


def _issued_ns(every: Spans, waits: Spans) -> Ints:
    """Return when the collective of each wait was issued; -1 if unknown. ``[N]``."""
    issued = _of_kinds(every, COLLECTIVES)
    place = matches(issued, waits)
    return np.where(place >= 0, np.append(issued.begin_ns, -1)[place], -1)


def _was_waited_for(every: Spans, found: Spans) -> NDArray[np.bool_]:
    """Return for each collective whether compute began to wait for it before its end was recorded. ``[N]``."""
    waits = _of_kinds(every, (Kind.WAIT,))
    waited = first_of(matches(found, waits), waits.begin_seq, len(found))
    until = np.where(found.end_seq >= 0, found.end_seq, np.iinfo(np.int64).max)
    begun: NDArray[np.bool_] = (waited >= 0) & (waited < until)
    return begun


def thinned(found: NDArray[np.void], limit: int) -> NDArray[np.void]:
    """Return at most about ``limit`` spans: the narrowest are merged with similar ones; each track stays in order.

    A merged span is as wide as its parts together, so that each colour keeps its share; ``count`` adds them up.
    """
    if len(found) <= limit:
        return found
    width_ns = int(found["end_ns"].max() - found["begin_ns"].min())
    pixel_ns = max(width_ns // max(limit, 1), 1)
    merged = _merged(found, pixel_ns)
    while len(merged) > limit and pixel_ns <= width_ns:
        pixel_ns *= 2
        merged = _merged(merged, pixel_ns)
    merged = merged[np.lexsort((merged["begin_ns"], merged["track"]))]
    one_by_one = np.isin(merged["track"] % NUM_TRACKS, (NUMBER[Track.COMPUTE], NUMBER[Track.WAIT]))
    for track in np.unique(merged["track"][one_by_one]):
        mine = np.flatnonzero(merged["track"] == track)
        merged[mine] = _one_after_the_other(merged[mine])
    return merged


def _one_after_the_other(found: NDArray[np.void]) -> NDArray[np.void]:
    """Delay each span until those before it are over: a thread does one thing at a time."""
    width = found["end_ns"] - found["begin_ns"]
    until = np.cumsum(width)
    late = np.maximum.accumulate(found["begin_ns"] - (until - width))
    found["begin_ns"], found["end_ns"] = late + until - width, late + until
    return found


def _merged(found: NDArray[np.void], pixel_ns: int) -> NDArray[np.void]:
    """Merge the spans that begin in the same pixel, are narrower than a pixel, and share track and kind."""
    pixel = (found["begin_ns"] - found["begin_ns"].min()) // pixel_ns
    wide = np.flatnonzero(found["end_ns"] - found["begin_ns"] >= pixel_ns)
    pixel[wide] = int(pixel.max()) + 1 + np.arange(len(wide))  # wide spans stay separate
    key = (found["track"].astype(np.int64) << 8 | found["kind"]) * (int(pixel.max()) + 1) + pixel
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    there = found[order]
    merged = there[first].copy()
    merged["begin_ns"] = np.minimum.reduceat(there["begin_ns"], first)
    merged["end_ns"] = merged["begin_ns"] + np.add.reduceat(there["end_ns"] - there["begin_ns"], first)
    for name in ("count", "num_bytes"):
        merged[name] = np.add.reduceat(there[name], first)
    merged["exposed"] = np.maximum.reduceat(there["exposed"], first)
    same_unit = np.minimum.reduceat(there["unit"], first) == np.maximum.reduceat(there["unit"], first)
    merged["unit"] = np.where(same_unit, merged["unit"], -1)
    return merged
