"""The text that :mod:`faulthandler` wrote as a signal ended a rank's process, as the end of a recording."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from workbench.trace.recording import Heartbeat, RunEnd, RunStart

CRASH_FILE = "rank{rank}.crash"
"""Name of the file of a rank."""

_HEAD = "main thread 0x{ident:016x}\n"
_MAX_BYTES = 1 << 18
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?: {2}[^\n]*\n?)*)", re.MULTILINE)
_CALL = re.compile(r'^ {2}File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_NOT_SHOWN = re.compile(r"runpy|/workbench/(record|watch)/")


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
    fatal = _FATAL.search(text)
    reason = "SIGTERM" if fatal is None else f"{_SIGNALS.get(fatal[1], 'crash')}: {fatal[1][:200]}"
    main = re.match(r"main thread 0x([0-9a-f]+)", text)
    stacks = {int(thread[1], 16): thread[2] for thread in _THREAD.finditer(text)}
    stack = stacks.get(int(main[1], 16), "") if main else ""
    calls = [call.groups() for call in _CALL.finditer(stack)]
    frames = tuple(f"{file}:{line} in {name}" for file, line, name in reversed(calls) if not _NOT_SHOWN.search(file))
    t_ns = max(found.st_mtime_ns - alive.wall_ns, 0) + alive.t_ns
    return RunEnd(t_ns=t_ns, reason=reason, frames=frames)
