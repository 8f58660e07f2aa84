"""The cluster at one moment: what every panel shows under the cursor, as plain data.

Key frames are kept along the way, so that a moment late in a long trace costs no more than one at its beginning.
Times are nanoseconds of rank 0's clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.replay import memory, states
from workbench.replay.alike import label
from workbench.replay.spans import of_kind
from workbench.replay.units import unit_name
from workbench.session.cursor import NO_EVENTS
from workbench.trace import advance
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Edge, Header, KeyFrame, Kind, Phase, Rows
from workbench.views import theme
from workbench.widgets.alike import ALIKE
from workbench.widgets.feed import offset_ns

EVERY = 16_384
"""Rows between two key frames."""

_NEAR = 512  # rows within which an event is looked for
_EDGES = {Edge.BEGIN: "begins", Edge.END: "ends", Edge.INSTANT: ""}


class Moments:
    """Finds the state of all ranks at any moment of a growing trace."""

    def __init__(self) -> None:
        self._frames: dict[int, dict[int, KeyFrame]] = {}
        self._tops_ns: dict[int, dict[int, int]] = {}  # by rank and first row, the latest time in EVERY rows

    def at(self, trace: Trace, t_ns: int) -> dict[str, Any] | None:
        """Return all ranks at ``t_ns``, and the last event of any up to then; None of an empty trace."""
        places = self._places(trace, t_ns)
        if not places:
            return None
        newest = max(places, key=lambda rank: _time(trace, rank, places[rank]))
        return self._told(trace, newest, places)

    def at_row(self, trace: Trace, rank: int, seq: int) -> dict[str, Any] | None:
        """Return all ranks at the time of row ``seq`` of ``rank``; None if the trace does not have it."""
        found = [r for r in trace.ranks if r.rank == rank and r.start.seq <= seq < r.end_seq]
        if not found:
            return None
        place = seq - found[0].start.seq
        places = self._places(trace, _time(trace, rank, place))
        return self._told(trace, rank, places | {rank: place})

    def beside(self, trace: Trace, rank: int, seq: int, by: int) -> dict[str, Any] | None:
        """Return all ranks ``by`` events after row ``seq`` of ``rank``, or at its last or first one."""
        found = next((r for r in trace.ranks if r.rank == rank and len(r.rows)), None)
        if found is None:
            return None
        place = min(max(seq - found.start.seq, 0), len(found.rows) - 1)
        return self.at_row(trace, rank, found.start.seq + _event_beside(found.rows, place, by))

    def _places(self, trace: Trace, t_ns: int) -> dict[int, int]:
        """Position in each rank of the last row up to ``t_ns``: before its first later one; at least the first row."""
        return {r.rank: self._place(r, t_ns + offset_ns(trace, r.rank)) for r in trace.ranks if len(r.rows)}

    def _place(self, rank_trace: RankTrace, t_ns: int) -> int:
        times, first, begin = rank_trace.rows["t_ns"], rank_trace.start.seq, 0
        tops_ns = self._tops_ns.setdefault(rank_trace.rank, {})
        while begin < len(times):
            seq = first + begin
            there = times[begin : begin + EVERY - seq % EVERY]
            top_ns = tops_ns.get(seq)
            if top_ns is None:
                top_ns = int(there.max())
                if len(there) == EVERY:
                    tops_ns[seq] = top_ns
            if top_ns > t_ns:
                return max(begin + int(np.argmax(there > t_ns)) - 1, 0)
            begin += len(there)
        return len(times) - 1

    def _told(self, trace: Trace, rank: int, places: dict[int, int]) -> dict[str, Any]:
        rows = trace.rank(rank).rows
        row = rows[_event_at(rows, places[rank])]
        entries = [self._entry(trace, trace.rank(r), place) for r, place in places.items()]
        return {
            "t_ns": _time(trace, rank, places[rank]),
            "rank": rank,
            "seq": int(row["seq"]),
            "step": int(row["step"]),
            "event": f"rank {rank}: {describe(trace.header, row)}",
            "ranks": [_shown(group) for group in _folded(entries)],
        }

    def _entry(self, trace: Trace, rank_trace: RankTrace, place: int) -> _Entry:
        frame = self._frame(rank_trace, rank_trace.start.seq + place)
        row = rank_trace.rows[_event_at(rank_trace.rows, place)]
        found = states.start(frame)
        units = tuple(int(found[unit.index]) for unit in trace.header.units)
        phase = "" if row["phase"] == Phase.IDLE else f"{theme.label(Phase(row['phase']))} · "
        doing = f"{phase}{describe(trace.header, row)}"
        return _Entry(rank=rank_trace.rank, doing=doing, units=units, num_bytes=frame.bytes_by_category)

    def _frame(self, rank_trace: RankTrace, seq: int) -> KeyFrame:
        """Return the state just after row ``seq``."""
        first = rank_trace.start.seq
        known = self._frames.setdefault(rank_trace.rank, {})
        wanted = (seq + 1) // EVERY * EVERY
        usable = [at for at in known if first <= at <= wanted]
        frame = known[max(usable)] if usable else rank_trace.start
        while frame.seq + EVERY <= wanted:
            end = frame.seq // EVERY * EVERY + EVERY
            frame = known[end] = advance(frame, rank_trace.rows[frame.seq - first : end - first])
        return advance(frame, rank_trace.rows[frame.seq - first : seq + 1 - first])


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One rank at a moment: what it does, the UnitState of each unit, live bytes by class."""

    rank: int
    doing: str
    units: tuple[int, ...]
    num_bytes: tuple[int, ...]

    def is_like(self, other: _Entry) -> bool:
        near = ALIKE * max(sum(self.num_bytes), 1)
        return (self.doing, self.units) == (other.doing, other.units) and all(
            abs(a - b) <= near for a, b in zip(self.num_bytes, other.num_bytes, strict=True)
        )


def _folded(entries: Iterable[_Entry]) -> list[list[_Entry]]:
    groups: list[list[_Entry]] = []
    for entry in entries:
        place = next((group for group in groups if group[0].is_like(entry)), None)
        if place is None:
            groups.append([entry])
        else:
            place.append(entry)
    return groups


def _shown(group: list[_Entry]) -> dict[str, Any]:
    first = group[0]
    return {
        "ranks": [entry.rank for entry in group],
        "label": label(entry.rank for entry in group),
        "doing": first.doing,
        "units": first.units,
        "bytes": first.num_bytes,
        "in_use": memory.in_use(first.num_bytes),
    }


def describe(header: Header, row: np.void) -> str:
    """Say what an event was, in plain text: ``"all-gather of blocks.2 begins (1.20 MiB)"``."""
    kind = Kind(row["kind"])
    about = f" of {unit_name(header, int(row['unit']))}" if row["unit"] >= 0 else ""
    size = f" ({theme.format_bytes(int(row['num_bytes']))})" if row["num_bytes"] > 0 else ""
    return f"{theme.label(kind)}{about} {_EDGES[Edge(row['edge'])]}".strip() + size


def _time(trace: Trace, rank: int, place: int) -> int:
    return int(trace.rank(rank).rows["t_ns"][place]) - offset_ns(trace, rank)


def _event_at(rows: Rows, place: int) -> int:
    """Position of the last event up to ``place``; ``place`` itself if there is none near."""
    first = max(place - _NEAR, 0)
    events = np.flatnonzero(~of_kind(rows[first : place + 1], NO_EVENTS))
    return first + int(events[-1]) if len(events) else place


def _event_beside(rows: Rows, place: int, by: int) -> int:
    """Position of the event ``by`` events after the one at ``place``; the last or first one if there are fewer."""
    events = np.flatnonzero(~of_kind(rows, NO_EVENTS))
    if not len(events):
        return place
    here = int(np.searchsorted(events, place, side="right")) - 1
    return int(events[min(max(here + by, 0), len(events) - 1)])
