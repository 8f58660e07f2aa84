"""A cluster in this process: its ranks follow a script and record a simulated training job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from tests.helpers.trace_strategies import example_trace
from workbench.base.codec import encode
from workbench.cluster.pending_replies import Answer, Output, PendingReplies, select, settle
from workbench.errors import ClusterError, RankDied, RankError, UsageError
from workbench.events import STOPS, Edge, Kind, Phase
from workbench.protocol.breakpoints import Breakpoint, Condition, split_event
from workbench.protocol.commands import (
    Continue,
    Next,
    Pause,
    RankRequest,
    Run,
    RunReply,
    Step,
    from_dict,
)
from workbench.protocol.lint_reply import LintReply
from workbench.protocol.rank_messages import (
    CellLine,
    Drain,
    DrainReply,
    Forget,
    Frame,
    GiveUp,
    Hold,
    Job,
    JobError,
    JobReply,
    ListModels,
    ListNames,
    Locate,
    LocateLine,
    ModelInfo,
    Names,
    Position,
    PreviewUnits,
    RecordSummary,
    RunTo,
    SetBreakpoints,
    Shut,
    Stacks,
    StepPosition,
    Thread,
    WrapClass,
)
from workbench.protocol.starting import ConnectReply
from workbench.replay.shards import shards, totals
from workbench.trace import advance, header_to_dict, key_frame_to_dict
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.row_compression import to_wire
from workbench.trace.schema import Header, KeyFrame

R = TypeVar("R")

Act = Callable[["FakeCluster", int, Answer], None]
"""What one rank does with a request on the shell channel: settle the answer now, or leave it to a later request."""


def gives(value: Any) -> Act:
    return lambda cluster, rank, answer: settle(answer.future, value)


def raises(ename: str, evalue: str = "", **more: Any) -> Act:
    return lambda cluster, rank, answer: settle(answer.future, rank_error(rank, ename, evalue, **more))


def rank_error(rank: int, ename: str, evalue: str, *, traceback: str = "", **more: Any) -> RankError:
    text = traceback or f"{ename}!\n"
    return RankError(f"rank {rank}: {ename}", rank=rank, ename=ename, evalue=evalue, traceback=text, **more)


KILLED = "died: the process was killed by SIGKILL"


def dies(cluster: FakeCluster, rank: int, answer: Answer) -> None:
    cluster.lose(rank)


def blocks(cluster: FakeCluster, rank: int, answer: Answer) -> None:
    """Block in a collective: an abort ends it."""
    cluster.unfinished[rank] = 1
    cluster.on_abort[rank] = lambda reason: settle(answer.future, rank_error(rank, "StepAborted", reason))


def computes(cluster: FakeCluster, rank: int, answer: Answer) -> None:
    """Be busy in Python: an abort has no effect, SIGINT ends it."""
    cluster.on_interrupt[rank] = lambda: settle(answer.future, rank_error(rank, "KeyboardInterrupt", ""))


returns = gives(None)


def writes(*outputs: Output, then: Act = returns) -> Act:
    def act(cluster: FakeCluster, rank: int, answer: Answer) -> None:
        answer.outputs.extend(outputs)
        then(cluster, rank, answer)

    return act


def prints(text: str, then: Act = returns) -> Act:
    return writes(Output("stdout", text=text), then=then)


class FakeGate:
    """The gate of one rank: it steps through a program of events, at most one event per request for its position.

    ``program`` holds the kind, edge and unit index of each event. While ``late``, the rank reaches no further event;
    while ``waits``, it waits at the end of the program for absent ranks.
    """

    def __init__(self, rank: int, program: list[tuple[str, str, int]], units: dict[int, str]) -> None:
        self.rank, self.program, self.units = rank, program, units
        self.answer: Answer | None = None
        self.ordinal = 0
        self.held: Hold | None = None
        self.mode: RankRequest[None] = Continue()
        self.breakpoints: tuple[Breakpoint, ...] = ()
        self.tickets: dict[str, JobReply] = {}
        self.jobs: Callable[[int, Job], JobReply] = lambda rank, job: text_reply(f"{rank}: {text_of(job)}")
        self.late = self.waits = self.synchronised = False
        self.since_ns = 0

    def begin(self, answer: Answer) -> None:
        self.answer, self.ordinal, self.held, self.mode = answer, 0, None, Continue()

    def end(self, outcome: object) -> None:
        if self.answer is not None:
            settle(self.answer.future, outcome)
        self.answer = self.held = None
        self.breakpoints = tuple(b for b in self.breakpoints if not b.once)

    def advance(self) -> None:
        """Reach the next event: hold there, or pass it; a pause holds a rank that waits in its wait."""
        if self.answer is not None and not self.held and self.waits and isinstance(self.mode, Pause):
            place = StepPosition(0, len(self.program))
            self.held = Hold(place=place, kind=Kind.WAIT, edge=Edge.BEGIN, phase=Phase.FORWARD)
        if self.answer is None or self.held or self.late or self.waits:
            return
        if self.ordinal == len(self.program):
            self.end(step_result(1))
            return
        kind, edge, unit = self.program[self.ordinal]
        met = next((b for b in self.breakpoints if b.is_on and self._meets(b, kind, unit)), None)
        if met is None and not self._is_wanted(kind):
            self.ordinal += 1
            return
        self.since_ns += 1
        self.held = Hold(
            place=StepPosition(0, self.ordinal),
            kind=STOPS[kind],
            edge=Edge[edge.upper()],
            phase=Phase.FORWARD,
            unit=unit,
            since_ns=self.since_ns,
            breakpoint=met.id if met else None,
            synchronised=self.synchronised,
        )
        self.mode = Continue()
        self.breakpoints = tuple(b for b in self.breakpoints if b is not met or not b.once)

    def _meets(self, breakpoint_: Breakpoint, kind: str, unit: int) -> bool:
        return (
            breakpoint_.event == kind
            and breakpoint_.rank in {None, self.rank}
            and fnmatchcase(self.units.get(unit, ""), breakpoint_.unit or "*")
        )

    def _is_wanted(self, kind: str) -> bool:
        match self.mode:
            case RunTo(place=place):
                return StepPosition(0, self.ordinal) >= place
            case Next(what=what):
                return what in {"event", kind}
        return isinstance(self.mode, Pause)

    def ask(self, request: RankRequest[Any]) -> bool | None:
        match request:
            case Job():
                if self.held:
                    self.tickets[request.ticket] = self.jobs(self.rank, request)
                return self.held is not None
            case Forget():
                for ticket in request.tickets:
                    self.tickets.pop(ticket, None)
            case SetBreakpoints():
                self.breakpoints = (*(b for b in self.breakpoints if b.once), *checked(request.breakpoints))
            case Pause():
                if not self.held:
                    self.mode = request
            case RunTo(place=place) if self.held and self.held.place >= place:
                pass
            case _:
                self._let_go(request)
        return None

    def _let_go(self, mode: RankRequest[None]) -> None:
        if self.held:
            self.ordinal, self.held = self.ordinal + (not isinstance(mode, RunTo)), None
        self.mode = mode

    def position(self, **more: Any) -> Position:
        self.advance()
        inside = self.answer is not None
        return Position(
            rank=self.rank,
            doing="step" if inside else "",
            place=StepPosition(0 if inside else -1, len(self.program) if self.waits else self.ordinal),
            held=self.held,
            waiting=self.waits,
            tickets=dict(self.tickets),
            **more,
        )


def checked(breakpoints: tuple[Breakpoint, ...]) -> tuple[Breakpoint, ...]:
    """Return the breakpoints; raise unless their events are known and their conditions parse."""
    for breakpoint_ in breakpoints:
        split_event(breakpoint_.event)
        if breakpoint_.when is not None:
            Condition.parse(breakpoint_.when, breakpoint_.rank)
    return breakpoints


def text_of(job: Job) -> str:
    """Return the subject of a job: its expression, its cell, or the name of its parameter."""
    (text,) = (getattr(job.work, name) for name in ("expr", "code", "fqn") if hasattr(job.work, name))
    return str(text)


def text_reply(text: str) -> JobReply:
    return JobReply(text=text)


def failed(ename: str, evalue: str) -> JobReply:
    return JobReply(error=JobError(ename=ename, evalue=evalue))


PROGRAM = [
    ("step", "begin", -1),
    *[(kind, "begin", unit) for unit in (0, 1, 2) for kind in ("all_gather", "forward")],
    *[(kind, "begin", unit) for unit in (2, 1, 0) for kind in ("backward", "reduce_scatter")],
    ("optimizer", "begin", -1),
]


def inside(cluster: FakeCluster, rank: int, answer: Answer) -> None:
    """Run a step with the events of PROGRAM; it may be stopped inside, and aborted."""
    gate = cluster.gates[rank]
    gate.begin(answer)
    cluster.on_abort[rank] = lambda reason: gate.end(rank_error(rank, "StepAborted", reason))


class FakeRank:
    """The recorder of one rank: its record is a growing part of a simulated job."""

    def __init__(self, whole: RankTrace, header: Header) -> None:
        self.whole, self.full_header = whole, header
        self.header = replace(header, units=(), strings=())
        self.version = 1
        self.recorded = self.overwritten = 0

    @property
    def step_ends(self) -> list[int]:
        rows = self.whole.rows
        return [i + 1 for i in range(len(rows)) if rows["kind"][i] == Kind.STEP and rows["edge"][i] == 1]

    def shard(self) -> None:
        self.header, self.version = self.full_header, self.version + 1

    def drain(self, known: RecordSummary, position: Position) -> DrainReply:
        first = max(known.next_seq, self.overwritten)
        rows = self.whole.rows[first : self.recorded]
        return DrainReply(
            rows=memoryview(to_wire(rows.tobytes())),
            lost=first - known.next_seq,
            key_frame=key_frame_to_dict(advance(KeyFrame(), self.whole.rows[: self.recorded])),
            header=header_to_dict(self.header) if known.header_version != self.version else None,
            header_version=self.version,
            position=position,
        )


class FakeCluster:
    """See the module docstring; has the methods of :class:`workbench.cluster.Cluster`.

    ``script`` holds what each rank does, by the word of a command or ``"cell"`` or ``"recover"``; a list has one act
    per rank. ``log`` holds the requests, in order.
    """

    def __init__(self, num_ranks: int = 4, **settings: Any) -> None:
        self.num_ranks, self.settings = num_ranks, settings
        self.job: Trace = example_trace(num_ranks=num_ranks, num_units=3, steps=3)
        self.ranks = [FakeRank(r, self.job.header) for r in self.job.ranks]
        self.modules = {rank: ["model"] for rank in range(num_ranks)}
        self.variables = {rank: ["model", "train_step", "mesh"] for rank in range(num_ranks)}
        self.script: dict[str, Act | list[Act]] = {
            "recover": gives({}),
            "give_up_step": gives(None),
            "cell": gives(None),
        }
        self.log: list[tuple[Any, ...]] = []
        self.dead: set[int] = set()
        self.open: dict[int, list[Answer]] = {rank: [] for rank in range(num_ranks)}
        self.silent: set[int] = set()
        self.patience: list[tuple[str, float]] = []  # (word, timeout in seconds) of each control-channel request
        self.unfinished: dict[int, int] = {}
        self.fault = ""
        self.lines: dict[int, CellLine] = {}
        self.optimizer_steps = dict.fromkeys(range(num_ranks), 0)
        self.commands = dict.fromkeys(range(num_ranks), 0)
        self.on_abort: dict[int, Callable[[str], None]] = {}
        self.on_interrupt: dict[int, Callable[[], None]] = {}
        self.on_drain: Callable[[], None] = lambda: None
        self.started = False
        names = {unit.index: unit.name or "(root)" for unit in self.job.header.units}
        self.gates = [FakeGate(rank, PROGRAM, names) for rank in range(num_ranks)]

    # ---- life

    @property
    def rank_info(self) -> list[ConnectReply]:
        self._check_started()
        return [ConnectReply(rank=r, host="<here>", device="cpu", pid=100 + r) for r in range(self.num_ranks)]

    held_by = ""
    is_free = False
    outlives = False
    one_job = ""

    def detach(self) -> None:
        self.started = False
        self.log.append(("detach",))

    def start(self, on_wait: Callable[[str], None] = lambda sentence: None) -> None:
        on_wait("they are being started")
        if self.started:
            raise UsageError("the ranks are already started")
        self.started = True
        self.log.append(("start",))

    def stop(self) -> str:
        self.started = False
        self.dead.clear()
        self.log.append(("stop",))
        for rank, answers in self.open.items():
            for answer in answers:
                settle(answer.future, ClusterError(f"rank {rank} was stopped"))
        return ""

    def lose(self, rank: int) -> None:
        """Make a rank die."""
        self.dead.add(rank)
        for answer in self.open[rank]:
            settle(answer.future, self._loss(rank))

    def losses(self) -> dict[int, str]:
        return dict.fromkeys(sorted(self.dead), KILLED)

    def alive(self) -> tuple[bool, ...]:
        return tuple(self.started and rank not in self.dead for rank in range(self.num_ranks))

    @staticmethod
    def _loss(rank: int) -> RankDied:
        return RankDied(f"rank {rank} {KILLED}", ranks=(rank,))

    # ---- shell channel

    def apply(self, name: str, *args: Any, ranks: Iterable[int] | None = None) -> PendingReplies:
        chosen = self._select(ranks)
        function = name.partition(":")[2]
        if function == "execute":
            args = (from_dict(args[0]),)
            if isinstance(args[0], (Step, Run)) and args[0].stop is not None:
                for gate in self.gates:
                    gate.breakpoints = (args[0].stop, *gate.breakpoints)
        self.log.append((function, *args))
        if function == "recover":
            self.unfinished.clear()
        return self._perform(args[0].word if function == "execute" else function, chosen)

    def run_cell(self, code: str, ranks: Iterable[int] | None = None) -> PendingReplies:
        chosen = self._select(ranks)
        self.log.append(("cell", code, chosen))
        return self._perform("cell", chosen)

    def _perform(self, what: str, ranks: tuple[int, ...]) -> PendingReplies:
        acts = self.script[what]
        answers = {rank: Answer() for rank in ranks}
        for rank, answer in answers.items():
            self.open[rank].append(answer)
            if rank in self.dead:
                settle(answer.future, self._loss(rank))
            else:
                (acts[rank] if isinstance(acts, list) else acts)(self, rank, answer)
        return PendingReplies(answers)

    def _check_started(self) -> None:
        if not self.started:
            raise UsageError("the ranks are not started: first %fsdp start")

    def _select(self, ranks: Iterable[int] | None, *, may_be_none: bool = False) -> tuple[int, ...]:
        self._check_started()
        return select(ranks, self.num_ranks, may_be_none=may_be_none)

    # ---- control channel

    def ask(
        self, request: RankRequest[R], ranks: Iterable[int] | None = None, timeout_s: float = 2.0
    ) -> dict[int, R | Exception]:
        chosen = self._select(ranks, may_be_none=True)
        self.patience.append((request.word, timeout_s))
        if isinstance(request, Drain):
            self.on_drain()
        elif not isinstance(request, (Locate, Stacks, LocateLine, ListNames, ListModels, PreviewUnits)):
            self.log.append((request.word, request, chosen))
        return {rank: self._answer(rank, request) for rank in chosen}

    def _answer(self, rank: int, request: RankRequest[Any]) -> Any:
        if rank in self.dead:
            return self._loss(rank)
        if rank in self.silent:
            return ClusterError(f"rank {rank} has not answered")
        try:
            return self._do(rank, request)
        except UsageError as error:
            return rank_error(rank, "UsageError", str(error))

    def _do(self, rank: int, request: RankRequest[Any]) -> Any:
        answer: Any = None
        match request:
            case Drain(known=known):
                answer = self.ranks[rank].drain(known[rank], self.position(rank))
            case Locate():
                answer = self.position(rank)
            case LocateLine():
                answer = self.lines.get(rank)
            case ListNames():
                mine = {"modules": tuple(self.modules[rank]), "variables": tuple(self.variables[rank])}
                answer = Names(**mine, classes=("Block",))
            case ListModels() | PreviewUnits():
                answer = self._planned(rank, request)
            case Stacks():
                frame = Frame(text="cell:3 in train_step: f()", number=0)
                answer = (Thread(name="MainThread", is_main=True, frames=(frame,)),)
            case GiveUp(reason=reason):
                self.on_abort.pop(rank, lambda reason: None)(reason)
            case Shut():
                pass
            case _:
                answer = self.gates[rank].ask(request)
        return answer

    def _planned(self, rank: int, request: ListModels | PreviewUnits) -> Any:
        if isinstance(request, ListModels):
            units = tuple(unit.index for unit in self.ranks[rank].header.units)  # those of the first model
            whole = totals(shards(self.job.header))
            has_optimizer = "optimizer" in self.variables[rank]
            held = {"num_elements": whole.num_elements, "num_bytes": whole.bytes_unsharded}
            return tuple(
                replace(example_model(name), **held, units=() if place else units, has_optimizer=has_optimizer)
                for place, name in enumerate(self.modules[rank])
            )
        if request.command.wrap == ("Blcok",):
            raise UsageError("the model has no module of class Blcok; its classes are: Block (2)")
        return self.job.header.units

    def position(self, rank: int) -> Position:
        return self.gates[rank].position(
            unfinished=self.unfinished.get(rank, 0),
            optimizer_steps=self.optimizer_steps[rank],
            commands=self.commands[rank],
            fault=self.fault,
        )

    def interrupt(self, ranks: Iterable[int] | None = None) -> None:
        chosen = self._select(ranks, may_be_none=True)
        self.log.append(("interrupt", chosen))
        for rank in chosen:
            self.on_interrupt.pop(rank, lambda: None)()

    # ---- scripts that take a while

    def sharded(self) -> None:
        """Give the ranks units from now on."""
        for rank in self.ranks:
            rank.shard()

    def trains(self, steps: int = 3) -> Act:
        """Record one more step at every drain; after ``steps``, the ranks answer."""
        waiting: list[Answer] = []
        done = 0

        def on_drain() -> None:
            nonlocal done
            if done == steps or not waiting:
                return
            done += 1
            for rank in self.ranks:
                rank.recorded = rank.step_ends[done - 1]
            if done == steps:
                for answer in waiting:
                    settle(answer.future, step_result(steps))

        def act(cluster: FakeCluster, rank: int, answer: Answer) -> None:
            waiting.append(answer)

        self.on_drain = on_drain
        return act


def example_model(name: str) -> ModelInfo:
    return ModelInfo(
        name=name,
        class_name="Net",
        is_sharded=False,
        **{"num_params": 10, "num_elements": 1000, "num_bytes": 4000},
        classes=(WrapClass(name="Block", count=2, num_elements=900),),
        suggested=("Block",),
    )


def ran(steps_done: int = 3, seconds: float = 2.0, models: tuple[str, ...] = ("model",)) -> Act:
    """Run a script to its end."""
    return gives(encode(RunReply(steps_done=steps_done, seconds=seconds, models=models)))


def step_result(steps: int) -> dict[str, Any]:
    return {
        "steps_done": steps,
        "losses": [4.5 - 0.1 * i for i in range(steps)],
        "seconds": [0.25] * steps,
        "optimizer_steps": steps,
        "first_step": 0,
        "unreduced": [],
        "unsharded": [],
        "never_cleared": [],
        "never_reduced": [],
        "snapshot_bytes": 0,
        "rows": [],
        "saved": [],
    }


LINT_RESULT = encode(LintReply(models=("model",), rules=("unsplit-unit",)))
SHARD_RESULT = {
    "model": "model",
    "lint": encode(LintReply()),
    "units": ["blocks.0", "blocks.1", "(root)"],
    "num_params": 10,
    "num_elements": 1000,
    "bytes_unsharded": 4000,
    "bytes_at_rest": 1000,
    "optimizers": 0,
    "policy": [],
    "chosen": None,
    "is_changed": True,
    "first_step": 0,
}
