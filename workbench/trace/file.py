"""Traces on disk: a zip that ``numpy.load`` opens too.

It holds ``trace.json`` (header, and per rank its key frame and lost rows) and one ``rows_<rank>.npy`` per rank.
Nothing in it is ever unpickled.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from numpy.lib import format as npy

from workbench.errors import TraceError
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.header import header_from_dict, header_to_dict, key_frame_from_dict, key_frame_to_dict

_META = "trace.json"
_COMPRESSION = 1  # zlib level; 6 takes four times as long for a tenth less

_NOT_A_TRACE = (
    *(zipfile.BadZipFile, zlib.error, EOFError),  # no zip, or a damaged one
    *(ValueError, KeyError, TypeError),  # a zip with other content
    *(tokenize.TokenError, RuntimeError),  # bytes made to hurt: numpy's header parser, an encrypted or exotic member
)
"""All that zipfile, json and numpy raise for bytes that are not what they claim to be."""


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write ``trace`` to ``path``, whole or not at all: see :func:`whole`.

    Raises:
        OSError: ``path`` cannot be written.
    """
    with whole(path) as file:
        _write(trace, file)


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a file that is at ``path`` when the body is over, with the permissions that the user's umask leaves.

    The file appears whole or not at all: an error leaves an older file at ``path`` as it was.

    Raises:
        OSError: ``path`` cannot be written.
    """
    path = Path(path)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(new, "xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            os.unlink(new)
            raise


def load(path: str | os.PathLike[str]) -> Trace:
    """Return the trace that :func:`save` wrote to ``path``.

    Raises:
        TraceError: the file is no trace, is damaged, or was written by a newer schema.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        return _read(io.BytesIO(data))
    except TraceError as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    except _NOT_A_TRACE as error:
        raise TraceError(f"cannot read {path}: it is not a trace, or it is damaged or cut short") from error


def _write(trace: Trace, file: IO[bytes]) -> None:
    meta = {
        "header": header_to_dict(trace.header),
        "ranks": [{"rank": r.rank, "lost": r.lost, "start": key_frame_to_dict(r.start)} for r in trace.ranks],
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=_COMPRESSION) as archive:
        archive.writestr(_META, json.dumps(meta, indent=1))
        for r in trace.ranks:
            with archive.open(f"rows_{r.rank}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, r.rows, allow_pickle=False)


def _read(file: IO[bytes]) -> Trace:
    with zipfile.ZipFile(file) as archive:
        if _META not in archive.namelist():
            raise TraceError(f"it holds no {_META}, so it is not a trace")
        meta = json.loads(archive.read(_META))
        header = header_from_dict(meta["header"])
        version = meta["header"]["schema_version"]
        return Trace(header, tuple(_read_rank(archive, entry, version) for entry in meta["ranks"]))


def _read_rank(archive: zipfile.ZipFile, entry: dict[str, Any], version: int) -> RankTrace:
    rank = int(entry["rank"])
    member = io.BytesIO(archive.read(f"rows_{rank}.npy"))  # read whole: its checksum is verified before it is parsed
    rows = npy.read_array(member, allow_pickle=False)
    return RankTrace(rank, rows, key_frame_from_dict(entry["start"], version), int(entry["lost"]))
