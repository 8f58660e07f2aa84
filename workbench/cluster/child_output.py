"""What processes that a rank starts write, such as workers of a DataLoader: shown where the rank's own output is.

A rank's stdout publishes through a thread, which a forked process does not have, so what that process wrote would be
lost. It gets plain files instead, whose text this process writes out as its own. Processes that multiprocessing or
subprocess start with a program of their own inherit these files as well: they are the rank's standard files for as long
as the start takes, and not longer, since what the rank itself writes there when it dies belongs in its log.
"""

from __future__ import annotations

import _posixsubprocess
import codecs
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

_PIECE_BYTES = 1 << 16


class ChildOutput:
    """Takes what forked processes write to stdout and stderr, from when it is made until this process ends."""

    def __init__(self) -> None:
        self._sources = [_OutputStream(stream, number) for number, stream in ((1, sys.stdout), (2, sys.stderr))]
        self._lock = threading.Lock()
        self._starts = threading.Lock()
        os.register_at_fork(after_in_child=self._in_child)
        for module, name in ((_posixsubprocess, "fork_exec"), (subprocess, "_fork_exec")):
            setattr(module, name, self._shown(getattr(module, name)))
        threading.Thread(target=self._listen, name="workbench: children", daemon=True).start()

    def take(self) -> None:
        """Write out all that was written so far."""
        with self._lock:
            for source in self._sources:
                source.take()

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        for source in self._sources:
            selector.register(source.reads, selectors.EVENT_READ)
        while selector.select():
            self.take()

    def _shown(self, start: Callable[..., int]) -> Callable[..., int]:
        """Return ``start``, of a process with another program, so that what this writes is shown."""

        def shown(*args: Any) -> int:  # noqa: ANN401 - as start has them
            with self._starts, ExitStack() as standard_files:
                for source in self._sources:
                    standard_files.enter_context(source.inherited())
                return start(*args)

        return shown

    def _in_child(self) -> None:
        self._starts = threading.Lock()  # another thread may have had it
        for name, source in zip(("stdout", "stderr"), self._sources, strict=True):
            file = source.in_child()
            if getattr(sys, name) is source.stream:  # else the user's code has redirected it
                setattr(sys, name, file)


class _OutputStream:
    """One of the two standard streams of forked processes.

    Args:
        stream: of this process, that shows what is written.
        number: of the file in those processes.

    Attributes:
        stream: likewise.
        reads: the end of the pipe at which this process reads.
    """

    def __init__(self, stream: TextIO, number: int) -> None:
        self.stream, self._number = stream, number
        self.reads, self._writes = os.pipe()
        os.set_blocking(self.reads, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self) -> None:
        while True:
            try:
                piece = os.read(self.reads, _PIECE_BYTES)
            except BlockingIOError:  # that was all
                return
            self.stream.write(self._decoder.decode(piece))

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Have the standard file be the pipe while the body runs."""
        before = os.dup(self._number)
        try:
            os.dup2(self._writes, self._number)
            yield
        finally:
            os.dup2(before, self._number)
            os.close(before)

    def in_child(self) -> TextIO:
        """Have the standard file write to the pipe, here and in what this process starts; return it."""
        os.dup2(self._writes, self._number)
        return open(self._number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
