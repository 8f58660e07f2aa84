"""Where the engines of a cluster come from: what a cluster asks of whatever starts them, or finds them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

Registered = Callable[[], dict[str, int]]
"""Returns the ipyparallel engine id of every engine that has registered, by session id."""

OnWait = Callable[[str], None]
"""Takes, in a sentence, what a start waits for; ``""``: nothing any more. A KeyboardInterrupt of it ends the start."""

NOTICE_S = 0.5
"""Seconds between two notices of what a start waits for."""


def no_wait(_sentence: str) -> None:
    """Tell nobody."""


class WaitNotices:
    """Says now and then what a start waits for, and since how many seconds.

    Args:
        on_wait: takes the sentence.
        after_s: seconds in which a start is too quick to be reported.
    """

    def __init__(self, on_wait: OnWait, after_s: float = 0.0) -> None:
        self._on_wait = on_wait
        self._began = time.monotonic()
        self._next = self._began + after_s

    def notice(self, what: str, detail: str = "") -> None:
        """Report ``what``, unless the last notice is less than :data:`NOTICE_S` old."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + NOTICE_S
            self._on_wait(f"{what}, {now - self._began:.0f} s{f': {detail}' if detail else ''}")


class EngineProvider(Protocol):
    """Engines, and the controller that routes messages to them.

    A rank is an index of what :meth:`wait_for_engines` has returned only where the place itself has started a process
    for each; elsewhere it is known from the controller alone whether an engine is there.

    Attributes:
        deadline: time (monotonic clock, s) at which what is waited for has taken too long.
        is_remote: whether its engines are to be told to end before :meth:`end`, which may not reach them at once.
        tells_ends: whether it tells of the end of each process at once.
    """

    deadline: float
    is_remote: bool
    tells_ends: bool

    def wait_for_controller(self) -> Path:
        """Wait until the controller listens, and return its connection file for clients.

        Raises:
            UsageError: there is none.
            ClusterError: it did not come up.
        """

    def wait_for_engines(self, registered: Registered) -> tuple[str, ...]:
        """Wait until there are enough engines, and return the session id of each.

        Raises:
            ClusterError: some did not come; the message says which, and why as far as it is known.
        """

    def is_running(self, rank: int) -> bool:
        """Tell whether nothing is known here of an end of the process of ``rank``."""

    def ending(self, rank: int | None) -> str:
        """Say how the process of a rank (None: the controller) ended; ``""`` while nothing is known of that."""

    def log_tail(self, rank: int | None) -> str:
        """Return the last lines that a process wrote to its own stdout and stderr as the end of a message."""

    def advice(self, rank: int | None, *others: int | None) -> str:
        """Return what there is to look at, and to do, when processes (None: the controller) are too slow."""

    def ask_why_gone(self, tell: Callable[[str], object]) -> None:
        """Have ``tell`` called with why an engine is gone, in words, ``""`` if that is not known.

        At once; or, in another thread, when a queue that has the engines was asked, which takes a second at most.
        """

    def end(self) -> str:
        """End what was started, and remove its files; may be called again.

        Returns:
            What could not be ended and what becomes of it, a sentence; empty: nothing is left.
        """
