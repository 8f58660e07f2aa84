"""Long polling: a view's question waits, in a thread of its own, until there is something new."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from workbench.errors import WorkbenchError
from workbench.live.overview import health
from workbench.live.rate_limit import LOOK_S, RateLimit
from workbench.session.snapshot import ClusterSnapshot

Send = Callable[[], None]

MAX_VIEWS = 8
"""Maximum number of views kept per widget; beyond it, the view with the oldest question is dropped."""


def crowded_out(views: Iterable[str]) -> list[str]:
    """Return the views to drop, given all views in the order of their last question."""
    return list(views)[:-MAX_VIEWS]


class WatchedWorkbench(Protocol):
    """The part of a workbench that is needed here."""

    def pulse(self) -> ClusterSnapshot:
        """Return a snapshot of the cluster."""

    def activity(self) -> object:
        """Return a value that changes with news that cannot wait; queries no rank."""


class LongPoll:
    """The waiting views of one widget.

    Args:
        look: returns a snapshot of the cluster.
        answer: makes the answer for the named view and returns the function that sends it.
        clock: seconds, monotonic.
        activity: returns, without querying a rank, a value that changes when a request starts, stops, resumes or ends;
            such a change is sent at once, even to a view that was answered a moment ago.
        whose: name of the widget, used in the names of the threads.
    """

    def __init__(
        self,
        look: Callable[[], ClusterSnapshot],
        answer: Callable[[str, ClusterSnapshot], Send],
        clock: Callable[[], float],
        activity: Callable[[], object] = lambda: None,
        *,
        whose: str = "dashboard",
    ) -> None:
        self._look, self._answer, self._clock, self._activity = look, answer, clock, activity
        self._whose = whose
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._paces: dict[str, RateLimit] = {}
        self._waits: dict[str, threading.Thread] = {}  # by view, the thread that is to answer it
        self._threads: set[threading.Thread] = set()  # all that may still run

    def ask(self, name: str) -> None:
        """Answer the view ``name`` when there is something new; drop its earlier question."""
        with self._lock:
            if self._is_closed.is_set():
                return
            pace = self._paces.setdefault(name, RateLimit())
            thread = threading.Thread(target=self._wait, args=(name, pace), name=f"{self._whose}: waits", daemon=True)
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

    def _wait(self, name: str, pace: RateLimit) -> None:
        while (rest_s := pace.rest_s(self._clock(), self._activity())) and self._is_mine(name):
            if self._is_closed.wait(min(rest_s, LOOK_S)):
                return
        while not self._is_closed.is_set() and self._is_mine(name):
            with suppress(WorkbenchError):  # the ranks are being stopped
                if self._answers(name, pace):
                    return
            self._is_closed.wait(LOOK_S)

    def _is_mine(self, name: str) -> bool:
        return self._waits.get(name) is threading.current_thread()

    def _answers(self, name: str, pace: RateLimit) -> bool:
        """Take a snapshot and answer if an answer is due; return whether the question is settled."""
        activity = self._activity()
        pulse = self._look()
        newest = activity, *mark(pulse)
        if not pace.is_due(self._clock(), newest):
            return False
        with self._lock:
            if not self._is_mine(name):
                return True
            del self._waits[name]
        send = self._answer(name, pulse)
        pace.answered(self._clock(), newest, time.thread_time(), activity)  # this thread serves one question alone
        send()
        return True


def mark(pulse: ClusterSnapshot) -> tuple[object, ...]:
    """Return a value that changes whenever there is something new to send."""
    ends = [(rank_trace.rank, rank_trace.end_seq) for rank_trace in pulse.trace.ranks]
    activity = pulse.under_way, pulse.ended, pulse.breakpoints
    held = pulse.losses, pulse.holder, pulse.is_free
    return pulse.running, pulse.exchange, pulse.record, ends, health(pulse), held, pulse.cursor, activity
