"""Ctrl-C on a rank within a step: it sets a flag, and raises only at a safe point.

The engine's state must not be left half updated. So the signal only sets a flag, and the exception is raised where the
rank can stop anyway: at the gate or in a wait. The user's own Python code is interrupted at once by a second signal, by
a signal after an abort, and, in a cell that runs while the step is stopped, by the first signal.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from workbench.engine.cancellable_waits import cancellation
from workbench.engine.errors import StepAborted

JOBS = "workbench.runtime.held_eval"
_BOOKKEEPING = (
    "workbench.engine",
    "workbench.runtime.gate",
    "workbench.runtime.recorder",
    "workbench.runtime.sharding",  # between two engine calls a model may be half sharded
)


class Interrupts:
    """Handling of Ctrl-C on a rank: it sets a flag, and raises only at a safe point.

    Args:
        on_flag: called in the signal handler once the flag is set; must take no lock.
    """

    def __init__(self, on_flag: Callable[[], None]) -> None:
        self._on_flag = on_flag
        self._is_installed = False
        self.is_flagged = False

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Make SIGINT set the flag within the body; no effect when nested or outside the main thread."""
        if self._is_installed or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._on_signal)
        self._is_installed = True
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self._is_installed = self.is_flagged = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if the flag is set, and clear it."""
        if self.is_flagged:
            self.is_flagged = False
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        place = _place(frame)
        if place == "job" or (place == "step" and (self.is_flagged or _is_aborted())):
            self.is_flagged = False
            raise KeyboardInterrupt
        self.is_flagged = True
        self._on_flag()


def _place(frame: FrameType | None) -> str:
    """Return whose code runs: ``engine`` (not interruptible), ``job`` (run while held) or ``step`` (the user's)."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == JOBS:
            return "job"
        if module.startswith(_BOOKKEEPING):
            return "engine"
        frame = frame.f_back
    return "step"


def _is_aborted() -> bool:
    try:
        cancellation.check()
    except StepAborted:
        return True
    return False
