"""Recordings on disk: a folder to which every rank of a run appends its rows while it trains.

A rank's recording is a sequence of files, ``rank3.0000.rec``, ``rank3.0001.rec`` ..., each of which can be read without
those before it, so that the oldest can be dropped. A file starts with :data:`MAGIC`; then come frames, each a
:data:`HEAD` and its content. The first frames of a file are a START, a HEADER, a KEY_FRAME and an OUTCOME, which has
space for how the run will end: it is overwritten in place, as a full disk has no space for a new frame.
:mod:`workbench.trace.read_recording` reads them.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Literal

import numpy as np

from workbench.base.codec import encode
from workbench.trace.header import header_to_dict, key_frame_to_dict
from workbench.trace.row_compression import to_wire
from workbench.trace.schema import ROW_DTYPE, Header, KeyFrame

MAGIC = b"workbench recording 1\n"
RANK_FILE = "rank{rank}.{number:04}.rec"
"""Name of a file: rank and number."""

RANK_FILES = "rank{rank}.*.rec"
"""Pattern of the names of a rank's files."""

HEAD = struct.Struct("<BII")
"""Start of a frame: kind, length of its content, CRC-32 of its content."""

MAX_FRAME_BYTES = 32 << 20
"""Maximum bytes of a frame's content: as much as the header of a trace file."""


OUTCOME_BYTES = 4096
"""Bytes of an OUTCOME's content."""

MAX_STOP_REASON = 200
"""Characters of the reason for which a recording stopped."""

MARK_EVERY = 4096
"""Least rows between two MARKs."""


class FrameKind(IntEnum):
    """Content of a frame."""

    # JSON of a RunStart
    START = 1
    # JSON of a Header: all earlier ones are replaced
    HEADER = 2
    # JSON of a KeyFrame: the state before the next row, whose rows before are lost or in earlier files
    KEY_FRAME = 3
    # compressed rows, which continue those before
    ROWS = 4
    # JSON of a SilentStack
    SILENT_STACK = 5
    # JSON of a Heartbeat
    HEARTBEAT = 6
    # JSON of a RunEnd, in recordings without an OUTCOME
    END = 7
    # JSON of a RunOutcome, padded; it replaces that of the file before
    OUTCOME = 8
    # JSON of a RunNote
    NOTE = 9
    # JSON of a KeyFrame: the state after the rows so far; no row before it is missing, so they need not be unpacked
    MARK = 10


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """How a rank's recording began.

    Attributes:
        rank: global rank.
        world_size: ranks of the job.
        clock: identity of the clock of its times (:func:`workbench.base.clock.clock_here`).
        t_ns: time on that clock.
        wall_ns: time of day at ``t_ns``, in nanoseconds since 1970: clocks of several hosts are compared by it.
        program: the script and its arguments.
        processes: identity of the namespace of its process's number; empty if unknown.
    """

    rank: int
    world_size: int
    clock: str
    t_ns: int
    wall_ns: int
    program: tuple[str, ...] = ()
    processes: str = ""


Activity = Literal[
    "",
    "asleep",
    "computing",
    "reading a disk or swapped memory",
    "stopped",
    "without a processor or disk",
    "since its last collective",
]
"""What a thread does that announces no event, in a sentence; empty: unknown. The last one: its stack is not recorded,
only that of the collective."""


@dataclass(frozen=True, kw_only=True)
class SilentStack:
    """The stack of a rank's main thread that has announced no event for a while.

    Attributes:
        t_ns: when the stack was read.
        seq: number of the next event.
        frames: its calls, the innermost last: ``train.py:31 in main: loss.backward()``.
        activity: what the thread does since its last event.
    """

    t_ns: int
    seq: int
    frames: tuple[str, ...]
    activity: Activity = ""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The rank's process was alive at ``t_ns``, ``wall_ns`` in time of day.

    Attributes:
        event_ns: when it had announced its newest event, also one of a step that is not recorded; at most 0.2 s late.
    """

    t_ns: int
    wall_ns: int
    event_ns: int


@dataclass(frozen=True, kw_only=True)
class RunNote:
    """A sentence for the reader of the recording, such as what could not be watched."""

    text: str


AFTER = "; after "
"""In the reason of a :class:`RunEnd`, between an error and the one that was being handled when it was raised."""


TWO_THREADS = "two of its threads issue collectives on one group, in an order that nothing fixes"
"""The begin of a note about them."""

THREAD_ENDED = "its thread"
"""The begin of a note about a thread that an error has ended."""


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How the program ended; a kill leaves no such frame.

    Attributes:
        t_ns: when.
        reason: its error as ``Name: text``, or its exit status; empty for success.
        frames: the calls that raised the error or called ``sys.exit``, the innermost last.
    """

    t_ns: int
    reason: str = ""
    frames: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordingStop:
    """Where the recording stopped while the program went on.

    Attributes:
        t_ns: when.
        step: the newest recorded step; -1: none.
        reason: why, such as ``No space left on device``.
    """

    t_ns: int
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The outcome of a rank: neither ``stop`` nor ``end`` while it runs, and after a kill."""

    stop: RecordingStop | None = None
    end: RunEnd | None = None


class RecordingWriter:
    """Writes the recording of one rank; called from one thread.

    What a failed call had written of a frame is taken back, so the file can be read up to the frame before.

    Args:
        folder: the recording's folder; created if it does not exist.
        start: its first frame.
        header: of the trace, with this rank alone.
        max_bytes: limit of all files of this rank together. The newest file may exceed it, by a frame or by what a
            program writes that announces no events.
        keep: number of the newest steps to keep at least, if they fit; older files are deleted. 0: keep all.

    Raises:
        FileExistsError: the folder has a recording of this rank.
        OSError: the folder or the file cannot be written.
    """

    def __init__(self, folder: Path, start: RunStart, header: Header, max_bytes: int, keep: int = 0) -> None:
        self._folder, self._start, self._header = folder, start, header
        self._max_bytes, self._keep = max_bytes, keep
        self._key_frame = KeyFrame()
        self._files: list[Path] = []
        self._sizes: list[int] = []
        self._first_steps: list[
            int
        ] = []  # of each file: all rows of later steps are in it or after it; -1: no step yet
        self._newest_step = -1
        self._marked_seq = 0  # of the last MARK, or of the KEY_FRAME at the begin of the file
        self._begin_bytes = 0  # of the newest file's first frames
        self._outcome, self._outcome_at = RunOutcome(), 0  # and its place in the newest file
        self._notes: list[bytes] = []
        self._number = 0
        self._fd = -1
        folder.mkdir(parents=True, exist_ok=True)
        taken = next(iter(sorted(folder.glob(RANK_FILES.format(rank=start.rank)))), None)
        if taken is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(taken))
        self._next_file()

    def _next_file(self) -> None:
        path = self._folder / RANK_FILE.format(rank=self._start.rank, number=self._number)
        frames = (
            _json_frame(FrameKind.START, encode(self._start)),
            _json_frame(FrameKind.HEADER, header_to_dict(self._header)),
            _json_frame(FrameKind.KEY_FRAME, key_frame_to_dict(self._key_frame)),
        )
        first = b"".join((MAGIC, *frames))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            self._begin_bytes = _append(fd, b"".join((first, _outcome_frame(self._outcome), *self._notes)), 0)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        self.close()
        self._fd, self._number, self._outcome_at = fd, self._number + 1, len(first)
        self._marked_seq = self._key_frame.seq
        self._files.append(path)
        self._sizes.append(self._begin_bytes)
        self._first_steps.append(-1)

    def _put(self, frame: bytes) -> None:
        self._sizes[-1] = _append(self._fd, frame, self._sizes[-1])

    def write(self, kind: FrameKind, value: SilentStack | Heartbeat) -> None:
        """Append one of the small frames."""
        self._put(_json_frame(kind, encode(value)))

    def note(self, text: str) -> None:
        """Append a sentence for the reader; later files have it too."""
        frame = _json_frame(FrameKind.NOTE, encode(RunNote(text=text)))
        self._notes.append(frame)
        self._put(frame)

    def end(self, end: RunEnd) -> None:
        """Write how the program ended, into the space that was reserved for it."""
        self._overwrite(replace(self._outcome, end=end))

    def stop(self, t_ns: int, reason: str) -> None:
        """Write why the recording stops here, into the space that was reserved for it."""
        stop = RecordingStop(t_ns=t_ns, step=self._newest_step, reason=reason[:MAX_STOP_REASON])
        self._overwrite(replace(self._outcome, stop=stop))

    def _overwrite(self, outcome: RunOutcome) -> None:
        self._outcome = outcome
        fd = os.open(self._files[-1], os.O_WRONLY)  # the other one can only append
        try:
            os.pwrite(fd, _outcome_frame(outcome), self._outcome_at)
        finally:
            os.close(fd)

    def set_header(self, header: Header) -> None:
        """Append a new version of the header."""
        self._header = header
        self._put(_json_frame(FrameKind.HEADER, header_to_dict(header)))

    def append(self, packed: bytes, key_frame: KeyFrame, *, lost: int = 0) -> None:
        """Append packed rows, then begin a new file and delete old ones if the limits say so.

        Args:
            packed: the rows, which refer to the newest header; left out if any were lost before them, as no state leads
                to them.
            key_frame: the state after them.
            lost: rows before them that were overwritten.
        """
        if lost:
            self._put(_json_frame(FrameKind.KEY_FRAME, key_frame_to_dict(key_frame)))
            self._key_frame, self._marked_seq = key_frame, key_frame.seq
        elif packed:
            self._put(_frame(FrameKind.ROWS, to_wire(packed)))
            self._key_frame = key_frame
            if key_frame.seq - self._marked_seq >= MARK_EVERY:
                self._put(_json_frame(FrameKind.MARK, key_frame_to_dict(key_frame)))
                self._marked_seq = key_frame.seq
            newest = int(np.frombuffer(packed, ROW_DTYPE)["step"].max())
            self._newest_step = max(self._newest_step, newest)
            if self._first_steps[-1] < 0:
                self._first_steps[-1] = newest
            self._turn()

    def _turn(self) -> None:
        """Begin a new file if the newest one is large or long enough; delete the oldest ones beyond the limits."""
        first, grown = self._first_steps[-1], self._sizes[-1] - self._begin_bytes
        is_long = self._keep > 0 and 0 <= first <= self._newest_step - max(self._keep // 2, 1)
        if is_long or grown > self._max_bytes // 4:
            self._next_file()
        while len(self._files) > 2 and (sum(self._sizes) > self._max_bytes or self._has_enough_without_first()):
            self._files.pop(0).unlink(missing_ok=True)
            del self._sizes[0], self._first_steps[0]

    def _has_enough_without_first(self) -> bool:
        return self._keep > 0 and 0 <= self._first_steps[1] <= self._newest_step - self._keep

    @property
    def exists(self) -> bool:
        """Whether the recording was not deleted."""
        return bool(self._files)

    def delete(self) -> None:
        """Delete all files of the rank."""
        while self._files:
            self._files.pop().unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _frame(kind: FrameKind, content: bytes) -> bytes:
    if len(content) > MAX_FRAME_BYTES:
        raise OSError(errno.EFBIG, f"a {kind.name} of {len(content):,} bytes is longer than {MAX_FRAME_BYTES:,}")
    return HEAD.pack(kind, len(content), zlib.crc32(content)) + content


def _json_frame(kind: FrameKind, data: object) -> bytes:
    return _frame(kind, json.dumps(data, separators=(",", ":")).encode())


def _outcome_frame(outcome: RunOutcome) -> bytes:
    """Return an OUTCOME, whose length does not depend on its content.

    Of an end that is too long, the outermost calls are left out, then a half of the reason.
    """
    content = json.dumps(encode(outcome), separators=(",", ":")).encode()
    end = outcome.end
    if len(content) > OUTCOME_BYTES and end is not None:
        shorter = {"frames": end.frames[1:]} if end.frames else {"reason": end.reason[: len(end.reason) // 2]}
        return _outcome_frame(replace(outcome, end=replace(end, **shorter)))
    return _frame(FrameKind.OUTCOME, content.ljust(OUTCOME_BYTES))


def _append(fd: int, data: bytes, size: int) -> int:
    """Append all of ``data`` to a file of ``size`` bytes, or nothing; return its new size."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, size)
        raise
    return size + len(data)
