"""The recorded run in a folder: a recording, or dumps of the Flight Recorder."""

from __future__ import annotations

import time
from pathlib import Path

from workbench.errors import TraceError
from workbench.trace.read_recording import Recording, is_recording, read


def recorded_run(folder: Path) -> tuple[Recording, int]:
    """Return the recording in a folder, or that of its dumps, and the time of day at which its ranks are judged.

    Raises:
        TraceError: the folder has neither, or cannot be read.
    """
    try:
        return _recorded(folder)
    except OSError as error:
        raise TraceError(f"cannot read {folder}: {error.strerror}") from error


def _recorded(folder: Path) -> tuple[Recording, int]:
    if not is_recording(folder):
        from workbench.importers.file_formats import dumps_in  # noqa: PLC0415 - many modules
        from workbench.importers.flight_recorder import read as read_dumps  # noqa: PLC0415

        dumps = dumps_in(folder)
        if dumps:
            recording = read_dumps(dumps)  # ranks are judged at the time at which the last dump was written
            written = [rank.last_beat.wall_ns for rank in recording.ranks.values() if rank.last_beat is not None]
            return recording, max(written, default=time.time_ns())
    return read(folder, newest_only=True), time.time_ns()
