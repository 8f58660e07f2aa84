"""Waiting for ranks: a failure frees the others, a Ctrl-C stops or frees all of them, and nobody is forgotten."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol

from workbench.cluster.deferred_interrupts import CountInterrupts
from workbench.cluster.pending_replies import PendingReplies
from workbench.cluster.release_ranks import SHUT_AFTER_S, SIGNAL_AFTER_S
from workbench.errors import RankDied, RankError
from workbench.protocol.rank_messages import GiveUp, Position, Shut
from workbench.reports.failures import Failure
from workbench.reports.stop_positions import StopGroup
from workbench.session.channel_protocol import ControlChannel
from workbench.session.pause_protocol import PauseProtocol

SLICE_S = 0.02
"""How often a wait looks up, in seconds."""

TICK_S = 0.1
"""How often the trace is drained while ranks work, in seconds."""

GRACE_S = 0.1
"""How long after a rank's failure the others may fail by themselves before they are aborted, in seconds."""

SIGNAL_CELL_AFTER_S = 0.25
"""How long after a Ctrl-C a cell, most of which is the user's own code, may still run before it is sent the signal, in
seconds: by then the engine's waits have ended."""

SIGNAL_AFTER_DEATH_S = 2.0
"""How long after the death of a rank the others may still run before they are sent SIGINT, in seconds: without it no
step can be done to its end."""

ABANDON_AFTER_S = 10.0
"""How long after an abort ranks that still run are waited for, in seconds."""

QUIET_S, HEAR_OUT_S = 0.05, 0.3
"""How long nothing must arrive until all that stopped ranks wrote counts as here, and how long at most, in seconds."""

ASK_S = 0.5
"""How long a rank may take to answer at its side door while others wait for it, in seconds."""

PATIENT_S = 5.0
"""How long when nothing else goes on and its answer matters, in seconds: it is there, and the machine may be busy."""


class Interruptible(ControlChannel, Protocol):
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
        given_up: why the user gave it up, ``"interrupted"`` or ``"aborted"``; empty: did not.
        abandoned: ranks that still run, because a last Ctrl-C ended the wait, or they did not heed an abort.
    """

    results: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    given_up: str = ""
    abandoned: tuple[int, ...] = ()


Asked = Literal["", "pause", "abort"]
"""What the user may ask for while ranks work."""


_MEANS = ("stops inside the step", "gives up", "sends SIGINT", "stops waiting")
"""What Ctrl-C does, of one after the other."""


class Tick(Enum):
    """Why it is asked what the ranks recorded."""

    IN_TIME = "they work"
    LEFT = "they are not waited for any more, and some still work"
    STOPPED = "they stand"
    FAILED = "all is over, and not every rank ended well"
    ENDED = "all is over, and every rank ended well"


class RequestWaiter:
    """Waits for one request, as often as it stops and goes on.

    Args:
        cluster: where the ranks are.
        pending: the request.
        on_slice: called at every look-up, about 50 times a second.
        on_tick: called about 10 times a second, and once when the ranks stand or all is over; returns where they are.
        num_outputs: returns how much the ranks have written so far, in pieces.
        can_pause: whether the first Ctrl-C stops the ranks inside the step; the next one then aborts.
        clock: seconds, monotonic.

    Attributes:
        stopper: stops the ranks and lets them go.
        running: ranks that have not ended.
    """

    def __init__(
        self,
        cluster: Interruptible,
        pending: PendingReplies,
        *,
        on_slice: Callable[[], None],
        on_tick: Callable[[Tick], Mapping[int, Position]],
        num_outputs: Callable[[], int] = lambda: 0,
        can_pause: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._pending, self._clock = cluster, pending, clock
        self._on_slice, self._on_tick, self._num_outputs = on_slice, on_tick, num_outputs
        self.stopper = PauseProtocol(cluster, clock)
        self.running = set(pending.ranks)
        self._outcome = Outcome()
        self._can_pause = can_pause
        self._level = 0
        self._pause_asked = self._abort_asked = False
        self._abort_at: float | None = None
        self._shut_at: float | None = None
        self._signal_at: float | None = None
        self._abandon_at: float | None = None
        self._next_tick = clock() + TICK_S

    def ask_pause(self) -> None:
        """Have the ranks stop; called from any thread."""
        self._pause_asked = True

    def ask_abort(self) -> None:
        """Have the ranks give up; called from any thread."""
        self._abort_asked = True

    @property
    def asked(self) -> Asked:
        """What the user asked for that has not come yet."""
        if self._outcome.given_up:
            return "abort"
        return "pause" if self.stopper.is_pausing else ""

    def run(self, interrupts: CountInterrupts | None = None) -> Outcome | StopGroup:
        """Wait until every rank is done, stands, or the user gives up on those that are neither.

        ``interrupts`` counts them since the request was sent, and until this returns.
        """
        self._level = 0
        with interrupts or CountInterrupts() as counted:
            try:
                stop = self._loop(counted)
            except BaseException:
                self._abort("the notebook stopped waiting")
                raise
        return self._outcome if stop is None else stop

    def _loop(self, interrupts: CountInterrupts) -> StopGroup | None:
        seen = 0
        while self.running and not self._outcome.abandoned:
            self._pending.wait(SLICE_S)
            self._gather()
            if interrupts.count > seen:
                seen += 1
                self._escalate()
            self._obey()
            self._act_in_time()
            self._on_slice()
            stop = self._look()
            if stop is not None:
                self._hear_out()
                self._on_tick(Tick.LEFT if stop.is_late else Tick.STOPPED)
                return stop
        has_failed = self._outcome.failures or self._outcome.given_up
        self._on_tick(Tick.LEFT if self._outcome.abandoned else Tick.FAILED if has_failed else Tick.ENDED)
        return None

    def _hear_out(self) -> None:
        """Wait until nothing more arrives of what the ranks wrote before they stopped: it takes another way."""
        until, heard = self._clock() + HEAR_OUT_S, -1
        while self._num_outputs() != heard and self._clock() < until:
            heard = self._num_outputs()
            self._pending.wait(QUIET_S)

    def _look(self) -> StopGroup | None:
        """Drain in time; return the stop if the ranks stand."""
        positions = None
        if self._clock() >= self._next_tick:
            positions = self._on_tick(Tick.IN_TIME)
            self._next_tick = self._clock() + TICK_S
        elif self.stopper.eager:
            positions = self.stopper.ask_where(self.running)
        if positions is None or self._outcome.given_up or self._outcome.failures:
            return None
        return self.stopper.look(positions, self.running)

    def _gather(self) -> None:
        """Sort out the ranks that have ended since the last look."""
        for rank in sorted(self.running):
            if not self._pending.done(rank):
                continue
            self.running.discard(rank)
            error = self._pending.error(rank)
            if error is None:
                self._outcome.results[rank] = self._pending.result(rank)
            else:
                self._outcome.failures.append(failure_of(rank, error))
                if self._outcome.failures[-1].died and self._signal_at is None:
                    self._signal_at = self._clock() + SIGNAL_AFTER_DEATH_S
                if self._abort_at is None:
                    self._abort_at = self._clock() + GRACE_S
                elif rank == 0 and self._outcome.failures[-1].died and self._outcome.aborted:
                    self._shut_at = self._clock()  # the others may wait for its store

    def _obey(self) -> None:
        """Do what other threads asked for."""
        if self._pause_asked:
            self._pause_asked = False
            self._pause()
        if self._abort_asked:
            self._abort_asked = False
            self._give_up("aborted")
            self._abandon_at = self._clock() + ABANDON_AFTER_S

    @property
    def is_exhausted(self) -> bool:
        """Whether a rank has died, and all was done to free the others: nothing is left but to wait."""
        has_died = any(failure.died for failure in self._outcome.failures)
        return has_died and self._signal_at is None and self.running <= self._outcome.aborted

    @property
    def next_means(self) -> str:
        """What the next Ctrl-C does: ``"Ctrl-C again gives up"``."""
        return f"Ctrl-C {'again ' if self._level else ''}{_MEANS[self._next_level()]}"

    def _escalate(self) -> None:
        """Do more than at the last Ctrl-C: stop, abort, signal at once, wait no more."""
        level = self._next_level()
        self._level = min(level + 1, 3)
        (self._pause, self._interrupt, self._signal, self._abandon)[level]()

    def _next_level(self) -> int:
        if self.is_exhausted:
            return 3
        if self._outcome.given_up:
            floor = 2
        else:
            floor = 0 if self._can_pause and not self.stopper.is_pausing and not self._outcome.failures else 1
        return max(self._level, floor)

    def _pause(self) -> None:
        self.stopper.pause(self.running)

    def _interrupt(self) -> None:
        self._give_up("interrupted")

    def _give_up(self, why: str) -> None:
        self._outcome.given_up = why
        self._abort(why)
        self._signal_at = self._clock() + (SIGNAL_AFTER_S if self._can_pause else SIGNAL_CELL_AFTER_S)

    def _abandon(self) -> None:
        self._outcome.abandoned = tuple(sorted(self.running))

    def _act_in_time(self) -> None:
        now = self._clock()
        if self._abort_at is not None and now >= self._abort_at:
            first = self._outcome.failures[0]
            self._abort(f"rank {first.rank}: {first}".partition("\n")[0][:200])
        if self._shut_at is not None and now >= self._shut_at:
            self._shut()
        if self._signal_at is not None and now >= self._signal_at:
            self._signal()
        if self._abandon_at is not None and now >= self._abandon_at:
            self._abandon()

    def _abort(self, reason: str) -> None:
        """Free the ranks that still run; each is told once."""
        ranks = sorted(self.running - self._outcome.aborted)
        self._outcome.aborted.update(ranks)
        if ranks:
            self._cluster.ask(GiveUp(reason=reason), ranks, timeout_s=ASK_S)
            self._shut_at = self._clock() + SHUT_AFTER_S

    def _shut(self) -> None:
        """Free the aborted ranks that still run from what blocks them."""
        self._shut_at = None
        self._gather()
        ranks = sorted(self.running & self._outcome.aborted)
        if ranks:
            store_is_gone = any(failure.rank == 0 and failure.died for failure in self._outcome.failures)
            self._cluster.ask(Shut(store=store_is_gone), ranks, timeout_s=ASK_S)

    def _signal(self) -> None:
        self._signal_at = None
        self._gather()
        if self.running:
            self._cluster.interrupt(sorted(self.running))


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return how ``rank`` failed, from the exception its request ended with."""
    if isinstance(error, RankDied):
        return Failure(rank=rank, evalue=str(error), died=True)
    if isinstance(error, RankError):
        return Failure(rank=rank, ename=error.ename, evalue=error.evalue, traceback=error.traceback, line=error.line)
    return Failure(rank=rank, ename=type(error).__name__, evalue=str(error))
