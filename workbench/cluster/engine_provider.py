"""The interface between a cluster and the code that starts its engines, or finds running ones."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.errors import UsageError

Registered = Callable[[], dict[str, int]]
"""Returns the ipyparallel engine id of every engine that has registered, by session id."""

OnWait = Callable[[str], None]
"""Receives a sentence on what a start waits for; ``""``: the wait is over. If it raises KeyboardInterrupt, the start
is cancelled."""

NOTICE_S = 0.5
"""Seconds between two notices of what a start waits for."""


def no_wait(_sentence: str) -> None:
    """Ignore the notice."""


class WaitNotices:
    """Rate-limited notices of what a start waits for, and for how many seconds.

    Args:
        on_wait: receives the notice.
        after_s: delay of the first notice, in seconds.
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


def unused(registered: Registered, used: Sequence[str]) -> list[str]:
    """Return the registered engines that are not among ``used``, in the order in which they registered."""
    found = registered()
    return sorted(found.keys() - set(used), key=found.__getitem__)


class EngineProvider(ABC):
    """Engines, and the controller that routes messages to them; by default it knows only what the controller tells.

    Ranks index the result of :meth:`wait_for_engines` only if the provider has started a process for each; otherwise
    only the controller knows whether an engine is alive.

    Attributes:
        deadline: time (monotonic clock, s) at which the current wait times out.
        is_remote: whether engines get a shutdown request before :meth:`end`, which may not reach them at once.
        tells_ends: whether it reports the end of each process at once.
    """

    deadline: float
    is_remote = False
    tells_ends = False

    @property
    def one_job(self) -> str:
        """The launcher that starts and ends all engines as one job, so none can be replaced alone; empty: each can."""
        return ""

    @abstractmethod
    def wait_for_controller(self) -> Path:
        """Wait until the controller listens, and return its connection file for clients.

        Raises:
            UsageError: there is none.
            ClusterError: it did not start.
        """

    @abstractmethod
    def wait_for_engines(self, registered: Registered) -> tuple[str, ...]:
        """Wait until there are enough engines, and return the session id of each.

        Raises:
            ClusterError: some did not register; the message says which, and why if that is known.
        """

    def replace(self, ranks: Sequence[int], registered: Registered, used: Sequence[str]) -> dict[int, str]:
        """Start another engine for each of ``ranks``, which are lost, and wait until it has registered.

        Args:
            ranks: the ranks.
            registered: returns the engines that have registered.
            used: the engines of all ranks, the lost ones included.

        Returns:
            the session id of the new engine of each rank.

        Raises:
            UsageError: it cannot start single engines; the message says what it needs.
            ClusterError: one did not start.
        """
        raise UsageError("the launcher of these ranks cannot start one alone: %fsdp stop, then %fsdp start")

    def is_overdue(self) -> bool:
        """Return whether the current wait has timed out."""
        return time.monotonic() > self.deadline

    def is_running(self, rank: int) -> bool:
        """Return whether the process of ``rank`` runs, as far as the provider knows."""
        return True

    def ending(self, rank: int | None) -> str:
        """Return how the process of a rank (None: the controller) ended, in words; ``""`` if unknown or running."""
        return ""

    def log_tail(self, rank: int | None) -> str:
        """Return the last lines of a process's log, as the end of a message."""
        return ""

    @abstractmethod
    def advice(self, rank: int | None, *others: int | None) -> str:
        """Return what to check and to do when processes (None: the controller) are too slow."""

    def ask_why_gone(self, report: Callable[[str], object]) -> None:
        """Call ``report`` with the reason why an engine is gone, in words; ``""`` if it is unknown.

        Immediately, or in another thread after querying the job queue, which takes a second at most.
        """
        report("")

    def end(self) -> str:
        """End everything that the provider started, and remove its files. Idempotent.

        Returns:
            A sentence on the engines that could not be ended and what happens to them; empty: all have ended.
        """
        return ""
