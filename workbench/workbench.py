"""Class Workbench: the one place where ranks, trace and views meet. Used by magics and scripts; never imports torch."""

from __future__ import annotations

import importlib
import inspect
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, cast

import plotly.graph_objects as go

from workbench.cluster import Cluster
from workbench.commands import (
    Abort,
    Break,
    Command,
    Continue,
    Evaluate,
    Inspect,
    Next,
    Pause,
    Reshard,
    Shard,
    Step,
    Unshard,
    Verify,
    to_dict,
)
from workbench.errors import UsageError
from workbench.export import export
from workbench.session.breakpoints import parse_event
from workbench.session.failures import losses_in_words
from workbench.session.follow import Follower
from workbench.session.names import Names, check_function, check_model, shard_first
from workbench.session.options import ReshardOptions, ShardOptions, check_fits, made, plain
from workbench.session.reports import (
    CellReport,
    ExportReport,
    RankStatus,
    Report,
    ReshardReport,
    ShardReport,
    StartReport,
    StatusReport,
    StepReport,
    UnshardReport,
    VerifyReport,
)
from workbench.session.request import CellWork, CommandWork, Listener, OnOutput, OnProgress, no_output, no_progress
from workbench.session.session import RUNTIME, ClusterLike, Session
from workbench.session.sides import side
from workbench.session.standing import OnStanding, no_standing
from workbench.session.stop_reports import BackgroundReport, StopReport
from workbench.session.watch import ASK_S
from workbench.stopping import Stopping
from workbench.trace.columns import Trace
from workbench.views import draw
from workbench.views.compare import draw as draw_compared


class RankSettings(TypedDict, total=False):
    """How ranks are started: their number, ``cpu``, ``cuda`` or ``auto``, and an IPython profile."""

    num_ranks: int
    device: str
    profile: str | None


class Workbench(Stopping):
    """Ranks that train, and everything that can be seen of it.

    ``with Workbench(4) as wb:`` starts the ranks and stops them at the end; what was recorded outlives them.

    Args:
        num_ranks: number of ranks.
        device: ``cpu``, ``cuda`` (one GPU per rank) or ``auto``.
        profile: an IPython profile whose ipyparallel configuration applies.
        cluster_factory: makes the cluster from ``num_ranks``, ``device`` and ``profile``.
        in_notebook: tells whether the caller itself has a variable of some name; used in messages only.
    """

    def __init__(
        self,
        num_ranks: int = 4,
        *,
        device: str = "auto",
        profile: str | None = None,
        cluster_factory: Callable[..., ClusterLike] = Cluster,
        in_notebook: Callable[[str], bool] = lambda name: False,
    ) -> None:
        super().__init__()
        self.num_ranks = num_ranks
        self.device = device
        self.profile = profile
        self._factory = cluster_factory
        self._in_notebook = in_notebook

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # ---- ranks

    @property
    def running(self) -> bool:
        """Whether ranks are started."""
        return self._session is not None

    @property
    def losses(self) -> dict[int, str]:
        """Of each rank that was lost, how: ``died: the process was killed by SIGKILL ...``; none when none run."""
        return {} if self._session is None else self._session.cluster.losses()

    @property
    def settings(self) -> RankSettings:
        """How ranks are started."""
        return {"num_ranks": self.num_ranks, "device": self.device, "profile": self.profile}

    def start(self, **settings: Unpack[RankSettings]) -> StartReport:
        """Start the ranks and forget what earlier ones recorded; those that are all lost are stopped first.

        Args:
            settings: ``num_ranks``, ``device`` and ``profile``, if they are to be others than before.

        Raises:
            UsageError: some run already, or they cannot be had as asked.
            ClusterError: they did not come up.
        """
        self._check_startable()
        self.stop()
        begin = time.monotonic()
        wanted: RankSettings = {**self.settings, **settings}
        cluster = self._factory(wanted["num_ranks"], device=wanted["device"], profile=wanted["profile"])
        cluster.start()
        self.num_ranks, self.device, self.profile = wanted["num_ranks"], wanted["device"], wanted["profile"]
        self._begin(Session(cluster))
        devices = tuple(info["device"] for info in cluster.rank_info)
        notice = cluster.rank_info[0].get("notice", "")
        return StartReport(num_ranks=self.num_ranks, devices=devices, seconds=time.monotonic() - begin, notice=notice)

    def stop(self) -> None:
        """Stop the ranks; nothing happens when none run. The trace stays."""
        session, self._session = self._session, None
        if session is None:
            return
        with ExitStack() as last:  # from the last line up, and each whether or not those before it could be done
            last.callback(session.cluster.stop)
            last.callback(self._keep_trace, session)
            last.callback(session.drain, timeout_s=ASK_S)
            last.callback(session.close)

    def _keep_trace(self, session: Session) -> None:
        self._last_trace = session.trace

    def _check_startable(self) -> None:
        """Raise unless there are no ranks, or none that lives."""
        if self._session is None or not self._session.living():
            return
        losses = losses_in_words(self.losses)
        if losses:
            raise UsageError(f"{losses}; the others run on: %fsdp stop first, then %fsdp start")
        raise UsageError(f"{self.num_ranks} ranks run already: %fsdp stop first, then %fsdp start")

    def status(self) -> StatusReport:
        """Return the ranks, what is sharded, and how much is recorded."""
        trace = self.trace
        return StatusReport(
            running=self.running,
            ranks=tuple(self._rank_status(self._session)) if self._session is not None else (),
            units=tuple(unit.name for unit in trace.header.units if not unit.retired),
            num_rows=trace.num_rows,
            num_lost=sum(rank.lost for rank in trace.ranks),
            num_dropped=trace.num_dropped,
        )

    def _rank_status(self, session: Session) -> Iterable[RankStatus]:
        positions, losses = session.where(), session.cluster.losses()
        for info, alive in zip(session.cluster.rank_info, session.cluster.alive(), strict=True):
            position = positions.get(info["rank"])
            doing = "" if position is None else position["doing"] or "idle"
            place = {key: info[key] for key in ("rank", "host", "device", "pid")}
            yield RankStatus(**place, alive=alive, doing=doing, loss=losses.get(info["rank"], ""))

    def names(self) -> dict[int, Names]:
        """Return what the ranks' namespaces hold, by rank; nothing when none run."""
        return {} if self._session is None else self._session.names()

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
            code: as in a notebook; ``rank, world_size, device, mesh`` are there.
            ranks: the ranks that run it; None: all.
            on_output: called with what the first of them writes and shows, as it arrives, and at the end with how the
                others' output differs.
            on_standing: called with a sentence that says which ranks still work, for how long and in which line, once
                nothing else was heard for 3 s; it replaces the last one. ``""``: nothing to say any more.

        Raises:
            UsageError: no such rank, or none run.
            RankError: the cell raised on a rank; the others were freed and all are ready again.
            RankDied: a rank is gone.
            Interrupted: Ctrl-C.
        """
        session = self._started()
        if session.request is not None and session.request.state == "stopped":
            return self._cell_inside(code, ranks, on_output)
        chosen = self._chosen(ranks)
        with session.changed:
            mark = session.ready(chosen)
            pending = session.cluster.run_cell(code, ranks=chosen)
            request = session.open(CellWork(pending), pending, mark)
        listener = Listener(on_output=on_output, on_standing=on_standing)
        return cast(CellReport | StopReport, self._run(session, request, listener, False))

    def do(
        self,
        command: Command,
        on_progress: OnProgress = no_progress,
        on_output: OnOutput = no_output,
        on_standing: OnStanding = no_standing,
    ) -> Report:
        """Carry out ``command`` and return its report, or where the ranks stopped inside it.

        Args:
            command: what to do.
            on_progress: called while steps are done, and once at their end.
            on_output: as for :meth:`run_cell`, of what the user's functions write.
            on_standing: as for :meth:`run_cell`.

        Raises:
            UsageError: it cannot be done as asked; the message says what to run first or write instead.
            RankError: it raised on a rank; the others were freed and all are ready again.
            RankDied: a rank is gone.
            Interrupted: it was given up.
        """
        report: Report
        listener = Listener(on_progress=on_progress, on_output=on_output, on_standing=on_standing)
        match command:
            case Pause():
                report = self.pause()
            case Continue():
                report = self.resume(background=False if command.foreground else None, **vars(listener))
            case Next():
                report = self.next(command.what, **vars(listener))
            case Abort():
                report = self.abort()
            case Break():
                report = self.break_add(command.event, rank=command.rank, when=command.when)
            case Inspect():
                report = self.inspect(command.fqn)
            case Evaluate():
                report = self.evaluate(command.expr, command.ranks or None, frame=command.frame)
            case _:
                report = self._do(command, listener)
        return report

    def _do(self, command: Command, listener: Listener) -> Report:
        session = self._started()
        with session.changed:
            mark = session.ready(range(self.num_ranks))
            self._check(command, session)
            if isinstance(command, Step) and command.until:
                session.breakpoints.set_until(*parse_event(command.until, self.units()))
                session.push_breakpoints()
            follower = (
                Follower(session.trace, num_ranks=self.num_ranks, total=command.count)
                if isinstance(command, Step)
                else None
            )
            pending = session.cluster.apply(f"{RUNTIME}:execute", to_dict(command))
            request = session.open(CommandWork(command, follower, pending), pending, mark)
        request.is_background = isinstance(command, Step) and command.background
        return self._run(session, request, listener, request.is_background)

    def shard(self, model: str, **policy: Unpack[ShardOptions]) -> ShardReport:
        """Shard the module that ranks call ``model``; errors as :meth:`do`.

        Args:
            model: a variable on the ranks, such as ``model`` or ``model.blocks``.
            policy: ``wrap`` names the classes of which each instance becomes a unit; ``mesh`` is ``4`` or ``"2x2"``;
                ``reshard_after_forward`` is ``"auto"``, ``"true"``, ``"false"`` or a number of ranks; ``mp`` such as
                ``"bf16,reduce=fp32"``; ``offload``; ``prefetch`` units ahead; ``ignore``: patterns of parameters. What
                each means says :class:`~workbench.commands.Shard`.
        """
        return cast(ShardReport, self.do(made(lambda: Shard(model=model, **plain(policy)))))

    def reshard(self, model: str, **policy: Unpack[ReshardOptions]) -> ReshardReport:
        """Change how a sharded model is sharded, in place; training goes on. Errors as :meth:`do`.

        Args:
            model: as in :meth:`shard`.
            policy: as in :meth:`shard`, without ``ignore``; what is not given stays as it is.
        """
        return cast(ReshardReport, self.do(made(lambda: Reshard(model=model, **plain(policy)))))

    def unshard(self, model: str) -> UnshardReport:
        """Make it a plain module again: :class:`~workbench.commands.Unshard`; errors as :meth:`do`."""
        return cast(UnshardReport, self.do(made(lambda: Unshard(model=model))))

    def step(
        self,
        count: int = 1,
        fn: str = "train_step",
        on_progress: OnProgress = no_progress,
        *,
        on_output: OnOutput = no_output,
        until: str = "",
        background: bool = False,
    ) -> StepReport | StopReport | BackgroundReport:
        """Train ``count`` steps: :class:`~workbench.commands.Step`; errors as :meth:`do`.

        Args:
            count: how many.
            fn: name of the step function on the ranks.
            on_progress: called while steps are done.
            on_output: as for :meth:`run_cell`.
            until: event before which all ranks stop once, as for :meth:`break_add`.
            background: return at once; :meth:`news` tells how it ended.
        """
        command = made(lambda: Step(count=count, fn=fn, until=until, background=background))
        return cast(StepReport | StopReport | BackgroundReport, self.do(command, on_progress, on_output))

    def verify(self, model: str = "", fn: str = "train_step") -> VerifyReport:
        """Compare a step with an unsharded one: :class:`~workbench.commands.Verify`; errors as :meth:`do`."""
        return cast(VerifyReport, self.do(made(lambda: Verify(model=model, fn=fn))))

    # ---- looking

    def view(self, name: str, **options: object) -> go.Figure:
        """Return the view called ``name`` of what happened so far, or up to the cursor.

        Raises:
            UsageError: no such view.
        """
        return draw(name, self.shown_trace, talk=bool(options.pop("talk", False)), **options)

    def dashboard(self) -> Any:  # noqa: ANN401 - a widget, which only a notebook needs
        """Return a widget that shows what the ranks do while they do it, with buttons to stop inside a step."""
        return importlib.import_module("workbench.widgets.dashboard").dashboard(self)

    def canvas(self) -> Any:  # noqa: ANN401 - a widget, which only a notebook needs
        """Return a widget with all of the timeline, to pan and zoom, that grows while the ranks train."""
        return importlib.import_module("workbench.widgets.canvas").canvas(self)

    def layout(self, **options: object) -> go.Figure:
        """Return which rows of which parameter lie on which rank."""
        return self.view("layout", **options)

    def memory(self, **options: object) -> go.Figure:
        """Return bytes by class over time per rank."""
        return self.view("memory", **options)

    def timeline(self, **options: object) -> go.Figure:
        """Return compute, collectives and waits per rank."""
        return self.view("timeline", **options)

    def states(self, **options: object) -> go.Figure:
        """Return the state of each unit over time."""
        return self.view("states", **options)

    def comms(self, **options: object) -> go.Figure:
        """Return collectives per unit, beside the closed form."""
        return self.view("comms", **options)

    def training(self, **options: object) -> go.Figure:
        """Return loss, step time and what else was logged."""
        return self.view("training", **options)

    def compare(
        self,
        a: str | os.PathLike[str] | Trace,
        b: str | os.PathLike[str] | Trace,
        *,
        rank: int | None = None,
        talk: bool = False,
    ) -> go.Figure:
        """Return what changed from ``a`` to ``b``, by logical event and not by time; the title says it in a sentence.

        Args:
            a: a trace file, ``"last"`` (what happened so far), or steps of either: ``"last:3..5"``, ``"3..5"``,
                ``"last:-3.."`` (the newest three).
            b: likewise.
            rank: compare this rank; None: the one whose peak differs most.
            talk: in sizes and colours for a projector.

        Raises:
            UsageError: there is no such file, trace, step or rank.
        """
        (name_a, first), (name_b, second) = side(a, lambda: self.trace), side(b, lambda: self.trace)
        return draw_compared(first, second, names=(name_a, name_b), rank=rank, talk=talk)

    def export(self, path: str | os.PathLike[str], *, steps: str = "") -> ExportReport:
        """Write what happened so far: ``.trace``, ``.json`` (Perfetto) or ``.html`` (a page of all views).

        Args:
            path: where to; its suffix says what to write.
            steps: only these, as in :meth:`compare`: ``"3..5"``, ``"7"``, ``"-3.."``; empty: everything.

        Raises:
            UsageError: another suffix, no such steps, or it cannot be written.
        """
        return export(self.trace, path, steps)

    def help(self, word: str = "") -> str:
        """Return what a method does, or the first line of each.

        Raises:
            UsageError: no such method.
        """
        methods = {name: inspect.getdoc(member) or "" for name, member in inspect.getmembers(type(self), callable)}
        public = {name: text for name, text in methods.items() if text and not name.startswith("_")}
        if word and word not in public:
            raise UsageError(f"there is no method {word!r}; there are: {', '.join(public)}")
        return public[word] if word else "\n".join(f"{name}: {text.splitlines()[0]}" for name, text in public.items())

    # ---- checks before ranks are asked

    def _check(self, command: Command, session: Session) -> None:
        """Raise if the ranks or their names do not fit ``command``: on some it would start, and wait for the rest."""
        if isinstance(command, (Shard, Reshard)):
            check_fits(command, self.num_ranks)
        names = session.names()
        is_sharded = any(not unit.retired for unit in session.trace.header.units)
        if isinstance(command, (Reshard, Step, Verify)) and not is_sharded:
            raise shard_first(names, command.word)
        if isinstance(command, (Step, Verify)):
            check_function(names, command.fn, self._in_notebook)
        if isinstance(command, (Shard, Reshard, Unshard, Verify)) and command.model:
            check_model(names, command.model, self._in_notebook)
