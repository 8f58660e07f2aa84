"""Waiting for ranks: a failure frees the others at once, a Ctrl-C frees all of them, and nobody is forgotten."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Protocol

from workbench.cluster.pending import Pending
from workbench.errors import RankDied, RankError
from workbench.session.collect import SideDoor
from workbench.session.failures import Failure

SLICE_S = 0.02
"""How often a wait looks up, in seconds."""

TICK_S = 0.1
"""How often the trace is drained while ranks work, in seconds."""

GRACE_S = 0.1
"""How long after a rank's failure the others may fail by themselves before they are aborted, in seconds."""

SHUT_AFTER_S = 0.35
"""How long after an abort a rank may still run before its process groups' sockets are shut, in seconds.

By then the engine's waits have ended, and who still runs computes or is blocked in a collective of the user's own.
Shutting while ranks still exchange data could leave one waiting for ever inside that exchange.
"""

SIGNAL_AFTER_S = 0.5
"""How long after a Ctrl-C a rank may still run before it is sent the signal itself, in seconds."""

ASK_S = 0.5
"""How long a rank may take to answer at its side door while others wait for it, in seconds."""


class Interruptible(SideDoor, Protocol):
    """What of a cluster is needed here."""

    def interrupt(self, ranks: Iterable[int] | None = None) -> None:
        """Send SIGINT to ranks."""


@dataclass
class Outcome:
    """How a request ended on each rank.

    Attributes:
        results: what ranks returned.
        failures: of the others, in the order they came in.
        aborted: ranks that were told to give up.
        interrupts: how often Ctrl-C was pressed.
        abandoned: ranks that still run, because a third Ctrl-C ended the wait.
    """

    results: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    interrupts: int = 0
    abandoned: tuple[int, ...] = ()


class CountInterrupts:
    """While it is entered, Ctrl-C only counts: no exception rises in the middle of what must be finished.

    Outside the main thread, where signals never arrive, it does nothing.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def __enter__(self) -> CountInterrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class Watch:
    """Waits for one request.

    Args:
        cluster: where the ranks are.
        pending: the request.
        on_slice: called at every look-up, about 50 times a second.
        on_tick: called about 10 times a second, and once when all is over.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cluster: Interruptible,
        pending: Pending,
        *,
        on_slice: Callable[[], None],
        on_tick: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._pending, self._clock = cluster, pending, clock
        self._on_slice, self._on_tick = on_slice, on_tick
        self._running = set(pending.ranks)
        self._outcome = Outcome()
        self._abort_at: float | None = None
        self._shut_at: float | None = None
        self._signal_at: float | None = None
        self._next_tick = clock() + TICK_S

    def run(self) -> Outcome:
        """Wait until every rank is done, or the user gives up on those that are not."""
        with CountInterrupts() as interrupts:
            try:
                self._loop(interrupts)
            except BaseException:
                self._abort("the notebook stopped waiting")
                raise
        return self._outcome

    def _loop(self, interrupts: CountInterrupts) -> None:
        while self._running and not self._outcome.abandoned:
            self._pending.wait(SLICE_S)
            self._gather()
            if interrupts.count > self._outcome.interrupts:
                self._outcome.interrupts = interrupts.count
                self._on_interrupt()
            self._act_in_time()
            self._on_slice()
            if self._clock() >= self._next_tick:
                self._on_tick()
                self._next_tick = self._clock() + TICK_S
        self._on_tick()

    def _gather(self) -> None:
        """Sort out the ranks that have ended since the last look."""
        for rank in sorted(self._running):
            if not self._pending.done(rank):
                continue
            self._running.discard(rank)
            error = self._pending.error(rank)
            if error is None:
                self._outcome.results[rank] = self._pending.result(rank)
            else:
                self._outcome.failures.append(failure_of(rank, error))
                if self._abort_at is None:
                    self._abort_at = self._clock() + GRACE_S

    def _on_interrupt(self) -> None:
        """First Ctrl-C: abort; second: also the signal, at once; third: stop waiting."""
        if self._outcome.interrupts == 1:
            self._abort("interrupted")
            self._signal_at = self._clock() + SIGNAL_AFTER_S
        elif self._outcome.interrupts == 2:
            self._signal()
        else:
            self._outcome.abandoned = tuple(sorted(self._running))

    def _act_in_time(self) -> None:
        now = self._clock()
        if self._abort_at is not None and now >= self._abort_at:
            first = self._outcome.failures[0]
            self._abort(f"rank {first.rank}: {first}".partition("\n")[0][:200])
        if self._shut_at is not None and now >= self._shut_at:
            self._shut()
        if self._signal_at is not None and now >= self._signal_at:
            self._signal()

    def _abort(self, reason: str) -> None:
        """Free the ranks that still run; each is told once."""
        ranks = sorted(self._running - self._outcome.aborted)
        self._outcome.aborted.update(ranks)
        if ranks:
            self._cluster.ask({"op": "abort", "reason": reason}, ranks, timeout_s=ASK_S)
            self._shut_at = self._clock() + SHUT_AFTER_S

    def _shut(self) -> None:
        """Free the aborted ranks that still run from what blocks them."""
        self._shut_at = None
        ranks = sorted(self._running & self._outcome.aborted)
        if ranks:
            self._cluster.ask({"op": "shut"}, ranks, timeout_s=ASK_S)

    def _signal(self) -> None:
        self._signal_at = None
        if self._running:
            self._cluster.interrupt(sorted(self._running))


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return how ``rank`` failed, from the exception its request ended with."""
    if isinstance(error, RankDied):
        return Failure(rank=rank, evalue=str(error), died=True)
    if isinstance(error, RankError):
        return Failure(rank=rank, ename=error.ename, evalue=error.evalue, traceback=error.traceback, line=error.line)
    return Failure(rank=rank, ename=type(error).__name__, evalue=str(error))
