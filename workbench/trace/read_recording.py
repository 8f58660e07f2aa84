"""Reading of recordings (:mod:`workbench.trace.recording`), also while the run still writes, or after it was killed.

Whatever follows the last whole frame of a file is ignored: the rank may have been killed while it wrote, or may be
writing now. Files are untrusted: nothing in them is unpickled or evaluated, and lengths are checked.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from workbench.codec import CodecError, decode
from workbench.errors import TraceError
from workbench.events import Edge, Kind
from workbench.trace.builder import TraceBuilder
from workbench.trace.columns import Trace
from workbench.trace.file import MAX_META_BYTES
from workbench.trace.header import header_from_dict, key_frame_from_dict
from workbench.trace.keyframe import advance
from workbench.trace.recording import HEAD, MAGIC, RANK_FILE, Beat, End, FrameKind, Quiet, Start
from workbench.trace.row_compression import from_wire
from workbench.trace.schema import ROW_DTYPE, ClockReading, Header, HostClock, KeyFrame, Rows

_NAME = re.compile(r"rank(\d{1,6})\.(\d{4,9})\.rec")
_T = TypeVar("_T")
_MEETINGS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BARRIER)
"""Collectives that end on no rank before they have begun on all."""


@dataclass(frozen=True, kw_only=True)
class RankRecording:
    """What a folder has of one rank.

    Attributes:
        start: how it began.
        header: its last header.
        quiet: the last stack of each silence, in order.
        last_beat: the last time at which it was alive; None if it never told.
        end: how the program ended; None: it was killed, or still runs.
        is_cut: whether something unreadable follows the last whole frame.
        offset_ns: nanoseconds by which its clock is ahead of that of the trace.
    """

    start: Start
    header: Header
    quiet: tuple[Quiet, ...] = ()
    last_beat: Beat | None = None
    end: End | None = None
    is_cut: bool = False
    offset_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a folder has.

    Attributes:
        trace: of all ranks, on rank 0's clock.
        ranks: what is known of each rank besides, by rank.
        notes: what is missing, as sentences.
    """

    trace: Trace
    ranks: dict[int, RankRecording] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read(folder: Path) -> Recording:
    """Return the recording in a folder, also of a run that still writes, or was killed.

    Raises:
        TraceError: the folder has no readable recording of any rank.
        OSError: the folder cannot be read.
    """
    files: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        named = _NAME.fullmatch(path.name)
        if named:
            files.setdefault(int(named[1]), {})[int(named[2])] = path
    found: dict[int, _RankReader] = {}
    notes: list[str] = []
    for rank, parts in sorted(files.items()):
        reader = _RankReader(rank)
        for _, path in sorted(parts.items()):
            try:
                reader.read(path)
            except FileNotFoundError:  # the run has just dropped it
                continue
            except TraceError as error:
                notes.append(f"{path.name} is left out: {error}")
        if reader.start is not None:
            found[rank] = reader
    if not found:
        more = f": {'; '.join(notes)}" if notes else f", such as {RANK_FILE.format(rank=0, number=0)}"
        raise TraceError(f"{folder} is a folder without the recording of a rank{more}")
    notes += [f"the run was restarted: its later part is in {each}" for each in sorted(folder.glob("restart*"))]
    return _joined(found, notes)


class _RankReader:
    """Collects the frames of one rank's files."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.start: Start | None = None
        self.header = Header()
        self.first = KeyFrame()  # the state before the rows
        self.pieces: list[bytes] = []
        self.next_seq = 0
        self.quiet: list[Quiet] = []
        self.last_beat: Beat | None = None
        self.end: End | None = None
        self.is_cut = False

    def read(self, path: Path) -> None:
        """Read a file up to its last whole frame."""
        with path.open("rb") as file:
            data = file.read()
        if not data.startswith(MAGIC):
            raise TraceError("it does not start as a recording does")
        self.is_cut = False
        for kind, content in self._frames(data):
            self._take(kind, content)

    def _frames(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        at = len(MAGIC)
        while at < len(data):
            if len(data) - at < HEAD.size:
                break
            kind, length, crc = HEAD.unpack_from(data, at)
            content = data[at + HEAD.size : at + HEAD.size + length]
            if length > MAX_META_BYTES or len(content) < length or zlib.crc32(content) != crc:
                break
            yield kind, content
            at += HEAD.size + length
        self.is_cut = at < len(data)

    def _take(self, kind: int, content: bytes) -> None:
        match kind:
            case FrameKind.START:
                self._take_start(_decoded(Start, content))
            case FrameKind.HEADER:
                self.header = header_from_dict(_json(content))
            case FrameKind.KEY_FRAME:
                key_frame = key_frame_from_dict(_json(content))
                if key_frame.seq != self.next_seq:  # the first file that is left, or rows were lost
                    self.first, self.pieces, self.next_seq = key_frame, [], key_frame.seq
            case FrameKind.ROWS:
                packed = from_wire(content)
                self.pieces.append(packed)
                self.next_seq += len(packed) // ROW_DTYPE.itemsize
            case _:
                self._take_note(kind, content)

    def _take_start(self, start: Start) -> None:
        if start.rank != self.rank:
            raise TraceError(f"its name says rank {self.rank}, its content rank {start.rank}")
        if self.start is not None and start != self.start:
            raise TraceError("it is of another run than the files before it")
        self.start = start

    def _take_note(self, kind: int, content: bytes) -> None:
        """Take a frame about the process; other kinds are of a newer version, and not needed to read the rest."""
        match kind:
            case FrameKind.QUIET:
                self.quiet.append(_decoded(Quiet, content))
            case FrameKind.BEAT:
                self.last_beat = _decoded(Beat, content)
            case FrameKind.END:
                self.end = _decoded(End, content)

    def rows(self) -> Rows:
        """Return the rows since :attr:`first`."""
        return np.frombuffer(b"".join(self.pieces), ROW_DTYPE)


def _json(content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"a frame is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise TraceError(f"a frame holds a {type(data).__name__}, not an object")
    return data


def _decoded(kind: type[_T], content: bytes) -> _T:
    try:
        found: _T = decode(kind, _json(content), kind.__name__.lower())
    except CodecError as error:
        raise TraceError(str(error)) from error
    return found


def _joined(found: dict[int, _RankReader], notes: list[str]) -> Recording:
    """Return one recording of all ranks, with times on the clock of the lowest one."""
    clocks = _clocks(found)
    builder = TraceBuilder()
    offset_of = {rank: clock.readings[0].offset_ns for clock in clocks for rank in clock.ranks}
    for rank, reader in found.items():
        builder.update_header(reader.header, rank=rank)
        start, rows = reader.first, reader.rows()
        if rank in offset_of:
            rows = rows.copy()
            rows["t_ns"] -= offset_of[rank]
        if start.seq:
            builder.append(rank, b"", lost=start.seq, key_frame=start)
        builder.append(rank, rows.tobytes(), key_frame=advance(start, rows))
    builder.set_clocks(clocks)
    world = max(reader.start.world_size for reader in found.values() if reader.start is not None)
    missing = sorted(set(range(world)) - found.keys())
    if missing:
        notes.append(f"nothing of {'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} of {world}")
    notes += [f"rank {rank}: the end of its file cannot be read" for rank, reader in found.items() if reader.is_cut]
    ranks = {
        rank: RankRecording(
            start=reader.start,
            header=reader.header,
            quiet=tuple(reader.quiet),
            last_beat=reader.last_beat,
            end=reader.end,
            is_cut=reader.is_cut,
            offset_ns=offset_of.get(rank, 0),
        )
        for rank, reader in found.items()
        if reader.start is not None
    }
    return Recording(trace=builder.snapshot(), ranks=ranks, notes=tuple(notes))


def _clocks(found: dict[int, _RankReader]) -> tuple[HostClock, ...]:
    """Return the clocks other than the lowest rank's: their offsets by the time of day, made possible by collectives.

    The offset by the time of day is as good as the hosts' clocks are set. A collective ends on no rank before it has
    begun on all of them, which bounds the offset from both sides; the time of day is moved into these bounds.
    """
    of_clock: dict[str, list[int]] = {}
    for rank, reader in found.items():
        if reader.start is not None:
            of_clock.setdefault(reader.start.clock, []).append(rank)
    (first, *_), *others = of_clock.values()
    return tuple(_clock(found, first, ranks) for ranks in others)


def _clock(found: dict[int, _RankReader], first: int, ranks: list[int]) -> HostClock:
    base, here = found[first].start, found[ranks[0]].start
    if base is None or here is None:
        raise TraceError(f"rank {first if base is None else ranks[0]} has no start")
    by_day = (here.t_ns - here.wall_ns) - (base.t_ns - base.wall_ns)
    least, most = _bounds(found[first], [found[rank] for rank in ranks])
    offset = min(max(by_day, least), most) if least <= most else (least + most) // 2
    error = max(abs(most - offset), abs(offset - least)) if most - least < _UNKNOWN_NS else _DAY_ERROR_NS
    return HostClock(ranks=tuple(ranks), readings=(ClockReading(t_ns=base.t_ns, offset_ns=offset, error_ns=error),))


_UNKNOWN_NS = 2**62
_DAY_ERROR_NS = 1_000_000_000


def _bounds(base: _RankReader, others: Sequence[_RankReader]) -> tuple[int, int]:
    """Return the least and the largest offset of other ranks' clock to the base's that their collectives allow."""
    begins, ends = _collective_times(base)
    least, most = -_UNKNOWN_NS // 2, _UNKNOWN_NS // 2
    for other in others:
        other_begins, other_ends = _collective_times(other)
        most = min([most, *(other_ends[key] - t_ns for key, t_ns in begins.items() if key in other_ends)])
        least = max([least, *(t_ns - ends[key] for key, t_ns in other_begins.items() if key in ends)])
    return least, most


def _collective_times(reader: _RankReader) -> tuple[dict[tuple[Any, int], int], dict[tuple[Any, int], int]]:
    """Return the times at which a rank's collectives begin and end, by group and number."""
    rows = reader.rows()
    rows = rows[np.isin(rows["kind"], _MEETINGS) & (rows["comm_group"] >= 0)]
    groups = reader.header.comm_groups
    times: tuple[dict[tuple[Any, int], int], dict[tuple[Any, int], int]] = {}, {}
    for group, number, edge, t_ns in zip(
        *(rows[name].tolist() for name in ("comm_group", "comm_seq", "edge", "t_ns")), strict=True
    ):
        if edge in (Edge.BEGIN, Edge.END):
            times[edge == Edge.END][groups[group], number] = t_ns
    return times
