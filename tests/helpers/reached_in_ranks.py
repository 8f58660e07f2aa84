"""Functions that a test reaches in forked ranks, told to mutmut, which counts those of its own process only.

While mutmut looks which test reaches which function, each forked process writes the names of the functions that it
calls to a file, each once per test, and the process that runs the tests adds them to its own.
"""

import fcntl
import mmap
import os
import tempfile


class Reached:
    """The names that processes forked from now on call.

    Args:
        state: of mutmut; a function that is called adds its name to its attribute ``_stats``.
    """

    def __init__(self, state) -> None:
        self._state = state
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as this process
        fcntl.fcntl(self.file, fcntl.F_SETFL, os.O_APPEND)  # it has many writers
        self.turn = mmap.mmap(-1, 1)  # shared with the children
        os.register_at_fork(after_in_child=lambda: setattr(state, "_stats", _Told(self)))

    def take(self) -> None:
        """Add the names since the last call to those of this process."""
        self.turn[0] = (self.turn[0] + 1) % 256
        told = os.pread(self.file.fileno(), 2**24, 0)
        self.file.truncate(0)
        self._state._stats.update(told.decode().split())


class _Told(set[str]):
    """The names that a child has written in this turn."""

    def __init__(self, reached: Reached) -> None:
        super().__init__()
        self._reached, self._turn = reached, reached.turn[0]

    def add(self, name: str) -> None:
        if self._turn != self._reached.turn[0]:
            self.clear()
            self._turn = self._reached.turn[0]
        if name not in self:
            super().add(name)
            os.write(self._reached.file.fileno(), f"{name}\n".encode())
