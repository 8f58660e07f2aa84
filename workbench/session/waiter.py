"""Waiting for ranks: after a failure the other ranks are aborted, and Ctrl-C stops or aborts all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from workbench.cluster.channel_protocol import Interruptible
from workbench.cluster.deferred_interrupts import CountInterrupts
from workbench.cluster.pending_replies import PendingReplies
from workbench.cluster.release_ranks import SHUT_AFTER_S, SIGNAL_AFTER_S
from workbench.errors import RankDied, RankError
from workbench.protocol.rank_messages import GiveUp, Position, Shut
from workbench.reports.failures import Failure
from workbench.reports.stop_positions import StopGroup
from workbench.session.pause_protocol import PauseProtocol

SLICE_S = 0.02
"""Polling period of a wait, in seconds."""

TICK_S = 0.1
"""Period at which the trace is drained while ranks run, in seconds."""

GRACE_S = 0.1
"""Time in seconds after a rank's failure before the others are aborted; they may fail themselves first."""

SIGNAL_CELL_AFTER_S = 0.25
"""Time in seconds after Ctrl-C before a running cell, which is mostly the user's code, is sent SIGINT; the engine's
waits have ended before."""

SIGNAL_AFTER_DEATH_S = 2.0
"""Time in seconds after the death of a rank before the others are sent SIGINT; they cannot finish a step without it."""

ALIGN_S = 2.0
"""Time in seconds for running ranks to stop at the same event before an abort, from the first of two Ctrl-C on; they
then have equal gradients and optimizer state. Ranks that do not get there, as some wait for ever, are aborted where
they are."""

ABANDON_AFTER_S = 10.0
"""Time in seconds after an abort before the wait for ranks that still run ends."""

QUIET_S, HEAR_OUT_S = 0.05, 0.3
"""Time in seconds without new output after which the output of stopped ranks counts as complete, and its limit."""

ASK_S = 0.5
"""Timeout of a control-channel request while others wait for the reply, in seconds."""

PATIENT_S = 5.0
"""The same when the reply matters and nothing else waits, in seconds: an idle rank answers, though late if the machine
is busy."""


@dataclass
class Outcome:
    """How a request ended on each rank.

    Attributes:
        results: return values, by rank.
        failures: failures of other ranks, in order of arrival.
        aborted: ranks that were sent an abort.
        given_up: how the user cancelled it, ``"interrupted"`` or ``"aborted"``; empty: not cancelled.
        abandoned: ranks still running when the last Ctrl-C, or the limit after an abort, ended the wait.
    """

    results: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    aborted: set[int] = field(default_factory=set)
    given_up: str = ""
    abandoned: tuple[int, ...] = ()


Requested = Literal["", "pause", "abort"]
"""What the user may request while ranks run."""


class InterruptStage(Enum):
    """The means that a Ctrl-C uses, gentlest first; each is used once."""

    PAUSE = "stops inside the step"
    ABORT = "aborts"
    SIGNAL = "sends SIGINT"
    ABANDON = "stops waiting"


class DrainCause(Enum):
    """Why the ranks are drained."""

    IN_TIME = "the ranks run"
    LEFT = "the wait has ended, and some ranks still run"
    STOPPED = "the ranks are stopped"
    FAILED = "all ranks have ended, some with a failure"
    ENDED = "all ranks have ended without failure"


class RequestWaiter:
    """Waits for one request, across its stops.

    Args:
        cluster: the cluster.
        pending: the request.
        on_slice: called at every poll, about 50 times a second.
        on_tick: called about 10 times a second, and once when the ranks are stopped or done; returns their positions.
        num_outputs: returns the number of outputs of the ranks so far.
        can_pause: whether the first Ctrl-C stops the ranks inside the step; the next one then aborts.
        clock: monotonic clock, in seconds.

    Attributes:
        stopper: stops and releases the ranks.
        running: ranks that have not ended.
    """

    def __init__(
        self,
        cluster: Interruptible,
        pending: PendingReplies,
        *,
        on_slice: Callable[[], None],
        on_tick: Callable[[DrainCause], Mapping[int, Position]],
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
        self._used: InterruptStage | None = None  # by the last Ctrl-C
        self._pause_requested = self._abort_requested = False
        self._aligns_first = False
        self._paused_at: float | None = None  # by a Ctrl-C
        self._align_until: float | None = None
        self._why = ""  # the user gives up after that
        self._abort_at: float | None = None
        self._shut_at: float | None = None
        self._signal_at: float | None = None
        self._abandon_at: float | None = None
        self._next_tick = clock() + TICK_S

    def request_pause(self) -> None:
        """Request a stop of the ranks. Thread-safe."""
        self._pause_requested = True

    def request_abort(self, *, aligns_first: bool = False) -> None:
        """Request an abort of the ranks; ``aligns_first``: once they have stopped at the same event. Thread-safe."""
        self._aligns_first = aligns_first and self._can_pause
        self._abort_requested = True

    @property
    def requested(self) -> Requested:
        """The user's request that is not complete yet."""
        if self._outcome.given_up or self._align_until is not None:
            return "abort"
        return "pause" if self.stopper.is_pausing else ""

    def run(self, interrupts: CountInterrupts) -> Outcome | StopGroup:
        """Wait until every rank is done or stopped, or the user abandons the rest; return the outcome or the stop.

        ``interrupts`` counts each Ctrl-C since the request was sent.
        """
        self._used = self._paused_at = None
        try:
            stop = self._loop(interrupts)
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
            if self._align_until is not None:
                self._abort_if_aligned(stop)
            elif stop is not None:
                self._hear_out()
                self._on_tick(DrainCause.LEFT if stop.is_late else DrainCause.STOPPED)
                return stop
        has_failed = self._outcome.failures or self._outcome.given_up
        ended = DrainCause.FAILED if has_failed else DrainCause.ENDED
        self._on_tick(DrainCause.LEFT if self._outcome.abandoned else ended)
        return None

    def _hear_out(self) -> None:
        """Wait for the output that the ranks wrote before they stopped; it arrives on another socket."""
        until, num_outputs = self._clock() + HEAR_OUT_S, -1
        while self._num_outputs() != num_outputs and self._clock() < until:
            num_outputs = self._num_outputs()
            self._pending.wait(QUIET_S)

    def _look(self) -> StopGroup | None:
        """Drain the ranks if it is time; return the stop if they are stopped, else None."""
        positions = None
        if self._clock() >= self._next_tick:
            positions = self._on_tick(DrainCause.IN_TIME)
            self._next_tick = self._clock() + TICK_S
        elif self.stopper.eager:
            positions = self.stopper.ask_where(self.running)
        if positions is None or self._outcome.given_up or self._outcome.failures:
            return None
        return self.stopper.look(positions, self.running)

    def _gather(self) -> None:
        """Collect the results and failures of ranks that have ended."""
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
        """Carry out the requests of other threads."""
        if self._pause_requested:
            self._pause_requested = False
            self._pause()
        if self._abort_requested:
            self._abort_requested = False
            self._why = "aborted"
            if self._aligns_first and not self._outcome.failures:
                self._align_until = self._clock() + ALIGN_S
                self._pause()
            else:
                self._give_up_at_once()

    def _abort_if_aligned(self, stop: StopGroup | None) -> None:
        """Abort the ranks once all are held at the same event, or it is too late for that."""
        is_aligned = stop is not None and not stop.is_late
        is_over = bool(self._outcome.failures or self._outcome.given_up) or self._clock() >= (self._align_until or 0.0)
        if is_aligned or is_over:
            self._give_up_at_once()
        elif stop is not None:
            self._pause()  # again: some were late, and may be at another event

    def _give_up_at_once(self) -> None:
        self._align_until = None
        if not self._outcome.given_up:
            self._give_up(self._why)
        if self._why == "aborted":
            self._abandon_at = self._clock() + ABANDON_AFTER_S

    @property
    def is_exhausted(self) -> bool:
        """Whether a rank has died and all means to abort the others are used up."""
        has_died = any(failure.died for failure in self._outcome.failures)
        return has_died and self._signal_at is None and self.running <= self._outcome.aborted

    @property
    def next_means(self) -> str:
        """What the next Ctrl-C does: ``"Ctrl-C again gives up"``."""
        means = self._next()
        is_aligning = means is InterruptStage.ABORT and self._align_until is not None
        return f"Ctrl-C {'again ' if self._used else ''}{means.value}{' at once' if is_aligning else ''}"

    def _escalate(self) -> None:
        """Use the next means at a Ctrl-C."""
        self._used = self._next()
        match self._used:
            case InterruptStage.PAUSE:
                self._paused_at = self._clock()
                self._pause()
            case InterruptStage.ABORT:
                is_first = self._align_until is None
                self._why = "interrupted"
                if is_first and self._paused_at is not None and not self._outcome.failures:
                    self._align_until = self._paused_at + ALIGN_S  # the ranks may be about to stop
                else:
                    self._give_up_at_once()
            case InterruptStage.SIGNAL:
                self._signal()
            case InterruptStage.ABANDON:
                self._abandon()

    def _next(self) -> InterruptStage:
        """Return the gentlest means that can help and was not used yet."""
        if self.is_exhausted or self._used in {InterruptStage.SIGNAL, InterruptStage.ABANDON}:
            return InterruptStage.ABANDON
        if self._align_until is not None:
            return InterruptStage.ABORT
        if self._outcome.given_up or self._used is InterruptStage.ABORT:
            return InterruptStage.SIGNAL
        can_pause = self._can_pause and not self.stopper.is_pausing and not self._outcome.failures
        return InterruptStage.PAUSE if can_pause and self._used is None else InterruptStage.ABORT

    def _pause(self) -> None:
        self.stopper.pause(self.running)

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
        """Abort the ranks that still run; each gets one abort."""
        ranks = sorted(self.running - self._outcome.aborted)
        self._outcome.aborted.update(ranks)
        if ranks:
            self._cluster.ask(GiveUp(reason=reason), ranks, timeout_s=ASK_S)
            self._shut_at = self._clock() + SHUT_AFTER_S

    def _shut(self) -> None:
        """Shut the sockets of aborted ranks that still run, to end what blocks them."""
        self._shut_at = None
        self._gather()
        ranks = sorted(self.running & self._outcome.aborted)
        if ranks:
            self._cluster.ask(Shut(), ranks, timeout_s=ASK_S)

    def _signal(self) -> None:
        self._signal_at = None
        self._gather()
        if self.running:
            self._cluster.interrupt(sorted(self.running))


def failure_of(rank: int, error: BaseException) -> Failure:
    """Return the failure of ``rank`` for the exception that its request ended with."""
    if isinstance(error, RankDied):
        return Failure(rank=rank, evalue=str(error), died=True)
    if isinstance(error, RankError):
        return Failure(
            rank=rank,
            ename=error.ename,
            evalue=error.evalue,
            traceback=error.traceback,
            line=error.line,
            script=error.script,
        )
    return Failure(rank=rank, ename=type(error).__name__, evalue=str(error))
