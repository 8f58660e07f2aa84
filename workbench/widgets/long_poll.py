"""Answers for views that wait until there is something new: each waits in a thread of its own, and nobody else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from workbench.errors import WorkbenchError
from workbench.events import Kind
from workbench.protocol.breakpoints import UNTIL
from workbench.replay.grouping import label
from workbench.reports.failures import RESTART, losses_in_words
from workbench.reports.stop_positions import State, describe, unit_names
from workbench.session.snapshot import ClusterSnapshot
from workbench.widgets.dashboard_messages import BreakpointState, RankHealth
from workbench.widgets.rate_limit import LOOK_S, RateLimit

Send = Callable[[], None]

MAX_VIEWS = 8
"""Views of one widget that are kept; of more the one that has not asked for longest is forgotten."""


def crowded_out(views: Iterable[str]) -> list[str]:
    """Return which views to forget, of those that are there in the order in which they have asked last."""
    return list(views)[:-MAX_VIEWS]


class WatchedWorkbench(Protocol):
    """What of a workbench is needed here."""

    def pulse(self) -> ClusterSnapshot:
        """Return how the cluster is doing."""

    def asked(self) -> object:
        """Return what is different once there is something to tell at once; no rank is asked."""


class LongPoll:
    """The views of one widget that wait.

    Args:
        look: tells how the cluster is doing.
        answer: makes the answer to the view of a name, and returns what sends it.
        clock: seconds, monotonic.
        asked: tells without asking a rank what is different once ranks were asked something, stand, go on or are done;
            that is told at once, also to a view that was told something a moment ago.
        whose: the widget, in the names of the threads.
    """

    def __init__(
        self,
        look: Callable[[], ClusterSnapshot],
        answer: Callable[[str, ClusterSnapshot], Send],
        clock: Callable[[], float],
        asked: Callable[[], object] = lambda: None,
        *,
        whose: str = "dashboard",
    ) -> None:
        self._look, self._answer, self._clock, self._asked = look, answer, clock, asked
        self._whose = whose
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._paces: dict[str, RateLimit] = {}
        self._waits: dict[str, threading.Thread] = {}  # by view, who is to answer
        self._threads: set[threading.Thread] = set()  # all that may not have ended

    def ask(self, name: str) -> None:
        """Answer the view ``name`` when there is something new; a question it had put before is dropped."""
        with self._lock:
            if self._is_closed.is_set():
                return
            pace = self._paces.setdefault(name, RateLimit())
            thread = threading.Thread(target=self._wait, args=(name, pace), name=f"{self._whose}: waits", daemon=True)
            self._waits[name] = thread
            thread.start()
            self._threads = {thread, *(before for before in self._threads if before.is_alive())}

    def forget(self, name: str) -> None:
        """Answer the view ``name`` no more."""
        with self._lock:
            self._waits.pop(name, None)
            self._paces.pop(name, None)

    def close(self) -> None:
        """Answer nobody any more; returns when nothing is left."""
        with self._lock:
            self._is_closed.set()
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join()

    def _wait(self, name: str, pace: RateLimit) -> None:
        while (rest_s := pace.rest_s(self._clock(), self._asked())) and self._is_mine(name):
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
        """Look; answer if it is time, and return whether that is done."""
        asked = self._asked()
        pulse = self._look()
        newest = asked, *mark(pulse)
        if not pace.is_due(self._clock(), newest):
            return False
        with self._lock:
            if not self._is_mine(name):
                return True
            del self._waits[name]
        send = self._answer(name, pulse)
        pace.answered(self._clock(), newest, time.thread_time(), asked)  # of this thread, which began with the question
        send()
        return True


def mark(pulse: ClusterSnapshot) -> tuple[object, ...]:
    """Return what is different if there is something to tell."""
    ends = [(rank_trace.rank, rank_trace.end_seq) for rank_trace in pulse.trace.ranks]
    asked = pulse.under_way, pulse.ended, pulse.breakpoints
    held = pulse.losses, pulse.holder, pulse.is_free
    return pulse.running, pulse.exchange, pulse.record, ends, health(pulse), held, pulse.cursor, asked


def health(pulse: ClusterSnapshot) -> tuple[RankHealth, ...]:
    """Return how the ranks are now, alike ones together."""
    names = unit_names(pulse.trace.header)
    groups: dict[tuple[State, str], list[int]] = {}
    for rank, state in sorted(pulse.states.items()):
        position = pulse.positions.get(rank)
        held = position.held if position is not None and state == "held" else None
        groups.setdefault((state, describe(held, names) if held is not None else ""), []).append(rank)
    return tuple(
        RankHealth(label=label(ranks), ranks=tuple(ranks), state=state, where=where)
        for (state, where), ranks in groups.items()
    )


def breakpoints(pulse: ClusterSnapshot) -> tuple[BreakpointState, ...]:
    """Return the breakpoints; that of ``step --until``, which cannot be switched, is told with what is under way."""
    return tuple(BreakpointState(id=b.id, text=str(b), is_on=b.is_on) for b in pulse.breakpoints if b.id != UNTIL)


FREE = "These ranks are free now. To take them: %fsdp attach."


def said(pulse: ClusterSnapshot) -> str:
    """Return a sentence about what there is to see, or about what to do first; empty while ranks train."""
    if pulse.exchange == "start":
        words = pulse.waits_for or "starting or attaching ranks"
        return f"{words[:1].upper()}{words[1:]}."
    if pulse.exchange == "stop":
        return "The ranks are being stopped; what they recorded stays."
    if pulse.is_free:
        return FREE
    if pulse.holder:
        return (
            f"{pulse.holder} controls these ranks; here you can only view them. To take control: %fsdp attach --take."
        )
    if pulse.losses:
        return f"{losses_in_words(pulse.losses)}. No step is possible any more: {RESTART}."
    return _recorded(pulse)


def _recorded(pulse: ClusterSnapshot) -> str:
    """Return a sentence about what is recorded, or about what to do so that something is."""
    is_recorded = pulse.trace.num_rows > 0
    if not pulse.running:
        if is_recorded:
            return f"No ranks are running: this is {pulse.record or 'what the last ones recorded'}."
        return "No ranks are running and nothing is recorded. Start ranks with %fsdp start -n 4."
    if any((rank_trace.kinds == Kind.STEP).any() for rank_trace in pulse.trace.ranks):
        return ""
    if any(unit.in_use for unit in pulse.trace.header.units):
        return "No step has run yet. Define train_step() in a %%fsdp cell, then press step, or type %fsdp step 40."
    return "No model is sharded yet. Define one in a %%fsdp cell, then shard it with %fsdp shard MODEL."
