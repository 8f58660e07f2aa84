"""Waiting for a collective without losing the ability to stop.

A thread blocked inside a collective's own wait cannot be interrupted on gloo. So collectives are issued async, their
completion sets a :class:`threading.Event`, and the wait looks at the cancel flag every :data:`SLICE_S` seconds.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from workbench.engine.errors import CollectiveFailed, StepAborted

SLICE_S = 0.2
GRACE_S = 0.3


class Work(Protocol):
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

    def check(self) -> None:
        """Raise StepAborted if cancelled."""
        if self._cancelled.is_set():
            raise StepAborted(self._reason)

    def check_after_failure(self) -> None:
        """Raise StepAborted if cancelled, now or within :data:`GRACE_S`.

        A collective most often fails because a peer was aborted and left; the word of it reaches this rank too.
        """
        if self._cancelled.wait(GRACE_S):
            self.check()


cancellation = Cancellation()


class PendingWork:
    """One collective in flight.

    Attributes:
        end_ns: monotonic time of its true completion, 0 while it runs.
    """

    def __init__(self, work: Work, what: str) -> None:
        self._work = work
        self._what = what
        self._done = threading.Event()
        self.end_ns = 0
        work.get_future().then(self._completed)

    def _completed(self, _future: Any) -> None:  # noqa: ANN401
        self.end_ns = time.monotonic_ns()
        self._done.set()

    @property
    def has_ended(self) -> bool:
        """True once the collective has ended, well or badly."""
        return self._done.is_set()

    def block(self) -> None:
        """Wait until the collective has ended, well or badly.

        Raises:
            StepAborted: cancelled meanwhile; the collective is still unfinished.
        """
        cancellation.check()
        while not self._done.wait(SLICE_S):
            cancellation.check()

    def finish(self) -> None:
        """Take the result; call after :meth:`block` (completion also means failure).

        Raises:
            CollectiveFailed: the collective ended in an error.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            cancellation.check_after_failure()
            raise CollectiveFailed(f"{self._what} failed: {str(error).splitlines()[0]}") from error
