"""Reading of recordings (:mod:`workbench.trace.recording`), also while the run still writes, or after it was killed.

A file is read up to its last whole frame: the rank may have been killed while it wrote, or may be writing now. Files
are untrusted: nothing in them is unpickled or evaluated, lengths are bounded, and a rank whose rows break a rule of
traces is left out. However large the files are, only the newest rows are kept, as many as a trace may have.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import numpy as np

from workbench.base.clock import clock_here
from workbench.base.codec import CodecError, decode, defaults
from workbench.errors import TraceError
from workbench.events import Edge, Kind, Unit
from workbench.trace.builder import MAX_ROWS, TraceBuilder
from workbench.trace.columns import RankTrace, Trace, merge
from workbench.trace.crash_text import CRASH_FILE, crash_end
from workbench.trace.earlier_steps import NO_STEPS
from workbench.trace.header import header_from_dict, key_frame_from_dict
from workbench.trace.invariants import MAX_RANKS, check_header, check_rank
from workbench.trace.keyframe import advance
from workbench.trace.newest_rows import NEWEST_FILE, read_newest
from workbench.trace.process_state import ProcessState, process_state
from workbench.trace.recording import (
    HEAD,
    MAGIC,
    MAX_FRAME_BYTES,
    OUTCOME_BYTES,
    RANK_FILE,
    FrameKind,
    Heartbeat,
    RecordingStop,
    RunEnd,
    RunNote,
    RunOutcome,
    RunStart,
    SilentStack,
)
from workbench.trace.row_compression import by_row, to_wire
from workbench.trace.schema import ROW_DTYPE, ClockReading, Header, HostClock, KeyFrame, Rows

_NAME = re.compile(r"rank(\d{1,6})\.(\d{4,9})\.rec")
_T = TypeVar("_T")
_Sign = TypeVar("_Sign", RunStart, Heartbeat)
_MEETINGS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BARRIER)
"""Collectives that end on no rank before they have begun on all."""

ALIVE_NS = 10_000_000_000
"""A process writes every second that it is alive. One that has not for this long is gone, or its host is."""

_MAX_T_NS = 2**62
NEWEST_ROWS = 1_000_000
"""Rows of all ranks together, where only the newest are asked for: read in about a second."""
_MAX_QUIET = 1000
_SHOWN_RANKS = 8
_PART_BYTES = 1 << 18
"""Bytes of compressed rows without a MARK after which they are unpacked: older versions wrote none."""


@dataclass(frozen=True, kw_only=True)
class RecordedRank:
    """One rank's part of a recording's folder.

    Attributes:
        start: how it began.
        header: its last header.
        quiet: stacks from the times without an event, in order.
        last_beat: the last time at which it was alive; None if it never told.
        end: how the program ended, also by a signal that leaves a stack; None: it still runs, or
            was killed.
        stop: where the recording stopped before the program ended, such as at a full disk; None: it did not.
        notes: sentences that the rank wrote for the reader; also among those of the recording.
        is_cut: whether something unreadable follows the last whole frame.
        offset_ns: nanoseconds by which its clock is ahead of that of the trace.
        process: state of its process when the folder was read, if it has not ended and is gone, or wrote nothing for a
            while.
    """

    start: RunStart
    header: Header
    quiet: tuple[SilentStack, ...] = ()
    last_beat: Heartbeat | None = None
    end: RunEnd | None = None
    stop: RecordingStop | None = None
    notes: tuple[str, ...] = ()
    is_cut: bool = False
    offset_ns: int = 0
    process: ProcessState = ""

    @property
    def last_sign(self) -> RunStart | Heartbeat:
        """Its last sign of life before the end."""
        return self.last_beat or self.start


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The content of a recording's folder.

    Attributes:
        trace: of all ranks, on rank 0's clock.
        ranks: what is known of each rank besides, by rank.
        notes: what is missing, as sentences.
    """

    trace: Trace
    ranks: dict[int, RecordedRank] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether the program of every rank has ended, as it wrote itself."""
        return len(self.ranks) == self.trace.header.world_size and all(rank.end for rank in self.ranks.values())

    def is_alive(self, now_ns: int) -> bool:
        """Return whether a rank that has not ended wrote until a moment before ``now_ns``, in time of day."""
        signs = [rank.last_sign for rank in self.ranks.values() if rank.end is None and rank.process != "gone"]
        return any(sign.wall_ns > now_ns - ALIVE_NS for sign in signs)


def is_recording(folder: Path) -> bool:
    """Return whether a folder has a rank's recording."""
    return any(folder.glob("rank*.rec"))


def read(folder: Path, *, newest_only: bool = False) -> Recording:
    """Return the recording in a folder; arguments and errors as for :class:`RecordingReader`."""
    return RecordingReader(folder, newest_only=newest_only).read()


class RecordingReader:
    """Reads the recording in a folder, and later what the run has written since. Thread-safe.

    Offsets of clocks are found when ranks are read first; if a further rank appears, all is read again.

    Args:
        folder: the folder.
        newest_only: read :data:`NEWEST_ROWS`, without the steps before them: enough to say why ranks stand.
    """

    def __init__(self, folder: Path, *, newest_only: bool = False) -> None:
        self._folder, self._newest_only = folder, newest_only
        self._max_rows = min(MAX_ROWS, NEWEST_ROWS) if newest_only else MAX_ROWS
        self._lock = threading.Lock()
        self._trace = Trace.empty()
        self._builder: TraceBuilder | None = None  # None: the trace was read at once
        self._readers: dict[int, _RankReader] = {}
        self._left_out: dict[int, str] = {}  # by rank, why its rows are not shown, or no longer
        self._offsets: dict[int, int] = {}  # by shown rank, nanoseconds by which its clock is ahead
        self._newest: Recording | None = None

    def read(self) -> Recording:
        """Return the recording so far; only what is new is read. The run may write meanwhile, or have been killed.

        Raises:
            TraceError: the folder has no readable recording of any rank.
            OSError: the folder cannot be read.
        """
        with self._lock:
            if self._newest is not None and self._newest.has_ended:
                return self._newest
            self._read_files()
            newly_gone = [reader.rank for reader in self._readers.values() if reader.is_newly_gone()]
            if newly_gone:
                self._read_files()  # their ends may have been written since
            self._newest = self._recording()
            return self._newest

    def _read_files(self) -> None:
        files: dict[int, dict[int, Path]] = {}
        for path in self._folder.iterdir():
            named = _NAME.fullmatch(path.name)
            if named:
                files.setdefault(int(named[1]), {})[int(named[2])] = path
        if not self._follows(files):
            self._read_all(files)

    def _follows(self, files: Mapping[int, Mapping[int, Path]]) -> bool:
        """Add what known ranks have written since; return False if all must be read again."""
        if not self._offsets or files.keys() - self._readers.keys():
            return False
        for rank, parts in files.items():
            reader = self._readers[rank]
            if rank in self._left_out and reader.start is not None:
                continue
            try:
                if not reader.read_files(parts) or (rank not in self._offsets and reader.start is not None):
                    return False
                reader.take_newest(self._folder)
                if rank in self._offsets:
                    self._add(rank, reader.take_trace())
            except _DamagedRowsError:
                return False
        if self._builder is not None:
            self._trace = self._builder.snapshot()
        return True

    def _add(self, rank: int, new: Trace) -> None:
        """Show the new rows of a rank, unless they break a rule."""
        (rank_trace,) = new.ranks
        broken = _broken_rules(new)
        if broken:
            self._left_out[rank] = f"rank {rank} is not followed any further: {broken}"
            return
        if self._builder is None:
            self._builder = TraceBuilder(MAX_ROWS)
            self._builder.update_header(self._trace.header)
            for so_far in self._trace.ranks:
                _append(self._builder, so_far)
        self._builder.update_header(new.header, rank=rank)
        _append(self._builder, _moved(rank_trace, self._offsets[rank]))

    def _read_all(self, files: Mapping[int, Mapping[int, Path]]) -> None:
        """Read all files from their beginning."""
        self._left_out, self._builder, self._readers, found = {}, None, {}, dict[int, Trace]()
        known_units: dict[str, Any] = {}
        for rank in sorted(files):
            options: dict[str, Any] = {"max_rows": self._max_rows // len(files), "newest_only": self._newest_only}
            reader, trace = _read_rank(partial(_RankReader, rank, known_units, **options), files[rank], self._folder)
            self._readers[rank] = reader
            first = next((self._readers[shown] for shown in found), reader)
            broken = reader.broken(first) or _broken_rules(trace)
            if broken:
                self._left_out[rank] = f"rank {rank} is left out: {broken}"
            else:
                found[rank] = trace
        self._offsets = dict.fromkeys(found, 0)
        if not found:
            notes = "; ".join(self._notes())
            raise TraceError(
                f"{self._folder} is a folder without the recording of a rank"
                + (f": {notes}" if notes else f", such as {RANK_FILE.format(rank=0, number=0)}")
            )
        self._trace = aligned(merge(*found.values()), {rank: self._readers[rank].begun for rank in found})
        clocks = self._trace.header.clocks
        self._offsets |= {rank: clock.readings[0].offset_ns for clock in clocks for rank in clock.ranks}

    def _notes(self) -> Iterator[str]:
        """Yield what is missing, as sentences."""
        for rank, reader in self._readers.items():
            yield from reader.notes.values()
            if rank in self._left_out:
                yield self._left_out[rank]
        trimmed = [rank for rank, reader in self._readers.items() if reader.is_trimmed and rank in self._offsets]
        if trimmed:
            part = self._trace.rank(trimmed[0])
            first, every = part.rows["step"], part.earlier.every
            which = f"every {every}th earlier step" if every > 1 else "earlier steps"
            kept = f"; of {which}, times and logged values are kept" if len(part.earlier.rows) else ""
            yield (
                f"at most {self._max_rows:,} events are read: the newest {len(first):,} of each rank are shown, from "
                f"step {int(first[0]) if len(first) else 0} on{kept}"
            )

    def _recording(self) -> Recording:
        shown = {rank: self._readers[rank] for rank in self._offsets}
        notes = [
            *self._notes(),
            *_notes_of_ranks(shown),
            *missing_ranks(shown, next(iter(shown.values())).begun.world_size),
        ]
        later = sorted(self._folder.glob("restart*"))
        notes += [f"the run was restarted: its later part is in {each}" for each in later]
        notes += other_units({rank: reader.header for rank, reader in shown.items()}, self._trace.header)
        ends = {
            rank: reader.end or crash_end(self._folder / CRASH_FILE.format(rank=rank), reader.last_sign)
            for rank, reader in shown.items()
        }
        clock = _WallClock()
        ranks = {
            rank: RecordedRank(
                start=clock.dated(reader.begun, reader.begun),
                header=reader.header,
                quiet=tuple(reader.quiet),
                last_beat=reader.last_beat and clock.dated(reader.last_beat, reader.begun),
                end=ends[rank],
                stop=reader.stop,
                notes=tuple(reader.own_notes),
                is_cut=reader.is_cut,
                offset_ns=self._offsets[rank],
                process="" if ends[rank] is not None else reader.process(),
            )
            for rank, reader in shown.items()
        }
        return Recording(trace=self._trace, ranks=ranks, notes=tuple(notes))


class _WallClock:
    """This machine's time of day, which may have been set while ranks ran: their other clock is never set."""

    def __init__(self) -> None:
        self._since_ns = time.time_ns() - time.monotonic_ns()
        self._clock = clock_here() if sys.platform == "linux" else None  # elsewhere it starts again at each boot

    def dated(self, sign: _Sign, start: RunStart) -> _Sign:
        """Return a sign of life of a rank of this machine with the time of day that the clock now gives it."""
        return replace(sign, wall_ns=self._since_ns + sign.t_ns) if start.clock == self._clock else sign


def _append(builder: TraceBuilder, new: RankTrace) -> None:
    builder.begin(new.rank, new.start, lost=new.lost, earlier=new.earlier)
    builder.append(new.rank, new.rows.tobytes(), key_frame=KeyFrame(seq=new.end_seq))


def _notes_of_ranks(shown: Mapping[int, _RankReader]) -> Iterator[str]:
    """Yield what ranks wrote for the reader, and where their recordings stopped early; equal sentences together."""
    ranks_of: dict[str, list[int]] = {}
    for rank, reader in shown.items():
        for text in reader.own_notes:
            ranks_of.setdefault(text, []).append(rank)
        if reader.stop is not None:
            where = f"at step {reader.stop.step}" if reader.stop.step >= 0 else "before the first step"
            ranks_of.setdefault(f"stopped recording {where}: {reader.stop.reason}", []).append(rank)
    for text, ranks in ranks_of.items():
        yield f"{'rank' if len(ranks) == 1 else 'ranks'} {_listed(ranks)}: {text}"


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return ", ".join(map(str, ranks[:_SHOWN_RANKS])) + more


def other_units(headers: Mapping[int, Header], joined: Header) -> Iterator[str]:
    """Yield a sentence if ranks number different units alike, as the stages of a pipeline do.

    Args:
        headers: of each rank.
        joined: their join, which has one description for each number.
    """
    known = {unit.index: unit for unit in joined.units}
    found = [
        rank
        for rank, header in headers.items()
        for unit in header.units
        if unit.in_use and _fqns(unit) != _fqns(known[unit.index])
    ]
    if found:
        have, ranks = ("has", "rank") if len(set(found)) == 1 else ("have", "ranks")
        listed = ", ".join(map(str, sorted(set(found))))
        yield (
            f"{ranks} {listed} {have} units of other parameters than the rest, as stages of a pipeline do: events of"
            f" {ranks} {listed} are shown under the names of the units that other ranks have in their place"
        )


def _fqns(unit: Unit) -> tuple[str, ...]:
    return tuple(param.fqn for param in unit.params)


class _PackedPart:
    """Rows that follow a known state, compressed until they are needed.

    Args:
        start: the state, or its JSON data.

    Attributes:
        seq: number of the first row.
        end_seq: number of the row after the last; -1: unknown.
        frames: contents of the ROWS, in order.
        num_bytes: of ``frames``.
    """

    def __init__(self, start: KeyFrame | dict[str, Any]) -> None:
        self._start = start
        self.seq: int = start.seq if isinstance(start, KeyFrame) else start["seq"]
        self.end_seq, self.num_bytes = -1, 0
        self.frames: list[bytes] = []

    @property
    def start(self) -> KeyFrame:
        """The state before the rows."""
        if not isinstance(self._start, KeyFrame):
            self._start = key_frame_from_dict(self._start)
        return self._start


def _rows_of(parts: Collection[_PackedPart]) -> Rows:
    """Return the rows of consecutive parts.

    Raises:
        TraceError: they are damaged, do not follow each other, or do not reach to the end of a part.
    """
    # as bytes: numpy would join each field on its own, which is slow
    pieces = [by_row(frame) for frame in (b"", *(frame for part in parts for frame in part.frames))]
    joined = np.empty((sum(map(len, pieces)), ROW_DTYPE.itemsize), np.uint8)
    rows: Rows = np.concatenate(pieces, out=joined).reshape(-1).view(ROW_DTYPE)
    first, *_, last = (*parts, *parts)
    end_seq = first.seq + len(rows)
    if not np.array_equal(rows["seq"], np.arange(first.seq, end_seq)) or last.end_seq not in (-1, end_seq):
        raise TraceError(f"its rows do not continue at row {first.seq}")
    return rows


class _RankReader:
    """Collects the frames of one rank's files.

    Rows between two MARKs are unpacked only if they are among the newest. A file whose rows contradict its marks has to
    be read carefully: each frame is then unpacked as it is read, and the first damaged one ends what is read.

    Args:
        rank: its number, from the names of the files.
        known_units: the units of the rank that was read before, as JSON data and decoded: usually all ranks have them.
        max_rows: number of the newest rows to keep.
        newest_only: whether to leave out the steps before the newest rows.
        is_careful: whether to unpack each frame as it is read.

    Attributes:
        is_trimmed: whether the files have had older rows too.
    """

    def __init__(
        self, rank: int, known_units: dict[str, Any], *, max_rows: int, newest_only: bool, is_careful: bool
    ) -> None:
        self.rank = rank
        self.start: RunStart | None = None
        self.header = Header()
        self.quiet: deque[SilentStack] = deque(maxlen=_MAX_QUIET)
        self.last_beat: Heartbeat | None = None
        self._beat = b""
        self.end: RunEnd | None = None
        self.stop: RecordingStop | None = None
        self.own_notes: dict[str, None] = {}  # sentences of the rank itself, each once
        self.is_cut = self._is_gone = False
        self.notes: dict[str, str] = {}  # by name of a file
        self._number, self._at, self._id = -1, 0, 0  # of the file that is read: its number, what was read, its inode
        self._outcome_at = 0  # in that file; 0: unknown
        self._max_rows, self._known_units, self._is_careful = max_rows, known_units, is_careful
        self._parts = deque([_PackedPart(KeyFrame())])
        self._lost = 0
        self._earlier = None if newest_only else NO_STEPS
        self.is_trimmed = False

    @property
    def begun(self) -> RunStart:
        """How the recording began, of a rank that has a readable file."""
        assert self.start is not None
        return self.start

    @property
    def last_sign(self) -> RunStart | Heartbeat:
        """The last sign of life that the rank wrote."""
        return self.last_beat or self.begun

    def is_newly_gone(self) -> bool:
        """Return whether its process was not known to be gone, and has ended without an end that was read."""
        was_gone, info = self._is_gone, self.header.info_of.get(self.rank)
        if self.end is None and self.start is not None and info is not None:
            self._is_gone = process_state(info, self.start) == "gone"
        return self._is_gone and not was_gone

    def process(self) -> ProcessState:
        """Return the state of its process if it is of this machine, and is gone or wrote nothing for long; else empty.

        A process is gone only if its files were read since.
        """
        if self._is_gone:
            return "gone"
        if time.monotonic_ns() - self.last_sign.t_ns <= ALIVE_NS or self.rank not in self.header.info_of:
            return ""
        return process_state(self.header.info_of[self.rank], self.begun)

    def read_files(self, parts: Mapping[int, Path]) -> bool:
        """Read on in files, by number, each up to the first frame that cannot be read.

        Return False if the file that was read last has been replaced by another one.
        """
        for number, path in sorted(parts.items()):
            if number < self._number:
                continue
            if number > self._number:
                self._number, self._at, self._id, self._outcome_at, self.is_cut = number, 0, 0, 0, False
            try:
                if not self._read_file(path):
                    return False
                self.is_cut = False
                self.notes.pop(path.name, None)
            except FileNotFoundError:  # the run has just deleted it
                continue
            except OSError as error:
                self.notes[path.name] = f"{path.name} cannot be read: {error.strerror}"
            except TraceError as error:
                self.notes[path.name] = f"{path.name} is left out: {error}"
            except _UnreadableFrameError as error:
                self.is_cut = True
                self.notes[path.name] = f"{path.name} {error}"
        return True

    def take_newest(self, folder: Path) -> None:
        """Take the rows that a rank which is gone had not written to its files; none if they break a rule."""
        if self.start is None or self.end is not None or not self._has_gone():
            return
        self._end_part()
        last = self._parts[-1]
        rows = read_newest(folder / NEWEST_FILE.format(rank=self.rank), last.seq, self.header)
        if len(rows) and not check_rank(self.header, RankTrace(self.rank, rows, last.start)):
            self._take_rows(to_wire(rows.tobytes()))

    def _has_gone(self) -> bool:
        """Return whether its process is gone, or, on another machine, has written nothing for long."""
        info = self.header.info_of.get(self.rank)
        is_elsewhere = info is None or not process_state(info, self.begun)
        return self._is_gone or (is_elsewhere and time.time_ns() - self.last_sign.wall_ns > ALIVE_NS)

    def _read_file(self, path: Path) -> bool:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            raise TraceError("it is not a file")
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if self._id not in (0, found.st_ino) or found.st_size < self._at:
                return False
            self._id = found.st_ino
            try:
                self._read(file)
            finally:
                self._take_last_beat()
        return True

    def _take_last_beat(self) -> None:
        if self._beat:
            try:
                self.last_beat = _decoded(Heartbeat, self._beat)
            except TraceError as error:
                raise _UnreadableFrameError(f"has an unreadable sign of life: {error}") from error
            finally:
                self._beat = b""

    def _read(self, file: IO[bytes]) -> None:
        if not self._at:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                is_begun = MAGIC.startswith(magic)
                raise TraceError(
                    f"it {'ends before its first frame' if is_begun else 'does not start like a recording'}"
                )
        if self._outcome_at:  # it was read before, and may have been overwritten
            again = next(_frames(file, self._outcome_at))
            self._take(again[1], again[2])
        for at, kind, content in _frames(file, self._at or len(MAGIC)):
            if kind == FrameKind.OUTCOME:
                self._outcome_at = at
            if kind == FrameKind.START:
                self._take_start(_decoded(RunStart, content))
            elif self.start is None:
                raise TraceError("it does not say how the recording began")
            else:
                try:
                    self._take(kind, content)
                except TraceError as error:
                    raise _UnreadableFrameError(f"is left out from byte {at:,} on: {error}") from error
            self._at = at + HEAD.size + (len(content) or OUTCOME_BYTES * (kind == FrameKind.OUTCOME))

    def _take(self, kind: int, content: bytes) -> None:
        """Take a frame; unknown kinds are of a newer version, and not needed to read the rest."""
        match kind:
            case FrameKind.HEADER:
                self._take_header(_json(content))
            case FrameKind.KEY_FRAME:
                self._take_key_frame(_json(content))
            case FrameKind.MARK:
                self._take_mark(_json(content))
            case FrameKind.ROWS:
                self._take_rows(content)
            case FrameKind.SILENT_STACK:
                self.quiet.append(_decoded(SilentStack, content))
            case FrameKind.HEARTBEAT:
                self._beat = content  # only the last one matters, and there may be many
            case FrameKind.END:
                self.end = _decoded(RunEnd, content)
            case FrameKind.OUTCOME if content:
                outcome = _decoded(RunOutcome, content)
                self.stop, self.end = outcome.stop, outcome.end
            case FrameKind.NOTE:
                self.own_notes[_decoded(RunNote, content).text] = None

    def _take_start(self, start: RunStart) -> None:
        if start.rank != self.rank:
            raise TraceError(f"its name says rank {self.rank}, its content rank {start.rank}")
        if self.start is not None and start != self.start:
            raise TraceError("it is of another run than the files before it")
        if not start.rank < start.world_size <= MAX_RANKS:
            raise TraceError(f"it is of rank {start.rank} of {start.world_size}")
        self.start = start

    def _take_header(self, data: dict[str, Any]) -> None:
        units = data.get("units")
        known = self._known_units.get("units")
        if known is not None and units == known[0]:
            self.header = replace(header_from_dict({**data, "units": []}), units=known[1])
        else:
            self.header = header_from_dict(data)
            self._known_units["units"] = units, self.header.units

    def _take_key_frame(self, data: dict[str, Any]) -> None:
        """Begin again at a key frame that does not continue the rows: the first one, or some were lost before it."""
        self._end_part()
        key_frame, next_seq = key_frame_from_dict(data), self._parts[-1].seq
        if key_frame.seq == next_seq:
            return
        broken = check_rank(self.header, RankTrace(self.rank, np.empty(0, ROW_DTYPE), key_frame))
        if broken or key_frame.seq < next_seq:
            raise TraceError(broken[0] if broken else f"row {key_frame.seq} follows row {next_seq - 1}")
        if next_seq:
            self._lost += key_frame.seq - next_seq
        self._parts = deque([_PackedPart(key_frame)])

    def _take_mark(self, data: dict[str, Any]) -> None:
        seq, last = data.get("seq"), self._parts[-1]
        if type(seq) is not int or (seq <= last.seq if last.frames else seq != last.seq):
            self._raise(TraceError(f"its rows do not end at row {seq}"))
        if last.frames:
            last.end_seq = seq
            self._begin_part(_PackedPart(data))

    def _take_rows(self, content: bytes) -> None:
        part = self._parts[-1]
        part.frames.append(content)
        part.num_bytes += len(content)
        if self._is_careful or part.num_bytes > _PART_BYTES:
            self._end_part()

    def _end_part(self) -> None:
        """Let the rows so far be a part, also without a MARK."""
        last = self._parts[-1]
        if last.frames:
            self._begin_part(_PackedPart(advance(last.start, self._unpacked([last]))))

    def _begin_part(self, part: _PackedPart) -> None:
        """Begin a part; drop the oldest as long as enough rows are left."""
        self._parts.append(part)
        while part.seq - self._parts[1].seq >= self._max_rows:
            old = self._parts.popleft()
            self.is_trimmed = True
            if self._earlier is not None:
                self._earlier = self._earlier.then(self._unpacked([old]))

    def _unpacked(self, parts: Collection[_PackedPart]) -> Rows:
        try:
            return _rows_of(parts)
        except TraceError as error:
            self._parts[-1].frames.clear()
            self._raise(error)

    def _raise(self, error: TraceError) -> NoReturn:
        if self._is_careful:
            raise error
        raise _DamagedRowsError from error

    def take_trace(self) -> Trace:
        """Return the rows since the last call, at most as many of the newest as are to be kept, with the header.

        Raises:
            _DamagedRowsError: some are damaged: read again, carefully.
        """
        first, last = self._parts[0], self._parts[-1]
        rows = self._unpacked(self._parts)
        more = max(len(rows) - self._max_rows, 0)
        start = advance(first.start, rows[:more])
        self.is_trimmed = self.is_trimmed or more > 0
        self._parts = deque([_PackedPart(advance(last.start, rows[last.seq - first.seq :]))])
        earlier = NO_STEPS if self._earlier is None else self._earlier.then(rows[:more])
        self._earlier = None if self._earlier is None else NO_STEPS
        return Trace(self.header, (RankTrace(self.rank, rows[more:], start, self._lost, earlier),))

    def broken(self, other: _RankReader) -> str:
        """Return why this rank cannot be shown, a sentence with a small first letter; empty if it can.

        Args:
            other: a rank that is shown, or this one.
        """
        if self.start is None or other.start is None:
            return "none of its files can be read"
        if self.start.world_size != other.start.world_size:
            return f"it is of a run of {self.start.world_size} ranks, rank {other.rank} of {other.start.world_size}"
        if self.header.world_size != self.start.world_size:
            return f"its header is of a run of {self.header.world_size} ranks, its start of {self.start.world_size}"
        return ""


def _read_rank(
    reader: Callable[..., _RankReader], parts: Mapping[int, Path], folder: Path
) -> tuple[_RankReader, Trace]:
    """Return the reader of a rank that has read its files, and the rows of these."""
    try:
        return _read_whole(reader(is_careful=False), parts, folder)
    except _DamagedRowsError:
        return _read_whole(reader(is_careful=True), parts, folder)


def _read_whole(found: _RankReader, parts: Mapping[int, Path], folder: Path) -> tuple[_RankReader, Trace]:
    found.read_files(parts)
    found.take_newest(folder)
    return found, found.take_trace()


def _broken_rules(trace: Trace) -> str:
    """Return which rule a trace of one rank breaks, a sentence with a small first letter; empty if none."""
    (rank_trace,) = trace.ranks
    if trace.header.clocks:
        return "its header has clocks of several hosts"
    times = rank_trace.rows["t_ns"]
    if len(times) and not 0 <= times.min() <= times.max() < _MAX_T_NS:
        return f"its times are out of range: {times.min()} to {times.max()} ns"
    sentences = [*check_header(trace.header), *check_rank(trace.header, rank_trace)]
    return sentences[0][:300].removeprefix(f"rank {rank_trace.rank}: ") if sentences else ""


class _DamagedRowsError(Exception):
    """Rows that were unpacked later than they were read are damaged."""


class _UnreadableFrameError(Exception):
    """A frame cannot be read; the message follows the name of the file."""


def _frames(file: IO[bytes], at: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield position, kind and content of the frames from byte ``at`` on.

    Raises:
        _UnreadableFrameError: something follows the last whole frame.
    """
    file.seek(at)
    while head := file.read(HEAD.size):
        kind, length, crc = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0, 0)
        content = file.read(min(length, MAX_FRAME_BYTES))
        if len(head) < HEAD.size or (len(content) < length <= MAX_FRAME_BYTES):
            raise _UnreadableFrameError(f"ends within a frame, at byte {at:,}: its rank was about to write it")
        if kind == FrameKind.OUTCOME and length == len(content) == OUTCOME_BYTES and zlib.crc32(content) != crc:
            content = b""  # it is being overwritten, or its rank was killed meanwhile
        elif len(content) < length or zlib.crc32(content) != crc:
            raise _UnreadableFrameError(f"is damaged at byte {at:,}; what follows is left out")
        yield at, kind, content
        at += HEAD.size + length


def _json(content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"a frame is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise TraceError(f"a frame holds a {type(data).__name__}, not an object")
    return data


def _decoded(kind: type[_T], content: bytes) -> _T:
    """Return one of the small frames; fields that an older version did not write have their defaults."""
    try:
        found: _T = decode(kind, {**defaults(kind), **_json(content)}, kind.__name__)
    except CodecError as error:
        raise TraceError(str(error)) from error
    return found


def missing_ranks(found: Collection[int], world: int, what: str = "recording") -> Iterator[str]:
    """Yield a sentence about the ranks of a world that are not ``found``, if there are any."""
    missing = sorted(set(range(world)) - set(found))
    if missing:
        yield f"no readable {what} of {'rank' if len(missing) == 1 else 'ranks'} {_listed(missing)}, of {world} ranks"


def aligned(trace: Trace, starts: Mapping[int, RunStart]) -> Trace:
    """Return a trace with all times on the clock of its lowest rank.

    Args:
        trace: times of each rank are of its own clock.
        starts: how each of its ranks began; ranks with equal ``clock`` share one.
    """
    clocks = _clocks(trace, starts)
    offset_of = {rank: clock.readings[0].offset_ns for clock in clocks for rank in clock.ranks}
    return Trace(
        replace(trace.header, clocks=clocks),
        tuple(_moved(rank_trace, offset_of.get(rank_trace.rank, 0)) for rank_trace in trace.ranks),
    )


def _moved(rank_trace: RankTrace, offset_ns: int) -> RankTrace:
    """Return a rank's rows with the times of a clock that is ``offset_ns`` ahead converted."""
    if not offset_ns:
        return rank_trace
    rows, earlier = rank_trace.rows.copy(), rank_trace.earlier.rows.copy()
    rows["t_ns"] -= offset_ns
    earlier["t_ns"] -= offset_ns
    return replace(rank_trace, rows=rows, earlier=replace(rank_trace.earlier, rows=earlier))


def _clocks(trace: Trace, starts: Mapping[int, RunStart]) -> tuple[HostClock, ...]:
    """Return the clocks other than the lowest rank's: their offsets by the time of day, made possible by collectives.

    The offset by the time of day is as good as the hosts' clocks are set. A collective ends on no rank before it has
    begun on all of them, which bounds the offset from both sides; the time of day is moved into these bounds.
    """
    of_clock: dict[str, list[int]] = {}
    for rank, start in starts.items():
        of_clock.setdefault(start.clock, []).append(rank)
    (first, *_), *others = of_clock.values()
    if not others:
        return ()
    base = _collective_times(trace, first)
    return tuple(_clock(trace, starts, base, first, ranks) for ranks in others)


_Times = tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]
_DAY_ERROR_NS = 1_000_000_000


def _clock(trace: Trace, starts: Mapping[int, RunStart], base_times: _Times, first: int, ranks: list[int]) -> HostClock:
    base, here = starts[first], starts[ranks[0]]
    offset = (here.t_ns - here.wall_ns) - (base.t_ns - base.wall_ns)
    error = _DAY_ERROR_NS
    least, most = _bounds(base_times, [_collective_times(trace, rank) for rank in ranks])
    if least is not None:
        offset = max(offset, least)
    if most is not None:
        offset = min(offset, most)
    if least is not None and most is not None:
        offset = offset if least <= most else (least + most) // 2
        error = max(abs(most - offset), abs(offset - least))
    offset = min(max(offset, -_MAX_T_NS), _MAX_T_NS)
    reading = ClockReading(t_ns=base.t_ns, offset_ns=offset, error_ns=min(error, _MAX_T_NS))
    return HostClock(ranks=tuple(ranks), readings=(reading,))


def _bounds(base: _Times, others: Sequence[_Times]) -> tuple[int | None, int | None]:
    """Return the least and the largest offset of other ranks' clock to the base's that their collectives allow."""
    begins, ends = base
    least = [t_ns - ends[key] for other_begins, _ in others for key, t_ns in other_begins.items() if key in ends]
    most = [t_ns - begins[key] for _, other_ends in others for key, t_ns in other_ends.items() if key in begins]
    return max(least, default=None), min(most, default=None)


def _collective_times(trace: Trace, rank: int) -> _Times:
    """Return the times at which a rank's collectives begin and end, by group and number.

    Empty for a device, whose collectives end later than the host's rows say.
    """
    times: _Times = {}, {}
    if replace(trace.header, ranks=tuple(info for info in trace.header.ranks if info.rank == rank)).is_enqueued:
        return times
    rows = trace.rank(rank).rows
    rows = rows[np.isin(rows["kind"], _MEETINGS)]
    columns = (rows[name].tolist() for name in ("comm_group", "comm_seq", "edge", "t_ns"))
    for group, number, edge, t_ns in zip(*columns, strict=True):
        times[edge == Edge.END][group, number] = t_ns
    return times
