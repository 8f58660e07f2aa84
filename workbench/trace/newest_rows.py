"""The newest rows of a recorded rank, in a file that a kill or a crash leaves whole.

A rank writes its recording every 0.2 s. Its last events tell why it was killed, or aborted by a library: it writes them
before each collective into a small file of its own, in which each row has its place by its number. A reader takes from
it what the recording lacks. A rank that ends by itself deletes it.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from workbench.trace.schema import ROW, ROW_DTYPE, Header, Rows

NEWEST_FILE = "rank{rank}.newest"
NUM_ROWS = 2048
_SLOW_S = 0.05


class NewestRows:
    """The file, as its rank writes it; one that cannot be written, or takes 50 ms, is written no more.

    Args:
        folder: the recording's folder.
        rank: the rank.

    Attributes:
        seq: number of the next row to write.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / NEWEST_FILE.format(rank=rank)
        self._fd = -1
        self._lock = threading.RLock()  # a handler of a signal may issue a collective, too
        self.seq = 0
        with suppress(OSError):
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    @property
    def is_open(self) -> bool:
        """Whether it is still written."""
        return self._fd >= 0

    def write(self, first: int, packed: bytes) -> None:
        """Write packed rows, at most :data:`NUM_ROWS`; ``first``: number of the first."""
        begin = time.monotonic()
        at = first % NUM_ROWS * ROW.size
        room = NUM_ROWS * ROW.size - at
        with self._lock:
            if not packed or self._fd < 0:
                return
            self.seq = first + len(packed) // ROW.size
            try:
                os.pwrite(self._fd, packed[:room], at)
                if len(packed) > room:
                    os.pwrite(self._fd, packed[room:], 0)
            except OSError:
                self.delete()
        if time.monotonic() - begin > _SLOW_S:  # training must not wait for a disk
            self.delete()

    def delete(self) -> None:
        """Close and delete the file."""
        with self._lock:
            if self._fd < 0:
                return
            os.close(self._fd)
            self._fd = -1
            with suppress(OSError):
                self._path.unlink()


def read_newest(path: Path, seq: int, header: Header) -> Rows:
    """Return the rows from number ``seq`` on, as far as the file has them all and the header what they refer to."""
    try:
        with path.open("rb") as file:
            content = file.read(NUM_ROWS * ROW.size)
    except OSError:
        content = b""
    rows = np.frombuffer(content[: len(content) // ROW.size * ROW.size], ROW_DTYPE)
    by_place = rows[np.arange(seq, seq + len(rows)) % max(len(rows), 1)] if len(rows) == NUM_ROWS else rows[seq:]
    limits = {"module": len(header.strings), "unit": len(header.units), "comm_group": len(header.comm_groups)}
    fits = by_place["seq"] == np.arange(seq, seq + len(by_place))
    for column, limit in limits.items():
        fits &= by_place[column] < limit
    return by_place[: int(np.argmin(fits)) if not fits.all() else len(fits)]
