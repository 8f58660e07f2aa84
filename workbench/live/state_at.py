"""The cluster at one moment: what every panel shows under the cursor, as plain data.

Key frames are kept, so that a moment late in a long trace costs no more than one at its beginning. Ranks with the same
history up to the same row share one computed state: among many ranks few differ. Times are nanoseconds. A row counts
from its *arrival time*, as for ``%fsdp back``: its own time or that of an earlier row, whichever is later (the end of a
collective may have an earlier time than rows recorded before it). So a moment depends on its time alone, and agrees
with what is drawn over time (:mod:`workbench.live.window_detail`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from workbench.base.text_formats import format_bytes
from workbench.events import BESIDE, MOVES, Category, Edge, Kind, Phase
from workbench.live.messages import Moment, RanksAt
from workbench.live.rank_groups import ALIKE
from workbench.replay import memory, states
from workbench.replay.grouping import label
from workbench.replay.spans import Ints, of_kind
from workbench.replay.units import unit_name
from workbench.reports.cursor import Cursor
from workbench.trace import advance
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, Header, KeyFrame, Rows

EVERY = 16_384
"""Rows between two key frames."""

_BLOCK = 256  # rows whose latest time is kept

_T = TypeVar("_T")
_Kept = tuple[KeyFrame, bytes]  # and a key that is equal for ranks with the same history up to it
_NEAR = 512  # rows searched for an event


class StateAt:
    """Finds the state of all ranks at any moment of a growing trace.

    Args:
        to_us: returns where the view's axis shows a time, for ``Moment.t_us``.
    """

    def __init__(self, to_us: Callable[[int], float] = float) -> None:
        self._to_us = to_us
        self._frames: dict[int, dict[int, _Kept]] = {}  # by rank and seq
        self._shared: dict[int, dict[bytes, KeyFrame]] = {}  # by seq and key of the history
        self._programs: dict[int, dict[int, tuple[int, bytes]]] = {}  # by rank and first row: end and digest
        self._known: dict[int, ArrivalIndex] = {}

    def at(self, trace: Trace, t_ns: int) -> Moment | None:
        """Return all ranks at ``t_ns``, and the last event of any up to then; None if the trace is empty."""
        places = self._places(trace, t_ns)
        if not places:
            return None
        known_ns = {rank: self._known_ns(trace, rank, place) for rank, place in places.items()}
        newest = max(places, key=lambda rank: (known_ns[rank] <= t_ns, known_ns[rank]))  # some ranks may begin later
        return self._told(trace, newest, places[newest], places)

    def at_cursor(self, trace: Trace, cursor: Cursor) -> Moment | None:
        """Return all ranks at ``cursor``, each just after its last row before it; None if the trace is empty."""
        ends = {r.rank: cursor.ends.get(r.rank, r.start.seq) - r.start.seq for r in trace.ranks if len(r.rows)}
        places = {rank: min(max(end, 1), len(trace.rank(rank).rows)) - 1 for rank, end in ends.items()}
        return self._told(trace, min(places), places[min(places)], places) if places else None

    def at_row(self, trace: Trace, rank: int, seq: int) -> Moment | None:
        """Return all ranks at the arrival of row ``seq`` of ``rank``; None if the trace does not have it."""
        found = [r for r in trace.ranks if r.rank == rank and r.start.seq <= seq < r.end_seq]
        if not found:
            return None
        place = seq - found[0].start.seq
        return self._told(trace, rank, place, self._places(trace, self._known_ns(trace, rank, place)))

    def beside(self, trace: Trace, rank: int, seq: int, by: int) -> Moment | None:
        """Return all ranks ``by`` events after row ``seq`` of ``rank``, at most at its first or last event."""
        found = next((r for r in trace.ranks if r.rank == rank and len(r.rows)), None)
        if found is None:
            return None
        place = min(max(seq - found.start.seq, 0), len(found.rows) - 1)
        return self.at_row(trace, rank, found.start.seq + _event_beside(found.rows, place, by))

    def between(self, trace: Trace, rank: int, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """Return the begin and end positions in ``rank`` of the rows that arrived from ``begin_ns`` to ``end_ns``."""
        rank_trace = trace.rank(rank)
        return self._times(rank_trace).count(begin_ns), self._times(rank_trace).count(end_ns)

    def part(self, trace: Trace, rank: int, begin_ns: int, end_ns: int) -> RankTrace:
        """Return the rows that moved bytes or changed a unit from ``begin_ns`` to ``end_ns``.

        Their times are arrival times. An empty row precedes them at ``begin_ns``, or at the rank's first row if that
        is later, so that every series begins with the state at that time.
        """
        rank_trace = trace.rank(rank)
        begin, end = self.between(trace, rank, begin_ns, end_ns)
        rows = rank_trace.rows[begin:end]
        changes = of_kind(rows, (*MOVES, *states.CHANGING_KINDS))
        found = np.concatenate([np.zeros(1, ROW_DTYPE), rows[changes]])
        found["kind"][0], found["unit"][0] = Kind.LOG, -1
        found["t_ns"][0] = max(begin_ns, int(rank_trace.rows["t_ns"][0]))
        found["t_ns"][1:] = np.maximum.accumulate(rows["t_ns"])[changes]  # the rows before arrived by begin_ns
        seq = rank_trace.start.seq + begin
        return RankTrace(rank, found, _advanced(rank_trace, self._frame_before(rank_trace, seq - 1)[0], seq))

    def _places(self, trace: Trace, t_ns: int) -> dict[int, int]:
        """Return each rank's position of the last row that had arrived by ``t_ns``; at least the first row."""
        return {r.rank: max(self._times(r).count(t_ns) - 1, 0) for r in trace.ranks if len(r.rows)}

    def _known_ns(self, trace: Trace, rank: int, place: int) -> int:
        """Return the arrival time of the row at ``place``."""
        return self._times(trace.rank(rank)).at(place)

    def _times(self, rank_trace: RankTrace) -> ArrivalIndex:
        known = self._known.get(rank_trace.rank)
        if known is None or known.rank_trace is not rank_trace:
            known = self._known[rank_trace.rank] = ArrivalIndex(rank_trace, known)
        return known

    def _told(self, trace: Trace, rank: int, place: int, places: dict[int, int]) -> Moment:
        """Return the moment of the row at ``place`` of ``rank``; ``places``: each rank's last row that had arrived."""
        rows = trace.rank(rank).rows
        row = rows[_event_at(rows, place)]
        return Moment(
            t_us=self._to_us(self._known_ns(trace, rank, place)),
            rank=rank,
            seq=int(row["seq"]),
            step=int(row["step"]),
            event=f"rank {rank}: {describe(trace.header, row)}",
            ranks=_folded(self._entries(trace, places, places | {rank: place})),
        )

    def _entries(self, trace: Trace, places: Mapping[int, int], named: Mapping[int, int]) -> list[RanksAt]:
        """Return the ranks, each just after its row in ``places``, those of one history together.

        The row in ``named`` describes what a rank does.
        """
        self._shared = _still_recorded(self._shared, min(rank_trace.start.seq for rank_trace in trace.ranks))
        found: dict[Hashable, RanksAt] = {}
        ranks: dict[Hashable, list[int]] = {}
        for rank, place in places.items():
            rank_trace = trace.rank(rank)
            seq = rank_trace.start.seq + place
            before, past = self._frame_before(rank_trace, seq)
            key = (past, self._program(rank_trace, before.seq), seq, named[rank] - place)
            if key not in found:
                row = rank_trace.rows[_event_at(rank_trace.rows, named[rank])]
                found[key] = _entry(trace.header, row, _advanced(rank_trace, before, seq + 1))
            ranks.setdefault(key, []).append(rank)
        return [replace(entry, ranks=tuple(ranks[key])) for key, entry in found.items()]

    def _frame_before(self, rank_trace: RankTrace, seq: int) -> _Kept:
        """Return the last key frame no later than the state just after row ``seq``, and the key of its history."""
        first = rank_trace.start.seq
        known = self._frames[rank_trace.rank] = _still_recorded(self._frames.get(rank_trace.rank, {}), first)
        wanted = (seq + 1) // EVERY * EVERY
        usable = [at for at in known if first <= at <= wanted]
        frame, past = known[max(usable)] if usable else (rank_trace.start, _past(rank_trace.start))
        while frame.seq < wanted:
            end = frame.seq // EVERY * EVERY + EVERY
            past = hashlib.blake2b(past + self._program(rank_trace, frame.seq), digest_size=16).digest()
            shared = self._shared.setdefault(end, {})
            frame = shared.get(past) or _advanced(rank_trace, frame, end)
            shared[past] = frame
            known[end] = frame, past
        return frame, past

    def _program(self, rank_trace: RankTrace, seq: int) -> bytes:
        """Return a digest of the rows from ``seq`` up to the next key frame; see :func:`_digest`."""
        first, end = rank_trace.start.seq, min(seq // EVERY * EVERY + EVERY, rank_trace.end_seq)
        known = self._programs[rank_trace.rank] = _still_recorded(self._programs.get(rank_trace.rank, {}), first)
        if seq not in known or known[seq][0] != end:
            known[seq] = end, _digest(rank_trace.rows[seq - first : end - first])
        return known[seq][1]


def _entry(header: Header, row: np.void, frame: KeyFrame) -> RanksAt:
    """Return a rank in the state of ``frame``, which ``row`` describes, without its number."""
    found = states.start(frame)
    held = frame.bytes_by_category
    units = tuple(found[unit.index] for unit in header.units)
    doing = describe_with_phase(header, row)
    return RanksAt(ranks=(), label="", doing=doing, units=units, bytes=held, in_use=memory.in_use(held))


def _are_alike(first: RanksAt, second: RanksAt) -> bool:
    near = ALIKE * max(sum(first.bytes), 1)
    return (first.doing, first.units) == (second.doing, second.units) and all(
        abs(a - b) <= near for a, b in zip(first.bytes, second.bytes, strict=True)
    )


def _still_recorded(found: dict[int, _T], first_seq: int) -> dict[int, _T]:
    """Return the entries of rows that the trace still has."""
    return found if min(found, default=first_seq) >= first_seq else {k: v for k, v in found.items() if k >= first_seq}


def _advanced(rank_trace: RankTrace, frame: KeyFrame, seq: int) -> KeyFrame:
    """Return the state just before row ``seq``, from an earlier one."""
    first = rank_trace.start.seq
    return advance(frame, rank_trace.rows[frame.seq - first : seq - first])


def _past(start: KeyFrame) -> bytes:
    """Return a key that is equal for ranks that begin in the same state."""
    units = (sorted(found.items()) for found in (start.unit_states, start.reducing))
    return repr((start.seq, start.bytes_by_category, *units)).encode()


def _digest(rows: Rows) -> bytes:
    """Return a digest that is equal for rows with the same events, units and bytes, whatever their times."""
    found = hashlib.blake2b(digest_size=16)
    for name in ("kind", "edge", "phase", "unit", "category", "num_bytes"):
        found.update(np.ascontiguousarray(rows[name]).data)
    return found.digest()


def _folded(entries: Iterable[RanksAt]) -> tuple[RanksAt, ...]:
    """Return the ranks in groups of the same state, with the bytes of the first of each."""
    groups: list[list[RanksAt]] = []
    for entry in entries:
        place = next((group for group in groups if _are_alike(group[0], entry)), None)
        if place is None:
            groups.append([entry])
        else:
            place.append(entry)
    ranks = [tuple(sorted(rank for entry in group for rank in entry.ranks)) for group in groups]
    return tuple(replace(group[0], ranks=mine, label=label(mine)) for group, mine in zip(groups, ranks, strict=True))


def describe(header: Header, row: np.void) -> str:
    """Describe an event in plain text: ``"all-gather of blocks.2 begins (1.20 MiB)"``."""
    kind = Kind(row["kind"])
    whose = f" {Category(row['category']).words}" if kind in MOVES else ""
    about = f"{whose} {kind.info.of} {unit_name(header, int(row['unit']))}" if row["unit"] >= 0 else whose
    size = f" ({format_bytes(int(row['num_bytes']))})" if row["num_bytes"] > 0 else ""
    return f"{kind.words}{about} {Edge(row['edge']).info.verb}".strip() + size


def describe_with_phase(header: Header, row: np.void) -> str:
    """Describe what a rank does in plain text: ``"forward · all-gather of blocks.2 begins (1.20 MiB)"``.

    The phase is left out where the event implies it: ``"backward of blocks.2 begins"``.
    """
    phase = Phase(row["phase"])
    is_said = phase is Phase.IDLE or phase.info.part == row["kind"]
    return describe(header, row) if is_said else f"{phase.words} · {describe(header, row)}"


def events_up_to(rows: Rows) -> Ints:
    """Return for each row the position of the event that :class:`StateAt` names for it. ``[N]``."""
    here = np.arange(len(rows))
    last = np.maximum.accumulate(np.where(of_kind(rows, BESIDE), -1, here))
    return np.where((last >= 0) & (here - last <= _NEAR), last, here)


def _event_at(rows: Rows, place: int) -> int:
    """Return the position of the last event up to ``place``; ``place`` itself if none is near."""
    first = max(place - _NEAR, 0)
    return first + int(events_up_to(rows[first : place + 1])[-1])


def _event_beside(rows: Rows, place: int, by: int) -> int:
    """Return the position of the event ``by`` events after that at ``place``, at most the first or last one."""
    events = np.flatnonzero(~of_kind(rows, BESIDE))
    if not len(events):
        return place
    here = int(np.searchsorted(events, place, side="right")) - 1
    return int(events[min(max(here + by, 0), len(events) - 1)])


class ArrivalIndex:
    """The arrival times in one state of a rank's trace, in nanoseconds of the rank's clock.

    Args:
        rank_trace: the rank's rows.
        before: index of an earlier state of the same trace; its blocks are reused.
    """

    def __init__(self, rank_trace: RankTrace, before: ArrivalIndex | None = None) -> None:
        self.rank_trace = rank_trace
        self._t_ns: Ints = rank_trace.rows["t_ns"]
        self._first = -(-rank_trace.start.seq // _BLOCK) * _BLOCK  # first row of the first whole block
        self._tops_ns = self._tops(before)
        self._head = min(self._first - rank_trace.start.seq, len(self._t_ns))  # rows before it
        start_ns = self._t_ns[: self._head].max(initial=np.iinfo(np.int64).min)
        self._until_ns = np.maximum.accumulate(np.concatenate([[start_ns], self._tops_ns]))  # before each block

    def _tops(self, before: ArrivalIndex | None) -> Ints:
        """Return the latest time in each whole block."""
        num_blocks = max(self.rank_trace.end_seq // _BLOCK - self._first // _BLOCK, 0)
        known = np.empty(0, np.int64)
        if before is not None and before._first <= self._first:
            known = before._tops_ns[(self._first - before._first) // _BLOCK :][:num_blocks]
        begin = self._first - self.rank_trace.start.seq
        rest = self._t_ns[begin + len(known) * _BLOCK : begin + num_blocks * _BLOCK]
        return np.concatenate([known, rest.reshape(-1, _BLOCK).max(axis=1, initial=np.iinfo(np.int64).min)])

    def count(self, t_ns: int) -> int:
        """Return how many leading rows had arrived by ``t_ns``."""
        block = int(np.searchsorted(self._until_ns, t_ns, side="right"))  # all rows before block - 1 had arrived
        begin = self._head + (block - 1) * _BLOCK if block else 0
        there = self._t_ns[begin : begin + _BLOCK if block else self._head] > t_ns
        return begin + (int(there.argmax()) if there.any() else len(there))

    def at(self, place: int) -> int:
        """Return the arrival time of the row at position ``place``."""
        block = (place - self._head) // _BLOCK
        if block < 0:
            return int(self._t_ns[: place + 1].max())
        begin = self._head + block * _BLOCK
        return max(int(self._until_ns[block]), int(self._t_ns[begin : place + 1].max()))
