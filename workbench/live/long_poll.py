"""Long polling: a question waits in a thread of its own until there is something new; answers are limited in rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from workbench.errors import WorkbenchError
from workbench.live.overview import health
from workbench.session.snapshot import ClusterSnapshot

Send = Callable[[], None]

BYTES_PER_S = 48 * 1024
"""Limit on the binary data of one open view; with the text of its messages it stays below 64 KiB a second."""

EVERY_S = 0.1
"""Minimum time between two answers."""

LEISURE = 8
"""Rest after an answer, as a multiple of the kernel's work for it; at most IDLE_S."""

LOOK_S = 0.05
"""Time between two checks for something new."""

IDLE_S = 1.0
"""Maximum wait for something new: an answer without news shows the view that the kernel is alive."""


class WatchedWorkbench(Protocol):
    """The part of a workbench that is needed here."""

    def pulse(self) -> ClusterSnapshot:
        """Return a snapshot of the cluster."""

    def activity(self) -> object:
        """Return a value that changes with news that cannot wait; queries no rank."""


class RateLimit:
    """Schedules the answers to one view."""

    def __init__(self) -> None:
        self._due_s = self._latest_s = float("-inf")
        self._state: object = None
        self._activity: object = None

    def rest_s(self, now_s: float, activity: object = None) -> float:
        """Return how long to wait before the next check.

        Args:
            now_s: the current time.
            activity: state of the ranks' requests; if it differs from that of the last answer, the wait is 0.
        """
        return max(self._due_s - now_s, 0.0) if activity == self._activity else 0.0

    def is_due(self, now_s: float, newest: object) -> bool:
        """Return whether to answer now, after :meth:`rest_s`.

        Args:
            now_s: the current time.
            newest: a value that equals that of the last answer if there is nothing new.
        """
        return newest != self._state or now_s >= self._latest_s

    def answered(self, now_s: float, state: object, spent_s: float, activity: object = None) -> None:
        """Record an answer with state ``state`` and ``activity``, which cost the kernel ``spent_s``."""
        self._state, self._activity = state, activity
        self._due_s = now_s + min(max(EVERY_S, LEISURE * spent_s), IDLE_S)
        self._latest_s = max(now_s + IDLE_S, self._due_s)


class LongPoll:
    """The waiting views of one browser.

    Args:
        look: returns a snapshot of the cluster.
        clock: seconds, monotonic.
        activity: returns, without querying a rank, a value that changes when a request starts, stops, resumes or ends;
            such a change is sent at once, even to a view that was answered a moment ago.
    """

    def __init__(
        self, look: Callable[[], ClusterSnapshot], clock: Callable[[], float], activity: Callable[[], object]
    ) -> None:
        self._look, self._clock, self._activity = look, clock, activity
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._paces: dict[str, RateLimit] = {}
        self._waits: dict[str, threading.Thread] = {}  # by view, the thread that is to answer it
        self._threads: set[threading.Thread] = set()  # all that may still run

    def ask(self, name: str, answer: Callable[[], Send]) -> None:
        """Answer the view ``name`` when there is something new; drop its earlier question.

        Args:
            name: name of the view.
            answer: makes the answer and returns the function that sends it.
        """
        with self._lock:
            if self._is_closed.is_set():
                return
            pace = self._paces.setdefault(name, RateLimit())
            thread = threading.Thread(
                target=self._wait, args=(name, pace, answer), name=f"dashboard: {name} waits", daemon=True
            )
            self._waits[name] = thread
            thread.start()
            self._threads = {thread, *(before for before in self._threads if before.is_alive())}

    def forget(self, name: str) -> None:
        """Stop answering the view ``name``."""
        with self._lock:
            self._waits.pop(name, None)
            self._paces.pop(name, None)

    def close(self) -> None:
        """Stop answering; return when all threads have ended."""
        with self._lock:
            self._is_closed.set()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join()

    def _wait(self, name: str, pace: RateLimit, answer: Callable[[], Send]) -> None:
        while (rest_s := pace.rest_s(self._clock(), self._activity())) and self._is_mine(name):
            if self._is_closed.wait(min(rest_s, LOOK_S)):
                return
        while not self._is_closed.is_set() and self._is_mine(name):
            with suppress(WorkbenchError):  # the ranks are being stopped
                if self._answers(name, pace, answer):
                    return
            self._is_closed.wait(LOOK_S)

    def _is_mine(self, name: str) -> bool:
        return self._waits.get(name) is threading.current_thread()

    def _answers(self, name: str, pace: RateLimit, answer: Callable[[], Send]) -> bool:
        """Take a snapshot and answer if an answer is due; return whether the question is settled."""
        activity = self._activity()
        newest = activity, *mark(self._look())
        if not pace.is_due(self._clock(), newest):
            return False
        with self._lock:
            if not self._is_mine(name):
                return True
            del self._waits[name]
        send = answer()
        pace.answered(self._clock(), newest, time.thread_time(), activity)  # this thread serves one question alone
        send()
        return True


def mark(pulse: ClusterSnapshot) -> tuple[object, ...]:
    """Return a value that changes whenever there is something new to send."""
    ends = [(rank_trace.rank, rank_trace.end_seq) for rank_trace in pulse.trace.ranks]
    activity = pulse.under_way, pulse.ended, pulse.breakpoints, pulse.output
    held = pulse.losses, pulse.holder, pulse.is_free
    return pulse.running, pulse.exchange, pulse.record, pulse.is_live, ends, health(pulse), held, pulse.cursor, activity
