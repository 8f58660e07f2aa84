"""The gate: it checks each event before it is recorded, and may hold its rank there.

A held thread runs a command loop, like a debugger's: expressions, cells and inspections that arrive meanwhile run in
the stopped step's own thread and grad mode. The control thread only sets what is wanted and puts jobs into the inbox::

    control thread                        held thread
    Pause     -> wanted                   event -> wanted? -> held: loop over the inbox
    Job       -> inbox                      job: run it, store its result under its ticket
    Continue  -> released, wake             wake: interrupted? aborted? released? then continue

While nothing is wanted :attr:`Gate.event` *is* the recorder's: the gate costs nothing. Memory events never hold a rank:
gradients are freed in the garbage collector, at any point.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue

from workbench.engine import cancellable_waits, probe
from workbench.engine.cancellable_waits import cancellation
from workbench.errors import UsageError
from workbench.events import COLLECTIVES, Comm, Edge, Kind, unit_words
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.commands import Continue, Inspect, Next, Pause
from workbench.protocol.rank_messages import Forget, Hold, Job, JobReply, RunTo, SetBreakpoints, StepPosition
from workbench.runtime import breakpoint_matching, held_eval
from workbench.runtime.breakpoint_matching import ArmedBreakpoint, PendingEvent, StopTargets
from workbench.runtime.gradient_values import GradientValues, GradientWatch
from workbench.runtime.interrupts import Interrupts
from workbench.runtime.recorder import NO_STEP, Recorder

Inbox = SimpleQueue[Job | None]
"""Jobs; None wakes the held thread."""

GateRequest = Pause | RunTo | Continue | Next | SetBreakpoints | Job | Forget

_NEEDS_OTHERS = (*COLLECTIVES, Kind.UNSHARD)
_WITHIN_COLLECTIVE = (*COLLECTIVES, Kind.WAIT)  # while one of these has begun
_RECENT_NS = 500_000_000  # a waiting rank calls the stop point more often than that


class Gate:
    """The probe that checks each event before it is recorded, and may hold its rank there and run jobs.

    Args:
        recorder: records the events that have passed the gate.
        rank: this rank.
        quiet: called in the thread that is about to be held, before the hold is visible: see
            :class:`workbench.runtime.flush_before_hold.FlushBeforeHold`.

    Attributes:
        event: the function that the engine calls; the recorder's own while nothing is wanted.
        interrupts: handling of SIGINT.
    """

    def __init__(self, recorder: Recorder, rank: int, quiet: Callable[[], bool] = lambda: False) -> None:
        self._recorder = recorder
        self._rank = rank
        self._quiet = quiet
        self._alone = ""
        self._lock = threading.Lock()  # guards the stop targets and whether the rank is held
        self._wanted = StopTargets()
        self._inbox: Inbox = SimpleQueue()  # its put may be called from a signal handler
        self._held: Hold | None = None
        self._is_released = False
        self._passes = False
        self._waits_at = StepPosition(NO_STEP, -1)
        self._waited_ns = 0
        self._tickets: dict[str, JobReply] = {}
        self._names: tuple[int, dict[int, str]] = (-1, {})
        self._gradients = GradientWatch(recorder)
        self.interrupts = Interrupts(self.check_soon)
        self.event = recorder.event
        self.memory, self.phase, self.late_end = recorder.memory, recorder.phase, recorder.late_end
        self.readers = recorder.readers
        self.unit, self.comm_group, self.issued = recorder.unit, recorder.comm_group, recorder.issued
        self.source, self.metric = recorder.source, recorder.metric
        self.begin_step, self.end_step = recorder.begin_step, recorder.end_step

    def install(self) -> None:
        """Become the active probe in front of the recorder, and the stop point of waits."""
        self._recorder.before_own = self._ask_own
        cancellable_waits.stop_point = self._ask_waiting
        probe.active = self

    def uninstall(self) -> None:
        """Remove the probe and the stop point of waits."""
        self._gradients.switch(is_on=False)
        probe.active = None
        cancellable_waits.stop_point = cancellable_waits.go_on

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Never hold this rank within the body, a command that is not a step."""
        self._passes = True
        try:
            yield
        finally:
            self._passes = False

    @contextmanager
    def stepping(self, stop: Breakpoint | None = None) -> Iterator[None]:
        """Run steps in the body, and hold once at ``stop``; requests for these steps are dropped at the end."""
        if stop is not None:
            with self._lock:
                armed = breakpoint_matching.arm((stop,), self._rank)
                self._want(replace(self._wanted, breakpoints=(*armed, *self._wanted.breakpoints)))
        self.watch_gradients()
        try:
            with self.interrupts.guarded():
                yield
        finally:
            self.forget_requests()

    def watch_gradients(self) -> None:
        """Watch gradients in the request that begins if a breakpoint needs it; all ranks then take part to its end."""
        if self._held is None:  # a cell within a stopped step
            self._gradients.switch(is_on=any(each.uses_gradients for each in self._wanted.breakpoints))

    def forget_requests(self) -> None:
        """Drop pause, next, run-to positions and one-time breakpoints; keep the other breakpoints."""
        with self._lock:
            self._want(self._wanted.lasting())

    # ---- checks before an event, in the step's thread

    def _requested(
        self,
        kind: Kind,
        edge: Edge,
        unit: int,
        num_bytes: int,
        comm: Comm | None,
        t_ns: int | None,
    ) -> None:
        self._ask(kind, edge, unit, num_bytes)
        self._recorder.event(kind, edge, unit, num_bytes, comm, t_ns)

    def _ask_own(self, kind: Kind, edge: Edge) -> None:
        is_compared = kind is Kind.OPTIMIZER and edge is Edge.BEGIN and self._may_hold
        self._ask(kind, edge, -1, 0, self._gradients.exchange() if is_compared else None)

    def _ask(self, kind: Kind, edge: Edge, unit: int, num_bytes: int, gradients: GradientValues | None = None) -> None:
        self.interrupts.check()
        if kind in _NEEDS_OTHERS and edge is Edge.BEGIN and not self._recorder.is_aside:
            cancellation.check()  # a rank that has left may have closed its sockets, and gloo would wait for ever
        # c10d's own calls, which belong to no unit, are refused where their group is known
        if self._alone and self._recorder.is_aside and kind in _NEEDS_OTHERS and edge is Edge.BEGIN and unit >= 0:
            raise UsageError(held_eval.needs_others(f"{kind.words} of {self._name_of(unit)}", self._alone))
        if not (self._wanted.may_stop_at(kind) and self._may_hold):
            return
        event = replace(self._event(kind, edge, unit, num_bytes), gradients=gradients)
        if self._stops(event, lambda wanted: wanted.stops_at(event)):
            self._hold(unit)

    def _ask_waiting(self) -> None:
        """Hold in a wait for other ranks, if it is within a collective, whose end has not passed the gate yet.

        Other waits, such as that for readers at the end of a backward, may be followed by the user's own code. A rank
        that is past such a wait may block there in a collective without an event, and wait for this rank: holding this
        one would keep the other from ever reaching an event.
        """
        self.interrupts.check()
        if self._alone and self._recorder.is_aside:
            raise UsageError(held_eval.needs_others("this", self._alone))
        self._waits_at = self._place()
        self._waited_ns = time.monotonic_ns()
        if not (self._wanted.is_anything and self._may_hold):
            return
        row = self._recorder.last_event()
        if row is None or row["edge"] != Edge.BEGIN or row["kind"] not in _WITHIN_COLLECTIVE:
            return
        event = self._event(Kind.WAIT, Edge.BEGIN, int(row["unit"]), 0)
        if self._stops(event, lambda wanted: (wanted.stops_waiting(event.place), None)):
            self._hold(event.unit)

    def _stops(self, event: PendingEvent, check: Callable[[StopTargets], tuple[bool, ArmedBreakpoint | None]]) -> bool:
        """Decide whether to hold before ``event``; if so, this rank counts as held on return.

        Flushing and synchronising come first, without the lock, so the decision is made again afterwards.
        """
        is_synchronised: bool | None = None
        while True:
            with self._lock:
                stops, met = check(self._wanted)
                if not stops or is_synchronised is not None:
                    if met is not None:
                        self._want(self._wanted.without(met))
                    if stops:
                        self._want(self._wanted.but())
                        self._begin_hold(event, met, is_synchronised=bool(is_synchronised))
                    return stops
            is_synchronised = self._quiet()

    @property
    def _may_hold(self) -> bool:
        recorder = self._recorder
        return not (self._passes or recorder.step == NO_STEP or recorder.is_aside)

    def _event(self, kind: Kind, edge: Edge, unit: int, num_bytes: int) -> PendingEvent:
        recorder = self._recorder
        return PendingEvent(
            kind=kind,
            edge=edge,
            unit=unit,
            unit_name=self._name_of(unit),
            num_bytes=num_bytes,
            phase=recorder.phase_now,
            place=self._place(),
        )

    def _place(self) -> StepPosition:
        return StepPosition(self._recorder.step, self._recorder.ordinal)

    def _name_of(self, unit: int) -> str:
        version = self._recorder.header_version
        if self._names[0] != version:
            self._names = version, {u.index: unit_words(u.name) for u in self._recorder.header.units}
        return self._names[1].get(unit, "")

    # ---- held

    def _begin_hold(self, event: PendingEvent, met: ArmedBreakpoint | None, *, is_synchronised: bool) -> None:
        self._is_released = False
        compared = event.gradients if met is not None and met.uses_gradients else None
        self._held = Hold(
            kind=event.kind,
            edge=event.edge,
            phase=event.phase,
            unit=event.unit,
            since_ns=time.monotonic_ns(),
            place=event.place,
            num_bytes=event.num_bytes,
            breakpoint=None if met is None else met.breakpoint.id,
            because="" if compared is None else compared.because,
            synchronised=is_synchronised,
        )

    def _hold(self, unit: int) -> None:
        """Run jobs until this rank is released.

        Raises:
            StepAborted: the step was aborted.
            KeyboardInterrupt: SIGINT.
        """
        try:
            with self._recorder.held(unit), self.interrupts.guarded():
                self._serve()
        finally:
            with self._lock:
                self._held = None
                left = self._take_left()
            self._tickets |= {ticket: held_eval.refusal("the step continued before this could run") for ticket in left}

    def _serve(self) -> None:
        cancellation.check()
        while True:
            while (job := self._next_message()) is not None:
                self._run(job)
            self.interrupts.check()
            cancellation.check()
            if self._is_released:  # it precedes the wake: earlier jobs have run
                return

    def _next_message(self) -> Job | None:
        while True:
            try:
                return self._inbox.get(timeout=cancellable_waits.SLICE_S)
            except Empty:
                continue  # Python handles a signal that another thread has caught between two calls

    def _run(self, job: Job) -> None:
        with self._recorder.aside(), self._in_company(job.alone):
            done = held_eval.run(job, self._recorder)
        self._tickets[job.ticket] = done

    @contextmanager
    def _in_company(self, alone: str) -> Iterator[None]:
        """Mark the body as run only by some ranks: it must not wait for others. ``alone`` empty: all ranks run it."""
        self._set_alone(alone)
        try:
            yield
        finally:
            self._set_alone("")

    def _set_alone(self, alone: str) -> None:
        with self._lock:
            self._alone = alone
            self._want(self._wanted)

    def _take_left(self) -> list[str]:
        left: list[str] = []
        while True:
            try:
                job = self._inbox.get_nowait()
            except Empty:
                return left
            if job is not None:
                left.append(job.ticket)

    # ---- from other threads

    def _want(self, wanted: StopTargets) -> None:
        """Replace the stop targets, and check events from now on if there are any; call with the lock held."""
        self._wanted = wanted
        if self._is_wanted():
            self.event = self._requested
            return
        self.event = self._recorder.event
        if self._is_wanted():  # a signal arrived between the two lines above
            self.event = self._requested

    def _is_wanted(self) -> bool:
        return self._wanted.is_anything or self.interrupts.is_flagged or bool(self._alone) or cancellation.is_set

    def check_soon(self) -> None:
        """Have the step's thread check whether it must leave: at once if held, else at its next event; never blocks."""
        self.event = self._requested
        self.wake()

    def wake(self) -> None:
        """Make the held thread check whether it may or must leave; thread-safe, never blocks."""
        self._inbox.put(None)

    def request(self, request: GateRequest) -> bool | None:
        """Handle a request on the control channel; for a job, return whether this rank runs it.

        A held rank does, in the held thread. Between steps an inspection runs here, in the control thread.

        Raises:
            UsageError: an event or a condition is invalid; nothing has changed then.
        """
        if isinstance(request, Job) and isinstance(request.work, Inspect) and self._is_between_steps():
            self._tickets[request.ticket] = held_eval.run(request, self._recorder)
            return True
        with self._lock:
            match request:
                case Job():
                    if self.held is not None:
                        self._inbox.put(request)
                    return self.held is not None
                case Forget():
                    for ticket in request.tickets:
                        self._tickets.pop(ticket, None)
                case SetBreakpoints():
                    self._want(self._wanted.with_breakpoints(breakpoint_matching.arm(request.breakpoints, self._rank)))
                case Pause():
                    if self.held is None:
                        self._want(self._wanted.but(pause=True))
                case _:
                    self._go_on(request)
        return None

    def _is_between_steps(self) -> bool:
        return self.held is None and self._recorder.step == NO_STEP

    def _go_on(self, request: RunTo | Continue | Next) -> None:
        match request:
            case RunTo(place=place):
                if self.held is None or self.held.place < place:
                    self._let_go(self._wanted.but(target=place))
            case Continue():
                self._let_go(self._wanted.but())
            case Next(what=what):
                is_next = breakpoint_matching.next_after(what, self._recorder.phase_now)
                self._let_go(self._wanted.but(is_next=is_next))

    def _let_go(self, wanted: StopTargets) -> None:
        held = self._held
        if held is None:
            self._want(wanted)
        else:
            self._want(replace(wanted, after=held.place))
            self._is_released = True
            self.wake()

    @property
    def held(self) -> Hold | None:
        """The event before which this rank is held; thread-safe."""
        return None if self._is_released else self._held

    @property
    def tickets(self) -> dict[str, JobReply]:
        """Results of the finished jobs, until a ``Forget``."""
        return dict(self._tickets)

    @property
    def is_waiting(self) -> bool:
        """Whether this rank is in a step and waits for other ranks."""
        return self._recorder.step != NO_STEP and self._is_waiting()

    def _is_waiting(self) -> bool:
        row = self._recorder.last_event()
        if row is not None and (row["kind"], row["edge"]) == (Kind.WAIT, Edge.BEGIN):
            return True
        # waits without an event: for all ranks to announce what they issue
        was_recent = time.monotonic_ns() - self._waited_ns < _RECENT_NS
        return was_recent and self._waits_at == self._place()
