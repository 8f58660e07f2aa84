"""The cluster at one moment: what every panel shows under the cursor, as plain data.

Key frames are kept along the way, so that a moment late in a long trace costs no more than one at its beginning.
Times are nanoseconds of rank 0's clock. A row counts from the time it was *known*: its own, or that of a row before it
if that is later (an arrival may bear an earlier time than what was recorded before it), as for ``%fsdp back``. So a
moment is a time, whatever led to it, and what is drawn over time (:mod:`workbench.widgets.window`) agrees with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from workbench.events import BESIDE, MOVES, Edge, Kind, Phase
from workbench.replay import memory, states
from workbench.replay.alike import label
from workbench.replay.spans import Ints, of_kind
from workbench.replay.units import unit_name
from workbench.reports.cursor import Cursor
from workbench.trace import advance
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, Header, KeyFrame, Rows
from workbench.views import theme
from workbench.widgets.alike import ALIKE
from workbench.widgets.feed import offset_ns

EVERY = 16_384
"""Rows between two key frames."""

_T = TypeVar("_T")
_NEAR = 512  # rows within which an event is looked for


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
        known_ns = {rank: self._known_ns(trace, rank, place) for rank, place in places.items()}
        newest = max(places, key=lambda rank: (known_ns[rank] <= t_ns, known_ns[rank]))  # some may begin later
        return self._told(trace, newest, places[newest], places)

    def at_cursor(self, trace: Trace, cursor: Cursor) -> dict[str, Any] | None:
        """Return all ranks where ``cursor`` cuts them, each just after its last row that is shown; None of no rows."""
        ends = {r.rank: cursor.ends.get(r.rank, r.start.seq) - r.start.seq for r in trace.ranks if len(r.rows)}
        places = {rank: min(max(end, 1), len(trace.rank(rank).rows)) - 1 for rank, end in ends.items()}
        return self._told(trace, min(places), places[min(places)], places) if places else None

    def at_row(self, trace: Trace, rank: int, seq: int) -> dict[str, Any] | None:
        """Return all ranks when row ``seq`` of ``rank`` was known; None if the trace does not have it."""
        found = [r for r in trace.ranks if r.rank == rank and r.start.seq <= seq < r.end_seq]
        if not found:
            return None
        place = seq - found[0].start.seq
        return self._told(trace, rank, place, self._places(trace, self._known_ns(trace, rank, place)))

    def beside(self, trace: Trace, rank: int, seq: int, by: int) -> dict[str, Any] | None:
        """Return all ranks ``by`` events after row ``seq`` of ``rank``, or at its last or first one."""
        found = next((r for r in trace.ranks if r.rank == rank and len(r.rows)), None)
        if found is None:
            return None
        place = min(max(seq - found.start.seq, 0), len(found.rows) - 1)
        return self.at_row(trace, rank, found.start.seq + _event_beside(found.rows, place, by))

    def num_rows(self, trace: Trace, rank: int, begin_ns: int, end_ns: int) -> int:
        """Return how many rows of ``rank`` were known from ``begin_ns`` to ``end_ns``."""
        begin, end = self.between(trace, rank, begin_ns, end_ns)
        return end - begin

    def between(self, trace: Trace, rank: int, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """Return the positions in ``rank`` between which are the rows that were known from ``begin_ns`` to ``end_ns``.

        Both times are on rank 0's clock.
        """
        rank_trace, ahead_ns = trace.rank(rank), offset_ns(trace, rank)
        return self._count(rank_trace, begin_ns + ahead_ns), self._count(rank_trace, end_ns + ahead_ns)

    def part(self, trace: Trace, rank: int, begin_ns: int, end_ns: int) -> RankTrace:
        """Return the rows that moved bytes or changed a unit from ``begin_ns`` to ``end_ns``, both on rank 0's clock.

        Their times are when they were known, on the rank's clock. A row that says nothing stands before them at
        ``begin_ns``, or at the rank's first row if that is later; so the state then is where every series begins.
        """
        rank_trace, ahead_ns = trace.rank(rank), offset_ns(trace, rank)
        begin, end = self.between(trace, rank, begin_ns, end_ns)
        rows = rank_trace.rows[begin:end]
        told = of_kind(rows, (*MOVES, *states.CHANGING_KINDS))
        found = np.concatenate([np.zeros(1, ROW_DTYPE), rows[told]])
        found["kind"][0], found["unit"][0] = Kind.LOG, -1
        found["t_ns"][0] = max(begin_ns + ahead_ns, int(rank_trace.rows["t_ns"][0]))
        found["t_ns"][1:] = np.maximum.accumulate(rows["t_ns"])[told]  # none before them is later than begin_ns
        return RankTrace(rank, found, self._frame(rank_trace, rank_trace.start.seq + begin - 1))

    def _places(self, trace: Trace, t_ns: int) -> dict[int, int]:
        """Position in each rank of the last row up to ``t_ns``: before its first later one; at least the first row."""
        return {r.rank: self._place(r, t_ns + offset_ns(trace, r.rank)) for r in trace.ranks if len(r.rows)}

    def _place(self, rank_trace: RankTrace, t_ns: int) -> int:
        return max(self._count(rank_trace, t_ns) - 1, 0)

    def _count(self, rank_trace: RankTrace, t_ns: int) -> int:
        """How many of its first rows were known at ``t_ns`` of the rank's own clock."""
        for begin, there, top_ns in self._blocks(rank_trace):
            if top_ns > t_ns:
                return begin + int(np.argmax(there > t_ns))
        return len(rank_trace.rows)

    def _known_ns(self, trace: Trace, rank: int, place: int) -> int:
        """When the row at ``place`` was known."""
        rank_trace, known_ns = trace.rank(rank), -(1 << 63)
        for begin, there, top_ns in self._blocks(rank_trace):
            if begin + len(there) > place:
                return max(known_ns, int(there[: place + 1 - begin].max())) - offset_ns(trace, rank)
            known_ns = max(known_ns, top_ns)
        raise IndexError(f"rank {rank} has no row at {place}")

    def _blocks(self, rank_trace: RankTrace) -> Iterator[tuple[int, Ints, int]]:
        """The times of a rank's rows, EVERY at once: position of the first one, times, and the latest of them."""
        times, first, begin = rank_trace.rows["t_ns"], rank_trace.start.seq, 0
        tops_ns = self._tops_ns[rank_trace.rank] = _kept(self._tops_ns.get(rank_trace.rank, {}), first)
        while begin < len(times):
            seq = first + begin
            there = times[begin : begin + EVERY - seq % EVERY]
            top_ns = tops_ns.get(seq)
            if top_ns is None:
                top_ns = int(there.max())
                if len(there) == EVERY:
                    tops_ns[seq] = top_ns
            yield begin, there, top_ns
            begin += len(there)

    def _told(self, trace: Trace, rank: int, place: int, places: dict[int, int]) -> dict[str, Any]:
        """The moment of the row at ``place`` of ``rank``; ``places``: up to where each rank's rows were known then."""
        rows = trace.rank(rank).rows
        row = rows[_event_at(rows, place)]
        entries = [self._entry(trace, trace.rank(r), last, place if r == rank else last) for r, last in places.items()]
        return {
            "t_ns": self._known_ns(trace, rank, place),
            "rank": rank,
            "seq": int(row["seq"]),
            "step": int(row["step"]),
            "event": f"rank {rank}: {describe(trace.header, row)}",
            "ranks": [_shown(group) for group in _folded(entries)],
        }

    def _entry(self, trace: Trace, rank_trace: RankTrace, place: int, named: int) -> _Entry:
        """A rank just after its row at ``place``; what it does is said of the row at ``named``."""
        frame = self._frame(rank_trace, rank_trace.start.seq + place)
        row = rank_trace.rows[_event_at(rank_trace.rows, named)]
        found = states.start(frame)
        units = tuple(int(found[unit.index]) for unit in trace.header.units)
        doing = describe_with_phase(trace.header, row)
        return _Entry(rank=rank_trace.rank, doing=doing, units=units, num_bytes=frame.bytes_by_category)

    def _frame(self, rank_trace: RankTrace, seq: int) -> KeyFrame:
        """Return the state just after row ``seq``."""
        first = rank_trace.start.seq
        known = self._frames[rank_trace.rank] = _kept(self._frames.get(rank_trace.rank, {}), first)
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


def _kept(found: dict[int, _T], first_seq: int) -> dict[int, _T]:
    """What is known of rows that the trace still has."""
    return found if min(found, default=first_seq) >= first_seq else {k: v for k, v in found.items() if k >= first_seq}


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
    return f"{kind.words}{about} {Edge(row['edge']).info.verb}".strip() + size


def describe_with_phase(header: Header, row: np.void) -> str:
    """Say what a rank does, in plain text: ``"forward · all-gather of blocks.2 begins (1.20 MiB)"``."""
    phase = "" if row["phase"] == Phase.IDLE else f"{Phase(row['phase']).words} · "
    return f"{phase}{describe(header, row)}"


def events_up_to(rows: Rows) -> Ints:
    """Return for each row the position of the event that :class:`Moments` names for it. ``[N]``."""
    here = np.arange(len(rows))
    last = np.maximum.accumulate(np.where(of_kind(rows, BESIDE), -1, here))
    return np.where((last >= 0) & (here - last <= _NEAR), last, here)


def _event_at(rows: Rows, place: int) -> int:
    """Position of the last event up to ``place``; ``place`` itself if there is none near."""
    first = max(place - _NEAR, 0)
    events = np.flatnonzero(~of_kind(rows[first : place + 1], BESIDE))
    return first + int(events[-1]) if len(events) else place


def _event_beside(rows: Rows, place: int, by: int) -> int:
    """Position of the event ``by`` events after the one at ``place``; the last or first one if there are fewer."""
    events = np.flatnonzero(~of_kind(rows, BESIDE))
    if not len(events):
        return place
    here = int(np.searchsorted(events, place, side="right")) - 1
    return int(events[min(max(here + by, 0), len(events) - 1)])
