"""Cancellation of every wait in this process, by a flag that waiting threads poll in time slices.

The backend defines how to wait for a collective (``backends/async_work.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from workbench.engine.errors import StepAborted

SLICE_S = 0.2
"""Length of a wait slice between two polls, in seconds."""
GRACE_S = 0.3


def go_on() -> None:
    """Default stop point: do nothing."""


stop_point: Callable[[], None] = go_on
"""Called repeatedly in a thread that waits for other ranks; it may block or raise."""


class AsyncWork(Protocol):
    """The used part of the work object that c10d's async collectives return."""

    def get_future(self) -> Any:  # noqa: ANN401 - torch.futures.Future is untyped in its value
        """Future completed when the collective is done."""

    def wait(self) -> Any:  # noqa: ANN401
        """Block until done; raise if it failed."""


class Cancellation:
    """A flag with a reason, set from another thread, that ends every wait of this process."""

    def __init__(self) -> None:
        self._reason = ""
        self._cancelled = threading.Event()

    def cancel(self, reason: str) -> None:
        """Make current and later waits raise :class:`StepAborted` until :meth:`reset`."""
        self._reason = reason
        self._cancelled.set()

    def reset(self) -> None:
        """Allow waits again."""
        self._cancelled.clear()

    @property
    def is_set(self) -> bool:
        """True if waits raise."""
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise StepAborted if cancelled."""
        if self._cancelled.is_set():
            raise StepAborted(self._reason)

    def sleep(self, seconds: float) -> None:
        """Sleep between two polls for other ranks; raise StepAborted as soon as cancelled."""
        if self._cancelled.wait(seconds):
            self.check()
        stop_point()

    def check_after_failure(self) -> None:
        """Raise StepAborted if cancelled, now or within :data:`GRACE_S`.

        A collective most often fails because a peer was aborted and left; the abort soon reaches this rank too.
        """
        if self._cancelled.wait(GRACE_S):
            self.check()


cancellation = Cancellation()
