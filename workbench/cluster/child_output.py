"""Output of a rank's child processes, such as DataLoader workers, and of its C code, shown with the rank's own output.

A rank's stdout publishes through a thread. A forked process lacks that thread, so its output would be lost. It writes
to a pipe instead, and the rank prints the pipe's text as its own, before what it writes itself after a child has
written. Programs started by multiprocessing or subprocess
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
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO

_PIECE_BYTES = 1 << 16

_POLL_S = 0.5
"""Time between two reads of the log, in seconds: nothing announces that it has grown."""


class ChildOutput:
    """Forwards the stdout and stderr of child processes, from its construction until this process ends.

    Args:
        log: descriptor of this process's log, to which its stderr is redirected; None: stderr is left as it is.
    """

    def __init__(self, log: int | None = None) -> None:
        self._pipes = [_Pipe(stream, number) for number, stream in ((1, sys.stdout), (2, sys.stderr))]
        self._logs = [] if log is None else _redirected(log, sys.stderr)
        self._lock = threading.RLock()  # what the garbage collector ends meanwhile may write, too
        self._starts = threading.Lock()
        for pipe in self._pipes:
            pipe.stream.write = self._after_children(pipe)  # type: ignore[method-assign]
        os.register_at_fork(after_in_child=self._in_child)
        for module, name in ((_posixsubprocess, "fork_exec"), (subprocess, "_fork_exec")):
            setattr(module, name, self._shown(getattr(module, name)))
        threading.Thread(target=self._listen, name="workbench: children", daemon=True).start()

    def take(self) -> None:
        """Forward everything that children and C code have written so far."""
        with self._lock:
            for file in (*self._pipes, *self._logs):
                file.take()

    def _after_children(self, pipe: _Pipe) -> Callable[[str], int]:
        """Return the ``write`` of a pipe's stream, which first forwards what children have written to the pipe."""
        write = pipe.write

        def write_after(text: str) -> int:
            with self._lock:
                pipe.take()
                return write(text)

        return write_after

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        for pipe in self._pipes:
            selector.register(pipe.reads, selectors.EVENT_READ)
        while True:
            selector.select(_POLL_S if self._logs else None)
            self.take()

    def _shown(self, start: Callable[..., int]) -> Callable[..., int]:
        """Wrap ``start``, which runs another program, so that the program's output is shown."""

        def shown(*args: Any) -> int:  # noqa: ANN401 - those of start
            with self._starts, ExitStack() as standard_files:
                for pipe in self._pipes:
                    standard_files.enter_context(pipe.inherited())
                return start(*args)

        return shown

    def _in_child(self) -> None:
        self._starts, self._lock = threading.Lock(), threading.RLock()  # another thread may have held them at the fork
        for name, pipe in zip(("stdout", "stderr"), self._pipes, strict=True):
            file = pipe.in_child()
            if getattr(sys, name) is pipe.stream:  # else the user's code has redirected it
                setattr(sys, name, file)


class _ReadFile:
    """A file whose text, from now on, a stream of this process receives.

    Args:
        reads: descriptor to read it.
        stream: the stream.

    Attributes:
        reads: likewise.
        stream: likewise.
        write: of the stream, as it was before.
    """

    def __init__(self, reads: int, stream: TextIO) -> None:
        self.reads, self.stream, self.write = reads, stream, stream.write
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self) -> None:
        with suppress(BlockingIOError):  # a pipe is empty
            while piece := os.read(self.reads, _PIECE_BYTES):
                self.write(self._decoder.decode(piece))


def _redirected(log: int, stream: TextIO) -> list[_ReadFile]:
    """Redirect stderr to a log, and return what reads it.

    Returns an empty list, and leaves stderr as it is, if the log is no regular file or cannot be read.
    """
    try:
        reads = os.open(f"/dev/fd/{log}", os.O_RDONLY)
    except OSError:
        return []
    if not stat.S_ISREG(os.fstat(reads).st_mode):
        os.close(reads)
        return []
    os.dup2(log, 2)
    os.lseek(reads, 0, os.SEEK_END)
    return [_ReadFile(reads, stream)]


class _Pipe(_ReadFile):
    """The pipe to which child processes write what they write to one of the two standard files.

    Args:
        stream: stream of this process that receives the text.
        number: descriptor of the standard file in the child processes.
    """

    def __init__(self, stream: TextIO, number: int) -> None:
        reads, self._writes = os.pipe()
        os.set_blocking(reads, False)
        super().__init__(reads, stream)
        self._number = number

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
