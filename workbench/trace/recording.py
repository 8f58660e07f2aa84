"""Recordings on disk: a folder to which every rank of a run appends its rows while it trains.

A rank's recording is a sequence of files, ``rank3.0000.rec``, ``rank3.0001.rec`` ..., each of which can be read without
those before it, so that the oldest can be dropped. A file starts with :data:`MAGIC`; then come frames, each a
:data:`HEAD` and its content. The first frames of a file are a START, a HEADER and a KEY_FRAME.
:mod:`workbench.trace.read_recording` reads them.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from workbench.codec import encode
from workbench.trace.header import header_to_dict, key_frame_to_dict
from workbench.trace.row_compression import to_wire
from workbench.trace.schema import ROW_DTYPE, Header, KeyFrame

MAGIC = b"workbench recording 1\n"
RANK_FILE = "rank{rank}.{number:04}.rec"
"""Name of a file: rank and number."""

HEAD = struct.Struct("<BII")
"""Start of a frame: kind, length of its content, CRC-32 of its content."""


class FrameKind(IntEnum):
    """Content of a frame."""

    # JSON of a Start
    START = 1
    # JSON of a Header: all earlier ones are replaced
    HEADER = 2
    # JSON of a KeyFrame: the state before the next row, whose rows before are lost or in earlier files
    KEY_FRAME = 3
    # compressed rows, which continue those before
    ROWS = 4
    # JSON of a Quiet
    QUIET = 5
    # JSON of a Beat
    BEAT = 6
    # JSON of an End
    END = 7


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a rank's recording began.

    Attributes:
        rank: global rank.
        world_size: ranks of the job.
        clock: identity of the clock of its times (:func:`workbench.clock.clock_here`).
        t_ns: time on that clock.
        wall_ns: time of day at ``t_ns``, in nanoseconds since 1970: clocks of several hosts are compared by it.
        program: the script and its arguments.
    """

    rank: int
    world_size: int
    clock: str
    t_ns: int
    wall_ns: int
    program: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """The stack of a rank's main thread that has announced no event for a while.

    Attributes:
        t_ns: when the stack was read.
        seq: number of the next event.
        frames: its calls, the innermost last: ``train.py:31 in main: loss.backward()``.
    """

    t_ns: int
    seq: int
    frames: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The rank's process was alive at ``t_ns``, ``wall_ns`` in time of day."""

    t_ns: int
    wall_ns: int


@dataclass(frozen=True, kw_only=True)
class End:
    """How the program ended: ``reason`` is empty for success; a kill leaves no such frame."""

    t_ns: int
    reason: str = ""


class RecordingWriter:
    """Writes the recording of one rank; called from one thread.

    Args:
        folder: the recording's folder; created if it does not exist.
        start: its first frame.
        header: of the trace, with this rank alone.
        max_bytes: limit of all files of this rank together.
        keep: number of the newest steps to keep at least, if they fit; older files are deleted. 0: keep all.

    Raises:
        FileExistsError: the folder has a recording of this rank.
        OSError: the folder or the file cannot be written.
    """

    def __init__(self, folder: Path, start: Start, header: Header, max_bytes: int, keep: int = 0) -> None:
        self._folder, self._start, self._header = folder, start, header
        self._max_bytes, self._keep = max_bytes, keep
        self._key_frame = KeyFrame()
        self._files: list[Path] = []
        self._sizes: list[int] = []
        self._first_steps: list[int] = []
        self._number = 0
        self._fd = -1
        folder.mkdir(parents=True, exist_ok=True)
        taken = next(iter(sorted(folder.glob(f"rank{start.rank}.*.rec"))), None)
        if taken is not None:
            raise FileExistsError(str(taken))
        self._next_file()

    def _next_file(self) -> None:
        path = self._folder / RANK_FILE.format(rank=self._start.rank, number=self._number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._number = fd, self._number + 1
        self._files.append(path)
        self._sizes.append(0)
        self._first_steps.append(-1)
        self._put(MAGIC)
        self.write(FrameKind.START, self._start)
        self._write_json(FrameKind.HEADER, header_to_dict(self._header))
        self._write_json(FrameKind.KEY_FRAME, key_frame_to_dict(self._key_frame))

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._sizes[-1] += written
            view = view[written:]

    def _frame(self, kind: FrameKind, content: bytes) -> None:
        self._put(HEAD.pack(kind, len(content), zlib.crc32(content)) + content)

    def _write_json(self, kind: FrameKind, data: object) -> None:
        self._frame(kind, json.dumps(data, separators=(",", ":")).encode())

    def write(self, kind: FrameKind, value: Start | Quiet | Beat | End) -> None:
        """Append one of the small frames."""
        self._write_json(kind, encode(value))

    def set_header(self, header: Header) -> None:
        """Append a new version of the header."""
        self._header = header
        self._write_json(FrameKind.HEADER, header_to_dict(header))

    def append(self, packed: bytes, key_frame: KeyFrame, *, lost: int = 0) -> None:
        """Append packed rows; ``key_frame`` is the state after them, and ``lost`` rows before them were overwritten."""
        if lost:  # the rows do not continue those before: start again after them
            self._key_frame = key_frame
            self._write_json(FrameKind.KEY_FRAME, key_frame_to_dict(key_frame))
        elif packed:
            self._frame(FrameKind.ROWS, to_wire(packed))
            self._key_frame = key_frame
            if self._first_steps[-1] < 0:
                self._first_steps[-1] = int(np.frombuffer(packed, ROW_DTYPE)["step"].max())

    def turn(self, step: int) -> None:
        """Begin a new file if the current one is large or long enough; delete the oldest ones beyond the limits.

        Args:
            step: the current step, -1 outside.
        """
        first = self._first_steps[-1]
        is_long = self._keep > 0 and 0 <= first <= step - max(self._keep // 2, 1)
        if is_long or self._sizes[-1] > self._max_bytes // 4:
            self._next_file()
        while len(self._files) > 2 and (sum(self._sizes) > self._max_bytes or self._has_enough_without_first(step)):
            self._files.pop(0).unlink(missing_ok=True)
            del self._sizes[0], self._first_steps[0]

    def _has_enough_without_first(self, step: int) -> bool:
        return self._keep > 0 and 0 <= self._first_steps[1] <= step - self._keep

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
