"""Output of a rank's child processes, such as DataLoader workers, and of its C code, shown with the rank's own output.

A rank's stdout publishes through a thread. A forked process lacks that thread, so its output would be lost. It writes
to a pipe instead, and the rank prints the pipe's text as its own. Programs started by multiprocessing or subprocess
inherit the pipe too: it replaces the rank's standard files while the child starts, and no longer, because what the rank
itself writes there when it dies belongs in its log.

What C code of the rank writes to stderr goes into its log at once, for the same reason: ipykernel sends it through a
pipe, whose rest is lost when the process dies. Here it is read from the log, and shown.
"""

from __future__ import annotations

import _posixsubprocess
import codecs
import os
import selectors
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

_PIECE_BYTES = 1 << 16

_POLL_S = 0.5
"""How often the log is read while a cell runs, in seconds; nothing announces that it has grown."""


class ChildOutput:
    """Forwards the stdout and stderr of child processes, from its construction until this process ends.

    Args:
        log: descriptor of this process's log, which then becomes its stderr; None: stderr stays.
    """

    def __init__(self, log: int | None = None) -> None:
        self._log = None if log is None else _Log.of(log, sys.stderr)
        self._sources = [_OutputStream(stream, number) for number, stream in ((1, sys.stdout), (2, sys.stderr))]
        self._lock = threading.Lock()
        self._starts = threading.Lock()
        os.register_at_fork(after_in_child=self._in_child)
        for module, name in ((_posixsubprocess, "fork_exec"), (subprocess, "_fork_exec")):
            setattr(module, name, self._shown(getattr(module, name)))
        threading.Thread(target=self._listen, name="workbench: children", daemon=True).start()

    def take(self) -> None:
        """Forward everything that children have written so far."""
        with self._lock:
            for source in self._sources:
                source.take()
            if self._log is not None:
                self._log.take()

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        for source in self._sources:
            selector.register(source.reads, selectors.EVENT_READ)
        while selector.select(None if self._log is None else _POLL_S) or self._log is not None:
            self.take()

    def _shown(self, start: Callable[..., int]) -> Callable[..., int]:
        """Wrap ``start``, which runs another program, so that the program's output is shown."""

        def shown(*args: Any) -> int:  # noqa: ANN401 - those of start
            with self._starts, ExitStack() as standard_files:
                for source in self._sources:
                    standard_files.enter_context(source.inherited())
                return start(*args)

        return shown

    def _in_child(self) -> None:
        self._starts = threading.Lock()  # another thread may have held it at the fork
        for name, source in zip(("stdout", "stderr"), self._sources, strict=True):
            file = source.in_child()
            if getattr(sys, name) is source.stream:  # else the user's code has redirected it
                setattr(sys, name, file)


class _Log:
    """What this process writes into its log from now on.

    Args:
        file: descriptor to read the log.
        stream: stream of this process that receives the text.
    """

    def __init__(self, file: int, stream: TextIO) -> None:
        self._file, self._stream = file, stream
        os.lseek(file, 0, os.SEEK_END)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @classmethod
    def of(cls, log: int, stream: TextIO) -> _Log | None:
        """Make a log the stderr of this process; None: it is no file, or this system cannot read it."""
        try:
            file = os.open(f"/dev/fd/{log}", os.O_RDONLY)
        except OSError:
            return None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            return None
        os.dup2(log, 2)
        return cls(file, stream)

    def take(self) -> None:
        while piece := os.read(self._file, _PIECE_BYTES):
            self._stream.write(self._decoder.decode(piece))


class _OutputStream:
    """One of the two standard streams of child processes.

    Args:
        stream: stream of this process that receives the text.
        number: file descriptor in the child processes.

    Attributes:
        stream: likewise.
        reads: read end of the pipe.
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
            except BlockingIOError:  # the pipe is empty
                return
            self.stream.write(self._decoder.decode(piece))

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Replace this process's standard file by the pipe while the body runs."""
        before = os.dup(self._number)
        try:
            os.dup2(self._writes, self._number)
            yield
        finally:
            os.dup2(before, self._number)
            os.close(before)

    def in_child(self) -> TextIO:
        """Redirect the standard file to the pipe, here and in child processes; return it as a text file."""
        os.dup2(self._writes, self._number)
        return open(self._number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
