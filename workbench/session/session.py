"""One started cluster: its trace, its requests from sending to settled, and getting over what went wrong."""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol, TypeVar

import numpy as np

from workbench.cluster.deferred_interrupts import CountInterrupts
from workbench.cluster.engine_provider import OnWait, no_wait
from workbench.cluster.pending_replies import PendingReplies, select
from workbench.cluster.release_ranks import free, late
from workbench.errors import ClusterError, Interrupted, RankDied, RankError, UsageError, WorkbenchError
from workbench.events import Phase, Unit
from workbench.protocol.breakpoints import UNTIL, Breakpoint
from workbench.protocol.commands import Command, Inspect, Reshard, Shard, Step, to_dict
from workbench.protocol.commands import RankRequest as SideRequest
from workbench.protocol.rank_messages import (
    JobReply,
    ListModels,
    ListNames,
    Locate,
    LocateLine,
    ModelInfo,
    Names,
    Plan,
    Position,
    SetBreakpoints,
    Stacks,
)
from workbench.protocol.starting import ConnectReply
from workbench.replay.grouping import label
from workbench.reports.failures import (
    RESTART,
    Aftermath,
    death_in_short,
    death_sentence,
    first_cause,
    left_behind,
    losses_in_words,
    to_error,
    what_is_left,
)
from workbench.reports.pause_results import BackgroundReport, EndReport, StopReport, WhereReport, WhereRow, row_of
from workbench.reports.results import Report, StepReport
from workbench.reports.stop_positions import State, StopGroup, live_units, param_names, state_of, unit_names
from workbench.reports.until_text import came
from workbench.session.breakpoint_table import Breakpoints
from workbench.session.channel_protocol import answers
from workbench.session.clock_sync import ClockSync
from workbench.session.pause_protocol import WHERE_S
from workbench.session.remote_eval import Inner, JobRanks, RemoteEval, check_held
from workbench.session.remote_eval import to_error as to_error_of_jobs
from workbench.session.request import CellTask, CommandTask, RankTask, Request, RequestListener, TraceMark, no_output
from workbench.session.snapshot import ActivePolicy, ActiveRequest, ClusterSnapshot, LastResult, pulse
from workbench.session.stall_notice import OnStanding, StallNotice, no_standing, who_works
from workbench.session.trace_collector import TraceCollector
from workbench.session.variable_check import check, check_parameter, on_hosts, with_path
from workbench.session.waiter import ASK_S, PATIENT_S, TICK_S, Interruptible, Outcome, RequestWaiter, Tick, failure_of
from workbench.trace.columns import Trace

R = TypeVar("R")

RUNTIME = "workbench.runtime.rank"
"""The rank side, in the ranks' processes; here it is only a name."""

PULSE_S = 0.02
"""How old what a live view is shown may be, in seconds: several of them ask the ranks once."""

REST_S = 0.5
"""The same while the ranks are idle and nothing is under way, in seconds."""

SHARED_S = TICK_S
"""How old what a view was told may be, in seconds, for those who wait for a request not to ask the ranks once more."""

RECOVER_S = 30.0
"""How long ranks may take to build new process groups, in seconds."""

STOP_S = 10.0
"""How long a pause that somebody else carries out is waited for, in seconds; after an abort the ranks recover."""

CLOSE_S = 1.0
"""How long ranks may take to leave what they do before they are stopped, in seconds."""


class ClusterLike(Interruptible, Protocol):
    """What a workbench needs of a cluster: see :class:`workbench.cluster.Cluster`."""

    num_ranks: int

    @property
    def rank_info(self) -> Sequence[ConnectReply]:
        """What each rank said of itself when it joined."""

    @property
    def held_by(self) -> str:
        """Who else commands these ranks; empty: nobody."""

    @property
    def is_free(self) -> bool:
        """Whether the notebook that had them has let go of them."""

    @property
    def outlives(self) -> bool:
        """Whether the engines were there before, and stay."""

    def detach(self) -> None:
        """Leave the ranks as they are, for whoever comes next."""

    def start(self, on_wait: OnWait = no_wait) -> None:
        """Start all ranks; ``on_wait`` is told what is waited for."""

    def stop(self) -> str:
        """Stop all ranks; may be called again. Returns what could not be ended, a sentence; empty: nothing is left."""

    def alive(self) -> tuple[bool, ...]:
        """Tell for each rank whether it can be reached."""

    def losses(self) -> dict[int, str]:
        """Say of each rank that was lost how: ``died: ...`` or ``cannot be reached: ...``."""

    def apply(self, name: str, *args: Any, ranks: Iterable[int] | None = None) -> PendingReplies:  # noqa: ANN401
        """Call ``"module:function"`` in the main thread of ranks."""

    def run_cell(self, code: str, ranks: Iterable[int] | None = None) -> PendingReplies:
        """Run a cell in the main thread of ranks."""


NEXT_THING = "the ranks are idle again and keep their variables: correct the code, run its cell, and go on"

IDLE_AGAIN = "The ranks are idle again; their variables are kept."

STOP_SOMEWHERE = "stop one with %fsdp step --until all_gather, or %fsdp break add EVENT and %fsdp step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Obstacle:
    """Why the ranks cannot do a step together any more.

    Attributes:
        why: a sentence, without what to do.
        pending: what some of them may still do; these run nothing else meanwhile.
        culprits: the ranks that it began with.
        is_for_good: whether it stays when these have ended what they do.
    """

    why: str
    pending: PendingReplies
    culprits: tuple[int, ...]
    is_for_good: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInspection:
    """What ranks did inside a stopped step.

    Attributes:
        done: how it ended, by rank.
        others: ranks that do not stand in the gate, and so could not be asked.
        error: what to raise; None: nothing.
    """

    done: Mapping[int, JobReply]
    others: tuple[int, ...]
    error: WorkbenchError | None


class Session:
    """A started cluster: what it is asked, what it has recorded, and how it gets over what went wrong.

    Its methods may be called from any thread.

    Args:
        cluster: started.
        in_notebook: tells whether the caller itself has a variable of some name; used in messages only.
        on_go: called when the ranks begin or go on.

    Attributes:
        request: what is under way, stopped ones included; None between requests.
        breakpoints: where ranks stop.
        ended: how the last request ended; None: none has.
        is_closed: whether the ranks are being stopped.
    """

    def __init__(
        self,
        cluster: ClusterLike,
        *,
        in_notebook: Callable[[str], bool] = lambda name: False,
        on_go: Callable[[], None] = lambda: None,
    ) -> None:
        self.cluster = cluster
        self._in_notebook, self._on_go = in_notebook, on_go
        # held while a request is sent, stops, goes on or ends; notified at the latter three
        self._changed = threading.Condition(threading.RLock())
        self._news: deque[tuple[Request, str]] = deque()  # added to by the threads that wait in the background
        self.request: Request | None = None
        self.breakpoints = Breakpoints()
        self._pulsed: tuple[object, ...] | None = None  # what was asked at the last pulse
        self.ended: LastResult | None = None
        self.is_closed = False
        self._clocks = ClockSync({info.rank: info.clock for info in cluster.rank_info})
        self._collector = TraceCollector(self._clocks)
        self._catch_up: Callable[[], object] = self.drain  # with what ranks recorded, before the next request
        self._needs_recovery: bool | None = None if cluster.outlives else False  # None: another notebook may know
        self._obstacle: Obstacle | None = None

    # ---- asking

    @property
    def trace(self) -> Trace:
        """What was drained so far."""
        return self._collector.trace

    @property
    def policies(self) -> tuple[ActivePolicy, ...]:
        """Those that were in force, from the first on."""
        return self._collector.policies

    def living(self) -> list[int]:
        """Return the ranks that can be reached."""
        return [rank for rank, alive in enumerate(self.cluster.alive()) if alive]

    @property
    def heard(self) -> Mapping[int, Position]:
        """Where the ranks were that answered the last drain."""
        return self._collector.heard

    def drain(self, *, timeout_s: float = PATIENT_S, max_age_s: float = 0.0) -> None:
        """Take what the ranks recorded since the last time, unless that is less than ``max_age_s`` seconds ago."""
        self._collector.drain(self.cluster, self.living(), timeout_s=timeout_s, max_age_s=max_age_s)

    def pulse(self) -> ClusterSnapshot:
        """Return the trace so far and how each rank is, about a tenth of a second old.

        While nothing is under way idle ranks are asked less often, but at once when something has begun or ended.
        """
        alive = self.cluster.alive()
        living = [rank for rank, is_alive in enumerate(alive) if is_alive]
        self._collector.drain(self.cluster, living, timeout_s=ASK_S, max_age_s=self._max_age_s(living))
        self._renew_stop(self._collector.heard)
        trace, losses = self.trace, self.cluster.losses()
        alive = tuple(rank in living and rank not in losses for rank in range(len(alive)))  # one may be lost meanwhile
        found = pulse(trace, alive, self._collector.positions, self.state)
        return dataclasses.replace(
            found,
            losses=losses,
            holder=self.cluster.held_by,
            is_free=self.cluster.is_free,
            under_way=_under_way(self.request, trace, self._left()),
            ended=self.ended,
            breakpoints=self.stops(),
            policies=self.policies,
        )

    def _renew_stop(self, positions: Mapping[int, Position]) -> None:
        """Take note of ranks that have come to the stop late, or had not answered."""
        request = self.request
        if request is None or request.state != "stopped":
            return
        with self._changed:  # it may go on, and stop elsewhere
            if request.state == "stopped" and request.stop is not None:
                request.stop = request.stop.renewed(positions)

    def _max_age_s(self, living: Sequence[int]) -> float:
        """How old what a live view is shown may be; 0 once after each change of what the ranks are asked."""
        asked = self.asked()
        before, self._pulsed = self._pulsed, asked
        if asked != before:
            return 0.0
        heard = self._collector.heard
        is_quiet = self.request is None and all(rank in heard and state_of(heard[rank]) == "idle" for rank in living)
        return REST_S if is_quiet else PULSE_S

    def asked(self) -> tuple[object, ...]:
        """Return what is different once a request was sent, stands, goes on or is over; no rank is asked."""
        request = self.request
        under_way = None if request is None else (request.work.words, request.state)
        return under_way, self.ended, self.stops()  # the same words again: another one has ended

    def stops(self) -> tuple[Breakpoint, ...]:
        """Return all breakpoints, that of ``step --until`` last."""
        until = None if self.request is None else self.request.work.until
        return (*self.breakpoints, *(() if until is None else (until,)))

    def names(self) -> dict[int, Names]:
        """Return what the ranks' namespaces hold; a rank that does not answer at once is left out."""
        return self.ask(ListNames())

    def models(self) -> dict[int, tuple[ModelInfo, ...]]:
        """Return the models that the ranks' cells have made; a rank that does not answer at once is left out."""
        return self.ask(ListModels())

    def plan(self, command: Shard | Reshard) -> tuple[Unit, ...]:
        """Return the units that ``command`` would make; nothing is changed.

        Raises:
            UsageError: it cannot be done; the message says what to write instead.
        """
        command = with_path(on_hosts(command, self.cluster.rank_info), self.models, self.trace.header)
        check(command, self.names(), self.trace.header, self.cluster.num_ranks, self._in_notebook)
        reply = self.cluster.ask(Plan(command=command), self.living()[:1], timeout_s=ASK_S)
        for found in reply.values():
            if isinstance(found, RankError):
                raise UsageError(found.evalue)
            if not isinstance(found, Exception):
                return found
        raise UsageError("no rank has answered: see %fsdp where")

    def positions(self, *, timeout_s: float = ASK_S) -> dict[int, Position]:
        """Return where each rank is; one that does not answer in time is left out."""
        return self.ask(Locate(), timeout_s=timeout_s)

    @property
    def patience_s(self) -> float:
        """How long to wait for the ranks to say where they are, in seconds.

        If all are stopped or idle, they are there, and answer once the machine lets them.
        """
        request = self.request
        if request is not None and request.state == "stopped" and request.stop is not None:
            return WHERE_S if request.stop.is_late else PATIENT_S
        return PATIENT_S if request is None and not self.obstacle else WHERE_S

    def where(self, *, stacks: bool) -> WhereReport:
        """Return where every rank is; one that does not answer in a moment is named so."""
        timeout_s = self.patience_s
        positions = self.positions(timeout_s=timeout_s)
        self._renew_stop(positions)
        threads = self.ask(Stacks(), timeout_s=timeout_s) if stacks else {}
        header = self.trace.header
        rows = []
        for rank, alive in enumerate(self.cluster.alive()):
            found = threads.get(rank, ())
            if rank in positions:
                state = self.state(rank, positions[rank])
                rows.append(row_of(rank, positions[rank], header, found, state))
            else:
                rows.append(WhereRow(rank=rank, state="no answer" if alive else "gone", stacks=found))
        return WhereReport(rows=tuple(rows), obstacle=self.obstacle)

    def units(self) -> list[str]:
        """Return the names of all units, root ``""`` included."""
        self.drain()
        return [unit.name for unit in live_units(self.trace.header)]

    def state(self, rank: int, position: Position) -> State:
        """Return what a rank that answered is doing; one that has not begun what it was asked says that it is idle."""
        request = self.request
        if request is None or rank not in request.watch.running:
            return state_of(position)
        if not request.work.is_command:
            return state_of(position, "running")
        has_begun = position.commands > request.mark.commands.get(rank, -1)
        return state_of(position, "idle" if has_begun else "starting")

    def ask(self, request: SideRequest[R], *, timeout_s: float = ASK_S) -> dict[int, R]:
        """Return what the ranks answer to a request at their side doors; one that does not in time is left out."""
        return answers(self.cluster, request, self.living(), timeout_s=timeout_s)

    def parameters(self) -> list[str]:
        """Return the names of all sharded parameters, flat ones and those in them."""
        self.drain()
        return param_names(self.trace.header)

    # ---- the life of a request

    def run(self, command: Command, listener: RequestListener) -> Report:
        """Have all ranks do ``command``; return its report, or where they stopped inside it.

        Raises:
            UsageError: it cannot be done as asked; the message says what to run first or write instead.
            RankError: it raised on a rank; the others were freed and all are ready again.
            RankDied: a rank is gone.
            Interrupted: it was given up.
        """
        num_ranks = self.cluster.num_ranks
        interrupts = CountInterrupts()
        with ExitStack() as sending:
            with self._changed:
                mark = self._ready(range(num_ranks))
                command = with_path(on_hosts(command, self.cluster.rank_info), self.models, self.trace.header)
                check(command, self.names(), self.trace.header, num_ranks, self._in_notebook)
                before = self.trace
                sending.enter_context(interrupts)  # else some ranks might wait for others that were asked nothing
                pending = self.cluster.apply(f"{RUNTIME}:execute", to_dict(command))
                request = self._open(CommandTask(command, pending, before), pending, mark, interrupts)
            request.is_background = isinstance(command, Step) and command.background
            return self._follow(request, listener, background=request.is_background)

    def run_cell(self, code: str, ranks: Sequence[int], listener: RequestListener) -> Report:
        """Run a cell in the main thread of ``ranks``; errors as :meth:`run`."""
        interrupts = CountInterrupts()
        with ExitStack() as sending:
            with self._changed:
                mark = self._ready(ranks)
                sending.enter_context(interrupts)
                pending = self.cluster.run_cell(code, ranks=ranks)
                request = self._open(CellTask(pending), pending, mark, interrupts)
            return self._follow(request, listener, background=False)

    def pause(self, tell: OnStanding = no_standing) -> Report:
        """Stop all ranks at the same event of what they are doing, and return where they stand.

        Args:
            tell: is told what is waited for.

        Raises:
            UsageError: nothing is under way.
        """
        request = self._under_way("pause")
        with self._changed:
            if request.state == "running":
                request.watch.ask_pause()
                self._wait_while_running(request, STOP_S, tell)
            report: Report | None = request.report if request.state == "stopped" else None
            if report is not None and request.dead:
                report = EndReport(sentence=busy_sentence(request))
        if report is not None:
            self._drop_news_of(request)
            return report
        ended = "is over" if request.state == "over" else self._awaited(request) or "stops at its next event"
        how = "" if request.state == "over" else ": see %fsdp where --stacks; %fsdp abort gives it up"
        return EndReport(sentence=f"{request.work.words} {ended}{how}")

    def go_on(self, what: str | None, listener: RequestListener, *, background: bool | None) -> Report:
        """Let stopped ranks go on, to the next ``what`` if one is given; return how it ended or where it stopped again.

        Args:
            what: as for :class:`~workbench.protocol.commands.Next`.
            listener: who is told; without an ``on_output``, what is printed stays with the one who was told of it.
            background: return at once; None: if it was begun so.

        Raises:
            UsageError: nothing is stopped.
        """
        request = self._under_way("continue" if what is None else "next")
        interrupts = CountInterrupts()
        with ExitStack() as sending:
            with self._changed:
                if request.state != "stopped":
                    raise UsageError(f"nothing is stopped: {busy_sentence(request)}")
                positions = self.positions(timeout_s=PATIENT_S)
                request.interrupts = sending.enter_context(interrupts)
                request.watch.stopper.release(set(request.watch.running), positions, what)
                request.state = "running"
                request.is_background |= bool(background)
            if listener.on_output is no_output:  # such as a button's
                listener = dataclasses.replace(listener, on_output=request.listener.on_output)
            is_background = request.is_background if background is None else background
            return self._follow(request, listener, background=is_background)

    def abort(self, tell: OnStanding = no_standing) -> Report:
        """Give up what the ranks do; they are ready again afterwards.

        Args:
            tell: is told what is waited for.

        Raises:
            UsageError: nothing is under way.
            WorkbenchError: they could not be made ready again.
        """
        if self.request is None and self._needs_recovery is None:
            return self._end_left()
        request = self._under_way("abort")
        with self._changed:
            request.watch.ask_abort()
            is_mine = request.state == "stopped"
            if is_mine:
                request.state, request.interrupts = "running", CountInterrupts()
            else:
                self._wait_while_running(request, STOP_S + RECOVER_S, tell)
        if is_mine:
            if tell is not no_standing:
                request.listener = dataclasses.replace(request.listener, on_standing=tell)
            try:
                return self._attend(request)
            except Interrupted as ended:
                return EndReport(sentence=str(ended))
        if request.thread is not None:
            self._drop_news_of(request)
        return EndReport(
            sentence=request.ending if request.state == "over" else f"{request.work.words} is being aborted"
        )

    def do_inside(self, word: str, work: Inner, ranks: Sequence[int] | None) -> StepInspection:
        """Have ranks do ``work`` in the stopped step's own threads.

        Args:
            word: what is asked, for messages.
            work: what to do; an :class:`~workbench.protocol.commands.Evaluate` is told its ranks here.
            ranks: which; None: all that stand in the gate.

        Raises:
            UsageError: nothing is stopped, a rank does not stand in the gate, or it waits for ranks that do not do it.
            RankError: it raised; the stop stays.
        """
        request = self._under_way(word)
        if request.state != "stopped":
            raise UsageError(f"nothing is stopped: {busy_sentence(request)}")
        here = self.positions(timeout_s=PATIENT_S)
        held = tuple(sorted(rank for rank, position in here.items() if position.held is not None))
        if not held:
            raise UsageError(f"no rank stands in the gate, so there is nothing to {word}: see %fsdp where")
        if isinstance(work, Inspect):
            check_parameter(work.fqn, self.parameters())
        num_ranks = self.cluster.num_ranks
        chosen = held if ranks is None else select(ranks, num_ranks)
        check_held(chosen, held)
        done = RemoteEval(self.cluster, JobRanks(ranks=chosen, held=held, num_ranks=num_ranks)).run(work)
        others = tuple(rank for rank in range(num_ranks) if rank not in held)
        return StepInspection(done=done, others=others, error=to_error_of_jobs(done, str(request.stop)))

    def news(self) -> tuple[str, ...]:
        """Return what ended or stopped in the background since the last time, a sentence each.

        What stopped ranks had written and what came too late to be shown then is handed on first.
        """
        if self.request is not None and self.request.state == "stopped":
            self.request.work.on_slice(self.request.listener)
        news = []
        with suppress(IndexError):  # one at a time: another may be added meanwhile, and none is to be lost
            while True:
                news.append(self._news.popleft()[1])
        return tuple(news)

    def _under_way(self, word: str) -> Request:
        request = self.request
        if request is None:
            left = self._left()
            raise UsageError(_left_sentence(left) if left else _nothing(word))
        return request

    def _follow(self, request: Request, listener: RequestListener, *, background: bool) -> Report:
        """Wait for a request here, or have a thread wait for it."""
        self._on_go()
        self._forget_news_of(request)  # where it stood before it went on
        request.listener, request.thread = listener, None
        if not background:
            return self._attend(request)
        request.interrupts = CountInterrupts()  # that of the main thread ends with the caller
        name = f"workbench: {request.work.words}"
        request.thread = threading.Thread(target=self._attend_behind, args=(request,), name=name, daemon=True)
        request.thread.start()
        return BackgroundReport(words=request.work.words)

    def _attend_behind(self, request: Request) -> None:
        try:
            said = self._attend(request).headline
        except WorkbenchError as error:
            said = str(error)
        except Exception as error:  # noqa: BLE001 - nobody else is there to be told of it
            said = f"{type(error).__name__}: {error}"
        if not self.is_closed:
            self._news.append((request, f"in the background, {request.work.words}: {said}"))

    def _drop_news_of(self, request: Request) -> None:
        """Leave out what the caller is told anyway."""
        if request.thread is not None and request.thread is not threading.current_thread():
            request.thread.join(STOP_S)
        self._forget_news_of(request)

    def _forget_news_of(self, request: Request) -> None:
        for entry in tuple(self._news):
            if entry[0] is request:
                with suppress(ValueError):  # it was told at this moment
                    self._news.remove(entry)

    def _wait_while_running(self, request: Request, timeout_s: float, tell: OnStanding) -> None:
        if request.watcher is threading.current_thread():
            return  # a callback of the one who waits cannot wait for itself
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            if self._changed.wait_for(lambda: request.state != "running", min(left_s, ASK_S)):
                return
            if awaited := self._awaited(request):
                tell(awaited)

    # ---- its steps

    def _ready(self, ranks: Sequence[int]) -> TraceMark:
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
            losses = {rank: how for rank, how in self.cluster.losses().items() if rank in dead}
            how = losses_in_words(losses) or f"{label(dead)} died: no process is left"
            raise RankDied(f"{how}\n{death_sentence(dead, living)}", ranks=dead)
        if self._needs_recovery is None:
            self._needs_recovery = self._find_left()
        if self.obstacle:
            if len(ranks) == self.cluster.num_ranks or not set(ranks) <= set(self._usable(living)):
                raise ClusterError(self.obstacle)
        elif self._needs_recovery and len(living) == self.cluster.num_ranks:
            self.recover()
        self._catch_up()
        here = self._collector.positions.items()
        return TraceMark(
            num_rows=self._collector.next_seq,
            optimizer_steps={rank: position.optimizer_steps for rank, position in here},
            commands={rank: position.commands for rank, position in here},
            gradient_bytes=dict(self._collector.gradient_bytes),
        )

    @property
    def obstacle(self) -> str:
        """Why no step is possible any more, and what to do; empty: nothing is known of it."""
        found = self._obstacle
        if found is None or not (found.is_for_good or late(found.pending, self.living())):
            return ""
        usable = self._usable(self.living())
        return f"{found.why}: {what_is_left([rank for rank in usable if rank not in found.culprits])}"

    def _usable(self, living: Sequence[int]) -> list[int]:
        """Return which of the ``living`` ranks run a cell of their own at once."""
        busy = () if self._obstacle is None else late(self._obstacle.pending, living)
        return [rank for rank in living if rank not in busy]

    def _left(self) -> str:
        """Return in words what these ranks still do for a notebook that had them before, as far as they say."""
        if self._needs_recovery is not None or self.cluster.held_by:
            return ""
        here = self._collector.positions
        doing = {here[rank].doing for rank in self.living() if rank in here} - {""}
        return f"%fsdp {min(doing)} of the notebook before" if doing else ""

    def _find_left(self) -> bool:
        """Return whether an earlier notebook gave up what these ranks did, so that they have to be joined again.

        Raises:
            UsageError: they do it still.
        """
        self.drain()
        left = self._left()
        if left or not self._is_idle().wait(PATIENT_S):
            raise UsageError(_left_sentence(left or "what the notebook before asked of them"))
        return any(position.given_up for position in self._collector.positions.values())

    def _is_idle(self) -> PendingReplies:
        """Return what is done once the ranks have done all that they were asked before."""
        return self.cluster.run_cell("pass", self.living())

    def _open(self, work: RankTask, pending: PendingReplies, mark: TraceMark, interrupts: CountInterrupts) -> Request:
        """Return the request that ``pending`` is, just sent; nothing else is asked of the ranks until it is over."""
        request = Request(work, pending, mark)
        request.interrupts = interrupts
        request.watch = RequestWaiter(
            self.cluster,
            pending,
            on_slice=lambda: work.on_slice(request.listener),
            on_tick=lambda tick: self._end(request) if tick is Tick.ENDED else self._take(request, tick),
            num_outputs=work.num_outputs,
            can_pause=work.is_command,
        )
        self.request, self._catch_up = request, self.drain
        return request

    def _take(self, request: Request, tick: Tick) -> dict[int, Position]:
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
        """Say who works and where if nothing else was heard of ``request`` for a while, and somebody wants to know.

        That a rank has died, and what a pause or an abort waits for, is said at once.
        """
        if request.listener.on_standing is no_standing:
            return
        heard = (request.work.num_outputs(), tuple(request.watch.running), self._collector.next_seq)
        asked = request.watch.asked

        def sentence(seconds: float) -> str:
            awaited = self._awaited(request)
            if not awaited:
                request.worked = self._who_works(request, seconds)
            said = awaited or request.worked
            is_told = request.thread is None and (asked or request.watch.is_exhausted)
            return f"{said}; {request.watch.next_means}" if is_told else said

        is_urgent = bool(asked or request.dead)
        request.standing.look(heard, sentence, request.listener.on_standing, is_urgent=is_urgent)
        if not request.standing.said:
            request.worked = ""

    def _who_works(self, request: Request, seconds: float) -> str:
        running = sorted(set(request.watch.running) - set(request.dead))  # the watch may not have seen a death yet
        ended = sorted(set(request.pending.ranks) - set(running))
        losses = self.cluster.losses()
        deaths = {rank: death_in_short(losses.get(rank, "died")) for rank in request.dead}
        return who_works(seconds, running, self.ask(LocateLine()), ended, deaths)

    def _awaited(self, request: Request) -> str:
        """Return what a pause or an abort still waits for; empty: nothing was asked for."""
        here, running = self._collector.heard, sorted(request.watch.running)
        if not request.watch.asked or not running:
            return ""
        if request.watch.asked == "abort":
            return f"given up; {label(running)} still {_run(running)}"
        late = [rank for rank in running if rank not in here or state_of(here[rank]) == "running"]
        return f"stops at the next event of {label(late or running)}"

    def _end(self, request: Request) -> dict[int, Position]:
        """Take what is left of a command; of a cell later, while nobody waits: most record nothing."""
        if request.work.is_command:
            self._take(request, Tick.ENDED)
            self._catch_up = lambda: None
        else:
            thread = threading.Thread(target=self.drain, name="workbench: drain", daemon=True)
            self._catch_up = thread.join
            thread.start()
        return self._collector.heard

    def _attend(self, request: Request) -> Report:
        """Wait for ``request`` until it is over or stops; after a failure the ranks are ready again.

        Raises:
            UsageError: the ranks refused the command.
            RankError: it raised on a rank.
            RankDied: a rank is gone.
            Interrupted: it was given up.
        """
        request.watcher = threading.current_thread()
        request.standing = StallNotice(time.monotonic)
        report: Report | None = None
        try:
            outcome = self._watch(request)
            report = (
                self._stopped(request, outcome) if isinstance(outcome, StopGroup) else self._result(request, outcome)
            )
            request.ending, request.failed = report.headline, False
        except BaseException as error:
            request.ending, request.failed = str(error), True
            raise
        finally:
            self._note(request, is_over=not isinstance(report, StopReport))
        return report

    def _watch(self, request: Request) -> Outcome | StopGroup:
        try:
            return request.watch.run(request.interrupts)
        except BaseException:
            self._needs_recovery = True  # the ranks were aborted; nobody saw how they ended
            raise

    def _stopped(self, request: Request, stop: StopGroup) -> StopReport:
        request.work.stand(request.listener)
        request.stop = dataclasses.replace(stop, units=unit_names(self.trace.header))
        reasons = tuple(self._reason(number, request.work.until) for number in stop.breakpoints)
        if UNTIL in stop.breakpoints:
            request.work.until = None
        request.report = StopReport(stop=request.stop, words=request.work.words, reasons=reasons)
        return request.report

    def _result(self, request: Request, outcome: Outcome) -> Report:
        if self.is_closed:
            raise ClusterError("the ranks were stopped")
        request.watch.stopper.disarm(set(self.living()))
        if not outcome.failures and not outcome.given_up:
            return self._with_missed(request, request.work.finish(outcome.results, request.listener))
        error = self._settle(outcome, request)
        request.work.fail(request.listener)
        raise error

    def _reason(self, number: int, until: Breakpoint | None) -> str:
        """Return in words what held a rank: a breakpoint, or the ``until`` of its steps."""
        if number == UNTIL:
            return f"--until {until or ''}".rstrip()
        return self.breakpoints.named(number)

    def _with_missed(self, request: Request, report: Report) -> Report:
        """Say in the report of steps that were to stop before an event that the event did not come."""
        until = request.work.until
        if until is None or not isinstance(report, StepReport):
            return report
        events = came(self.trace, request.mark.num_rows, str(until))
        return dataclasses.replace(report, missed=str(until), came=tuple(events))

    def _note(self, request: Request, *, is_over: bool) -> None:
        """Tell everybody that ``request`` stands or is over."""
        with self._changed:
            request.state = "over" if is_over else "stopped"
            if is_over and self.request is request:
                self.request = None
                count = 1 if self.ended is None else self.ended.count + 1
                line, text = request.work.words, request.ending
                self.ended = LastResult(count=count, line=line, text=text, is_error=request.failed)
            self._changed.notify_all()

    def push_breakpoints(self) -> None:
        """Have all ranks take the breakpoints that there are."""
        self.ask(SetBreakpoints(breakpoints=tuple(self.breakpoints)), timeout_s=PATIENT_S)

    def close(self) -> None:
        """Free the ranks from what they do, and whoever waits for them; called before the cluster is stopped."""
        self.is_closed = True
        self._catch_up()
        request = self.request
        if request is None:
            return
        self._free(request.pending, "the ranks are being stopped")
        request.pending.wait(CLOSE_S)
        if request.thread is not None and request.thread is not threading.current_thread():
            request.thread.join(CLOSE_S)

    def _free(self, pending: PendingReplies, reason: str, *, store: bool = False) -> None:
        """Free the ranks from what they do until ``pending`` is done, with ``store`` from their store, for good."""
        living = self.living()
        free(self.cluster, living, pending, reason, store=store or 0 not in living)

    def _end_left(self) -> EndReport:
        """Have the ranks give up what an earlier notebook asked of them, if they do it still.

        Raises:
            UsageError: they do nothing.
            ClusterError: they do it for ever.
        """
        idle = self._is_idle()
        if idle.wait(ASK_S):
            raise UsageError(_nothing("abort"))
        self._free(idle, "aborted")
        if not idle.wait(RECOVER_S):
            raise ClusterError(
                f"{label(late(idle, self.living()))} did not give up what the notebook before asked of it: {RESTART}"
            )
        self._needs_recovery = True
        return EndReport(sentence="what the ranks did for the notebook before was given up")

    def recover(self) -> None:
        """Have all ranks build new process groups and forget the step they were in.

        Raises:
            ClusterError: it failed or took too long; the cluster is of no more use.
        """
        self._needs_recovery = True
        pending = self.cluster.apply(f"{RUNTIME}:recover", uuid.uuid4().hex)
        is_done = pending.wait(RECOVER_S, or_error=True)
        failures = [failure_of(rank, error) for rank in pending.ranks if (error := pending.error(rank)) is not None]
        if is_done and not failures:
            self._needs_recovery = False
            return
        if failures:
            cause = first_cause(failures)
            culprits: tuple[int, ...] = (cause.rank,)
            why = str(cause) if cause.died else f"rank {cause.rank} raised {cause}"
        else:
            culprits = tuple(self._not_there(pending))
            why = who_works(RECOVER_S, culprits, self.ask(LocateLine()), ())
        self._free(pending, "the ranks could not be joined again", store=True)  # the others wait for those
        pending.wait(CLOSE_S)
        why = f"the ranks could not be joined again ({why})"
        self._obstacle = Obstacle(why=why, pending=pending, culprits=culprits, is_for_good=True)
        raise ClusterError(self.obstacle)

    def _not_there(self, pending: PendingReplies) -> list[int]:
        """Return the ranks that the others wait for: that say nothing, or still run a cell; all if none does."""
        waiting, lines = late(pending, self.living()), self.ask(LocateLine())
        return [rank for rank in waiting if rank not in lines or lines[rank] is not None] or waiting

    def _settle(self, outcome: Outcome, request: Request) -> WorkbenchError:
        """Get the ranks ready again, if that can be, and return what to raise."""
        found = self._aftermath(request.mark, timeout_s=ASK_S if outcome.abandoned else PATIENT_S)
        return _error_of(outcome, found, self._get_ready(outcome, request, found), request.worked)

    def _get_ready(self, outcome: Outcome, request: Request, found: Mapping[int, Aftermath]) -> str:
        """Have the ranks joined again if they have to be; return why that cannot be, empty: they are ready."""
        living = self.living()
        worked = request.work.is_command or self._collector.next_seq != request.mark.num_rows
        blocked = any(left.unfinished for left in found.values())
        if not (worked or blocked or outcome.aborted or outcome.results):
            return self.obstacle  # all ranks raised by themselves, before anything that concerns the others
        self._needs_recovery = True
        if outcome.abandoned and not self.obstacle:
            still = f"{label(outcome.abandoned)} still {_run(outcome.abandoned)}, and nobody waits"
            self._obstacle = Obstacle(why=still, pending=request.pending, culprits=outcome.abandoned, is_for_good=False)
        if self.obstacle:
            return self.obstacle
        if len(living) < self.cluster.num_ranks:  # it would be waited for
            return death_sentence([rank for rank in range(self.cluster.num_ranks) if rank not in living], living)
        try:
            self.recover()
        except ClusterError as broken:
            return str(broken)
        return ""

    def _aftermath(self, mark: TraceMark, *, timeout_s: float) -> dict[int, Aftermath]:
        """Return where the ranks that answer are, with what they did since ``mark``."""
        trace, gradient_bytes = self.trace, self._collector.gradient_bytes
        names = {unit.index: unit.name for unit in trace.header.units}
        newest = {r.rank: r.rows[-1] for r in trace.ranks if r.end_seq > mark.num_rows.get(r.rank, 0) and len(r.rows)}
        return {
            rank: Aftermath(
                step=int(newest[rank]["step"]) if rank in newest else None,
                phase=Phase(newest[rank]["phase"]).words if rank in newest else None,
                unit=names.get(_unit_at_work(newest[rank], position.raised_in)) if rank in newest else None,
                optimizer_steps=position.optimizer_steps - mark.optimizer_steps.get(rank, 0),
                unfinished=position.unfinished,
                left_gradients=gradient_bytes.get(rank, 0) > 0 == mark.gradient_bytes.get(rank, 0),
            )
            for rank, position in self.positions(timeout_s=timeout_s).items()
        }


def _unit_at_work(newest: np.void, raised_in: int) -> int:
    """Return the index of the unit in which a rank raised; a forward that raises ends in the units around it too."""
    return raised_in if raised_in >= 0 and newest["phase"] == Phase.FORWARD else int(newest["unit"])


def _under_way(request: Request | None, trace: Trace, left: str) -> ActiveRequest | None:
    if request is None:
        return ActiveRequest(words=left, in_background=True) if left else None
    is_stopped, report = request.state == "stopped", request.report
    return ActiveRequest(
        words=request.work.words,
        is_stopped=is_stopped,
        stop=str(request.stop) if is_stopped else "",
        reasons=report.reasons if is_stopped and report is not None else (),
        in_background=request.thread is not None,
        progress=request.work.progress(trace),
    )


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


def _nothing(word: str) -> str:
    """Return why ``word`` has nothing to do while the ranks are idle, and what to do first."""
    if word in {"abort", "pause"}:
        return f"nothing to {word}: no step is running"
    return f"{word}: no step is stopped; {STOP_SOMEWHERE}"


def _left_sentence(left: str) -> str:
    """Return why nothing can be asked of ranks that do something for nobody any more, and what to do."""
    return f"the ranks still do {left}: wait, or give it up with %fsdp abort"


def _run(ranks: Sequence[int]) -> str:
    return "run" if len(ranks) > 1 else "runs"


def _error_of(outcome: Outcome, found: dict[int, Aftermath], obstacle: str, said: str) -> WorkbenchError:
    """Return what to raise for an outcome that is not a success.

    Args:
        outcome: how it ended.
        found: where that found the ranks.
        obstacle: why they cannot go on; empty: they are ready.
        said: who worked and where, as far as the user was told of it.
    """
    given_up = (outcome.given_up or "interrupted").capitalize()
    if outcome.abandoned or (outcome.given_up and not any(failure.died for failure in outcome.failures)):
        done = f"{given_up}; {obstacle}" if obstacle else f"{given_up}. {IDLE_AGAIN}"
        return Interrupted("\n".join([done, *([f"before that: {said}"] if said else []), *left_behind(found)]))
    cause = first_cause(outcome.failures)
    if cause.ename == UsageError.__name__:
        alike = sum(str(failure) == str(cause) for failure in outcome.failures)
        everywhere = alike == len(outcome.failures) + len(outcome.results)
        refused = cause.evalue if everywhere else f"rank {cause.rank}: {cause.evalue}"
        return UsageError("\n".join(filter(None, [refused, obstacle])))
    return to_error(outcome.failures, found, next_thing=obstacle or NEXT_THING)
