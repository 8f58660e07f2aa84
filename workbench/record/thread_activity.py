"""Activity of a thread of this process that announces nothing: it sleeps, computes, or waits for a disk."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from workbench.trace.recording import Activity

_BUSY = 0.5
"""Part of the time in which a thread must have used a processor to count as computing."""


class ThreadActivity:
    """Activity of a thread since :meth:`begin`.

    Args:
        thread: the thread, of this process.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._clock = None if sys.platform == "win32" else time.pthread_getcpuclockid(thread.ident or 0)
        self.begin()

    def begin(self) -> None:
        """Start to measure anew."""
        self._since, self._cpu_s = time.monotonic(), self._used_s()

    def now(self) -> Activity:
        """Return what the thread has done since, or does now."""
        if self._clock is None:
            return ""
        passed = time.monotonic() - self._since
        if passed > 0 and self._used_s() - self._cpu_s > _BUSY * passed:
            return "computing"
        try:
            text = Path(f"/proc/self/task/{self._thread.native_id}/stat").read_text()
        except OSError:  # another system than Linux
            return ""
        state = text.rpartition(")")[2].split()[0]
        found: dict[str, Activity] = {"S": "asleep", "D": "reading a disk or swapped memory"}
        return found.get(state, "")

    def _used_s(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)
