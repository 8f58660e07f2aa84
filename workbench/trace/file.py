"""Traces on disk: a zip that ``numpy.load`` opens too.

It holds ``trace.json`` (header, and per rank its key frame and lost rows) and one ``rows_<rank>.npy`` per rank. Files
are untrusted: nothing in them is unpickled or evaluated, claimed sizes are checked before unpacking, and a trace must
obey the rules in :mod:`workbench.trace.invariants`.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from workbench.errors import TraceError
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.earlier_steps import MAX_EARLIER_ROWS, NO_STEPS, EarlierSteps
from workbench.trace.header import header_from_dict, header_to_dict, key_frame_from_dict, key_frame_to_dict
from workbench.trace.invariants import check_header, check_rank
from workbench.trace.schema import ROW_DTYPE, Rows

MAX_ROWS = 20_000_000
"""Maximum rows of all ranks together in a file: 1 GB. A notebook keeps a tenth of that."""

MAX_META_BYTES = 32 << 20
"""Maximum bytes of ``trace.json``; parsed, they take up to twenty times as much."""

META = "trace.json"
_EARLIER = "earlier_{}.npy"
_COMPRESSION = 1  # zlib level; 6 takes four times as long for a tenth less
_MAX_CONTENTS_BYTES = 8 << 20  # of the zip's table of contents: 100,000 ranks
_PIECE_BYTES = 1 << 20
_MAX_THREADS = 8
_MAX_ROWS_RATIO, _MAX_META_RATIO = 50, 250  # unpacked bytes to bytes of the file; traces have up to 6 and 40
_SMALL_BYTES = 1 << 20  # always unpacked, whatever the ratio
_NPY_START = struct.Struct("<8sH")
_NPY_MAGIC = npy.magic(1, 0)
_NPY_HEADER = re.compile(
    re.escape(f"{{'descr': {npy.dtype_to_descr(ROW_DTYPE)!r}, 'fortran_order': False, 'shape': (") + r"(\d{1,15}),\), }"
)

_NOT_A_TRACE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, struct.error),  # no zip, or a damaged one
    *(ValueError, KeyError, TypeError, OverflowError),  # a zip with other content
    *(RuntimeError, MemoryError, OSError),  # malicious: endless nesting, encryption, offsets outside the file
)
"""Exceptions that zipfile and json raise for invalid data."""


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write ``trace`` to ``path``.

    The file appears whole or not at all: an error leaves an existing file at ``path`` unchanged.

    Raises:
        TraceError: its header is larger than :func:`load` accepts.
        OSError: ``path`` cannot be written.
    """
    with whole(path) as file:
        _write(trace, file)


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing; rename it to ``path`` when the body ends, delete it when the body raises."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with part.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink()
            raise


def load(path: str | os.PathLike[str]) -> Trace:
    """Return the trace that :func:`save` wrote to ``path``.

    Raises:
        TraceError: the file is not a trace, is damaged, breaks a rule of traces, has more rows than :data:`MAX_ROWS` or
            a larger header than :data:`MAX_META_BYTES`, unpacks to more than a file of its size can hold, or was
            written by another schema.
        OSError: the file cannot be opened.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe would block
        raise TraceError(f"cannot read {path}: it is a pipe, a socket or a device, not a file")
    with Path(path).open("rb") as file:
        try:
            trace, broken = _read(_Pieces(file), os.fstat(file.fileno()).st_size)
        except TraceError as error:
            raise TraceError(f"cannot read {path}: {error}") from error
        except _NOT_A_TRACE as error:
            raise TraceError(f"cannot read {path}: it is not a trace, or it is damaged or truncated") from error
    if broken:
        more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise TraceError(f"cannot read {path}: it is not a valid trace: {broken[0][:300]}{more}")
    return trace


class _Pieces(io.BufferedIOBase):
    """A file with bounded reads: zipfile reads the table of contents at once, whatever length the file claims."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to ``size`` bytes; raise TraceError if there are more than any table of contents has."""
        wanted = _MAX_CONTENTS_BYTES + 1 if size is None or size < 0 else size
        found = self._file.read(min(wanted, _MAX_CONTENTS_BYTES + 1))
        if len(found) > _MAX_CONTENTS_BYTES:
            raise TraceError("its table of contents is too long for a trace")
        return found

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the position."""
        return self._file.tell()

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True


def _write(trace: Trace, file: IO[bytes]) -> None:
    meta = {
        "header": header_to_dict(trace.header),
        "ranks": [
            {"rank": r.rank, "lost": r.lost, "start": key_frame_to_dict(r.start), "earlier": _numbers_of(r.earlier)}
            for r in trace.ranks
        ],
    }
    text = json.dumps(meta, indent=1).encode()
    if len(text) > MAX_META_BYTES:
        raise TraceError(f"the header takes {len(text):,} bytes, more than the limit of {MAX_META_BYTES:,}")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as archive:
        archive.writestr(META, text)
        for r in trace.ranks:
            with archive.open(_member_name(r.rank), "w", force_zip64=True) as member:
                npy.write_array(member, r.rows, version=(1, 0), allow_pickle=False)
            if len(r.earlier.rows):
                with archive.open(_EARLIER.format(r.rank), "w") as member:
                    npy.write_array(member, r.earlier.rows, version=(1, 0), allow_pickle=False)


def _numbers_of(earlier: EarlierSteps) -> list[int]:
    return [earlier.every, earlier.step, earlier.forward_step]


def _member_name(rank: int) -> str:
    return f"rows_{rank}.npy"


def _read(file: io.BufferedIOBase, file_bytes: int) -> tuple[Trace, list[str]]:
    """Return the trace in a file, and a sentence for each rule that it breaks."""
    with zipfile.ZipFile(file) as archive:
        if META not in archive.namelist():
            raise TraceError(f"it is not a trace: it has no {META}")
        meta = json.loads(_unpacked(archive, META, min(MAX_META_BYTES, _MAX_META_RATIO * file_bytes + _SMALL_BYTES)))
        header = header_from_dict(meta["header"])
        entries = [(_rank_number(entry), entry) for entry in meta["ranks"]]
        _weigh(archive, [rank for rank, _ in entries], file_bytes)

        def read(entry: tuple[int, dict[str, Any]]) -> tuple[RankTrace, list[str]]:
            rank_trace = _read_rank(archive, *entry)
            broken = check_rank(header, rank_trace)
            if not broken:
                rank_trace.prepare()
            return rank_trace, broken

        # most of the time is spent in zlib and numpy, which run for several ranks in parallel
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as pool:
            found = list(pool.map(read, entries))
    trace = Trace(header, tuple(rank_trace for rank_trace, _ in found))
    return trace, [*check_header(header), *(sentence for _, broken in found for sentence in broken)]


def _rank_number(entry: dict[str, Any]) -> int:
    for name in ("rank", "lost"):
        if type(entry[name]) is not int or not 0 <= entry[name] < 2**62:
            raise TraceError(f"{name} is {entry[name]!r:.80}, expected a whole number from 0 to 2**62")
    number: int = entry["rank"]
    return number


def _weigh(archive: zipfile.ZipFile, ranks: list[int], file_bytes: int) -> None:
    """Raise if the claimed rows of ``ranks`` exceed the maximum, or what a file of this size can hold."""
    num_bytes = sum(archive.getinfo(_member_name(rank)).file_size for rank in ranks)
    num_rows = num_bytes // ROW_DTYPE.itemsize
    if num_rows > MAX_ROWS:
        raise TraceError(
            f"it claims {num_rows:,} rows, more than the limit of {MAX_ROWS:,}. Export fewer steps, for example: "
            "%fsdp export run.trace --steps 3..5"
        )
    if num_bytes > _MAX_ROWS_RATIO * file_bytes + _SMALL_BYTES:
        raise TraceError(f"it claims {num_rows:,} rows in {file_bytes:,} bytes, which is impossible")


def _read_rank(archive: zipfile.ZipFile, rank: int, entry: dict[str, Any]) -> RankTrace:
    rows = _rows(rank, _unpacked(archive, _member_name(rank), _NPY_START.size + 2**16 + MAX_ROWS * ROW_DTYPE.itemsize))
    earlier = _read_earlier(archive, rank, entry.get("earlier", _numbers_of(NO_STEPS)))
    return RankTrace(rank, rows, key_frame_from_dict(entry["start"]), entry["lost"], earlier)


def _read_earlier(archive: zipfile.ZipFile, rank: int, numbers: list[int]) -> EarlierSteps:
    """Return the earlier steps of a rank; a file of an older version has none."""
    every, step, forward_step = numbers
    if not all(type(each) is int and -1 <= each <= 2**31 for each in numbers) or every < 1:
        raise TraceError(f"rank {rank}: the numbers of its earlier steps are {numbers!r:.80}")
    name = _EARLIER.format(rank)
    rows = np.empty(0, ROW_DTYPE)
    if name in archive.namelist():
        rows = _rows(rank, _unpacked(archive, name, _NPY_START.size + 2**16 + MAX_EARLIER_ROWS * ROW_DTYPE.itemsize))
    return EarlierSteps(rows, every, step, forward_step)


def _rows(rank: int, data: bytes) -> Rows:
    """Return the array of an npy file as written by :func:`save`; numpy's own reader would evaluate the header."""
    magic, length = _NPY_START.unpack_from(data)
    begin = _NPY_START.size + length
    header = data[_NPY_START.size : begin].decode("latin-1").strip()
    found = _NPY_HEADER.fullmatch(header) if magic == _NPY_MAGIC else None
    if found is None:
        raise TraceError(f"rank {rank}: rows must be a 1-D array of ROW_DTYPE, its header is {header[:80]!r}")
    if int(found[1]) * ROW_DTYPE.itemsize != len(data) - begin:
        raise TraceError(f"rank {rank}: its header claims {found[1]} rows, but {len(data) - begin:,} bytes follow")
    return np.frombuffer(data, ROW_DTYPE, offset=begin)


def _unpacked(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """Return a whole member, checksum verified; unpack no more bytes than it claims to hold."""
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise TraceError(f"{name} has an unsupported compression")
    if info.file_size > limit:
        raise TraceError(f"{name} claims {info.file_size:,} bytes, more than the limit of {limit:,}")
    with archive.open(info) as member:
        pieces = list(iter(lambda: member.read(_PIECE_BYTES), b""))
    if sum(map(len, pieces)) != info.file_size:
        raise EOFError(f"{name} is truncated")
    return b"".join(pieces)
