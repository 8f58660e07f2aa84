"""The stack of a process that a signal ends, written by :mod:`faulthandler`: after a crash no Python code runs."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from workbench.trace.crash_text import CRASH_FILE, head_of


class CrashReport:
    """Writes the stacks of this process into a file of the recording when a crash or SIGTERM ends it.

    A program that reports crashes itself, or handles SIGTERM, still does, and then nothing is written. Processes that
    it forks report nothing.

    Args:
        folder: the recording's folder.
        rank: of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / CRASH_FILE.format(rank=rank)
        self._file: IO[str] | None = None
        self._enables = False
        self._pid = os.getpid()

    def begin(self) -> CrashReport:
        """Write from now on."""
        try:
            self._file = self._path.open("w")
            self._file.write(head_of(threading.main_thread().ident or 0))
            self._file.flush()
        except OSError:  # such as a full disk
            self._file = None
            return self
        self._enables = not faulthandler.is_enabled()
        if self._enables:
            faulthandler.enable(self._file)
        if hasattr(faulthandler, "register"):  # not on Windows
            faulthandler.register(signal.SIGTERM, self._file, chain=True)
        return self

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C take effect after the body, in which the program's end is written.

        The launcher sends them as soon as another rank has ended.
        """
        if self._file is not None and hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGTERM)  # puts the handler back that was there before it
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT) if is_main}
        came: list[int] = []
        for number, handler in before.items():
            if handler is not None:  # None: of C code
                signal.signal(number, lambda which, _: came.append(which))
        try:
            yield
        finally:
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)
            for sent in dict.fromkeys(came):
                signal.raise_signal(sent)

    def end(self) -> None:
        """Write no longer; callable more than once."""
        if self._file is None:
            return
        if self._enables:
            faulthandler.disable()
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGTERM)
        self._file.close()
        self._file = None
        if os.getpid() == self._pid:
            self._path.unlink(missing_ok=True)
