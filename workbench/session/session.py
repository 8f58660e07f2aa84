"""One started cluster: its trace, its requests from sending to settled, and getting over what went wrong."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from workbench.cluster.pending import Pending, Reply
from workbench.errors import ClusterError, Interrupted, RankDied, UsageError, WorkbenchError
from workbench.events import Phase
from workbench.replay.alike import label
from workbench.session.breakpoints import UNTIL, Breakpoints
from workbench.session.collect import Collector
from workbench.session.failures import (
    RESTART,
    Position,
    death_sentence,
    first_cause,
    left_behind,
    losses_in_words,
    to_error,
)
from workbench.session.names import Names
from workbench.session.places import State, Stop, state_of, unit_names
from workbench.session.pulse import Pulse, pulse
from workbench.session.reports import Report, StepReport
from workbench.session.request import Mark, Request, Work
from workbench.session.standing import Standing, no_standing, who_works
from workbench.session.stop_reports import StopReport
from workbench.session.until import came
from workbench.session.watch import ASK_S, PATIENT_S, Interruptible, Outcome, Tick, Watch
from workbench.trace.columns import Trace

RUNTIME = "workbench.runtime.rank"
"""The rank side, in the ranks' processes; here it is only a name."""

PULSE_S = 0.02
"""How old what a live view is shown may be, in seconds: several of them ask the ranks once."""

SHARED_S = 0.08
"""How old what a view was told may be, in seconds, for those who wait for a request not to ask the ranks once more."""

RECOVER_S = 30.0
"""How long ranks may take to build new process groups, in seconds."""

CLOSE_S = 1.0
"""How long ranks may take to leave what they do before they are stopped, in seconds."""


class ClusterLike(Interruptible, Protocol):
    """What a workbench needs of a cluster: see :class:`workbench.cluster.Cluster`."""

    num_ranks: int

    @property
    def rank_info(self) -> Sequence[dict[str, Any]]:
        """Per rank: ``rank, host, device, pid, notice``."""

    def start(self) -> None:
        """Start all ranks."""

    def stop(self) -> None:
        """Stop all ranks; may be called again."""

    def alive(self) -> tuple[bool, ...]:
        """Tell for each rank whether it can be reached."""

    def losses(self) -> dict[int, str]:
        """Say of each rank that was lost how: ``died: ...`` or ``cannot be reached: ...``."""

    def apply(self, name: str, *args: Any, ranks: Iterable[int] | None = None) -> Pending:  # noqa: ANN401
        """Call ``"module:function"`` in the main thread of ranks."""

    def run_cell(self, code: str, ranks: Iterable[int] | None = None) -> Pending:
        """Run a cell in the main thread of ranks."""


NEXT_THING = "the ranks are ready again and keep their variables: correct the code, run its cell, and go on"


class Session:
    """See the module docstring.

    Args:
        cluster: started.

    Attributes:
        changed: held while a request is sent, stops, goes on or ends; notified at the latter three.
        request: what is under way, stopped ones included; None between requests.
        breakpoints: where ranks stop.
        is_closed: whether the ranks are being stopped.
    """

    def __init__(self, cluster: ClusterLike) -> None:
        self.cluster = cluster
        self.changed = threading.Condition(threading.RLock())
        self.request: Request | None = None
        self.breakpoints = Breakpoints()
        self.is_closed = False
        self._collector = Collector()
        self._catch_up: Callable[[], object] = self.drain  # with what ranks recorded, before the next request
        self._generation = 0
        self._needs_recovery = False

    # ---- asking

    @property
    def trace(self) -> Trace:
        """What was drained so far."""
        return self._collector.trace

    def living(self) -> list[int]:
        """Return the ranks that can be reached."""
        return [rank for rank, alive in enumerate(self.cluster.alive()) if alive]

    def drain(self, *, timeout_s: float = PATIENT_S, max_age_s: float = 0.0) -> None:
        """Take what the ranks recorded since the last time, unless that is less than ``max_age_s`` seconds ago."""
        self._collector.drain(self.cluster, self.living(), timeout_s=timeout_s, max_age_s=max_age_s)

    def pulse(self) -> Pulse:
        """Return the trace so far and how each rank is, at most a tenth of a second old."""
        self.drain(timeout_s=ASK_S, max_age_s=PULSE_S)
        found = pulse(self.trace, self.cluster.alive(), self._collector.positions, self.state)
        return dataclasses.replace(found, losses=self.cluster.losses())

    def names(self) -> dict[int, Names]:
        """Return what the ranks' namespaces hold; a rank that does not answer at once is left out."""
        replies = self.ask({"op": "names"})
        return {
            rank: Names(**{kind: tuple(content[kind]) for kind in ("modules", "variables", "classes")})
            for rank, content in replies.items()
        }

    def where(self, *, timeout_s: float = ASK_S) -> dict[int, dict[str, Any]]:
        """Return where each rank is; one that does not answer in time is left out."""
        return self.ask({"op": "where"}, timeout_s=timeout_s)

    def state(self, rank: int, position: Mapping[str, Any]) -> State:
        """Return what a rank that answered is doing; one that has not begun what it was asked says that it is idle."""
        request = self.request
        if request is None or rank not in request.watch.running:
            return state_of(position)
        if not request.work.is_command:
            return state_of(position, "running")
        has_begun = position.get("commands", 0) > request.mark.commands.get(rank, -1)
        return state_of(position, "idle" if has_begun else "starting")

    def ask(self, request: dict[str, Any], *, timeout_s: float = ASK_S) -> dict[int, dict[str, Any]]:
        """Return what the ranks answer to a request at their side doors; one that does not in time is left out."""
        replies = self.cluster.ask(request, self.living(), timeout_s=timeout_s)
        return {rank: reply.content for rank, reply in replies.items() if isinstance(reply, Reply)}

    # ---- doing

    def ready(self, ranks: Sequence[int]) -> Mark:
        """Make sure that ``ranks`` can take a request, and return where things are before it.

        Raises:
            UsageError: another request is under way.
            RankDied: one of them is gone.
            ClusterError: they could not be joined again after an earlier failure.
        """
        if self.request is not None:
            raise UsageError(busy_sentence(self.request))
        living = self.living()
        dead = tuple(rank for rank in ranks if rank not in living)
        if dead:
            how = losses_in_words(self.cluster.losses()) or "its process is gone"
            raise RankDied(f"{label(dead)} died earlier: {how}\n{death_sentence(dead, living)}", ranks=dead)
        if self._needs_recovery and len(living) == self.cluster.num_ranks:
            self.recover()
        self._catch_up()
        here = self._collector.positions.items()
        return Mark(
            num_rows=self._collector.next_seq,
            optimizer_steps={rank: position["optimizer_steps"] for rank, position in here},
            commands={rank: position.get("commands", 0) for rank, position in here},
            gradient_bytes=dict(self._collector.gradient_bytes),
        )

    def open(self, work: Work, pending: Pending, mark: Mark) -> Request:
        """Return the request that ``pending`` is, just sent; nothing else is asked of the ranks until it is over."""
        request = Request(work, pending, mark)
        request.watch = Watch(
            self.cluster,
            pending,
            on_slice=lambda: work.on_slice(request.listener),
            on_tick=lambda tick: self._end(request) if tick is Tick.ENDED else self._take(request, tick),
            num_outputs=work.num_outputs,
            can_pause=work.is_command,
        )
        self.request, self._catch_up = request, self.drain
        return request

    def _take(self, request: Request, tick: Tick) -> dict[int, dict[str, Any]]:
        """Take what the ranks recorded, and return where those that answered are.

        While they work, what a live view was told a moment ago is new enough, and a late answer comes the next time.
        """
        if self.is_closed:
            raise ClusterError("the ranks were stopped")
        may_be_late = tick in {Tick.IN_TIME, Tick.LEFT}
        self.drain(
            timeout_s=ASK_S if may_be_late else PATIENT_S,
            max_age_s=SHARED_S if tick is Tick.IN_TIME else 0.0,
        )
        request.work.on_tick(request.listener, self.trace)
        if tick is Tick.IN_TIME:
            self._tell_who_works(request)
        return self._collector.heard

    def _tell_who_works(self, request: Request) -> None:
        """Say who works and where if nothing else was heard of ``request`` for a while, and somebody wants to know."""
        if request.listener.on_standing is no_standing:
            return
        running = tuple(request.watch.running)
        heard = (request.work.num_outputs(), running, self._collector.next_seq)
        ended = sorted(set(request.pending.ranks) - set(running))

        def sentence(seconds: float) -> str:
            lines = self.ask({"op": "line"})
            return who_works(seconds, {rank: lines.get(rank) for rank in running}, ended)

        request.standing.look(heard, sentence, request.listener.on_standing)

    def _end(self, request: Request) -> dict[int, dict[str, Any]]:
        """Take what is left of a command; of a cell later, while nobody waits: most record nothing."""
        if request.work.is_command:
            self._take(request, Tick.ENDED)
            self._catch_up = lambda: None
        else:
            thread = threading.Thread(target=self.drain, name="workbench: drain", daemon=True)
            self._catch_up = thread.join
            thread.start()
        return self._collector.heard

    def attend(self, request: Request) -> Report:
        """Wait for ``request`` until it is over or stops; after a failure the ranks are ready again.

        Raises:
            UsageError: the ranks refused the command.
            RankError: it raised on a rank.
            RankDied: a rank is gone.
            Interrupted: it was given up.
        """
        request.watcher = threading.current_thread()
        request.standing = Standing(time.monotonic)
        report: Report | None = None
        try:
            outcome = self._watch(request)
            report = self._stopped(request, outcome) if isinstance(outcome, Stop) else self._result(request, outcome)
            request.ending = report.headline
        except BaseException as error:
            request.ending = str(error)
            raise
        finally:
            self._note(request, is_over=not isinstance(report, StopReport))
        return report

    def _watch(self, request: Request) -> Outcome | Stop:
        try:
            return request.watch.run()
        except BaseException:
            self._needs_recovery = True  # the ranks were aborted; nobody saw how they ended
            raise

    def _stopped(self, request: Request, stop: Stop) -> StopReport:
        request.work.stand(request.listener)
        request.stop = dataclasses.replace(stop, units=unit_names(self.trace.header))
        reasons = tuple(self.breakpoints.named(number) for number in stop.breakpoints)
        request.report = StopReport(stop=request.stop, words=request.work.words, reasons=reasons)
        return request.report

    def _result(self, request: Request, outcome: Outcome) -> Report:
        if self.is_closed:
            raise ClusterError("the ranks were stopped")
        request.watch.stopper.disarm(set(self.living()))
        if not outcome.failures and not outcome.given_up:
            return self._with_missed(request.work.finish(outcome.results, request.listener), request.mark)
        error = self._settle(outcome, request.mark, request.work.is_command)
        request.work.fail(request.listener)
        raise error

    def _with_missed(self, report: Report, mark: Mark) -> Report:
        """Say in the report of steps that were to stop before an event that the event did not come."""
        until = self.breakpoints.until
        if until is None or not isinstance(report, StepReport):
            return report
        events = came(self.trace, mark.num_rows, str(until))
        return dataclasses.replace(report, missed=str(until), came=tuple(events))

    def _note(self, request: Request, *, is_over: bool) -> None:
        """Tell everybody that ``request`` stands or is over."""
        with self.changed:
            request.state = "over" if is_over else "stopped"
            if is_over and self.request is request:
                self.request = None
            came_to_until = request.stop is not None and UNTIL in request.stop.breakpoints
            if (is_over or came_to_until) and self.breakpoints.clear_until() and not self.is_closed:
                self.push_breakpoints()
            self.changed.notify_all()

    def push_breakpoints(self) -> None:
        """Have all ranks take the breakpoints that there are."""
        self.ask({"op": "breakpoints", "breakpoints": self.breakpoints.to_data()}, timeout_s=PATIENT_S)

    def close(self) -> None:
        """Free the ranks from what they do, and whoever waits for them; called before the cluster is stopped."""
        self.is_closed = True
        self._catch_up()
        request = self.request
        if request is None:
            return
        self.ask({"op": "abort", "reason": "the ranks are being stopped"})
        request.pending.wait(CLOSE_S)
        if request.thread is not None and request.thread is not threading.current_thread():
            request.thread.join(CLOSE_S)

    def recover(self) -> None:
        """Have all ranks build new process groups and forget the step they were in.

        Raises:
            ClusterError: it failed or took too long; the cluster is of no more use.
        """
        self._needs_recovery = True
        self._generation += 1
        try:
            self.cluster.apply(f"{RUNTIME}:recover", self._generation).results(RECOVER_S)
        except WorkbenchError as error:
            raise ClusterError(f"the ranks could not be joined again ({error}): {RESTART}") from error
        self._needs_recovery = False

    def _settle(self, outcome: Outcome, mark: Mark, is_command: bool) -> WorkbenchError:
        """Get the ranks ready again and return what to raise."""
        positions = self._positions(mark, timeout_s=ASK_S if outcome.abandoned else PATIENT_S)
        error = _error_of(outcome, positions)
        worked = is_command or self._collector.next_seq != mark.num_rows
        blocked = any(position.unfinished for position in positions.values())
        if not (worked or blocked or outcome.aborted or outcome.results):
            return error  # all ranks raised by themselves, before anything that concerns the others
        self._needs_recovery = True
        if outcome.abandoned or len(self.living()) < self.cluster.num_ranks:
            return error  # ranks that cannot take part would be waited for
        try:
            self.recover()
        except ClusterError as broken:
            return ClusterError(f"{error}\n{broken}")
        return error

    def _positions(self, mark: Mark, *, timeout_s: float) -> dict[int, Position]:
        """Return where the ranks that answer are, with what they did since ``mark``."""
        trace, gradient_bytes = self.trace, self._collector.gradient_bytes
        names = {unit.index: unit.name for unit in trace.header.units}
        newest = {r.rank: r.rows[-1] for r in trace.ranks if r.end_seq > mark.num_rows.get(r.rank, 0) and len(r.rows)}
        return {
            rank: Position(
                step=int(newest[rank]["step"]) if rank in newest else None,
                phase=Phase(newest[rank]["phase"]).words if rank in newest else None,
                unit=names.get(int(newest[rank]["unit"])) if rank in newest else None,
                optimizer_steps=content["optimizer_steps"] - mark.optimizer_steps.get(rank, 0),
                unfinished=content["unfinished"],
                left_gradients=gradient_bytes.get(rank, 0) > 0 == mark.gradient_bytes.get(rank, 0),
            )
            for rank, content in self.where(timeout_s=timeout_s).items()
        }


def busy_sentence(request: Request) -> str:
    """Return why nothing else can be asked while ``request`` is under way, and what to do."""
    dead = request.dead
    if dead:
        return f"{request.work.words} is under way, and {label(dead)} died meanwhile: end it with %fsdp abort"
    if request.state == "stopped":
        return (
            f"{request.work.words} is under way ({request.stop}): first %fsdp continue, or give it up with %fsdp abort"
        )
    where = " in the background" if request.thread is not None else ""
    return f"{request.work.words} runs{where}: %fsdp pause stops inside it, %fsdp abort gives it up"


def _error_of(outcome: Outcome, positions: dict[int, Position]) -> WorkbenchError:
    """Return what to raise for an outcome that is not a success."""
    if outcome.abandoned:
        still = f"{label(outcome.abandoned)} still {'run' if len(outcome.abandoned) > 1 else 'runs'}"
        return Interrupted(f"interrupted; {still} and nobody waits: {RESTART}")
    if outcome.given_up and not any(failure.died for failure in outcome.failures):
        done = f"{outcome.given_up}; the ranks are ready again and keep their variables"
        return Interrupted("\n".join([done, *left_behind(positions)]))
    cause = first_cause(outcome.failures)
    if cause.ename == UsageError.__name__:
        alike = sum(str(failure) == str(cause) for failure in outcome.failures)
        everywhere = alike == len(outcome.failures) + len(outcome.results)
        return UsageError(cause.evalue if everywhere else f"rank {cause.rank}: {cause.evalue}")
    return to_error(outcome.failures, positions, next_thing=NEXT_THING)
