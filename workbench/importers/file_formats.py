"""Recognition of the tool that wrote a file, by its content, and the opening of such files."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from workbench.errors import TraceError
from workbench.importers import flight_recorder, kineto
from workbench.importers.flight_recorder import PICKLE
from workbench.importers.json_stream import DAMAGED, unpacked
from workbench.trace.columns import Trace

_HEAD_BYTES = 1 << 16
_ZIP = b"PK"


class FileFormat(Enum):
    """Format of a file of another tool; the value is its display text."""

    KINETO = "profiles of torch.profiler"
    FLIGHT_RECORDER = "dumps of the Flight Recorder"
    # JSON, or compressed, and neither of the above
    UNKNOWN = "other JSON"


def format_of(path: Path) -> FileFormat | None:
    """Return the format of a file; None if it is a trace of the workbench, or of no format that is read here.

    Raises:
        OSError: the file cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
        return None
    with path.open("rb") as raw:
        try:
            head = unpacked(raw).read1(_HEAD_BYTES)
        except DAMAGED:
            return FileFormat.UNKNOWN
    if head.startswith(PICKLE):
        return FileFormat.FLIGHT_RECORDER
    if head.startswith(_ZIP) or head.lstrip()[:1] not in (b"{", b"["):
        return None
    if b'"traceEvents"' in head:
        return FileFormat.KINETO
    return FileFormat.FLIGHT_RECORDER if b'"entries"' in head else FileFormat.UNKNOWN


def is_foreign(path: Path) -> bool:
    """Return whether a file is to be read here, and not as a trace of the workbench."""
    return format_of(path) is not None


def in_folder(folder: Path) -> dict[FileFormat, list[Path]]:
    """Return the files of other tools in a folder, by format, without those of unknown format."""
    found: dict[FileFormat, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        known = format_of(path)
        if known not in (None, FileFormat.UNKNOWN):
            found.setdefault(known, []).append(path)
    return found


def dumps_in(folder: Path) -> list[Path]:
    """Return the dumps of the Flight Recorder in a folder.

    Raises:
        OSError: the folder cannot be read.
    """
    return in_folder(folder).get(FileFormat.FLIGHT_RECORDER, [])


def read(files: dict[FileFormat, list[Path]]) -> tuple[Trace, tuple[str, ...]]:
    """Return the trace in files of other tools, and what it lacks, as sentences.

    Args:
        files: at least one; of several formats, profiles are read.

    Raises:
        TraceError: a file is damaged, too long, or of no known format.
        OSError: a file cannot be read.
    """
    profiles = files.get(FileFormat.KINETO, []) + files.get(FileFormat.UNKNOWN, [])
    dumps = files.get(FileFormat.FLIGHT_RECORDER, [])
    if not profiles:
        recording = flight_recorder.read(dumps)
        return recording.trace, recording.notes
    trace, notes = kineto.read(profiles)
    if dumps:
        notes = (*notes, f"{_counted(dumps)} beside the profiles: open them by their names, {dumps[0].name}")
    return trace, notes


def _counted(dumps: Sequence[Path]) -> str:
    is_one = len(dumps) == 1
    return f"{len(dumps)} {'dump' if is_one else 'dumps'} of the Flight Recorder {'is' if is_one else 'are'}"


def sorted_by_format(paths: Sequence[Path]) -> dict[FileFormat, list[Path]]:
    """Return files by format.

    Raises:
        TraceError: one is a trace of the workbench, or no JSON.
        OSError: one cannot be read.
    """
    found: dict[FileFormat, list[Path]] = {}
    for path in paths:
        known = format_of(path)
        if known is None:
            raise TraceError(f"{path} is no profile of torch.profiler and no dump of the Flight Recorder")
        found.setdefault(known, []).append(path)
    return found
