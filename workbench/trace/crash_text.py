"""The text that :mod:`faulthandler` wrote as a signal ended a rank's process, as the end of a recording."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from pathlib import Path

from workbench.base.crash import StackCall, read_crash
from workbench.trace.frames import is_of_a_library
from workbench.trace.recording import Heartbeat, RunEnd, RunStart

CRASH_FILE = "rank{rank}.crash"
"""Name of the file of a rank."""

_HEAD = "main thread 0x{ident:016x}\n"
_MAX_BYTES = 1 << 18
_NOT_SHOWN = re.compile(r"runpy|/workbench/(record|models)/")


def head_of(ident: int) -> str:
    """Return the first line of the file; ``ident`` is that of the main thread."""
    return _HEAD.format(ident=ident)


def crash_end(path: Path, alive: RunStart | Heartbeat) -> RunEnd | None:
    """Return how a signal ended a rank's process; None if none did, or if the file cannot be read.

    Args:
        path: the rank's file, which need not exist.
        alive: the rank's last sign of life; the clock of the day may have been set since an earlier one.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size <= len(head_of(0)):
            return None
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return None
    crash = read_crash(text)
    reason = f"{crash.signal or 'crash'}: {crash.reason[:200]}" if crash.reason else "SIGTERM"
    main = re.match(r"main thread 0x([0-9a-f]+)", text)
    frames = _frames(crash.stacks.get(int(main[1], 16), ())) if main else ()
    if crash.reason and crash.thread in crash.stacks:  # else the signal came to all threads, or to none of Python
        own = _frames(crash.stacks[crash.thread])
        frames = own if not all(map(is_of_a_library, own)) else frames
    t_ns = max(found.st_mtime_ns - alive.wall_ns, 0) + alive.t_ns
    return RunEnd(t_ns=t_ns, reason=reason, frames=frames)


def _frames(calls: Sequence[StackCall]) -> tuple[str, ...]:
    return tuple(
        f"{each.file}:{each.line} in {each.function}" for each in reversed(calls) if not _NOT_SHOWN.search(each.file)
    )
