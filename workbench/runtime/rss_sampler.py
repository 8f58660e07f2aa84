"""The memory of this process as the operating system counts it: the engine's bytes and everything else.

A sample is one read of ``/proc/self/statm``, which costs as much as recording five events; at most one is taken per
:data:`EVERY_NS`. Without such a file (not on Linux) nothing is sampled. Pages shared with other processes count in
full, as in most tools.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

EVERY_NS = 10_000_000
_STATM = Path("/proc/self/statm")


class RssSampler:
    """Sampler of the memory of the process that made it.

    Args:
        record: called with a number of bytes, and with what has just ended.
        statm: the file to read.
        clock: nanoseconds, monotonic.
    """

    def __init__(
        self, record: Callable[[int, str], None], statm: Path = _STATM, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._record = record
        self._clock = clock
        self._next_ns = 0
        self._page = os.sysconf("SC_PAGE_SIZE")
        # opened once, as opening costs more than a read; even after a fork it shows the process that opened it
        self._file = os.open(statm, os.O_RDONLY) if statm.exists() else None
        if self._file is not None:
            weakref.finalize(self, os.close, self._file)

    def sample(self, after: str = "") -> None:
        """Record the current memory, ``after`` what has just ended; if that has no name, not a moment after another."""
        now = self._clock()
        if (after or now >= self._next_ns) and self._file is not None:
            self._next_ns = now + EVERY_NS
            self._record(self.num_bytes(), after)

    def num_bytes(self) -> int:
        """Return the bytes in memory now; 0 if unknown."""
        if self._file is None:
            return 0
        return int(os.pread(self._file, 128, 0).split()[1]) * self._page
