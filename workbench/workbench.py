"""Class Workbench: the API over ranks, trace and views. Used by magics and scripts; never imports torch."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypedDict, TypeVar, Unpack, cast

import plotly.graph_objects as go

from workbench.base.devices import AUTO
from workbench.base.glossary import introduced
from workbench.base.machines import DEFAULT
from workbench.base.text_formats import plural
from workbench.cluster import Cluster
from workbench.cluster.attached import AttachTarget
from workbench.cluster.deferred_interrupts import CountInterrupts
from workbench.cluster.engine_provider import OnWait, no_wait
from workbench.cluster.pending_replies import Output, select
from workbench.cluster.processes import usable_cores
from workbench.cluster.zygote_cache import KEEPER
from workbench.errors import Interrupted, RankError, TraceError, UsageError, WorkbenchError, did_you_mean
from workbench.events import Unit
from workbench.export import export
from workbench.protocol.arguments import argument_of
from workbench.protocol.breakpoints import Condition, parse_event, read_event, with_condition
from workbench.protocol.commands import (
    START_TIMEOUT_S,
    Command,
    Evaluate,
    InjectFault,
    Inspect,
    Lint,
    Load,
    Plan,
    Reshard,
    Run,
    Save,
    Shard,
    ShardReply,
    ShowOutput,
    Snapshot,
    Start,
    Step,
    Unshard,
    Verify,
    to_text,
)
from workbench.protocol.example import EXAMPLE
from workbench.protocol.planning import planned_ranks
from workbench.protocol.rank_messages import ModelInfo, Names, RunCell
from workbench.replay.activations import comparable
from workbench.replay.units import collectives_words, policy_steps, unmanaged_notes
from workbench.reports import cursor as cursors
from workbench.reports import run_where
from workbench.reports.checkpoint_reports import LoadReport, SaveReport, SnapshotReport
from workbench.reports.explain_report import ExplainReport
from workbench.reports.explanations import explain
from workbench.reports.failures import losses_in_words
from workbench.reports.fit_report import FitReport
from workbench.reports.heal_report import HealReport
from workbench.reports.history_report import HistoryReport, PastCommand, Source
from workbench.reports.injected_fault import FaultListReport, InjectReport
from workbench.reports.lint_report import LintReport
from workbench.reports.next_line import AND_THEN, SessionStage, next_line
from workbench.reports.output_report import CellReport, OutputReport
from workbench.reports.pause_reports import (
    BackgroundReport,
    BackReport,
    BreakReport,
    EndReport,
    EvalReport,
    InspectReport,
    StopReport,
    WhereReport,
)
from workbench.reports.plan_report import PlanReport
from workbench.reports.record_reports import ExportReport, OpenReport
from workbench.reports.report import Report
from workbench.reports.run_where import RunWhereReport
from workbench.reports.sharding_reports import ReshardReport, ShardReport, UnshardReport
from workbench.reports.status_report import RankStatus, StartReport, StatusReport, sharded_models
from workbench.reports.step_reports import RunReport, StepReport
from workbench.reports.stop_positions import live_units, param_names
from workbench.reports.verify_report import VerifyReport
from workbench.reports.view_numbers import CompareReport, ViewReport, compared, numbers
from workbench.script.fit_search import FitSearch
from workbench.script.planner import PlannedRank, plan_program
from workbench.session.healing import heal, snapshot_notice
from workbench.session.output_log import OutputLog
from workbench.session.outputs import OnOutput, written_at_once
from workbench.session.program import CompletedCommand, Program
from workbench.session.request import OnProgress, RequestListener, no_output, no_progress
from workbench.session.session import Session, busy_sentence
from workbench.session.snapshot import ActiveRequest, ClusterSnapshot, Exchange
from workbench.session.stall_notice import QUIET_S, OnStanding, chosen_quiet_s, no_standing
from workbench.session.trace_selectors import LAST, file_at, opened_with_notes, policies, sides
from workbench.session.variable_check import everywhere
from workbench.session.waiter import ASK_S
from workbench.trace.columns import Trace, steps
from workbench.trace.file import load, save
from workbench.trace.read_recording import RecordingReader
from workbench.views import VIEWS, draw, theme
from workbench.views.compare import draw as draw_compared
from workbench.views.fit import fit as fit_figure
from workbench.views.mark_buttons import NO_MARKS, Marks

PLAN = "plan"
"""The name of the newest plan, as a side of ``compare``."""

MAX_PAST = 1000
"""Commands that the history keeps."""

FOLLOW_S = 0.2
"""Minimum time in seconds between two readings of a recording that its run still writes, five times a second."""

CROWDED = 4
"""Number of ranks per core above which a start warns."""

DRAWN = (*VIEWS, "compare")
"""Commands that draw a figure of numbers."""

LOOKS = ("explain", "dashboard", *VIEWS)
"""Commands after which nothing has to say that one can look at a step."""

_ONLY_DRAWN = {
    "dashboard": "%fsdp status --json, %fsdp where --json and %fsdp states --json say the same",
    "canvas": "%fsdp timeline --json has the numbers of a step, %fsdp export FILE.json those of the whole run",
}
"""Methods that return a widget; what to type instead for its numbers."""

TraceSelector = str | os.PathLike[str] | Trace
"""One side of a comparison: a trace, its file, or text as :mod:`workbench.session.trace_selectors` reads it."""

OnNotice = Callable[[str], None]
"""Receives a sentence for the user, in addition to a result."""

P = ParamSpec("P")
R = TypeVar("R", bound=Report)
C = TypeVar("C", bound=Command)


class RankSettings(TypedDict, total=False):
    """Settings of a start: see :class:`Workbench`."""

    num_ranks: int
    device: str
    profile: str | None
    engines: str
    interface: str
    start_timeout_s: float


def no_notice(sentence: str) -> None:
    """Ignore a sentence."""


def made(command: Callable[P, C], *args: P.args, **kwargs: P.kwargs) -> C:
    """Return the command with these arguments.

    Raises:
        UsageError: the command does not take these arguments.
    """
    try:
        return command(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _check_arguments(
    method: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Raise UsageError unless a method of this name and signature takes these arguments."""
    known = signature.parameters
    for name in kwargs.keys() - known.keys():
        near = did_you_mean(name, known) or ";"
        raise UsageError(f"{method}() has no argument {name!r}{near} the arguments are: {', '.join(known)}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{method}(): {error}") from None


def on_ranks(command: Callable[P, Command], report: type[R]) -> Callable[Concatenate[Workbench, P], R]:
    """Return a method that runs a command on all ranks; it has the signature and the docstring of the command."""
    declared = cast("type[Command]", command)
    signature = inspect.signature(declared)

    def method(self: Workbench, /, *args: P.args, **kwargs: P.kwargs) -> R:
        _check_arguments(declared.word, signature, args, kwargs)
        return cast(R, self.do(made(command, *args, **kwargs)))

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[itself, *signature.parameters.values()], return_annotation=report
    )
    method.__name__ = method.__qualname__ = declared.method or declared.word
    arguments = [f"    {f.name}: {argument_of(f).about}." for f in dataclasses.fields(declared)]
    errors = "Raises:\n    UsageError, RankError, RankDied, Interrupted: as :meth:`do`."
    method.__doc__ = "\n".join(
        [(inspect.getdoc(declared) or "").partition("\n\n")[0], "", "Args:", *arguments, "", errors]
    )
    return method


class Workbench:
    """Ranks that train, and the views of their trace.

    ``with Workbench(4) as wb:`` starts the ranks and stops them at the end; the trace is kept.

    Args:
        num_ranks: number of ranks.
        device: one of :data:`workbench.base.devices.CHOICES`: ``cpu``, ``cuda`` (one GPU per rank), ...
        profile: an IPython profile whose ipyparallel configuration applies.
        engines: ipyparallel launcher that starts them: ``ssh``, ``slurm``, ``mpi``, ...; empty: the profile's launcher,
            or without one the fast start on this machine.
        interface: network interface on which hosts reach each other; empty: that of the route between them.
        start_timeout_s: time that a start may take, in seconds, without progress.
        cluster_factory: makes the cluster from all of these.
        in_notebook: returns whether the caller has a variable of a name; used in messages only.

    Attributes:
        cursor: event up to which views show the trace; None: all of it.
        record: name of the opened trace file that is shown; empty: the ranks' own trace is shown.
        exchange: the start, stop or open under way, during which others are refused; empty: none.
        cores: number of cores that ranks started here share.
    """

    def __init__(  # noqa: PLR0913 - keywords: settings of a start, and callbacks
        self,
        num_ranks: int = 4,
        *,
        device: str = AUTO,
        profile: str | None = None,
        engines: str = "",
        interface: str = "",
        start_timeout_s: float = START_TIMEOUT_S,
        cluster_factory: Callable[..., Cluster] = Cluster,
        in_notebook: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.num_ranks = num_ranks
        self._settings: RankSettings = {
            "num_ranks": num_ranks,
            "device": device,
            "profile": profile,
            "engines": engines,
            "interface": interface,
            "start_timeout_s": start_timeout_s,
        }
        self._factory = cluster_factory
        self._in_notebook = in_notebook
        self.cursor: cursors.Cursor | None = None
        self._session: Session | None = None
        self._quiet_s = QUIET_S
        self.exchange: Exchange = ""
        self.cores = usable_cores()
        self._exchange_lock = threading.RLock()  # held while ranks or the shown trace are replaced
        self._is_cancelled = False  # the start under way
        self._terms = set[str]()  # of the glossary, which a report has explained
        self._is_new = True  # no ranks were started and no file was opened yet
        self._waits_for = ""
        self._target = AttachTarget()  # of the last attach
        self._last = ClusterSnapshot(trace=Trace.empty())
        self._program = Program()
        self._output = OutputLog(0)
        self._planned: Trace | None = None
        self._past: deque[PastCommand] = deque(maxlen=MAX_PAST)
        self.record = ""
        self._recording: RecordingReader | None = None  # of the opened folder
        self._read_at_s = 0.0
        self._step_raised = False  # the newest step
        self._left = ""  # the line of steps that a heal left to do
        self.failed_step = ""
        """Error of the newest command that trains; empty if it completed."""
        self.open_question: Callable[[str], str] = lambda view: ""
        """Returns why a view must not be shown now, such as a prediction that is not locked; empty: it may."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Return a workbench that shows a trace file or a recording's folder, without ranks.

        Errors as :meth:`open_record`.
        """
        workbench = cls()
        workbench.open_record(path)
        return workbench

    @classmethod
    def attach(cls, num_ranks: int | None = None, **which: Any) -> Self:  # noqa: ANN401 - as :meth:`join`
        """Return a workbench whose ranks are engines that already run: arguments and errors as :meth:`join`."""
        workbench = cls()
        workbench.join(num_ranks, **which)
        return workbench

    def __enter__(self) -> Self:
        if not self.running:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # ---- ranks

    @property
    def running(self) -> bool:
        """Whether there are ranks."""
        return self._session is not None

    @property
    def losses(self) -> dict[int, str]:
        """Cause of each rank's loss: ``died: the process was killed by SIGKILL ...``; empty when no ranks run."""
        return {} if self._session is None else self._session.cluster.losses()

    @property
    def settings(self) -> RankSettings:
        """Settings with which ranks start."""
        return self._settings.copy()

    def start(
        self, *, on_wait: OnWait = no_wait, on_notice: OnNotice = no_notice, **settings: Unpack[RankSettings]
    ) -> StartReport:
        """Start the ranks and drop the earlier trace; ranks that are all lost are stopped first.

        Args:
            on_wait: called with a sentence that says what a long start waits for, such as a queue.
            on_notice: called with a warning if the ranks are many for this machine.
            settings: constructor arguments that replace the earlier ones.

        Raises:
            UsageError: ranks already run, are being started or stopped, or these settings are not possible.
            ClusterError: the ranks did not start.
            Interrupted: Ctrl-C; all started processes have ended, and nothing is queued.
        """
        with self._exchanging("start"):
            self._check_replaceable("%fsdp start")
            self._quiet_s = chosen_quiet_s()
            wanted: RankSettings = {**self.settings, **settings}
            if wanted["num_ranks"] > CROWDED * self.cores and not wanted["engines"] and wanted["profile"] is None:
                on_notice(
                    f"{wanted['num_ranks']} ranks share {plural(self.cores, 'core')} here: the start may take minutes "
                    f"or fail"
                )
            self.stop()
            begin = time.monotonic()
            cluster = self._factory(**wanted)
            cluster.start(self._noting(on_wait))
            self._settings = wanted
            return self._take(cluster, "started", begin)

    def join(  # noqa: PLR0913 - keywords: the line's arguments, and a callback
        self,
        num_ranks: int | None = None,
        *,
        on_wait: OnWait = no_wait,
        profile: str | None = None,
        cluster_id: str = "",
        file: str | os.PathLike[str] = "",
        device: str = AUTO,
        interface: str = "",
        take: bool = False,
        look: bool = False,
    ) -> StartReport:
        """Use engines that already run as ranks (``%fsdp attach``); drops the earlier trace.

        Engines that already are ranks keep their variables. If another notebook controls them, this one can only view
        them: views and the dashboard work, commands are refused. If this notebook already views such ranks and the call
        names no cluster, it attaches to them again, to take control once they are free.

        Args:
            num_ranks: number of engines to use; None: all.
            on_wait: as in :meth:`start`.
            profile: IPython profile that the cluster was started with; None: the default one.
            cluster_id: id of a cluster of that profile; empty: the only one.
            file: the cluster's connection file for clients; empty: the one in the profile.
            device: as in the constructor.
            interface: as in the constructor.
            take: take the ranks from a notebook that is gone.
            look: only view the ranks, also if no notebook controls them.

        Raises:
            UsageError: ranks run here, there is no such cluster, or it has fewer engines.
            ClusterError: the cluster does not answer, or its engines are incompatible.
            Interrupted: Ctrl-C; no process of the cluster has ended.
        """
        target = AttachTarget(profile=profile, cluster_id=cluster_id, file=os.fspath(file))
        with self._exchanging("start"):
            if not self.held_by:
                self._check_replaceable("%fsdp attach")
            elif target == AttachTarget():
                target = self._target
            self._quiet_s = chosen_quiet_s()
            self.stop()
            self._target = target
            begin = time.monotonic()
            cluster = Cluster.attached(target, num_ranks, take=take, look=look, device=device, interface=interface)
            cluster.start(self._noting(on_wait))
            return self._take(cluster, "attached", begin)

    def _take(self, cluster: Cluster, how: str, begin: float) -> StartReport:
        """Use a cluster that was just started or attached; return its report."""
        self.num_ranks = cluster.num_ranks
        self._session = Session(cluster, in_notebook=self._in_notebook, on_go=self._show_newest, quiet_s=self._quiet_s)
        self._last, self.record, self._is_new = ClusterSnapshot(trace=Trace.empty()), "", False
        self._recording, self.failed_step, self._step_raised, self._left = None, "", False, ""
        self._show_newest()
        devices = tuple(info.device for info in cluster.rank_info)
        notice = cluster.rank_info[0].notice
        return StartReport(
            num_ranks=self.num_ranks,
            devices=devices,
            seconds=time.monotonic() - begin,
            notice=notice,
            how=how,
            holder=cluster.held_by,
        )

    @property
    def outlives(self) -> bool:
        """Whether the ranks' processes were attached, so that they outlive this workbench."""
        session = self._session  # another thread may reset it
        return session is not None and session.cluster.outlives

    @property
    def held_by(self) -> str:
        """The other notebook that controls the ranks, in words: this one can then only view them; empty: none."""
        session = self._session
        return "" if session is None else session.cluster.held_by

    @property
    def is_free(self) -> bool:
        """Whether the notebook that controlled the ranks has released them, so that :meth:`join` can take them."""
        session = self._session
        return session is not None and session.cluster.is_free

    @property
    def one_job(self) -> str:
        """The launcher that starts and ends all ranks as one job, which :meth:`heal` cannot replace; empty: it can."""
        session = self._session
        return "" if session is None else session.cluster.one_job

    def stop(self, *, on_notice: OnNotice = no_notice) -> str | None:
        """Stop the ranks, if any run. The trace is kept.

        Attached ranks become plain engines again: their processes do not end.

        Args:
            on_notice: called with a sentence that says so.

        Returns:
            a sentence on the hosts that were not reached and on their processes; None if all ranks have ended.

        Raises:
            UsageError: ranks are being started or stopped.
            Interrupted: Ctrl-C during the stop; the ranks are stopped nevertheless.
        """
        left: list[str] = []
        with self._exchanging("stop"):
            session = self._session
            if session is not None:
                self._leave(lambda: left.append(session.cluster.stop()))
        on_notice("No ranks are running" if session is None else "Ranks stopped. The trace is kept: views still work")
        return "".join(left) or None

    def heal(self, *, on_wait: OnWait = no_wait, on_notice: OnNotice = no_notice) -> HealReport:
        """Replace ranks that died, repeat the cells and commands on all ranks, and restore the newest snapshot.

        The steps since that snapshot are done again, so training goes on where it was. Nothing is recorded or printed
        twice. Without a snapshot the steps are lost; the report says how many.

        Args:
            on_wait: as in :meth:`start`.
            on_notice: called first, with a sentence for each cell that has effects outside the ranks.

        Raises:
            UsageError: no rank is lost, a request is under way, or their launcher cannot start single engines.
            ClusterError, RankDied: another rank was lost meanwhile; call it again.
            Interrupted: Ctrl-C; call it again.
        """
        with self._exchanging("start"):
            session = self._started()
            report = heal(session, self._noting(on_wait), on_notice)
            session.output.note(f"%fsdp heal: {report.headline}", is_error=bool(report.problem))
            self._step_raised, self._left = False, report.next or self._left
            return dataclasses.replace(report, next=next_line(self._stage(is_healed=True)))

    def detach(self, *, on_notice: OnNotice = no_notice) -> None:
        """Release attached ranks, which keep their variables; the trace is kept.

        Args:
            on_notice: called with a sentence that says so.

        Raises:
            UsageError: there are no ranks, they were started here, or they are busy.
        """
        with self._exchanging("stop"):
            session = self._started()
            if session.request is not None and session.cluster.outlives:
                raise UsageError(f"{busy_sentence(session.request)}; then %fsdp detach")
            if not session.cluster.outlives:
                session.cluster.detach()  # raises, and says what to do instead
            self._leave(session.cluster.detach)
        on_notice("Detached. The ranks keep their variables: attach again with %fsdp attach")

    def close(self) -> None:
        """Detach from attached ranks, which aborts their work; stop ranks started here. May be called again."""
        if self._session is not None:
            cluster = self._session.cluster
            with self._exchanging("stop", waits=True):
                self._leave(cluster.detach if cluster.outlives else cluster.stop)

    def _leave(self, end: Callable[[], object]) -> None:
        session = self._session
        if session is None:  # another thread has stopped them meanwhile
            return
        self._keep_record(session)  # for views during the end; the last rows follow
        self._session = None
        # callbacks run in reverse order, each also if another one raises
        with CountInterrupts() as interrupts, ExitStack() as last:
            last.callback(end)
            last.callback(self._keep_record, session)
            last.callback(session.drain, timeout_s=ASK_S)
            last.callback(session.close)
        if interrupts.count:
            raise Interrupted("Interrupted, but no ranks are left in this notebook; the trace is kept")

    @contextmanager
    def _exchanging(self, exchange: Exchange, *, waits: bool = False) -> Iterator[None]:
        """Let only this thread replace the ranks or the shown trace; within another exchange of its own, do nothing.

        Raises:
            UsageError: another thread does so, and ``waits`` is False.
        """
        if not self._exchange_lock.acquire(blocking=waits):
            raise UsageError("ranks are being started or stopped: wait until that is done")
        before = self.exchange
        try:
            if not before:
                self.exchange, self._is_cancelled = exchange, False
            yield
        finally:
            self.exchange = before
            self._waits_for = self._waits_for if before else ""
            self._exchange_lock.release()

    def _noting(self, on_wait: OnWait) -> OnWait:
        """Return an ``on_wait`` that also shows in live views what a start waits for, and cancels it on request."""

        def note(sentence: str) -> None:
            if self._is_cancelled:
                raise KeyboardInterrupt
            self._waits_for = sentence
            on_wait(sentence)

        return note

    def open_record(self, path: str | os.PathLike[str]) -> OpenReport:
        """Show a trace file, or a recording's folder (``%fsdp open``), instead of the ranks' trace.

        Ranks that are all lost are stopped.

        Views, the dashboard, ``compare``, ``export`` and ``back`` work on it as on the trace of live ranks. While the
        run of a recording still writes, they show what it has written until a moment ago, and ``where`` says where
        its ranks are.

        Raises:
            UsageError: ranks run, there is no such file, or it is not a trace; nothing has changed then.
        """
        with self._exchanging("open"):
            self._check_replaceable("%fsdp open", " To view the file without stopping them: Workbench.open(path).")
            opened = opened_with_notes(path)
            trace = opened.trace
            self.stop()
            self._last = ClusterSnapshot(trace=trace, is_live=opened.is_live)
            self.record, self._is_new, self.failed_step = Path(path).name, False, ""
            self._recording, self._read_at_s = opened.recording, time.monotonic()
            self._show_newest()
        return OpenReport(
            name=self.record,
            num_ranks=len(trace.ranks),
            steps=tuple(steps(trace)),
            models=sharded_models(trace.header),
            num_rows=trace.num_rows,
            notes=opened.notes,
            is_live=opened.is_live,
        )

    def _show_newest(self) -> None:
        self.cursor = None

    def _keep_record(self, session: Session) -> None:
        self._last = ClusterSnapshot(trace=session.trace, policies=session.policies, output=session.output.version)
        self._program, self._output = session.program, session.output

    def _check_replaceable(self, word: str, more: str = "") -> None:
        """Raise UsageError if any rank is alive; the message says to stop the ranks before ``word``."""
        if self._session is None or not self._session.living():
            return
        losses = losses_in_words(self.losses)
        if losses:
            raise UsageError(f"{losses}; the others still run: %fsdp stop first, then {word}{more and '.'}{more}")
        are = "is" if self.num_ranks == 1 else "are"
        running = f"{plural(self.num_ranks, 'rank')} {are} already running"
        raise UsageError(f"{running}: %fsdp stop first, then {word}{more and '.'}{more}")

    def status(self) -> StatusReport:
        """Return the state of the ranks, the sharded models and the size of the trace."""
        session = self._session
        ranks = () if session is None else tuple(self._rank_status(session))
        trace = self._shown_without_ranks().trace if session is None else session.trace
        request = None if session is None else session.request
        return StatusReport(
            running=self.running,
            ranks=ranks,
            models=sharded_models(trace.header, next(iter(self.models().values()), ())),
            num_rows=trace.num_rows,
            num_lost=sum(rank.lost for rank in trace.ranks),
            num_dropped=trace.num_dropped,
            record=self.record,
            kept=tuple(process.pid for process in KEEPER.processes),
            holder=self.held_by,
            is_free=self.is_free,
            clocks=trace.header.clocks,
            stopped=str(request.stop) if request is not None and request.state == "stopped" else "",
            obstacle="" if session is None else session.obstacle,
            under_way=_words_of(self.pulse().under_way),
            cluster=self._target.words if self.outlives else "",
            notes=unmanaged_notes(trace.header),
            collectives=collectives_words(trace.header),
            next=self.next_line,
        )

    @property
    def next_line(self) -> str:
        """What to type next; empty: nothing more than what was done before."""
        return next_line(self._stage())

    def _stage(self, *, is_healed: bool = False) -> SessionStage:
        """Return how far the session is, which decides what comes next; ``is_healed``: ranks were just replaced."""
        session = self._session
        if session is None or self.held_by:
            return SessionStage(is_running=session is not None, is_viewed=session is not None)
        request, living = session.request, session.living()
        models = sorted(next(iter(self.models().values()), ()), key=lambda model: -model.num_elements)
        sharded = [model for model in models if model.is_sharded or model.units]
        model = next(iter(sharded or models), None)
        return SessionStage(
            is_busy=request is not None,
            is_stopped=request is not None and request.state == "stopped",
            has_lost=0 < len(living) < self.num_ranks,
            is_stuck=not living or bool(session.obstacle),
            model="" if model is None else model.name,
            is_sharded=bool(sharded),
            has_optimizer=any(each.has_optimizer for each in sharded),
            has_function=Step.fn in everywhere(self.names(), "variables"),
            left=self._left,
            is_healed=is_healed,
            has_failed=self._step_raised,
            has_stepped=max(steps(session.trace), default=-1) >= max(self._first_steps(), default=0),
            has_looked=any(past.line.split()[1] in LOOKS for past in self._past),
        )

    def _rank_status(self, session: Session) -> Iterable[RankStatus]:
        doing, losses = session.doing(), session.cluster.losses()
        for info, alive in zip(session.cluster.rank_info, session.cluster.alive(), strict=True):
            yield RankStatus(
                rank=info.rank,
                host=info.host,
                device=info.device,
                pid=info.pid,
                alive=alive,
                doing=doing.get(info.rank, ""),
                lost=losses.get(info.rank, ""),
            )

    def names(self) -> dict[int, Names]:
        """Return the names in the ranks' namespaces, by rank; empty when no ranks run."""
        return {} if self._session is None else self._session.names()

    def models(self) -> dict[int, tuple[ModelInfo, ...]]:
        """Return the models among the variables of the ranks' cells, by rank; empty when no ranks run."""
        return {} if self._session is None else self._session.models()

    def preview(self, command: Shard | Reshard) -> tuple[Unit, ...]:
        """Return the units that ``command`` would make, without any change.

        Raises:
            UsageError: no ranks run, or the command is not possible.
        """
        return self._started().preview(command)

    # ---- work

    def run_cell(
        self,
        code: str,
        ranks: Sequence[int] | None = None,
        on_output: OnOutput = no_output,
        on_standing: OnStanding = no_standing,
    ) -> CellReport | StopReport:
        """Run a cell in the main thread of ranks, or inside the step in which they are stopped.

        Args:
            code: as in a notebook; ``rank``, ``world_size``, ``device`` and ``mesh`` are defined.
            ranks: the ranks that run it; None: all.
            on_output: called with the ranks' output as it arrives: once as long as it is equal on all ranks; from the
                first line or figure that differs on, with displays of each rank's output (tabs in a notebook), which
                are then updated.
            on_standing: called after 3 s without output, with a sentence that says which ranks still work, for how long
                and in which line; each call replaces the last sentence. ``""`` clears it.

        Raises:
            UsageError: there is no such rank, or no ranks run.
            RankError: the cell raised on a rank; the others were aborted and all are ready again.
            RankDied: a rank is gone.
            Interrupted: Ctrl-C.
        """
        session = self._started()
        if session.request is not None and session.request.state == "stopped":
            return self._cell_inside(session, code, ranks, on_output, on_standing)
        listener = RequestListener(on_output=on_output, on_standing=on_standing)
        return cast(CellReport | StopReport, session.run_cell(code, ranks, listener))

    @staticmethod
    def _cell_inside(
        session: Session, code: str, ranks: Sequence[int] | None, on_output: OnOutput, on_standing: OnStanding
    ) -> CellReport:
        """Run a cell in the stopped step's own threads."""
        inside = session.do_inside("run a cell in", RunCell(code=code), ranks, on_standing)
        texts = {rank: done.text for rank, done in sorted(inside.done.items())}
        for rank, text in texts.items():
            session.output.write(rank, text)
        remarks = written_at_once(texts, on_output)
        if inside.error is not None:
            raise inside.error
        return CellReport(texts=texts, remarks=remarks)

    def do(
        self,
        command: Command,
        on_progress: OnProgress = no_progress,
        on_output: OnOutput = no_output,
        on_standing: OnStanding = no_standing,
        on_wait: OnWait = no_wait,
        on_notice: OnNotice = no_notice,
    ) -> Any:  # noqa: ANN401 - what the command's method returns
        """Run ``command`` and return the result of its method: a report (also of a stop inside it), a figure, a widget.

        ``start`` with the settings of running ranks, none of them lost, changes nothing and returns their status.

        Args:
            command: the command.
            on_progress: called while steps run, and once at their end.
            on_output: as for :meth:`run_cell`, for the output of the user's functions.
            on_standing: as for :meth:`run_cell`.
            on_wait: called with what a start or an attach waits for.
            on_notice: called with further sentences for the user.

        Raises:
            UsageError: it is not possible as given; the message says what to run first or write instead.
            RankError: it raised on a rank; the others were aborted and all are ready again.
            RankDied: a rank is gone.
            Interrupted: it was aborted.
        """
        try:
            result = self._do(command, on_progress, on_output, on_standing, on_wait, on_notice)
        except WorkbenchError as error:
            self._note_training(command, error)
            self._note_failed(command)
            raise
        self._note_training(command, None)
        return self._introduced(result)

    def _note_training(self, command: Command, error: WorkbenchError | None) -> None:
        """Note how a command that trains or loads has ended, which decides what comes next."""
        if isinstance(command, (Step, Run)):
            self.failed_step = "" if error is None else str(error)
            self._step_raised = isinstance(command, Step) and isinstance(error, RankError)
        if isinstance(command, (Step, Run, Load)) and not isinstance(error, UsageError):
            self._left = self._left.partition(AND_THEN)[2]

    def _introduced(self, result: Any) -> Any:  # noqa: ANN401 - as :meth:`do`
        """Return a report with the terms that no earlier one explained; anything else as it is."""
        if not isinstance(result, (ShardReport, ExplainReport)):
            return result
        new = tuple(term for term in introduced(str(result)) if term not in self._terms)
        self._terms.update(new)
        return dataclasses.replace(result, terms=new)

    def _do(
        self,
        command: Command,
        on_progress: OnProgress,
        on_output: OnOutput,
        on_standing: OnStanding,
        on_wait: OnWait,
        on_notice: OnNotice,
    ) -> Any:  # noqa: ANN401 - as :meth:`do`
        listener = RequestListener(on_progress=on_progress, on_output=on_output, on_standing=on_standing)
        if command.on_ranks:
            session = self._started()
            if isinstance(command, Step) and command.snapshot and (notice := snapshot_notice(session)):
                on_notice(notice)
            return session.run(command, listener)
        self._check_started_for(command)
        name, arguments = command.call()
        if isinstance(command, Start) and self._runs_with(arguments):
            on_notice(
                "The ranks are already running; nothing was changed. For fresh ones: %fsdp stop, then %fsdp start"
            )
            return self.status()
        method = getattr(self, name)
        callbacks = {**vars(listener), "on_wait": on_wait, "on_notice": on_notice}
        wanted = callbacks.keys() & inspect.signature(method).parameters
        return method(**arguments, **{name: callbacks[name] for name in wanted})

    def report(self, command: Command, **callbacks: Any) -> Any:  # noqa: ANN401 - as :meth:`do`
        """Run ``command`` as :meth:`do` does, but return a report also if it draws: the numbers behind the figure.

        Args:
            command: the command.
            callbacks: as for :meth:`do`.

        Raises:
            UsageError: it only draws, or as :meth:`do`; other errors also as there.
        """
        name, arguments = command.call()
        if name in _ONLY_DRAWN:
            raise UsageError(f"%fsdp {to_text(command)} only draws: it has no --json. {_ONLY_DRAWN[name]}")
        if name not in DRAWN:
            return self.do(command, **callbacks)
        self._check_started_for(command)
        arguments.pop("talk", None)
        return self.numbers(name, **arguments)

    def _check_started_for(self, command: Command) -> None:
        """Raise UsageError, which says what to do first, if ``command`` needs ranks and none were ever started."""
        if self._is_new and command.waits_for_start:
            self._started()

    def _runs_with(self, settings: dict[str, Any]) -> bool:
        """Return whether ranks that were started here with these settings run, none of them lost."""
        return self.running and self._settings == settings and not self.outlives and not self.losses

    shard = on_ranks(Shard, ShardReport)
    reshard = on_ranks(Reshard, ReshardReport)
    unshard = on_ranks(Unshard, UnshardReport)
    verify = on_ranks(Verify, VerifyReport)
    lint = on_ranks(Lint, LintReport)
    fault = on_ranks(InjectFault, InjectReport)
    snapshot = on_ranks(Snapshot, SnapshotReport)
    save = on_ranks(Save, SaveReport)
    load = on_ranks(Load, LoadReport)

    def faults(self) -> FaultListReport:
        """Return the faults that :meth:`fault` can inject, with the instrument that names each."""
        return FaultListReport()

    def step(  # noqa: PLR0913 - keywords: the line's arguments, and callbacks
        self,
        count: int = 1,
        fn: str = "train_step",
        on_progress: OnProgress = no_progress,
        *,
        on_output: OnOutput = no_output,
        on_standing: OnStanding = no_standing,
        until: str = "",
        background: bool = False,
        save: str = "",
        every: int = 0,
        snapshot: int = 0,
    ) -> StepReport | StopReport | BackgroundReport:
        """Train ``count`` steps: :class:`~workbench.protocol.commands.Step`; errors as :meth:`do`.

        Args:
            count: number of steps.
            fn: name of the step function on the ranks.
            on_progress: called while steps run.
            on_output: as for :meth:`run_cell`.
            on_standing: as for :meth:`run_cell`; also says that a rank has died, or what a Ctrl-C waits for.
            until: event before which all ranks stop once, as for :meth:`break_add`.
            background: return at once; :meth:`news` then reports how it ended.
            save: folder of checkpoints that are saved meanwhile.
            every: number of steps between two of them; 0: one after the last step.
            snapshot: keep a snapshot every so many steps, from which :meth:`heal` goes on; 0: none.
        """
        command = made(Step, count, fn, until=until, background=background, save=save, every=every, snapshot=snapshot)
        return cast(StepReport | StopReport | BackgroundReport, self.do(command, on_progress, on_output, on_standing))

    # ---- pause and continue

    def run_script(
        self,
        script: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        module: bool = False,
        until: str = "",
        background: bool = False,
        on_output: OnOutput = no_output,
        on_standing: OnStanding = no_standing,
    ) -> RunReport | StopReport | BackgroundReport:
        """Run a training script on every rank, unchanged, as torchrun would (``%fsdp run``); its variables stay.

        The variables of an earlier script are removed first, and modules that lie beside the script are imported anew.

        Args:
            script: the file, which all hosts must have; or the name of a module.
            args: its arguments.
            module: whether ``script`` is the name of a module.
            until: as for :meth:`step`.
            background: as for :meth:`step`.
            on_output: as for :meth:`run_cell`.
            on_standing: as for :meth:`run_cell`.

        Raises:
            UsageError: there is no such script, or it is no Python.
            RankError: it raised, or ended with a status other than 0.
            RankDied, Interrupted: as :meth:`do`.
        """
        command = made(Run, os.fspath(script), args, module=module, until=until, background=background)
        return cast(
            RunReport | StopReport | BackgroundReport, self.do(command, on_output=on_output, on_standing=on_standing)
        )

    def pause(self, *, on_standing: OnStanding = no_standing) -> Report:
        """Stop all ranks at the same event of the running request, and return where they are.

        Args:
            on_standing: called with a sentence that says which ranks it waits for; each call replaces the last one.

        Raises:
            UsageError: nothing is running.
        """
        return self._started().pause(on_standing)

    def resume(
        self,
        *,
        background: bool | None = None,
        on_progress: OnProgress = no_progress,
        on_output: OnOutput = no_output,
        on_standing: OnStanding = no_standing,
    ) -> Report:
        """Continue stopped ranks (``%fsdp continue``); return how the request ended or where it stopped again.

        Args:
            background: return at once; None: as it was started.
            on_progress: as for ``step``.
            on_output: as for ``run_cell``; by default the callback of the request stays.
            on_standing: as for ``run_cell``.

        Raises:
            UsageError: nothing is stopped.
        """
        listener = RequestListener(on_progress=on_progress, on_output=on_output, on_standing=on_standing)
        return self._started().go_on(None, listener, background=background)

    @property
    def is_background(self) -> bool:
        """Whether the current request runs in the background."""
        request = self._session.request if self._session is not None else None
        return request is not None and request.is_background

    def next(
        self,
        what: str = "event",
        *,
        background: bool = False,
        on_progress: OnProgress = no_progress,
        on_output: OnOutput = no_output,
        on_standing: OnStanding = no_standing,
    ) -> Report:
        """Continue stopped ranks to the next ``event``, ``collective``, ``unit`` or ``phase``; else as ``resume``."""
        listener = RequestListener(on_progress=on_progress, on_output=on_output, on_standing=on_standing)
        return self._started().go_on(what, listener, background=background)

    def abort(self, *, on_standing: OnStanding = no_standing) -> Report:
        """Abort the running request; all ranks are ready again afterwards, or the report names those that are not.

        While ranks are being started or attached, this cancels the start.

        Args:
            on_standing: as for :meth:`pause`.

        Raises:
            UsageError: nothing is running.
            WorkbenchError: the ranks could not be made ready again.
        """
        if self.exchange == "start":
            self._is_cancelled = True
            return EndReport(sentence="Cancelled: no ranks are started or attached")
        return self._started().abort(on_standing)

    def news(self) -> tuple[str, ...]:
        """Return a sentence for each background request that ended or stopped since the last call."""
        return () if self._session is None else self._session.news()

    # ---- inspect

    def where(self, *, stacks: bool = False) -> WhereReport | RunWhereReport:
        """Return where every rank is, and with ``stacks`` its Python threads; busy ranks answer as well.

        Without ranks, of an opened recording: where the ranks of its run are, with the stacks that they have written.

        Raises:
            UsageError: no ranks run and no recording is open, or its folder can no longer be read; or a prediction that
                is not locked asks for what it shows.
        """
        self._check_looks("where")
        if self._session is None and self._recording is not None:
            try:
                return run_where.where(self._recording.read(), time.time_ns())
            except (OSError, TraceError) as error:
                raise UsageError(f"{self.record} is no longer there as it was opened: {error}") from error
        return self._started().where(stacks=stacks)

    def inspect(self, fqn: str) -> InspectReport:
        """Return what every rank holds of the parameter ``fqn``: shard, gradient, optimizer state and more.

        Ranks are between steps, or stopped inside one; of the latter, those that are held in the gate.

        Raises:
            UsageError: the ranks are at work, or there is no such parameter.
        """
        self._check_looks("inspect")
        inside = self._started().do_inside("inspect", Inspect(fqn), None)
        if inside.error is not None:
            raise inside.error
        by_rank = {rank: done.inspected for rank, done in inside.done.items() if done.inspected is not None}
        return InspectReport(fqn=fqn, by_rank=by_rank, not_queried=inside.others)

    def evaluate(
        self,
        expr: str,
        ranks: Sequence[int] | None = None,
        *,
        frame: int = 0,
        on_standing: OnStanding = no_standing,
    ) -> EvalReport:
        """Return a Python expression's value on stopped ranks (``%fsdp eval``), evaluated in the step's own thread.

        Names are looked up in the active functions, innermost first, and then in the cells' variables.

        Args:
            expr: the expression.
            ranks: the ranks that evaluate it; None: all held ranks.
            frame: index of the function at which the search for names begins: 0 the innermost, 1 its caller.
            on_standing: as for :meth:`run_cell`.

        Raises:
            UsageError: nothing is stopped, or the expression waits for ranks that would not evaluate it.
            RankError: it raised; the ranks stay stopped.
        """
        command = made(Evaluate, expr, tuple(ranks or ()), frame=frame)
        inside = self._started().do_inside("eval", command, ranks, on_standing)
        if inside.error is not None:
            raise inside.error
        texts = {rank: done.text for rank, done in inside.done.items()}
        return EvalReport(expr=expr, texts=texts, not_queried=inside.others if ranks is None else ())

    def parameters(self) -> list[str]:
        """Return the names of all sharded parameters."""
        return param_names(self.trace.header)

    # ---- set breakpoints

    def break_add(self, event: str, *, rank: int | None = None, when: str | None = None) -> BreakReport:
        """Add a breakpoint (``%fsdp break add``): ranks stop before every such event.

        Args:
            event: such as ``all_gather``, ``all_gather:blocks.2``, ``backward.end:*``; ``nan`` or ``grad_norm > 10``: a
                condition on the gradients, compared before the optimizer's step.
            rank: the only rank that stops; None: all of them.
            when: condition over num_bytes, unit, kind, edge, phase, step, ordinal and rank, before an optimizer's step
                also over nan and grad_norm; None: always.

        Raises:
            UsageError: there is no such event or rank, the condition is invalid, or models are sharded and none has
                such a unit.
        """
        session = self._started()
        units = session.units()
        event, when = with_condition(event, when)
        kind, unit = parse_event(event, units) if units else read_event(event)  # a script shards its model itself
        if rank is not None:
            select([rank], self.num_ranks)
        condition = None if when is None else Condition.parse(when, rank, kind)
        added = session.breakpoints.add(kind, unit, rank=rank, when=when)
        note = "; nothing is sharded yet" if unit is not None and not units else ""
        if condition is not None and condition.uses_gradients and session.request is not None:
            note = f"; it holds from the next %fsdp step or cell on, not in {session.request.work.words}"
        return self._changed_breakpoints(f"breakpoint {added.id}: {added}{note}")

    def break_list(self) -> BreakReport:
        """Return the breakpoints."""
        return BreakReport(breakpoints=self._started().stops())

    def break_clear(self, id: int | None = None) -> BreakReport:
        """Remove the breakpoint ``id``, or all.

        Raises:
            UsageError: there is no such breakpoint.
        """
        count = self._started().breakpoints.clear(id)
        return self._changed_breakpoints(f"removed {plural(count, 'breakpoint')}" if count else "")

    def break_on(self, id: int | None = None) -> BreakReport:
        """Turn the breakpoint ``id`` on again, or all.

        Raises:
            UsageError: there is no such breakpoint.
        """
        return self._switch(id, is_on=True)

    def break_off(self, id: int | None = None) -> BreakReport:
        """Turn the breakpoint ``id`` off, or all, without removing it.

        Raises:
            UsageError: there is no such breakpoint.
        """
        return self._switch(id, is_on=False)

    def _switch(self, id: int | None, *, is_on: bool) -> BreakReport:
        count = self._started().breakpoints.switch(id, is_on=is_on)
        return self._changed_breakpoints(
            f"{plural(count, 'breakpoint')} turned {'on' if is_on else 'off'}" if count else ""
        )

    def _changed_breakpoints(self, change: str) -> BreakReport:
        session = self._started()
        session.push_breakpoints()
        return BreakReport(breakpoints=session.stops(), change=change)

    def units(self) -> list[str]:
        """Return the names of all units, including ``""`` for a root."""
        return [unit.name for unit in live_units(self.trace.header)]

    # ---- step back

    def back(self, n: int = 1) -> BackReport:
        """Move the cursor ``n`` recorded events back: views then show the trace up to there. 0: to the newest event.

        The ranks' work is not undone.

        Raises:
            UsageError: ``n`` is negative.
        """
        if n < 0:
            raise UsageError(f"back takes a number of events, 0 for the newest, not {n}")
        if n == 0:
            self.cursor = None
            return BackReport(sentence="at the newest event")
        self.cursor, sentence = cursors.back(self.trace, self.cursor, n)
        if self.cursor is None:
            return BackReport(sentence=sentence)
        return BackReport(
            sentence=sentence,
            events_back=self.cursor.events_back,
            t_ns=self.cursor.t_ns,
            next_seq=self.cursor.ends,
        )

    @property
    def trace(self) -> Trace:
        """The trace so far, updated from the ranks if they run."""
        session = self._session
        if session is None:
            return self._shown_without_ranks().trace
        session.drain()
        return session.trace

    def pulse(self) -> ClusterSnapshot:
        """Return a snapshot of the trace and of each rank; live views poll it several times a second."""
        session = self._session
        found = self._shown_without_ranks() if session is None else session.pulse()
        return dataclasses.replace(
            found, cursor=self.cursor, record=self.record, exchange=self.exchange, waits_for=self._waits_for
        )

    def _shown_without_ranks(self) -> ClusterSnapshot:
        """Return what is shown; of a recording, up to what its run wrote a moment ago."""
        now_s = time.monotonic()
        if self._recording is not None and now_s - self._read_at_s > FOLLOW_S:
            self._read_at_s = now_s
            with suppress(OSError, TraceError):  # the folder is gone: what was read of it stays
                found = self._recording.read()
                is_live = found.is_alive(time.time_ns())
                self._last = dataclasses.replace(self._last, trace=found.trace, is_live=is_live)
        return self._last

    def activity(self) -> tuple[object, ...]:
        """Return a value that changes when ranks start, get a request, stop, continue or end; contacts no rank."""
        return self.exchange, self._waits_for, *(() if self._session is None else self._session.request_state())

    @property
    def shown_trace(self) -> Trace:
        """The trace that views show: up to the cursor, if it is set."""
        return self.trace if self.cursor is None else cursors.cut(self.trace, self.cursor)

    def _started(self) -> Session:
        if self._session is None:
            only = f"; views show {self.record}" if self.record else " yet" if self._is_new else ""
            raise UsageError(f"No ranks are running{only}. Start them with %fsdp start -n 4")
        return self._session

    # ---- views

    def view(self, name: str, **options: object) -> go.Figure:
        """Return the view ``name`` of the trace up to the cursor.

        Raises:
            UsageError: no such view.
        """
        return self._draw(name, options)

    def _draw(self, name: str, options: Mapping[str, object], marks: Marks = NO_MARKS) -> go.Figure:
        self._check_looks(name)
        others = {key: value for key, value in options.items() if key != "talk"}
        return draw(name, self.shown_trace, talk=bool(options.get("talk")), marks=marks, **others)

    def _check_looks(self, view: str) -> None:
        """Raise UsageError if a view must not be shown now."""
        why = self.open_question(view)
        if why:
            raise UsageError(why)

    def numbers(self, name: str, **options: Any) -> ViewReport:  # noqa: ANN401 - of the view
        """Return the numbers behind a figure: ``numbers("comms", step=3)`` has what ``comms(step=3)`` draws.

        Args:
            name: one of :data:`DRAWN`.
            options: those of the method with this name, except ``talk``.

        Raises:
            UsageError: as for the figure.
        """
        self._check_looks(name)
        if name == "compare":
            return self._compared(**options)
        return numbers(name, self.shown_trace, **options)

    def explain(self, subject: str = "", which: str = "", *, step: int | None = None) -> ExplainReport:
        """Return why something is as it is (``%fsdp explain``): a verdict, the evidence, and what to type.

        Args:
            subject: ``"peak"``, ``"step"``, ``"wait"``, a unit, a rank such as ``"1"``, or ``"rank"`` or ``"unit"``
                followed by ``which``; empty: what matters most.
            which: the rank or unit.
            step: which step; None: the newest.

        Raises:
            UsageError: nothing is recorded, or there is no such step, unit or rank.
        """
        self._check_looks("explain")
        cause = None if subject or step is not None or self._session is None else self._session.stop_cause
        if cause is not None:  # says more than any step that has ended
            return ExplainReport(faults=(cause,), num_checks=1, subject=subject, step=None, answer=cause)
        models = next(iter(self.models().values()), ())
        return explain(self.shown_trace, subject, which, step=step, models=models, is_live=self.running)

    def picture(self, result: object) -> go.Figure | None:
        """Return the figure of a search, or of an explanation with the events that it names; None for other results."""
        if isinstance(result, FitReport):
            return fit_figure(result.policies, result.limit_bytes, result.headline, result.time_error)
        report = result if isinstance(result, ExplainReport) else None
        if report is None or report.picture is None:
            return None
        try:
            return self._draw(report.picture.view, report.picture.options, report.marks)
        except Exception as error:  # noqa: BLE001 - a picture may fail for any reason, and the answer must still be shown
            return theme.empty(f"{report.picture.line} cannot be drawn: {type(error).__name__}: {error}")

    def _sides(self, a: TraceSelector, b: TraceSelector) -> tuple[tuple[str, Trace], tuple[str, Trace]]:
        if a != "":
            b = LAST if b == "" else b
            (name_a, first), (name_b, second) = sides(self._named(a), self._named(b), lambda: self.trace)
            first, second, note = comparable(first, second)
            name_a = " ".join(filter(None, [f"the {PLAN}" if a == PLAN else name_a, note]))
            return (name_a, first), (f"the {PLAN}" if b == PLAN else name_b, second)
        first_steps = policy_steps(self.trace.header) if self.record else self._first_steps()
        return policies(first_steps, lambda: self.trace, is_live=not self.record)

    def _first_steps(self) -> list[int]:
        """Return the number of the first step under each policy, oldest first."""
        replies = (entry.reply for entry in self.program.entries if isinstance(entry, CompletedCommand))
        return [reply.first_step for reply in replies if isinstance(reply, ShardReply)]

    def _named(self, side: TraceSelector) -> TraceSelector:
        """Return the trace of the newest plan for its name, and any other side of a comparison as it is."""
        if side != PLAN:
            return side
        if self._planned is None:
            raise UsageError(f"nothing is planned yet: {PLAN!r} is the newest plan, of %fsdp plan MODEL")
        return self._planned

    def _compared(self, a: TraceSelector = "", b: TraceSelector = "", *, rank: int | None = None) -> CompareReport:
        (name_a, first), (name_b, second) = self._sides(a, b)
        return compared(first, second, names=(name_a, name_b), rank=rank)

    def dashboard(self) -> Any:  # noqa: ANN401 - a widget, which only a notebook needs
        """Return a widget that shows the ranks live, with buttons to stop inside a step."""
        self._check_looks("dashboard")
        return importlib.import_module("workbench.widgets.dashboard").DashboardWidget(self)

    def canvas(self) -> Any:  # noqa: ANN401 - a widget, which only a notebook needs
        """Return a dashboard with only the timeline: the whole run, to pan and zoom, growing while ranks train."""
        return importlib.import_module("workbench.widgets.dashboard").DashboardWidget(self, panels=("timeline",))

    def layout(self, **options: object) -> go.Figure:
        """Return the figure of each parameter's rows on each rank."""
        return self.view("layout", **options)

    def memory(self, **options: object) -> go.Figure:
        """Return the figure of bytes by class over time per rank."""
        return self.view("memory", **options)

    def timeline(self, **options: object) -> go.Figure:
        """Return the figure of compute, collectives and waits per rank."""
        return self.view("timeline", **options)

    def states(self, **options: object) -> go.Figure:
        """Return the figure of each unit's state over time."""
        return self.view("states", **options)

    def comms(self, **options: object) -> go.Figure:
        """Return the figure of collectives per unit, measured and expected."""
        return self.view("comms", **options)

    def training(self, **options: object) -> go.Figure:
        """Return the figure of loss, step time and other logged metrics."""
        return self.view("training", **options)

    def compare(
        self,
        a: TraceSelector = "",
        b: TraceSelector = "",
        *,
        rank: int | None = None,
        talk: bool = False,
    ) -> go.Figure:
        """Return the figure of changes from ``a`` to ``b``, by logical event, not by time; its title summarises them.

        Args:
            a: a trace file, ``"last"`` (the trace so far), or steps of either: ``"last:3..5"``, ``"3..5"``,
                ``"last:-3.."`` (the newest three); empty: the steps under the last policy but one, and ``b`` those
                under the last.
            b: likewise; empty: the trace so far. If ``a`` is its beginning, only its later steps count.
            rank: compare this rank; None: the one whose peak differs most.
            talk: use sizes and colours for a projector.

        Raises:
            UsageError: there is no such file, trace, step or rank.
        """
        (name_a, first), (name_b, second) = self._sides(a, b)
        return draw_compared(first, second, names=(name_a, name_b), rank=rank, talk=talk)

    @property
    def program(self) -> Program:
        """The cells and commands that all ranks have completed since their start, also after they were stopped."""
        return self._program if self._session is None else self._session.program

    def export(self, path: str | os.PathLike[str], *, steps: str = "", engine: str = "") -> ExportReport:
        """Write the trace so far: ``.trace``, ``.json`` (Perfetto) or ``.html`` (a page that replays it).

        With ``.py``, write what the ranks have done since their start, cells and commands, as a script for torchrun.

        Args:
            path: output file; its suffix selects the format.
            steps: steps to write, as in :meth:`compare`: ``"3..5"``, ``"7"``, ``"-3.."``; empty: all. Not for scripts.
            engine: whose FSDP a script uses: ``"workbench"`` or ``"torch"``; empty: the one that ran the models.

        Raises:
            UsageError: the suffix is unknown, there are no such steps, the file cannot be written, or what the ranks
                have done has no script.
        """
        return export(self.trace, path, steps, program=self.program, engine=engine)

    def plan(
        self,
        model: str,
        *,
        ranks: int = 8,
        hosts: int | None = None,
        device: str = DEFAULT,
        fn: str = "train_step",
        out: str | os.PathLike[str] = "",
        on_output: OnOutput = no_output,
        **change: Any,  # noqa: ANN401 - of reshard
    ) -> PlanReport | FitReport:
        """Return what the program of the ranks would need and take on other machines, which need not exist.

        ``compare("plan", "last")`` then shows the difference to what was measured here.

        Args:
            model: the variable of the model.
            ranks: number of ranks.
            hosts: number of hosts; None: as few as their devices need.
            device: a name of :data:`workbench.base.machines.MACHINES`, or a file of ``workbench calibrate``.
            fn: the step function.
            out: the trace file to write; empty: none.
            on_output: as for :meth:`run_cell`.
            change: options of :class:`~workbench.protocol.commands.Reshard`: how the model would be sharded;
                ``checkpoint``: classes whose modules keep only their inputs for backward; and ``fit``: with a size such
                as ``"80GB"``, or ``"device"``, search the policies for what fits into that many bytes a rank.

        Raises:
            UsageError: the program cannot be planned as given.
            RankError, RankDied, Interrupted: the program failed on the planned rank, or was interrupted.
        """
        try:
            command = Plan(model, ranks=ranks, hosts=hosts, device=device, fn=fn, **change)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error
        planned_ranks(device, ranks, hosts)
        known = {info.name: info for info in next(iter(self.models().values()), ())}
        if model not in known:
            raise UsageError(f"the ranks have no model {model!r}{did_you_mean(model, known)}")
        with (
            tempfile.TemporaryDirectory(prefix="workbench-plan-") as name,
            PlannedRank(no_output if command.fit else on_output) as rank,
        ):
            folder = Path(name)
            if command.fit:
                search = FitSearch(
                    lambda each: plan_program(self.program, known[model], each, folder, rank),
                    lambda each: f"%fsdp {to_text(each)}",
                    lambda each: on_output(Output("stdout", text=f"{each}\n")),
                )
                return search.limit(command.fit).run(command)
            report = plan_program(self.program, known[model], command, folder, rank)
            self._planned = load(folder / "plan.trace")
            if out:
                save(self._planned, file_at(out))
        return dataclasses.replace(report, trace=os.fspath(out) or PLAN)

    def note(self, command: Command, source: Source) -> None:
        """Add ``command``, given by ``source`` now, to the history."""
        self._past.append(PastCommand(line=f"%fsdp {to_text(command)}", source=source, t_s=time.time()))

    def _note_failed(self, command: Command) -> None:
        """Mark ``command`` in the history, if it is the newest there."""
        if self._past and self._past[-1].line == f"%fsdp {to_text(command)}":
            self._past[-1] = dataclasses.replace(self._past[-1], failed=True)

    def history(self, n: int = 0) -> HistoryReport:
        """Return the newest ``n`` commands of the history; 0: all that it keeps."""
        return HistoryReport(commands=tuple(self._past)[-n:])

    def output(self, *, rank: int | None = None, lines: int = ShowOutput.lines) -> OutputReport:
        """Return the newest lines that ranks printed, and how cells and commands ended, also what no front end showed.

        They are those since the ranks started, also after they have stopped. Ranks that printed the same line in the
        same step share it.

        Args:
            rank: whose lines; None: those of all ranks.
            lines: number of lines; 0: all that are kept, up to 20,000 of each rank.

        Raises:
            UsageError: there is no such rank, or ``lines`` is negative.
        """
        if lines < 0:
            raise UsageError(f"output takes a number of lines, 0 for all, not {lines}")
        session = self._session
        log = self._output if session is None else session.output
        if session is not None and session.request is not None:
            session.request.log_output()
        if rank is not None and log.num_ranks:
            select([rank], log.num_ranks)
        return log.report(rank, lines)

    def example(self) -> str:
        """Return the code of a cell with a model, an optimizer and ``train_step()``."""
        return EXAMPLE

    def help(self, topic: str = "") -> str:
        """Return the docstring of a method, or without ``topic`` the first line of each.

        Raises:
            UsageError: there is no such method.
        """
        methods = {name: inspect.getdoc(member) or "" for name, member in inspect.getmembers(type(self), callable)}
        public = {name: text for name, text in methods.items() if text and not name.startswith("_")}
        if topic and topic not in public:
            raise UsageError(f"there is no method {topic!r}; methods: {', '.join(public)}")
        return public[topic] if topic else "\n".join(f"{name}: {text.splitlines()[0]}" for name, text in public.items())


def _words_of(under_way: ActiveRequest | None) -> str:
    """Return what the ranks are doing and how many steps are done; empty if they are idle."""
    if under_way is None:
        return ""
    steps = under_way.progress
    return f"{under_way.words}{f': {steps.done} of {steps.total} steps' if steps is not None and steps.total else ''}"
