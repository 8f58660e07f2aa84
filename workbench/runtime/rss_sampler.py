"""The memory of this process as the operating system counts it: what the engine owns, and everything else.

A sample is one read of ``/proc/self/statm``, as dear as recording five events, and at most one is taken in
:data:`EVERY_NS`. Where there is no such file (not on Linux) nothing is sampled. Pages shared with other processes count
in full, as they do in most tools.
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
    """Samples the memory of the process that made it.

    Args:
        record: takes a number of bytes.
        statm: where the numbers come from.
        clock: nanoseconds, monotonic.
    """

    def __init__(
        self, record: Callable[[int], None], statm: Path = _STATM, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._record = record
        self._clock = clock
        self._next_ns = 0
        self._page = os.sysconf("SC_PAGE_SIZE")
        # opened once: that is dearer than a read; it belongs to the process that opened it, also after a fork
        self._file = os.open(statm, os.O_RDONLY) if statm.exists() else None
        if self._file is not None:
            weakref.finalize(self, os.close, self._file)

    def sample(self) -> None:
        """Record how much there is, unless that was done a moment ago."""
        now = self._clock()
        if now >= self._next_ns and self._file is not None:
            self._next_ns = now + EVERY_NS
            self._record(self.num_bytes())

    def num_bytes(self) -> int:
        """Return the bytes in memory now; 0 where that cannot be known."""
        if self._file is None:
            return 0
        return int(os.pread(self._file, 128, 0).split()[1]) * self._page
