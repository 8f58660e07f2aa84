"""Class Workbench: the one place where ranks, trace and views meet. Used by magics and scripts; never imports torch."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, cast

import plotly.graph_objects as go

from workbench.cluster import Cluster
from workbench.cluster.pending import Output, Pending
from workbench.commands import Command, Reshard, Shard, Step, Unshard, Verify, to_dict
from workbench.errors import UsageError, WorkbenchError
from workbench.export import export
from workbench.policy import as_mesh, check_mesh_fits, check_reshard_fits
from workbench.session.follow import Follower, Progress
from workbench.session.names import Names, check_function, check_model, shard_first
from workbench.session.outputs import compare, text_of
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
from workbench.session.results import to_report
from workbench.session.session import RUNTIME, ClusterLike, Meanwhile, Session
from workbench.trace.columns import Trace
from workbench.views import draw

OnProgress = Callable[[Progress], None]
OnOutput = Callable[[Output], None]


class ReshardOptions(TypedDict, total=False):
    """What :meth:`Workbench.reshard` takes; :class:`workbench.commands.Reshard` says what each means."""

    wrap: str | Iterable[str]
    mesh: int | str | Sequence[int]
    reshard_after_forward: str | int
    mp: str
    offload: bool
    prefetch: int


class ShardOptions(ReshardOptions, total=False):
    """What :meth:`Workbench.shard` takes; :class:`workbench.commands.Shard` says what each means."""

    ignore: str | Iterable[str]


class Workbench:
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
        self.num_ranks = num_ranks
        self.device = device
        self.profile = profile
        self._factory = cluster_factory
        self._in_notebook = in_notebook
        self._session: Session | None = None
        self._last_trace = Trace.empty()

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

    def start(self) -> StartReport:
        """Start the ranks and forget what earlier ones recorded.

        Raises:
            UsageError: they run already, or cannot be had as asked.
            ClusterError: they did not come up.
        """
        if self._session is not None:
            raise UsageError(f"{self.num_ranks} ranks run already: stop them first (%fsdp stop)")
        begin = time.monotonic()
        cluster = self._factory(self.num_ranks, device=self.device, profile=self.profile)
        cluster.start()
        self._session = Session(cluster)
        devices = tuple(info["device"] for info in cluster.rank_info)
        return StartReport(num_ranks=self.num_ranks, devices=devices, seconds=time.monotonic() - begin)

    def stop(self) -> None:
        """Stop the ranks; nothing happens when none run. The trace stays."""
        session, self._session = self._session, None
        if session is None:
            return
        try:
            session.drain()
        finally:
            self._last_trace = session.trace
            session.cluster.stop()

    def status(self) -> StatusReport:
        """Return the ranks, what is sharded, and how much is recorded."""
        trace = self.trace
        return StatusReport(
            running=self.running,
            ranks=tuple(self._rank_status(self._session)) if self._session is not None else (),
            units=tuple(unit.name for unit in trace.header.units if not unit.retired),
            num_rows=trace.num_rows,
            num_lost=sum(rank.lost for rank in trace.ranks),
        )

    def _rank_status(self, session: Session) -> Iterable[RankStatus]:
        positions = session.where()
        for info, alive in zip(session.cluster.rank_info, session.cluster.alive(), strict=True):
            position = positions.get(info["rank"])
            doing = "" if position is None else position["doing"] or "idle"
            place = {key: info[key] for key in ("rank", "host", "device", "pid")}
            yield RankStatus(**place, alive=alive, doing=doing)

    def names(self) -> dict[int, Names]:
        """Return what the ranks' namespaces hold, by rank; nothing when none run."""
        return {} if self._session is None else self._session.names()

    # ---- work

    def run_cell(
        self, code: str, ranks: Sequence[int] | None = None, on_output: OnOutput = lambda output: None
    ) -> CellReport:
        """Run a cell in the main thread of ranks.

        Args:
            code: as in a notebook; ``rank, world_size, device, mesh`` are there.
            ranks: the ranks that run it; None: all.
            on_output: called with what the first of them writes and shows, as it arrives, and at the end with how the
                others' output differs.

        Raises:
            UsageError: no such rank, or none run.
            RankError: the cell raised on a rank; the others were freed and all are ready again.
            RankDied: a rank is gone.
            Interrupted: Ctrl-C.
        """
        session = self._started()
        chosen = self._chosen(ranks)
        mark = session.ready(chosen)
        pending = session.cluster.run_cell(code, ranks=chosen)
        stream = _Stream(pending, chosen[0], on_output)
        try:
            session.finish(pending, mark, Meanwhile(on_slice=stream.forward), is_command=False)
        except WorkbenchError:
            stream.finish(also_agreement=False)
            raise
        remarks = stream.finish(also_agreement=True)
        return CellReport(texts={rank: text_of(pending.outputs(rank)) for rank in chosen}, remarks=remarks)

    def do(self, command: Command, on_progress: OnProgress = lambda progress: None) -> Report:
        """Carry out ``command`` on every rank and return its report.

        Args:
            command: what to do.
            on_progress: called while steps are done, and once at their end.

        Raises:
            UsageError: it cannot be done as asked; the message says what to run first or write instead.
            RankError: it raised on a rank; the others were freed and all are ready again.
            RankDied: a rank is gone.
            Interrupted: Ctrl-C.
        """
        session = self._started()
        mark = session.ready(range(self.num_ranks))
        self._check(command, session)
        meanwhile = Meanwhile()
        if isinstance(command, Step):
            follower = Follower(session.trace, num_ranks=self.num_ranks, total=command.count)
            meanwhile = Meanwhile(on_tick=lambda: on_progress(follower.catch_up(session.trace)))
        pending = session.cluster.apply(f"{RUNTIME}:execute", to_dict(command))
        return to_report(command, session.finish(pending, mark, meanwhile, is_command=True))

    def shard(self, model: str, **policy: Unpack[ShardOptions]) -> ShardReport:
        """Shard the module that ranks call ``model``; errors as :meth:`do`.

        Args:
            model: a variable on the ranks, such as ``model`` or ``model.blocks``.
            policy: ``wrap`` names the classes of which each instance becomes a unit; ``mesh`` is ``4`` or ``"2x2"``;
                ``reshard_after_forward`` is ``"auto"``, ``"true"``, ``"false"`` or a number of ranks; ``mp`` such as
                ``"bf16,reduce=fp32"``; ``offload``; ``prefetch`` units ahead; ``ignore``: patterns of parameters. What
                each means says :class:`~workbench.commands.Shard`.
        """
        return cast(ShardReport, self.do(_made(lambda: Shard(model=model, **_plain(policy)))))

    def reshard(self, model: str, **policy: Unpack[ReshardOptions]) -> ReshardReport:
        """Change how a sharded model is sharded, in place; training goes on. Errors as :meth:`do`.

        Args:
            model: as in :meth:`shard`.
            policy: as in :meth:`shard`, without ``ignore``; what is not given stays as it is.
        """
        return cast(ReshardReport, self.do(_made(lambda: Reshard(model=model, **_plain(policy)))))

    def unshard(self, model: str) -> UnshardReport:
        """Make it a plain module again: :class:`~workbench.commands.Unshard`; errors as :meth:`do`."""
        return cast(UnshardReport, self.do(_made(lambda: Unshard(model=model))))

    def step(
        self, count: int = 1, fn: str = "train_step", on_progress: OnProgress = lambda progress: None
    ) -> StepReport:
        """Train ``count`` steps: :class:`~workbench.commands.Step`; errors as :meth:`do`."""
        return cast(StepReport, self.do(_made(lambda: Step(count=count, fn=fn)), on_progress))

    def verify(self, model: str = "", fn: str = "train_step") -> VerifyReport:
        """Compare a step with an unsharded one: :class:`~workbench.commands.Verify`; errors as :meth:`do`."""
        return cast(VerifyReport, self.do(_made(lambda: Verify(model=model, fn=fn))))

    # ---- looking

    @property
    def trace(self) -> Trace:
        """What happened so far, brought up to date when ranks run."""
        if self._session is None:
            return self._last_trace
        self._session.drain()
        return self._session.trace

    def view(self, name: str, **options: object) -> go.Figure:
        """Return the view called ``name`` of what happened so far.

        Raises:
            UsageError: no such view.
        """
        return draw(name, self.trace, **options)

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

    def export(self, path: str | os.PathLike[str]) -> ExportReport:
        """Write what happened so far: ``.trace``, ``.json`` (Perfetto) or ``.html`` (a page of all views).

        Raises:
            UsageError: another suffix, or it cannot be written.
        """
        return export(self.trace, path)

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

    def _started(self) -> Session:
        if self._session is None:
            raise UsageError("there are no ranks: first %fsdp start -n 4")
        return self._session

    def _chosen(self, ranks: Sequence[int] | None) -> tuple[int, ...]:
        chosen = tuple(range(self.num_ranks)) if ranks is None else tuple(sorted(set(ranks)))
        unknown = [rank for rank in chosen if rank not in range(self.num_ranks)]
        if unknown or not chosen:
            named = f"there is no rank {', '.join(map(str, unknown))}" if unknown else "no rank is named"
            raise UsageError(f"{named}: the ranks are 0 to {self.num_ranks - 1}")
        return chosen

    def _check(self, command: Command, session: Session) -> None:
        """Raise if the ranks or their names do not fit ``command``: on some it would start, and wait for the rest."""
        if isinstance(command, (Shard, Reshard)):
            _check_fits(command, self.num_ranks)
        names = session.names()
        is_sharded = any(not unit.retired for unit in session.trace.header.units)
        if isinstance(command, (Reshard, Step, Verify)) and not is_sharded:
            raise shard_first(names, command.word)
        if isinstance(command, (Step, Verify)):
            check_function(names, command.fn, self._in_notebook)
        if isinstance(command, (Shard, Reshard, Unshard, Verify)) and command.model:
            check_model(names, command.model, self._in_notebook)


class _Stream:
    """Hands on the output of one rank as it arrives, and compares the others' with it at the end."""

    def __init__(self, pending: Pending, rank: int, on_output: OnOutput) -> None:
        self._pending, self._rank, self._on_output = pending, rank, on_output
        self._num_seen = 0

    def forward(self) -> None:
        """Hand on what is new."""
        for output in self._pending.outputs(self._rank, self._num_seen):
            self._num_seen += 1
            self._on_output(output)

    def finish(self, *, also_agreement: bool) -> str:
        """Hand on the rest, then how the ranks differ; return the latter."""
        self.forward()
        texts = {rank: text_of(self._pending.outputs(rank)) for rank in self._pending.ranks}
        agree = len({text.strip() for text in texts.values()}) == 1
        remarks = compare(texts, self._rank) if also_agreement or not agree else ""
        if remarks:
            self._on_output(Output("stdout", text=remarks))
        return remarks


def _several(names: str | Iterable[str]) -> tuple[str, ...]:
    """One name is no sequence of letters."""
    return (names,) if isinstance(names, str) else tuple(names)


def _plain(policy: ShardOptions | ReshardOptions) -> dict[str, Any]:
    """Return options as a command's fields take them."""
    fields: dict[str, Any] = dict(policy)
    fields |= {name: _several(fields[name]) for name in ("wrap", "ignore") if name in fields}
    if "mesh" in fields:
        fields["mesh"] = as_mesh(fields["mesh"])
    return fields


def _check_fits(command: Shard | Reshard, num_ranks: int) -> None:
    """Raise UsageError if a mesh does not hold all ranks, or a number of ranks does not split a copy."""
    try:
        check_mesh_fits(command.mesh, num_ranks)
        if command.mesh or isinstance(command, Shard):
            check_reshard_fits(command.reshard_after_forward, [num_ranks, *command.mesh][-1])
    except ValueError as error:
        raise UsageError(f"%fsdp {command.word}: {error}") from error


def _made(make: Callable[[], Command]) -> Command:
    """Return the command that ``make`` makes; what it takes amiss becomes a UsageError."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
