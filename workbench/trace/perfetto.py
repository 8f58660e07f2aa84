"""A trace as Chrome's trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

There is one process per rank, with the tracks of :class:`workbench.events.Track`. Spans of one track that overlap
without nesting go to further tracks of the same name. Where ranks compute on devices, these tracks show the host, which
enqueues work; below them are the device's tracks, one for each stream and each kind of collective. Arrows lead from
where a collective was issued to where it was waited for, on the host; counters show live bytes and logged numbers, with
host times. All times are in microseconds from the earliest row, on rank 0's clock. If the caller gives a note on the
clock error of a rank, it follows the rank's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.events import COLLECTIVES, MOVES, RANK_TRACKS, Category, Edge, Kind, Phase, on_track, unit_words
from workbench.trace.begin_end import partners
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, Header

Event = dict[str, Any]

_MARKS = frozenset(kind for kind in Kind if kind.info.is_event and not kind.info.is_span)
_COMPUTE_THREAD = 0
_THREADS_PER_TRACK = 1000


def to_perfetto(trace: Trace, notes: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return ``trace`` as data for ``json.dump``.

    A span without an end reaches to the rank's last row and has ``"unfinished": true``. Spans that began before the
    trace's left edge are left out.

    Args:
        trace: the trace.
        notes: by rank, a short note on its times; None: no notes.
    """
    notes = notes or {}
    start_ns = min((int(rank.rows["t_ns"].min()) for rank in trace.ranks if len(rank.rows)), default=0)
    events: list[Event] = []
    for rank in trace.ranks:
        events += _rank_events(_process(trace.header, rank, rank.rows["t_ns"] - start_ns), notes.get(rank.rank, ""))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"producer": trace.header.producer}}


@dataclass(frozen=True)
class _Process:
    """One rank during its conversion to events.

    Attributes:
        columns: the columns of the rank's rows as lists, much faster than arrays to read value by value.
        clock_ns: time of each row since the start of the whole trace, int64 [rows].
        micros: the same in microseconds.
        threads: the thread of each span, by position of its BEGIN row.
    """

    header: Header
    rank: RankTrace
    columns: dict[str, list[Any]]
    clock_ns: NDArray[np.int64]
    micros: list[float]
    threads: dict[int, int] = field(default_factory=dict)

    def event(self, phase: str, name: str, place: int, **more: Any) -> Event:  # noqa: ANN401 - the format's fields
        """Return an event of the format's type ``phase`` at the time of the row at ``place``."""
        return {"ph": phase, "name": name, "pid": self.rank.rank, "ts": self.micros[place], **more}


def _process(header: Header, rank: RankTrace, clock_ns: NDArray[np.int64]) -> _Process:
    columns = {name: rank.rows[name].tolist() for name in ROW_DTYPE.names or ()}
    return _Process(header, rank, columns, clock_ns, (clock_ns / 1000).tolist())


class _Span(NamedTuple):
    """A BEGIN row at ``place`` and its END, in ns since the start of the trace."""

    place: int
    begin_ns: int
    end_ns: int
    is_finished: bool


def _rank_events(process: _Process, note: str) -> Iterator[Event]:
    info = next((i for i in process.header.ranks if i.rank == process.rank.rank), None)
    known = ", ".join([*([info.host, info.device] if info else []), *([note] if note else [])])
    yield _name(process, "process_name", 0, f"rank {process.rank.rank}{known and f' ({known})'}")
    partner = partners(process.rank.rows)
    hosts = "host: " if process.header.is_enqueued else ""
    for place, track in enumerate(RANK_TRACKS):
        found = _spans(process, on_track(track), partner)
        yield from _track(process, hosts + track.value, found, place * _THREADS_PER_TRACK)
    yield from _device(process, partner)
    yield from _arrows(process)
    yield from _memory(process)
    yield from _instants(process)


def _device(process: _Process, partner: NDArray[np.int64]) -> Iterator[Event]:
    """Yield the device's events, one track per stream and per kind of collective; arrows are on the host's tracks."""
    columns, clock, ends = process.columns, process.clock_ns.tolist(), partner.tolist()
    device_rows = np.flatnonzero(process.rank.rows["kind"] == Kind.DEVICE).tolist()
    row_of = {int(columns["value"][row]) - process.rank.start.seq: row for row in device_rows}
    last_ns = max(clock, default=0)
    tracks: dict[str, list[_Span]] = {}
    for place, row in sorted(row_of.items()):
        kind = Kind(columns["kind"][place]) if place >= 0 else Kind.DEVICE
        if kind.info.track is None or columns["edge"][place] != Edge.BEGIN:
            continue
        name = kind.info.track.value if kind.info.is_collective else process.header.strings[columns["module"][row]]
        ended = row_of.get(ends[place])
        end_ns = max(clock[row], last_ns if ended is None else clock[ended])
        tracks.setdefault(name, []).append(_Span(place, clock[row], end_ns, ended is not None))
    apart = replace(process, threads={})
    for number, (name, spans) in enumerate(tracks.items(), start=len(RANK_TRACKS)):
        yield from _track(apart, f"device: {name}", sorted(spans, key=_outer_first), number * _THREADS_PER_TRACK)


def _outer_first(span: _Span) -> tuple[int, int]:
    return span.begin_ns, -span.end_ns


def _name(process: _Process, what: str, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process.rank.rank, "tid": thread, "args": {"name": name}}


def _spans(process: _Process, kinds: Sequence[Kind], partner: NDArray[np.int64]) -> list[_Span]:
    """Return the spans of ``kinds``, outer ones first."""
    rows, clock = process.rank.rows, process.clock_ns
    places = np.flatnonzero(np.isin(rows["kind"], kinds) & (rows["edge"] == Edge.BEGIN))
    is_finished = partner[places] >= 0
    ends = np.where(is_finished, clock[partner[places]], clock.max(initial=0))
    columns = (places, clock[places], ends, is_finished)
    spans = [_Span(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
    return sorted(spans, key=_outer_first)


def _track(process: _Process, name: str, spans: list[_Span], first_thread: int) -> Iterator[Event]:
    """Draw spans on as many threads as needed so that the spans of each thread nest."""
    open_ends: list[list[int]] = []  # per thread, when its open spans end, outermost first
    for span in spans:
        lane = next((n for n, ends in enumerate(open_ends) if _fits(span, ends)), len(open_ends))
        thread = first_thread + lane
        if lane == len(open_ends):
            open_ends.append([])
            yield _name(process, "thread_name", thread, f"{name} {lane + 1}" if lane else name)
            yield {**_name(process, "thread_sort_index", thread, ""), "args": {"sort_index": thread}}
        open_ends[lane].append(span.end_ns)
        process.threads[span.place] = thread
        yield _span_event(process, span, thread)


def _fits(span: _Span, open_ends: list[int]) -> bool:
    """Remove the open spans of a thread that end before ``span``; return whether ``span`` nests into the rest."""
    while open_ends and open_ends[-1] <= span.begin_ns:
        open_ends.pop()
    return not open_ends or span.end_ns <= open_ends[-1]


def _span_event(process: _Process, span: _Span, thread: int) -> Event:
    row = {name: column[span.place] for name, column in process.columns.items()}
    args: dict[str, Any] = {"step": row["step"], "phase": Phase(row["phase"]).words, "seq": row["seq"]}
    if row["num_bytes"]:
        args["bytes"] = row["num_bytes"]
    if not span.is_finished:
        args["unfinished"] = True
    name = f"{Kind(row['kind']).words} {_unit_name(process.header, row['unit'])}".strip()
    duration = (span.end_ns - span.begin_ns) / 1000
    return process.event("X", name, span.place, tid=thread, dur=duration, args=args) | {"ts": span.begin_ns / 1000}


def _arrows(process: _Process) -> Iterator[Event]:
    """Yield the arrows from where a collective was issued to each wait for it."""
    rows = process.rank.rows
    begins = rows["edge"] == Edge.BEGIN
    issued = np.flatnonzero(begins & np.isin(rows["kind"], COLLECTIVES))
    key_of = list(zip(process.columns["comm_group"], process.columns["comm_seq"], strict=True))
    place_of = {key_of[place]: place for place in issued.tolist()}
    for wait in np.flatnonzero(begins & (rows["kind"] == Kind.WAIT)).tolist():
        issue = place_of.get(key_of[wait])
        if issue is not None:
            common = {"cat": "collective", "id": (process.rank.rank << 32) + process.columns["seq"][wait]}
            yield process.event("s", "issued", issue, tid=process.threads[issue], **common)
            yield process.event("f", "issued", wait, tid=process.threads[wait], bp="e", **common)


def _memory(process: _Process) -> Iterator[Event]:
    """Yield counters of live bytes by category, after each row that changes them."""
    category, num_bytes = process.columns["category"], process.columns["num_bytes"]
    moves = np.flatnonzero(np.isin(process.rank.rows["kind"], MOVES)).tolist()
    start = process.rank.start.bytes_by_category
    moved = {category[place] for place in moves}
    live = {c.words: start[c] for c in Category if start[c] or c in moved}
    for place in moves:
        live[Category(category[place]).words] += num_bytes[place]
        yield process.event("C", "live bytes", place, args=dict(live))


def _instants(process: _Process) -> Iterator[Event]:
    """Yield marks for instants and logged texts, and counters for logged numbers."""
    columns = process.columns
    for place, kind in enumerate(columns["kind"]):
        if kind in _MARKS:
            name = f"{Kind(kind).words} {_unit_name(process.header, columns['unit'][place])}".strip()
            yield process.event("i", name, place, tid=_COMPUTE_THREAD, s="t")
        elif kind == Kind.LOG:
            text = process.header.strings[columns["module"][place]]
            yield process.event("i", text, place, tid=_COMPUTE_THREAD, s="p")
        elif kind == Kind.METRIC and math.isfinite(columns["value"][place]):  # JSON has no NaN or infinity
            name = process.header.strings[columns["module"][place]]
            yield process.event("C", name, place, args={"value": columns["value"][place]})
        elif kind == Kind.RESIDENT:
            yield process.event("C", "resident bytes", place, args={"value": columns["num_bytes"][place]})


def _unit_name(header: Header, unit: int) -> str:
    return unit_words(header.units[unit].name) if unit >= 0 else ""
