"""How every wait of this process is ended from outside: a flag, at which whoever waits looks in slices of time.

How a collective is waited for is the affair of its backend (``backends/async_work.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from workbench.engine.errors import StepAborted

SLICE_S = 0.2
"""How long whoever waits does not look, in seconds."""
GRACE_S = 0.3


def go_on() -> None:
    """Do not stop."""


stop_point: Callable[[], None] = go_on
"""Called in the waiting thread, again and again while it waits for other ranks; it may block or raise there."""


class AsyncWork(Protocol):
    """What c10d's async collectives return, as far as it is used here."""

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
        """Whether waits raise."""
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise StepAborted if cancelled."""
        if self._cancelled.is_set():
            raise StepAborted(self._reason)

    def sleep(self, seconds: float) -> None:
        """Sleep before looking again whether other ranks have come, and raise StepAborted as soon as cancelled."""
        if self._cancelled.wait(seconds):
            self.check()
        stop_point()

    def check_after_failure(self) -> None:
        """Raise StepAborted if cancelled, now or within :data:`GRACE_S`.

        A collective most often fails because a peer was aborted and left; the word of it reaches this rank too.
        """
        if self._cancelled.wait(GRACE_S):
            self.check()


cancellation = Cancellation()
