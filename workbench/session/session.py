"""The session of a started cluster: its trace, its requests, and the recovery after failures."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

import numpy as np

from workbench.base.fault import Fault
from workbench.base.text_formats import format_bytes
from workbench.cluster import Cluster
from workbench.cluster.channel_protocol import answers
from workbench.cluster.deferred_interrupts import CountInterrupts
from workbench.cluster.engine_provider import OnWait
from workbench.cluster.pending_replies import PendingReplies, select
from workbench.cluster.release_ranks import free, late
from workbench.errors import ClusterError, Interrupted, RankDied, RankError, UsageError, WorkbenchError
from workbench.events import Edge, Kind, Phase, Unit
from workbench.protocol.breakpoints import UNTIL, Breakpoint
from workbench.protocol.commands import Command, Inspect, Load, Reshard, Run, Save, Shard, Snapshot, Step, to_dict
from workbench.protocol.commands import RankRequest as SideRequest
from workbench.protocol.rank_messages import (
    CellLine,
    JobReply,
    ListModels,
    ListNames,
    Locate,
    LocateLine,
    ModelInfo,
    Names,
    Position,
    PreviewUnits,
    RunCell,
    SetBreakpoints,
    Stacks,
)
from workbench.replay.grouping import by_value, label
from workbench.replay.run_positions import RunPosition, RunState, begins_of_newest_step, live_positions
from workbench.reports.event_text import unit_names
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
from workbench.reports.pause_reports import BackgroundReport, EndReport, StopReport, WhereReport, WhereRow, row_of
from workbench.reports.report import Report
from workbench.reports.stall_cause import parted, stall_cause
from workbench.reports.step_reports import UntilReport
from workbench.reports.stop_positions import State, StopGroup, is_in_wait, live_units, param_names, state_of
from workbench.reports.until_text import came
from workbench.session.breakpoint_table import Breakpoints
from workbench.session.clock_sync import ClockSync
from workbench.session.output_log import OutputLog
from workbench.session.pause_protocol import WHERE_S
from workbench.session.program import CompletedCommand, Entry, Omission, Program, failed
from workbench.session.remote_eval import Inner, JobRanks, RemoteEval, abandoned, check_held
from workbench.session.remote_eval import to_error as to_error_of_jobs
from workbench.session.request import CellTask, CommandTask, RankTask, Request, RequestListener, TraceMark, no_output
from workbench.session.snapshot import ActivePolicy, ActiveRequest, ClusterSnapshot, LastResult, pulse
from workbench.session.stall_notice import QUIET_S, OnStanding, StallNotice, no_standing, place_words, who_works
from workbench.session.trace_collector import TraceCollector
from workbench.session.variable_check import check, check_parameter, on_hosts, with_folder, with_path, with_script
from workbench.session.waiter import (
    ASK_S,
    PATIENT_S,
    SLICE_S,
    TICK_S,
    DrainCause,
    Outcome,
    RequestWaiter,
    failure_of,
)
from workbench.trace.columns import Trace

C = TypeVar("C", bound=Command)
R = TypeVar("R")

RUNTIME = "workbench.runtime.rank"
"""Module of the rank side, imported in the ranks' processes only."""

PULSE_S = 0.02
"""Maximum age of the data of a live view, in seconds, so that several views poll the ranks once."""

REST_S = 0.5
"""The same while the ranks are idle and no request is under way, in seconds."""

SHARED_S = TICK_S
"""Maximum age of data drained for a view that a waiting request may use instead of polling again, in seconds."""

RECOVER_S = 30.0
"""Timeout of building new process groups, in seconds."""

STOP_S = 10.0
"""Time in seconds to wait for a pause that another thread carries out; an abort adds the time to recover."""

_NEWEST = 20_000
"""Rows of each rank that tell what it waits for."""

CLOSE_S = 1.0
"""Time in seconds for ranks to end their current work before they are stopped."""


TRAINING = ({Step.word}, {Run.word})
"""Commands that ranks run when they are within a training step."""

IDLE_AGAIN = "The ranks are idle again; their variables are kept."

STOP_SOMEWHERE = "stop one with %fsdp step --until all_gather, or %fsdp break add EVENT and %fsdp step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Obstacle:
    """The reason why the ranks cannot do a step together any more.

    Attributes:
        why: the reason, a sentence without advice.
        pending: a request that some ranks may still run; these can run nothing else.
        outlasts_it: whether it remains after these have finished, until a recovery succeeds.
    """

    why: str
    pending: PendingReplies
    outlasts_it: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInspection:
    """The result of work inside a stopped step.

    Attributes:
        done: replies, by rank.
        others: ranks that are not held in the gate and so could not take part.
        error: the exception to raise; None: no rank failed.
    """

    done: Mapping[int, JobReply]
    others: tuple[int, ...]
    error: WorkbenchError | None


class Session:
    """A started cluster with its requests, its trace, and its recovery after failures. Thread-safe.

    Args:
        cluster: a started cluster.
        in_notebook: returns whether the notebook has a variable of this name; used in messages only.
        on_go: called when the ranks begin or continue.
        quiet_s: time in seconds without news of a request before it is reported as stalled.

    Attributes:
        request: the request under way or stopped; None between requests.
        breakpoints: the breakpoints.
        ended: the result of the last request; None: none has ended.
        is_closed: whether the ranks are being stopped.
        output: what the ranks printed, and how requests ended.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        in_notebook: Callable[[str], bool] = lambda name: False,
        on_go: Callable[[], None] = lambda: None,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.cluster, self._quiet_s = cluster, quiet_s
        self._in_notebook, self._on_go = in_notebook, on_go
        # held while a request is sent, stops, continues or ends; notified when it stops or ends
        self._changed = threading.Condition(threading.RLock())
        self._news: deque[tuple[Request, str]] = deque()  # appended to by background threads
        self.request: Request | None = None
        self.breakpoints = Breakpoints()
        self._pulsed: tuple[object, ...] | None = None  # request_state() at the last pulse
        self.ended: LastResult | None = None
        self.is_closed = False
        self._clocks = ClockSync({info.rank: info.clock for info in cluster.rank_info})
        self._collector = TraceCollector(self._clocks)
        self._catch_up: Callable[[], object] = self.drain  # completes the trace before the next request
        self._needs_recovery: bool | None = None if cluster.outlives else False  # None: not known yet
        self._obstacle: Obstacle | None = None
        self._rows_before: Mapping[int, int] = {}  # the current request, or else the last
        self._raised: Sequence[RunPosition] = ()  # the ranks that it raised on
        self._entries: list[Entry] = []
        self._repeats = False  # what was done before
        self.output = OutputLog(cluster.num_ranks)
        cluster.on_loss = lambda rank, how: self.output.note(f"rank {rank} {how}", is_error=True)

    # ---- queries

    @property
    def program(self) -> Program:
        """What the ranks have done since their start, and what they do now."""
        request, ranks = self.request, self.cluster.rank_info
        return Program(
            device=ranks[0].device.partition(":")[0],
            ranks_per_host=tuple(Counter(rank.host for rank in ranks).values()),
            is_attached=self.cluster.outlives,
            entries=tuple(self._entries),
            under_way="" if request is None else request.work.words,
        )

    @property
    def trace(self) -> Trace:
        """The trace drained so far."""
        return self._collector.trace

    @property
    def policies(self) -> tuple[ActivePolicy, ...]:
        """All sharding policies so far, oldest first."""
        return self._collector.policies

    def living(self) -> list[int]:
        """Return the ranks that can be reached."""
        return [rank for rank, alive in enumerate(self.cluster.alive()) if alive]

    def drain(self, *, timeout_s: float = PATIENT_S, max_age_s: float = 0.0) -> Mapping[int, Position]:
        """Collect the rows recorded since the last drain, unless that is less than ``max_age_s`` seconds ago.

        Returns:
            The positions of the ranks that answered.
        """
        return self._collector.drain(self.cluster, self.living(), timeout_s=timeout_s, max_age_s=max_age_s)

    def doing(self) -> dict[int, str]:
        """Drain the ranks; return what each one does that answers, and ``busy`` for one that runs a request instead.

        A rank that runs no request is sure to answer, so it is given more time.
        """
        timeout_s, busy = self.patience_s, self._busy()
        here = dict(self.drain(timeout_s=timeout_s))
        idle = [rank for rank in self.living() if rank not in here and rank not in busy]
        if timeout_s < PATIENT_S:
            here |= answers(self.cluster, Locate(), idle, timeout_s=PATIENT_S)
        doing = {rank: position.saving or position.doing or "idle" for rank, position in here.items()}
        kept = {rank: position.snapshot_bytes for rank, position in here.items() if position.snapshot_bytes}
        words = {rank: f"{doing[rank]}; keeps {format_bytes(size)} of snapshots" for rank, size in kept.items()}
        return dict.fromkeys(busy, "busy") | doing | words

    def _busy(self) -> set[int]:
        """Return the ranks that have not ended the request under way, or one that the notebook no longer waits for."""
        running = set() if self.request is None else set(self.request.watch.running)
        return running | (set() if self._obstacle is None else set(late(self._obstacle.pending, self.living())))

    def pulse(self) -> ClusterSnapshot:
        """Return a snapshot of the trace and the ranks, about a tenth of a second old.

        Idle ranks are polled less often, but at once when a request has begun or ended.
        """
        alive = self.cluster.alive()
        living = [rank for rank, is_alive in enumerate(alive) if is_alive]
        self._collector.drain(self.cluster, living, timeout_s=ASK_S, max_age_s=self._max_age_s(living))
        self._renew_stop(self._collector.heard)
        trace, losses = self.trace, self.cluster.losses()
        alive = tuple(rank in living and rank not in losses for rank in range(len(alive)))  # may be lost meanwhile
        found = pulse(trace, alive, self._collector.positions, self.state)
        return dataclasses.replace(
            found,
            losses=losses,
            output=self.output.version,
            holder=self.cluster.held_by,
            is_free=self.cluster.is_free,
            under_way=_under_way(self.request, trace, self._left()),
            ended=self.ended,
            breakpoints=self.stops(),
            policies=self.policies,
        )

    def _renew_stop(self, positions: Mapping[int, Position]) -> None:
        """Update the current stop with ranks that stopped late or had not answered."""
        request = self.request
        if request is None or request.state != "stopped":
            return
        with self._changed:  # it may have continued and stopped elsewhere
            if request.state == "stopped" and request.stop is not None:
                request.stop = request.stop.renewed(positions)

    def _max_age_s(self, living: Sequence[int]) -> float:
        """Return the maximum age of a live view's data; 0 once after each change of the request."""
        current = self.request_state()
        before, self._pulsed = self._pulsed, current
        if current != before:
            return 0.0
        positions = self._collector.heard
        are_idle = all(rank in positions and state_of(positions[rank]) == "idle" for rank in living)
        is_quiet = self.request is None and are_idle
        return REST_S if is_quiet else PULSE_S

    def request_state(self) -> tuple[object, ...]:
        """Return a value that changes when a request is sent, stops, continues or ends, without polling a rank."""
        request = self.request
        under_way = None if request is None else (request.work.words, request.state)
        return under_way, self.ended, self.stops()  # ``ended`` changes even if the same words follow

    def stops(self) -> tuple[Breakpoint, ...]:
        """Return all breakpoints; that of ``step --until`` is the last."""
        until = None if self.request is None else self.request.work.until
        return (*self.breakpoints, *(() if until is None else (until,)))

    def names(self) -> dict[int, Names]:
        """Return the names in the ranks' namespaces, without ranks that do not answer in time."""
        return self.ask(ListNames())

    def models(self) -> dict[int, tuple[ModelInfo, ...]]:
        """Return the models created by cells on the ranks, without ranks that do not answer in time."""
        return self.ask(ListModels())

    def preview(self, command: Shard | Reshard) -> tuple[Unit, ...]:
        """Return the units that ``command`` would create, without running it.

        Raises:
            UsageError: it cannot run; the message says what to write instead.
        """
        command = self._checked(command)
        reply = self.cluster.ask(PreviewUnits(command=command), self.living()[:1], timeout_s=ASK_S)
        for found in reply.values():
            if isinstance(found, RankError):
                raise UsageError(found.evalue)
            if not isinstance(found, Exception):
                return found
        raise UsageError("no rank has answered: see %fsdp where")

    def _checked(self, command: C) -> C:
        """Return ``command`` as ranks take it: with hosts in numbers, a unit or a script by its full path.

        Raises:
            UsageError: it cannot run; the message says what to run first or write instead.
        """
        command = with_path(on_hosts(command, self.cluster.rank_info), self.models, self.trace.header)
        command = with_folder(with_script(command))
        check(command, self.names(), self.trace.header, self.cluster.num_ranks, self._in_notebook)
        return command

    def positions(self, *, timeout_s: float = ASK_S) -> dict[int, Position]:
        """Return the position of each rank that answers in time."""
        return self.ask(Locate(), timeout_s=timeout_s)

    @property
    def patience_s(self) -> float:
        """Timeout of a position query, in seconds.

        If all ranks are stopped or idle, they are sure to answer, at the latest when the machine is less busy.
        """
        request = self.request
        if request is not None and request.state == "stopped" and request.stop is not None:
            return WHERE_S if request.stop.is_late else PATIENT_S
        return PATIENT_S if request is None and not self.obstacle else WHERE_S

    def where(self, *, stacks: bool) -> WhereReport:
        """Return where every rank is; a rank without an answer is reported as such."""
        timeout_s = self.patience_s
        positions = self.positions(timeout_s=timeout_s)
        self._renew_stop(positions)
        threads = self.ask(Stacks(), timeout_s=timeout_s) if stacks else {}
        lines = self.ask(LocateLine(), timeout_s=timeout_s)
        units, losses = unit_names(self.trace.header), self.cluster.losses()
        rows = []
        for rank, alive in enumerate(self.cluster.alive()):
            found = threads.get(rank, ())
            if rank in positions:
                state = self.state(rank, positions[rank])
                line = lines.get(rank)
                inside = place_words(line).removeprefix(", ") if line is not None and line.inside else ""
                rows.append(row_of(rank, positions[rank], units, found, state, inside))
            else:
                lost = "" if alive else losses.get(rank, "")
                rows.append(WhereRow(rank=rank, state="no answer" if alive else "gone", event=lost, stacks=found))
        request = self.request
        if (request is not None and request.state == "running") or self.cluster.held_by:
            self.drain(timeout_s=timeout_s)
        cause = self._cause_seen(positions, lines) if self.cluster.held_by else self._cause(request, positions, lines)
        return WhereReport(ranks=tuple(rows), obstacle=self.obstacle, cause=cause)

    @property
    def stop_cause(self) -> Fault | None:
        """Why the stopped ranks were waiting; None if they were not, or if no rank is stopped."""
        request = self.request
        return request.cause if request is not None and request.state == "stopped" else None

    def units(self) -> list[str]:
        """Return the names of all units, root ``""`` included."""
        self.drain()
        return [unit.name for unit in live_units(self.trace.header)]

    def state(self, rank: int, position: Position) -> State:
        """Return the state of a rank that answered; one that has not begun its request yet reports itself idle."""
        request = self.request
        if request is None or rank not in request.watch.running:
            return state_of(position)
        if not request.work.is_command:
            return state_of(position, "running")
        has_begun = position.commands > request.mark.commands.get(rank, -1)
        return state_of(position, "idle" if has_begun else "starting")

    def ask(self, request: SideRequest[R], *, timeout_s: float = ASK_S) -> dict[int, R]:
        """Return the control-channel replies of the living ranks, without those that failed or timed out."""
        return answers(self.cluster, request, self.living(), timeout_s=timeout_s)

    def parameters(self) -> list[str]:
        """Return the names of all sharded parameters, both flat parameters and their parts."""
        self.drain()
        return param_names(self.trace.header)

    # ---- requests

    def run(self, command: Command, listener: RequestListener) -> Report:
        """Run ``command`` on all ranks; return its report, or where they stopped inside it.

        Raises:
            UsageError: it cannot run; the message says what to run first or write instead.
            RankError: it raised on a rank; the others were aborted and all are ready again.
            RankDied: a rank is gone.
            Interrupted: it was cancelled.
        """
        interrupts = CountInterrupts()
        with ExitStack() as sending:
            with self._changed:
                mark = self._ready(range(self.cluster.num_ranks))
                checked = self._checked(command)
                before = self.trace
                sending.enter_context(interrupts)  # else some ranks might wait for others without the request
                entry = [len(self._entries)] if isinstance(command, (Step, Snapshot)) else []  # for their marks
                pending = self.cluster.apply(f"{RUNTIME}:execute", to_dict(checked), *entry)
                request = self._open(CommandTask(command, pending, before), pending, mark, interrupts)
            request.is_background = isinstance(command, (Step, Run)) and command.background
            return self._follow(request, listener, background=request.is_background)

    def run_cell(self, code: str, ranks: Sequence[int] | None, listener: RequestListener) -> Report:
        """Run a cell in the main thread of ``ranks``; errors as :meth:`run`.

        Ranks that are named run it even if they cannot do a step together; None names none and means all.
        """
        chosen = select(ranks, self.cluster.num_ranks)
        interrupts = CountInterrupts()
        with ExitStack() as sending:
            with self._changed:
                mark = self._ready(chosen, are_named=ranks is not None)
                sending.enter_context(interrupts)
                pending = self.cluster.run_cell(code, ranks=chosen)
                request = self._open(CellTask(code, pending), pending, mark, interrupts)
            return self._follow(request, listener, background=False)

    def pause(self, on_standing: OnStanding = no_standing) -> Report:
        """Stop all ranks at the same event of the request under way, and return where they stopped.

        Args:
            on_standing: receives notices of what the pause waits for.

        Raises:
            UsageError: no request is under way.
        """
        request = self._under_way("pause")
        with self._changed:
            if request.state == "running":
                request.watch.request_pause()
                self._wait_while_running(request, STOP_S, on_standing)
            report: Report | None = request.report if request.state == "stopped" else None
            if report is not None and request.dead:
                report = EndReport(sentence=busy_sentence(request))
        if report is not None:
            self._drop_news_of(request)
            return report
        ended = "has ended" if request.state == "over" else self._awaited(request) or "stops at its next event"
        how = "" if request.state == "over" else ": see %fsdp where --stacks; %fsdp abort aborts it"
        return EndReport(sentence=f"{request.work.words} {ended}{how}")

    def go_on(self, what: str | None, listener: RequestListener, *, background: bool | None) -> Report:
        """Continue a stopped request, to the next ``what`` if given; return its report, or where it stopped again.

        Args:
            what: as for :class:`~workbench.protocol.commands.Next`.
            listener: callbacks; without an ``on_output``, output still goes to that of the previous listener.
            background: return at once; None: as the request was started.

        Raises:
            UsageError: no request is stopped.
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
                request.state, request.cause = "running", None
                request.is_background |= bool(background)
            if listener.on_output is no_output:  # such as a button's
                listener = dataclasses.replace(listener, on_output=request.listener.on_output)
            is_background = request.is_background if background is None else background
            return self._follow(request, listener, background=is_background)

    def abort(self, on_standing: OnStanding = no_standing) -> Report:
        """Abort the request under way; the ranks are ready again afterwards.

        Args:
            on_standing: receives notices of what the abort waits for.

        Raises:
            UsageError: no request is under way.
            WorkbenchError: the ranks could not recover.
        """
        if self.request is None and self._needs_recovery is None:
            return self._end_left()
        request = self._under_way("abort")
        with self._changed:
            request.watch.request_abort(aligns_first=request.state == "running")
            is_mine = request.state == "stopped"
            if is_mine:
                request.state, request.interrupts = "running", CountInterrupts()
            else:
                self._wait_while_running(request, STOP_S + RECOVER_S, on_standing)
        if is_mine:
            if on_standing is not no_standing:
                request.listener = dataclasses.replace(request.listener, on_standing=on_standing)
            try:
                return self._attend(request)
            except Interrupted as ended:
                return EndReport(sentence=str(ended))
        if request.thread is not None:
            self._drop_news_of(request)
        return EndReport(
            sentence=request.ending if request.state == "over" else f"{request.work.words} is being aborted"
        )

    def do_inside(
        self, word: str, work: Inner, ranks: Sequence[int] | None, on_standing: OnStanding = no_standing
    ) -> StepInspection:
        """Run ``work`` in the threads of the stopped step; between steps, run an inspection on all ranks.

        Args:
            word: name of the command, for messages.
            work: the work.
            ranks: ranks that run it; None: all that are held in the gate.
            on_standing: receives notices of ranks that do not end it.

        Raises:
            UsageError: no request is stopped, a rank is not held in the gate, or the work waits for ranks that do not
                run it.
            RankError: a rank refused it; the step stays stopped.
        """
        if self.request is None and not self._left() and isinstance(work, Inspect):
            return self._inspect_at_rest(work)
        request = self._under_way(word)
        if request.state != "stopped":
            raise UsageError(f"nothing is stopped: {busy_sentence(request)}")
        here = self.positions(timeout_s=PATIENT_S)
        held = tuple(sorted(rank for rank, position in here.items() if position.held is not None))
        if not held:
            raise UsageError(f"no rank is held in the gate, so there is nothing to {word}: see %fsdp where")
        if isinstance(work, Inspect):
            check_parameter(work.fqn, self.parameters())
        num_ranks = self.cluster.num_ranks
        chosen = held if ranks is None else select(ranks, num_ranks)
        check_held(chosen, held)
        if isinstance(work, RunCell):
            self._entries.append(Omission(what="a cell that ran inside a stopped step"))
        company = JobRanks(ranks=chosen, held=held, num_ranks=num_ranks)
        done = RemoteEval(self.cluster, company, on_standing, self._quiet_s).run(work)
        others = tuple(rank for rank in range(num_ranks) if rank not in held)
        return StepInspection(done=done, others=others, error=self._job_error(chosen, done, str(request.stop)))

    def _job_error(self, ranks: Sequence[int], done: Mapping[int, JobReply], where: str) -> WorkbenchError | None:
        """Return the exception of a job that some of its ranks have not ended, or in which some failed."""
        left = [rank for rank in ranks if rank not in done]
        if not left:
            return to_error_of_jobs(done, where)
        lines = self.ask(LocateLine())
        return abandoned({rank: lines.get(rank) for rank in left})

    def _inspect_at_rest(self, work: Inspect) -> StepInspection:
        check_parameter(work.fqn, self.parameters())
        ranks = range(self.cluster.num_ranks)
        done = RemoteEval(self.cluster, JobRanks(ranks=ranks, held=ranks, num_ranks=len(ranks))).run(work)
        return StepInspection(done=done, others=(), error=self._job_error(ranks, done, ""))

    def news(self) -> tuple[str, ...]:
        """Return a sentence for each request that ended or stopped in the background since the last call.

        Output of stopped ranks that arrived too late for the stop is forwarded first.
        """
        if self.request is not None and self.request.state == "stopped":
            self._on_slice(self.request)
        news = []
        with suppress(IndexError):  # popped one at a time, as another thread may append meanwhile
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
        """Wait for a request in this thread, or start a background thread that waits."""
        self._on_go()
        self._forget_news_of(request)  # its previous stop is no news any more
        request.listener, request.thread = listener, None
        if not background:
            return self._attend(request)
        request.interrupts = CountInterrupts()  # the main thread's ends with this call
        name = f"workbench: {request.work.words}"
        request.thread = threading.Thread(target=self._attend_behind, args=(request,), name=name, daemon=True)
        request.thread.start()
        return BackgroundReport(request=request.work.words)

    def _attend_behind(self, request: Request) -> None:
        try:
            ending = self._attend(request).headline
        except WorkbenchError as error:
            ending = str(error)
        except Exception as error:  # noqa: BLE001 - reported as news
            ending = f"{type(error).__name__}: {error}"
        if not self.is_closed:
            self._news.append((request, f"in the background, {request.work.words}: {ending}"))

    def _drop_news_of(self, request: Request) -> None:
        """Drop the news of a request whose end the caller reports itself."""
        if request.thread is not None and request.thread is not threading.current_thread():
            request.thread.join(STOP_S)
        self._forget_news_of(request)

    def _forget_news_of(self, request: Request) -> None:
        for entry in tuple(self._news):
            if entry[0] is request:
                with suppress(ValueError):  # news() took it meanwhile
                    self._news.remove(entry)

    def _wait_while_running(self, request: Request, timeout_s: float, on_standing: OnStanding) -> None:
        if request.watcher is threading.current_thread():
            return  # a callback of the waiting thread must not wait for it
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            if self._changed.wait_for(lambda: request.state != "running", min(left_s, ASK_S)):
                return
            if awaited := self._awaited(request):
                on_standing(awaited)

    # ---- stages of a request

    def _ready(self, ranks: Sequence[int], *, are_named: bool = False) -> TraceMark:
        """Make ``ranks`` ready for a request, and return their state before it.

        Ranks that ``are_named`` need not be able to do a step together.

        Raises:
            UsageError: another request is under way.
            RankDied: one of them is gone.
            ClusterError: they could not recover after an earlier failure.
        """
        if self.request is not None:
            raise UsageError(busy_sentence(self.request))
        living = self.living()
        dead = tuple(rank for rank in ranks if rank not in living)
        if dead:
            losses = {rank: how for rank, how in self.cluster.losses().items() if rank in dead}
            how = losses_in_words(losses) or f"{label(dead)} died: the process is gone"
            raise RankDied(f"{how}\n{death_sentence(dead, living)}", ranks=dead)
        if self._needs_recovery is None:
            self._needs_recovery = self._find_left()
        self._free_waiting()
        if self.obstacle and not (are_named and set(ranks) <= set(self._usable(living))):
            if len(self._usable(living)) < len(living):
                raise ClusterError(self.obstacle)
            self.recover()  # the last one failed
        elif self._needs_recovery and not self.obstacle and len(living) == self.cluster.num_ranks:
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
        """Why no step is possible any more, and what to do; empty: no obstacle is known."""
        found = self._obstacle
        if found is None or not (found.outlasts_it or late(found.pending, self.living())):
            return ""
        return f"{found.why}: {what_is_left(self._usable(self.living()))}"

    def _usable(self, living: Sequence[int]) -> list[int]:
        """Return those of the ``living`` ranks that can run a cell at once."""
        busy = () if self._obstacle is None else late(self._obstacle.pending, living)
        return [rank for rank in living if rank not in busy]

    def _free_waiting(self) -> None:
        """Abort ranks that came late to a failed recovery and wait in it for the others, which have left it."""
        found = self._obstacle
        if found is None or not found.outlasts_it or not late(found.pending, self.living()):
            return
        lines = self.ask(LocateLine())
        waiting = [rank for rank in late(found.pending, self.living()) if lines.get(rank, "") is None]
        free(self.cluster, waiting, found.pending, found.why)

    def _left(self) -> str:
        """Return in words the command of an earlier notebook that attached ranks still run; empty: none is known."""
        if self._needs_recovery is not None or self.cluster.held_by:
            return ""
        here = self._collector.positions
        doing = {here[rank].doing for rank in self.living() if rank in here} - {""}
        return f"%fsdp {min(doing)} of the previous notebook" if doing else ""

    def _find_left(self) -> bool:
        """Return whether an earlier notebook aborted these ranks, so that they need recovery.

        Ranks that have yet to end what it aborted are waited for, and aborted once more.

        Raises:
            UsageError: they still run its request, which it did not abort.
            ClusterError: they do not end the request that it aborted.
        """
        self.drain()
        aborted = any(position.given_up for position in self._collector.positions.values())
        left = self._left()
        if left and not aborted:
            raise UsageError(_left_sentence(left))
        idle = self._is_idle()
        if not idle.wait(PATIENT_S):
            if not aborted:
                raise UsageError(_left_sentence("a request of the previous notebook"))
            self._free_left(idle)
        return aborted

    def _is_idle(self) -> PendingReplies:
        """Return a request that completes once the ranks have completed all earlier ones."""
        return self.cluster.run_cell("pass", self.living())

    def _open(self, work: RankTask, pending: PendingReplies, mark: TraceMark, interrupts: CountInterrupts) -> Request:
        """Register the request just sent as the one under way, and return it."""
        request = Request(work, pending, mark)
        self._rows_before, self._raised = mark.num_rows, ()
        request.interrupts = interrupts
        request.log_output = (lambda: None) if self._repeats else self.output.follow(pending)
        request.watch = RequestWaiter(
            self.cluster,
            pending,
            on_slice=lambda: self._on_slice(request),
            on_tick=lambda tick: self._end(request) if tick is DrainCause.ENDED else self._take(request, tick),
            num_outputs=work.num_outputs,
            can_pause=work.is_command and not isinstance(work.command, (Load, Save)),
        )
        self.request, self._catch_up = request, self.drain
        return request

    @staticmethod
    def _on_slice(request: Request) -> None:
        request.log_output()
        request.work.on_slice(request.listener)

    def _take(self, request: Request, tick: DrainCause) -> dict[int, Position]:
        """Drain the ranks and return the positions of those that answered.

        While ranks run, the data of a live view from a moment ago is recent enough, and a late reply is repeated at the
        next drain.
        """
        if self.is_closed:
            raise ClusterError("the ranks were stopped")
        may_be_late = tick in {DrainCause.IN_TIME, DrainCause.LEFT}
        self.drain(
            timeout_s=ASK_S if may_be_late else PATIENT_S,
            max_age_s=SHARED_S if tick is DrainCause.IN_TIME else 0.0,
        )
        request.work.on_tick(request.listener, self.trace)
        if tick is DrainCause.IN_TIME:
            self._tell_who_works(request)
        return self._collector.heard

    def _tell_who_works(self, request: Request) -> None:
        """Notify the listener which ranks run and where, if there is no other news of ``request`` for a while.

        The death of a rank, and what a pause or an abort waits for, is reported at once.
        """
        if request.listener.on_standing is no_standing:
            return
        activity = (request.work.num_outputs(), tuple(request.watch.running), self._collector.next_seq)
        requested = request.watch.requested

        def sentence(seconds: float) -> str:
            awaited = self._awaited(request)
            if not awaited:
                lines = self.ask(LocateLine())
                request.worked = self._who_works(request, seconds, lines)
                request.cause = self._cause(request, self._collector.heard, lines)
            cause = None if awaited else request.cause
            saving = by_value((rank, position.saving) for rank, position in self._collector.heard.items())
            saves = [f"{label(ranks)}: {words}" for words, ranks in saving.items() if words]
            notice = "; ".join(
                filter(None, ["" if cause is None else cause.verdict, *saves, awaited or request.worked])
            )
            has_means = request.thread is None and (requested or request.watch.is_exhausted)
            return f"{notice}; {request.watch.next_means}" if has_means else notice

        is_urgent = bool(requested or request.dead)
        request.standing.look(activity, sentence, request.listener.on_standing, is_urgent=is_urgent)
        if not request.standing.text:
            request.worked, request.cause = "", None

    def _who_works(self, request: Request, seconds: float, lines: Mapping[int, CellLine | None]) -> str:
        running = sorted(set(request.watch.running) - set(request.dead))  # the waiter may not have noticed a death yet
        ended = sorted(set(request.pending.ranks) - set(running))
        losses = self.cluster.losses()
        deaths = {rank: death_in_short(losses.get(rank, "died")) for rank in request.dead}
        return who_works(seconds, running, lines, ended, deaths)

    def _since(self, before: Mapping[int, int]) -> Trace:
        """Return what each rank has recorded after its first rows, as many as ``before`` says."""
        trace = self.trace
        parts = (part.cut(max(part.start.seq, before.get(part.rank, 0)), part.end_seq) for part in trace.ranks)
        return Trace(trace.header, tuple(parts))

    def _cause(
        self, request: Request | None, positions: Mapping[int, Position], lines: Mapping[int, CellLine | None]
    ) -> Fault | None:
        """Return why ranks of a request wait for others that will not come, or do not agree, if the trace tells.

        Between requests: where ranks did not agree in the last one.
        """
        if request is None or request.state != "running" or request.dead:
            if request is not None and request.cause is not None:
                return request.cause  # of a stop
            raised = self._raised if request is None else _raised_on(request.pending)
            frames = {rank: line.frames for rank, line in lines.items() if line is not None}
            where = [
                RunPosition(rank=rank, state=RunState.RUNS, frames=own)
                for rank, own in frames.items()
                if rank not in {each.rank for each in raised}
            ]
            # a rank's own answer has the calls that led to the line too
            failed = [dataclasses.replace(each, frames=frames.get(each.rank, each.frames)) for each in raised]
            return parted(self._since(self._rows_before), [*failed, *where, *self._signalled()])
        since = request.mark.num_rows
        newest = {part.rank: max(part.end_seq - _NEWEST, since.get(part.rank, 0)) for part in self.trace.ranks}
        quiet = _quiet(positions)
        ended = {rank: _raised(request.pending, rank) for rank in {*request.pending.ranks} - {*request.watch.running}}
        frames = {rank: _raised_at(request.pending, rank) for rank in ended}
        frames |= {rank: line.frames for rank, line in lines.items() if line is not None}
        ago_ns = {rank: line.ago_ns for rank, line in lines.items() if line is not None}
        found = [
            dataclasses.replace(each, ago_ns=ago_ns.get(each.rank, 0)) if each.is_over else each
            for each in live_positions(self._since(newest), quiet, ended, since, frames)
        ]
        decide = stall_cause if any(position.state is RunState.WAITS for position in found) else parted
        return decide(self._since(self._rows_before if decide is parted else since), found)

    def _cause_seen(self, positions: Mapping[int, Position], lines: Mapping[int, CellLine | None]) -> Fault | None:
        """Return why ranks that another notebook controls wait in a step, as :meth:`_cause`; None if that is unclear.

        A rank that raised is not told from one that ended; while its notebook controls it, that aborts the others.
        """
        since, ended = begins_of_newest_step(self.trace), ended_of(positions, self.cluster.num_ranks)
        if not since or ended is None or self.cluster.is_free:
            return None
        frames = {rank: line.frames for rank, line in lines.items() if line is not None}
        here = self._since(since)
        found = live_positions(here, _quiet(positions), dict.fromkeys(ended, ""), since, frames)
        return stall_cause(here, found) if any(position.state is RunState.WAITS for position in found) else None

    def _signalled(self) -> Iterator[RunPosition]:
        """Yield the ranks whose processes a signal ended, with its name."""
        for rank, how in self.cluster.losses().items():
            signal = re.search(r"\bSIG[A-Z0-9]+\b", how)
            if signal:
                yield RunPosition(rank=rank, state=RunState.FAILED, reason=signal[0])

    def _awaited(self, request: Request) -> str:
        """Return what a pause or an abort still waits for, in words; empty: neither is under way."""
        here, running = self._collector.heard, sorted(request.watch.running)
        if not request.watch.requested or not running:
            return ""
        if request.watch.requested == "abort":
            return f"aborting; {label(running)} still {_run(running)}"
        if request.work.is_command and not isinstance(request.work.command, Run | Step):
            return f"{request.work.words} records no events to stop at"
        late = [rank for rank in running if rank not in here or state_of(here[rank]) == "running"]
        return f"stops at the next event of {label(late or running)}"

    def _end(self, request: Request) -> dict[int, Position]:
        """Drain the rest of a command now, of a cell in a thread: most cells record nothing, so no one waits."""
        if request.work.is_command:
            if self._take(request, DrainCause.ENDED).keys() >= set(self.living()):  # else the next request drains again
                self._catch_up = lambda: None
        else:
            thread = threading.Thread(target=self.drain, name="workbench: drain", daemon=True)
            self._catch_up = thread.join
            thread.start()
        return self._collector.heard

    def _attend(self, request: Request) -> Report:
        """Wait until ``request`` is done or stops; after a failure the ranks recover.

        Raises:
            UsageError: the ranks refused the command.
            RankError: it raised on a rank.
            RankDied: a rank is gone.
            Interrupted: it was cancelled.
        """
        request.watcher = threading.current_thread()
        request.standing = StallNotice(time.monotonic, self._quiet_s)
        report: Report | None = None
        try:
            with request.interrupts:  # until the ranks are ready again, which another Ctrl-C would leave half done
                outcome = self._watch(request)
                if isinstance(outcome, Outcome):
                    self._raise_failure(request, outcome)
            report = (
                self._stopped(request, outcome) if isinstance(outcome, StopGroup) else self._result(request, outcome)
            )
            request.ending, request.failed = report.headline, bool(report.problem)
        except BaseException as error:
            request.ending, request.failed = str(error), True
            done = self._steps_done(request)
            code = request.work.code if _raised_everywhere(request.pending, self.cluster.num_ranks) else ""
            self._entries += failed(request.work.words, request.work.command, error, done, code)
            raise
        finally:
            self._note(request, is_over=not isinstance(report, StopReport))
        return report

    def _steps_done(self, request: Request) -> int:
        """Return the number of steps of a request that all living ranks have done; a dead one did them too."""
        if not isinstance(request.work.command, Step):
            return 0
        since, living = request.mark.num_rows, self.living()
        rows = [
            part.rows[part.rows["seq"] >= since.get(part.rank, 0)] for part in self.trace.ranks if part.rank in living
        ]
        ended = [int(((each["kind"] == Kind.STEP) & (each["edge"] == Edge.END)).sum()) for each in rows]
        return min(ended, default=0)

    def _watch(self, request: Request) -> Outcome | StopGroup:
        try:
            return request.watch.run(request.interrupts)
        except BaseException:
            self._needs_recovery = True  # the ranks were aborted, and how they ended is unknown
            raise

    def _stopped(self, request: Request, stop: StopGroup) -> StopReport:
        request.work.stand(request.listener)
        request.stop = dataclasses.replace(stop, units=unit_names(self.trace.header))
        held_by = [self._reason(number, request.work.until) for number in stop.breakpoints]
        reasons = (*held_by, *dict.fromkeys(hold.because for hold in stop.holds.values() if hold.because))
        if UNTIL in stop.breakpoints:
            request.work.until = None
        waits = any(map(is_in_wait, stop.holds.values()))
        if not waits:
            request.cause = None
        elif request.cause is None and len(stop.positions) < len(request.pending.ranks):
            request.cause = self._cause(request, stop.positions, self.ask(LocateLine()))
        request.report = StopReport(stop=request.stop, request=request.work.words, reasons=reasons, cause=request.cause)
        return request.report

    def _result(self, request: Request, outcome: Outcome) -> Report:
        self._entries.append(self._completed(request, outcome.results))
        return self._with_missed(request, request.work.finish(outcome.results, request.listener))

    def _raise_failure(self, request: Request, outcome: Outcome) -> None:
        """Recover the ranks and raise if the request has failed or was cancelled."""
        if self.is_closed:
            raise ClusterError("the ranks were stopped")
        request.watch.stopper.disarm(set(self.living()))
        if not outcome.failures and not outcome.given_up:
            return
        self._raised = _raised_on(request.pending)
        error = self._settle(outcome, request)
        request.work.fail(request.listener)
        raise error

    def _completed(self, request: Request, results: Mapping[int, object]) -> Entry:
        """Return the entry of a request that all of its ranks completed."""
        entry = request.work.completed(dict(results), self.cluster.num_ranks)
        if not isinstance(entry, CompletedCommand) or not isinstance(entry.command, Reshard):
            return entry
        found = [model for own in self.models().values() for model in own if model.name == entry.command.model]
        return dataclasses.replace(entry, policy=found[0].policy if found else None)

    def _reason(self, number: int, until: Breakpoint | None) -> str:
        """Return in words what stopped a rank: a breakpoint, or the ``--until`` of its steps."""
        if number == UNTIL:
            return f"--until {until or ''}".rstrip()
        return self.breakpoints.named(number)

    def _with_missed(self, request: Request, report: Report) -> Report:
        """Add to the report of an ``--until`` that the event did not occur, and the events that did."""
        until = request.work.until
        if until is None or not isinstance(report, UntilReport):
            return report
        events = came(self.trace, request.mark.num_rows, str(until)) if until.when is None else ()
        return dataclasses.replace(report, missed=str(until), occurred=tuple(events))

    def _note(self, request: Request, *, is_over: bool) -> None:
        """Mark ``request`` stopped or done and wake all waiters."""
        request.log_output()
        if not self._repeats:
            self.output.note(f"{request.work.title}: {request.ending}", is_error=request.failed)
        with self._changed:
            request.state = "over" if is_over else "stopped"
            if is_over and self.request is request:
                self.request = None
                count = 1 if self.ended is None else self.ended.count + 1
                line, text = request.work.words, request.ending
                self.ended = LastResult(count=count, line=line, text=text, is_error=request.failed)
            self._changed.notify_all()

    def restart_ranks(self, on_wait: OnWait) -> None:
        """Start a process for each lost rank, and make all ranks ranks anew; what they recorded is continued.

        Raises:
            UsageError, ClusterError, Interrupted: as :meth:`Cluster.heal`.
        """
        self.drain()
        self._obstacle, self._needs_recovery = None, False
        self.cluster.heal(self._collector.pasts(self.cluster.num_ranks), on_wait)
        self._raised = ()
        self.push_breakpoints()

    @contextmanager
    def repeating(self) -> Iterator[list[Entry]]:
        """Let requests in the body repeat what the program has: they are no part of it, and no result to show.

        Yields:
            the program's entries, which the body may change.
        """
        entries, ended, self._repeats = [*self._entries], self.ended, True
        try:
            yield entries
        finally:
            self._entries, self.ended, self._repeats = entries, ended, False

    def push_breakpoints(self) -> None:
        """Send the breakpoints to all ranks."""
        self.ask(SetBreakpoints(breakpoints=tuple(self.breakpoints)), timeout_s=PATIENT_S)

    def close(self) -> None:
        """Abort the request under way, which also ends its waits; called before the cluster is stopped."""
        request = self.request  # before its thread sees `is_closed`, and ends it without freeing the ranks
        self.is_closed = True
        self._catch_up()
        if request is None:
            return
        self._free(request.pending, "the ranks are being stopped")
        request.pending.wait(CLOSE_S)
        if request.thread is not None and request.thread is not threading.current_thread():
            request.thread.join(CLOSE_S)

    def _free(self, pending: PendingReplies, reason: str) -> None:
        """Abort the ranks until ``pending`` is done."""
        free(self.cluster, self.living(), pending, reason)

    def _end_left(self) -> EndReport:
        """Abort the request of an earlier notebook that the ranks still run.

        Raises:
            UsageError: the ranks are idle.
            ClusterError: the ranks do not end it.
        """
        idle = self._is_idle()
        if idle.wait(ASK_S):
            raise UsageError(_nothing("abort"))
        self._free_left(idle)
        self._needs_recovery = True
        return EndReport(sentence="aborted the request of the previous notebook")

    def _free_left(self, idle: PendingReplies) -> None:
        """Abort what the ranks run for an earlier notebook, and wait for ``idle``, queued after it.

        Raises:
            ClusterError: the ranks do not end it.
        """
        self._free(idle, "aborted")
        if not idle.wait(RECOVER_S):
            raise ClusterError(
                f"{label(late(idle, self.living()))} did not abort the previous notebook's request: {RESTART}"
            )

    def recover(self, interrupts: CountInterrupts | None = None) -> None:
        """Have all ranks build new process groups and discard the step they were in.

        Args:
            interrupts: counts Ctrl-C; one that comes after :data:`PATIENT_S` ends the wait. None: it raises.

        Raises:
            ClusterError: it failed or timed out; the ranks can do no step together until it succeeds.
        """
        self._needs_recovery = True
        begun, pending = time.monotonic(), self.cluster.apply(f"{RUNTIME}:recover", uuid.uuid4().hex)
        is_done = pending.wait(PATIENT_S, or_error=True)
        early = 0 if interrupts is None else interrupts.count  # meant what the ranks did before
        while not is_done and not any(map(pending.error, pending.ranks)) and time.monotonic() < begun + RECOVER_S:
            if interrupts is not None and interrupts.count > early:
                break
            is_done = pending.wait(SLICE_S, or_error=True)
        failures = [failure_of(rank, error) for rank in pending.ranks if (error := pending.error(rank)) is not None]
        if is_done and not failures:
            self._needs_recovery, self._obstacle = False, None
            return
        if failures:
            cause = first_cause(failures)
            why = str(cause) if cause.died else f"rank {cause.rank} raised {cause}"
        else:
            seconds = time.monotonic() - begun
            why = who_works(seconds, self._not_there(pending), self.ask(LocateLine()), ())
        # the others wait for the culprits
        self._free(pending, "the ranks could not rebuild their process groups")
        pending.wait(PATIENT_S)  # those that can end it run cells afterwards
        why = f"the ranks could not rebuild their process groups ({why})"
        self._obstacle = Obstacle(why=why, pending=pending, outlasts_it=True)
        raise ClusterError(self.obstacle)

    def _not_there(self, pending: PendingReplies) -> list[int]:
        """Return the late ranks that do not answer or still run a cell; all late ranks if there are none."""
        waiting, lines = late(pending, self.living()), self.ask(LocateLine())
        return [rank for rank in waiting if rank not in lines or lines[rank] is not None] or waiting

    def _settle(self, outcome: Outcome, request: Request) -> WorkbenchError:
        """Recover the ranks, if possible, and return the exception to raise."""
        found = self._aftermath(request.mark, timeout_s=ASK_S if outcome.abandoned else PATIENT_S)
        if isinstance(request.work, CommandTask) and isinstance(request.work.command, Run):  # the next run starts clean
            found = {rank: left.without_training_state() for rank, left in found.items()}
        return _error_of(outcome, found, self._get_ready(outcome, request, found), request.worked)

    def _get_ready(self, outcome: Outcome, request: Request, found: Mapping[int, Aftermath]) -> str:
        """Recover the ranks if they need it; return why that is impossible, empty: they are ready."""
        living = self.living()
        worked = request.work.is_command or self._collector.next_seq != request.mark.num_rows
        blocked = any(left.unfinished for left in found.values())
        if not (worked or blocked or outcome.aborted or outcome.results):
            return self.obstacle  # all ranks raised on their own, before any work with the others
        self._needs_recovery = True
        if outcome.abandoned and not self.obstacle:
            still = f"{label(outcome.abandoned)} still {_run(outcome.abandoned)}, and the notebook no longer waits"
            self._obstacle = Obstacle(why=still, pending=request.pending, outlasts_it=False)
        if self.obstacle:
            return self.obstacle
        if len(living) < self.cluster.num_ranks:  # the recovery would wait for the dead
            if living:
                self.cluster.apply(f"{RUNTIME}:give_up_step", ranks=living).wait(PATIENT_S)
            return death_sentence([rank for rank in range(self.cluster.num_ranks) if rank not in living], living)
        try:
            self.recover(request.interrupts)
        except ClusterError as broken:
            return str(broken)
        return ""

    def _aftermath(self, mark: TraceMark, *, timeout_s: float) -> dict[int, Aftermath]:
        """Return the state of each rank that answers, relative to ``mark``."""
        trace, gradient_bytes = self.trace, self._collector.gradient_bytes
        names = {unit.index: unit.name for unit in trace.header.units}
        newest = {r.rank: r.rows[-1] for r in trace.ranks if r.end_seq > mark.num_rows.get(r.rank, 0) and len(r.rows)}
        found = self.positions(timeout_s=timeout_s)
        return {
            rank: Aftermath(
                step=int(newest[rank]["step"]) if rank in newest else None,
                phase=Phase(newest[rank]["phase"]).words if rank in newest else None,
                unit=names.get(_unit_at_work(newest[rank], position.raised_in)) if rank in newest else None,
                optimizer_steps=position.optimizer_steps - mark.optimizer_steps.get(rank, 0),
                unfinished=position.unfinished,
                left_gradients=gradient_bytes.get(rank, 0) > 0
                and (mark.gradient_bytes.get(rank, 0) == 0 or not all(gradient_bytes.get(r, 0) for r in found)),
            )
            for rank, position in found.items()
        }


def ended_of(positions: Mapping[int, Position], num_ranks: int) -> set[int] | None:
    """Return the ranks that have ended the steps in which others still are, or None if positions do not tell."""
    here = positions.values()
    if len(here) < num_ranks or len({at.commands for at in here}) > 1:  # one is lost, or has not begun it yet
        return None
    if any(at.held is not None or at.given_up for at in here) or {at.doing for at in here} - {""} not in TRAINING:
        return None
    return {rank for rank, at in positions.items() if not at.doing}


def _quiet(positions: Mapping[int, Position]) -> dict[int, int]:
    """Return the time since the newest event of each rank, in nanoseconds."""
    return {rank: at.now_ns - at.newest.since_ns for rank, at in positions.items() if at.newest is not None}


def _raised(pending: PendingReplies, rank: int) -> str:
    """Return the error with which a rank has ended a request as ``Name: text``; empty if it raised none."""
    error = pending.error(rank)
    return f"{error.ename}: {error.evalue}" if isinstance(error, RankError) else ""


def _raised_on(pending: PendingReplies) -> list[RunPosition]:
    """Return the ranks that have ended a request by an error, with its line."""
    errors = {rank: _raised(pending, rank) for rank in pending.ranks}
    return [
        RunPosition(rank=rank, state=RunState.FAILED, reason=reason, frames=_raised_at(pending, rank))
        for rank, reason in errors.items()
        if reason
    ]


def _raised_everywhere(pending: PendingReplies, num_ranks: int) -> bool:
    """Return whether all ranks ended a request by an error of their own."""
    errors = [pending.error(rank) for rank in pending.ranks]
    own = [each for each in errors if isinstance(each, RankError) and not failure_of(each.rank, each).is_consequence]
    return len(own) == num_ranks


def _raised_at(pending: PendingReplies, rank: int) -> tuple[str, ...]:
    """Return the line of the cell or script in which a rank's error was raised, as a call; empty if it is unknown."""
    error = pending.error(rank)
    if not isinstance(error, RankError) or error.line is None:
        return ()
    return (f"{error.script or 'cell'}:{error.line}",)


def _unit_at_work(newest: np.void, raised_in: int) -> int:
    """Return the index of the unit in which a rank raised; after a raising forward the newest row has an outer unit."""
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
    """Return the message that ``request`` is under way and blocks others, and what to do."""
    dead = request.dead
    if dead:
        return f"{request.work.words} was running when {label(dead)} died: end it with %fsdp abort"
    if request.state == "stopped":
        return f"{request.work.words} is stopped ({request.stop}): first %fsdp continue or %fsdp abort"
    where = " in the background" if request.thread is not None else ""
    return f"{request.work.words} runs{where}: %fsdp pause stops inside it, %fsdp abort aborts it"


def _nothing(word: str) -> str:
    """Return the message that ``word`` needs a request under way or stopped, and what to do first."""
    if word in {"abort", "pause"}:
        return f"nothing to {word}: no step is running"
    return f"{word}: no step is stopped; {STOP_SOMEWHERE}"


def _left_sentence(left: str) -> str:
    """Return the message that the ranks still run the request of an earlier notebook, and what to do."""
    return f"the ranks still run {left}: wait, or abort it: %fsdp abort"


def _run(ranks: Sequence[int]) -> str:
    return "run" if len(ranks) > 1 else "runs"


def _error_of(outcome: Outcome, found: dict[int, Aftermath], obstacle: str, notice: str) -> WorkbenchError:
    """Return the exception of a failed or cancelled request.

    Args:
        outcome: its outcome.
        found: state of the ranks afterwards, by rank.
        obstacle: why the ranks cannot continue; empty: they are ready.
        notice: the last notice of running ranks that the user saw.
    """
    given_up = (outcome.given_up or "interrupted").capitalize()
    if outcome.abandoned or (outcome.given_up and not any(failure.died for failure in outcome.failures)):
        done = f"{given_up}; {obstacle}" if obstacle else f"{given_up}. {IDLE_AGAIN}"
        return Interrupted("\n".join([done, *([f"before that: {notice}"] if notice else []), *left_behind(found)]))
    cause = first_cause(outcome.failures)
    if cause.ename == UsageError.__name__:
        alike = sum(str(failure) == str(cause) for failure in outcome.failures)
        everywhere = alike == len(outcome.failures) + len(outcome.results)
        refused = cause.evalue if everywhere else f"rank {cause.rank}: {cause.evalue}"
        return UsageError("\n".join(filter(None, [refused, obstacle])))
    return to_error(outcome.failures, found, next_thing=obstacle)
