"""All messages between a browser and the kernel: questions of the browser, and the answers.

The browser asks and the kernel only answers, so a page that is out of sight costs nothing. A message is plain
data with the fields of one of the classes below and its ``word``. Fields with a default may be left out of a question.
A malformed question is answered with :class:`Refused`.

A browser opens a comm of the target :data:`TARGET`, whose first question is :class:`Hello`. On it a *panel* asks about
the cluster and runs commands, and *views* of a dashboard ask what they draw. The dashboard as a widget sends the
questions of views over the widget's own comm. An answer has the ``number`` or the ``view`` of its question.

Times of views are microseconds from the view's origin, without the time in which ranks were held or idle. Numbers are
in a buffer next to the message, in the order of :data:`workbench.live.packing.COLUMNS`. Text is plain and is never
shown as HTML. A command is plain data: ``{"word": "shard", "model": "model", "wrap": ["Block"]}``.

``extension/src/protocol.ts`` has the same types for the front end, made of these by
``python -m workbench.cli.generate_front_end``.

======================  =======================  ===============================================================
question                answer                   when
======================  =======================  ===============================================================
:class:`Hello`          :class:`Welcome`         at once; the first question of a comm
:class:`GetState`       :class:`State`           at once, or with ``wait`` as soon as there is something new
:class:`FindModels`     :class:`Models`          at once
:class:`PreviewCommand` :class:`Preview`         at once; nothing is changed
:class:`FindParams`     :class:`Params`          at once
:class:`FormatCommand`  :class:`CommandLine`     at once: the line of a command, to copy
:class:`RunCommand`     :class:`CommandOutput`   when it has finished; what takes long continues in the background
:class:`GetHistory`     :class:`CommandHistory`  at once
:class:`GetOutput`      :class:`OutputTail`      at once
:class:`AskFeed`        :class:`FeedUpdate`      at once, or with ``wait`` as soon as there is something new
:class:`AskAt`          :class:`MomentReply`     at once
:class:`AskBeside`      :class:`MomentReply`     at once
:class:`AskWindow`      :class:`WindowDetail`    at once
:class:`RunButton`      :class:`ButtonResult`    when the command has finished
:class:`CloseView`      none                     the view is gone
any of them             :class:`Refused`         the question is malformed or cannot be answered
======================  =======================  ===============================================================
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from workbench.base.codec import NotFinite, decode_named
from workbench.events import Kind, UnitState
from workbench.protocol.rank_messages import ModelInfo
from workbench.replay.shards import AtRest
from workbench.reports.history_report import PastCommand
from workbench.reports.output_report import OutputLine
from workbench.reports.stop_positions import State as Health
from workbench.session.snapshot import Exchange, LastResult

TARGET = "workbench"
"""Name of the comm target."""

VERSION = 3
"""Version of these messages. It changes with every change that an earlier front end could not read."""

OUTPUT_LINES = 500
"""Maximum number of lines of what ranks printed in an answer."""

COMMAND = {"typescript": "Command"}
"""Metadata of a field that holds a command as plain data: its type in TypeScript."""

LINE = {"typescript": "Command | string"}
"""Metadata of a field that holds a command as plain data, or the text of its line behind ``%fsdp``."""

Panel = Literal["ranks", "memory", "units", "timeline"]


@dataclass(frozen=True, kw_only=True)
class PanelMessage:
    """A message of a panel.

    Attributes:
        number: chosen by the browser for its question; the answer has the same.
    """

    number: int


@dataclass(frozen=True, kw_only=True)
class ViewMessage:
    """A message of one view of a dashboard.

    Attributes:
        view: name of the view, chosen by the browser.
    """

    view: str = ""


@dataclass(frozen=True, kw_only=True)
class TraceMessage(ViewMessage):
    """A question of a view about a part of the trace, or its answer.

    Attributes:
        number: chosen by the browser for its question; the answer has the same.
    """

    number: int = 0


# ---- questions of a panel


@dataclass(frozen=True, kw_only=True)
class Hello(PanelMessage):
    """The first question, with the browser's versions. Its fields never change, so that any two versions can read it.

    Attributes:
        version: the browser's :data:`VERSION`.
        extension: version of the JupyterLab extension, such as ``0.2.0``.
    """

    word: ClassVar[str] = "hello"
    version: int
    extension: str


@dataclass(frozen=True, kw_only=True)
class GetState(PanelMessage):
    """Asks for the state of the cluster.

    Attributes:
        wait: answer when something is new, after a second at the latest, and leave out units that were sent before; the
            question replaces an earlier one that still waits. False: answer at once with everything.
    """

    word: ClassVar[str] = "look"
    wait: bool = False


@dataclass(frozen=True, kw_only=True)
class FindModels(PanelMessage):
    """Asks which models cells have created on the ranks."""

    word: ClassVar[str] = "find models"


@dataclass(frozen=True, kw_only=True)
class PreviewCommand(PanelMessage):
    """Asks for the result of a ``shard`` or ``reshard`` before it runs.

    Attributes:
        command: the command; the answer says so if it has no preview.
    """

    word: ClassVar[str] = "try"
    command: Any = field(metadata=COMMAND)


@dataclass(frozen=True, kw_only=True)
class FindParams(PanelMessage):
    """Asks for the parameters of a unit.

    Attributes:
        unit: index of the unit.
    """

    word: ClassVar[str] = "find params"
    unit: int


@dataclass(frozen=True, kw_only=True)
class FormatCommand(PanelMessage):
    """Asks for the ``%fsdp`` line of a command.

    Attributes:
        command: a command, or the text of its line.
    """

    word: ClassVar[str] = "spell"
    command: Any = field(metadata=LINE)


@dataclass(frozen=True, kw_only=True)
class RunCommand(PanelMessage):
    """Asks to run a command, as its line in a cell would.

    Attributes:
        command: a command, or the text of its line.
    """

    word: ClassVar[str] = "do"
    command: Any = field(metadata=LINE)


@dataclass(frozen=True, kw_only=True)
class GetHistory(PanelMessage):
    """Asks for the commands that this notebook has run."""

    word: ClassVar[str] = "recall"


@dataclass(frozen=True, kw_only=True)
class GetOutput(PanelMessage):
    """Asks for the newest lines that ranks printed.

    Attributes:
        rank: whose lines; None: those of all ranks.
    """

    word: ClassVar[str] = "output"
    rank: int | None = None


# ---- questions of a view


@dataclass(frozen=True, kw_only=True)
class AskFeed(ViewMessage):
    """Asks for new data.

    Attributes:
        wait: answer when there is some, or after a while. False: answer at once.
    """

    word: ClassVar[str] = "feed"
    wait: bool = False


@dataclass(frozen=True, kw_only=True)
class AskAt(TraceMessage):
    """Asks for the state of all ranks at a time.

    Attributes:
        t_us: the time.
    """

    word: ClassVar[str] = "at"
    t_us: float | int  # JSON has no float that is whole

    def __post_init__(self) -> None:
        _require_finite(self.t_us)


@dataclass(frozen=True, kw_only=True)
class AskBeside(TraceMessage):
    """Asks for the state of all ranks some events after a row.

    Attributes:
        rank: the rank of the row.
        seq: number of the row.
        by: number of events after the row; negative: before it.
    """

    word: ClassVar[str] = "beside"
    rank: int
    seq: int
    by: int


@dataclass(frozen=True, kw_only=True)
class AskWindow(TraceMessage):
    """Asks for everything that happened in a time window.

    Attributes:
        from_us: begin of the window.
        to_us: end of the window.
    """

    word: ClassVar[str] = "window"
    from_us: float | int
    to_us: float | int

    def __post_init__(self) -> None:
        _require_finite(self.from_us)
        _require_finite(self.to_us)


@dataclass(frozen=True, kw_only=True)
class RunButton(ViewMessage):
    """Asks to run the command of a button.

    Attributes:
        button: one of ``InitialState.buttons``, or ``break on``, ``break off`` or ``break clear``.
        argument: what ``next`` stops at, the condition of ``break``, or the number of the breakpoint; otherwise empty.
    """

    word: ClassVar[str] = "press"
    button: str
    argument: str = ""


@dataclass(frozen=True, kw_only=True)
class CloseView(ViewMessage):
    """Reports that a view was closed."""

    word: ClassVar[str] = "bye"


def _require_finite(time_us: float) -> None:
    if not math.isfinite(time_us):
        raise ValueError(f"a time is {time_us}, expected a finite number")


# ---- parts of answers


@dataclass(frozen=True, kw_only=True)
class BreakpointState:
    """A breakpoint.

    Attributes:
        id: its number, which ``break clear``, ``break on`` and ``break off`` take.
        text: as the user wrote it, such as ``all_gather:blocks.2 --rank 1``.
        is_on: whether it stops ranks.
    """

    id: int
    text: str
    is_on: bool


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """The first message to a dashboard.

    Attributes:
        buttons: names of the buttons.
        panels: panels to show.
        sizes: what ``next`` can stop at.
        faults: what ``fault`` can inject.
    """

    buttons: tuple[str, ...]
    panels: tuple[Panel, ...]
    sizes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


# ---- answers to a panel


@dataclass(frozen=True, kw_only=True)
class Welcome(PanelMessage):
    """Answer to :class:`Hello`.

    Attributes:
        version: the kernel's :data:`VERSION`.
        workbench: version of the Python package.
        dashboard: what a dashboard needs when it opens.
        problem: a sentence with both versions and what to do if they do not match; all further questions are refused
            then. Empty: they match.
    """

    word: ClassVar[str] = "welcome"
    version: int
    workbench: str
    dashboard: InitialState
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Answer to a question that is malformed or cannot be answered; nothing was done.

    Attributes:
        number: of the question; -1: it has none.
        text: the reason, one sentence.
        view: of the question; empty: it has none.
    """

    word: ClassVar[str] = "refused"
    number: int
    text: str
    view: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """The cluster: its ranks, how they were started, and who controls them.

    Attributes:
        is_running: whether ranks are running.
        exchange: command that is starting or stopping ranks, or opening a file; another such command is refused until
            it ends. Empty: none.
        waits_for: what a start waits for, one sentence; empty: unknown.
        num_ranks: number of ranks, or of those that ``start`` without a number would start.
        device: requested device: ``auto``, or a kind of device.
        profile: IPython profile that they were started with; empty: none.
        host: host of the notebook's kernel.
        kernel_pid: process id of the kernel.
        outlives: whether the rank processes existed before; ``detach`` leaves them running.
        held_by: name of another controller of the ranks, which can only be viewed here then; empty: none.
        is_free: whether their notebook has released the ranks, so that they can be attached here.
        one_job: launcher that starts and ends all ranks as one job, so that ``heal`` cannot replace one; empty: it can.
        cores: cores of the kernel's host, which ranks started there share.
    """

    is_running: bool = False
    exchange: Exchange = ""
    waits_for: str = ""
    num_ranks: int
    device: str
    profile: str
    host: str = field(default_factory=socket.gethostname)
    kernel_pid: int = field(default_factory=os.getpid)
    outlives: bool = False
    held_by: str = ""
    is_free: bool = False
    one_job: str = ""
    cores: int = 1


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank now.

    Attributes:
        rank: number of the rank.
        health: what it is doing; ``gone``: its process has ended; ``no answer``: it did not answer in time.
        where: its position, such as ``before all-gather of blocks.2, step 3``; of a rank that is gone, how it was lost.
        host: its host.
        device: its device, such as ``cpu`` or ``cuda:0``.
        pid: its process id.
        num_bytes: live bytes of each memory class, in the order of the dashboard's ``CATEGORIES``.
        in_use: sum of those bytes without what pools keep for reuse.
        peak_bytes: highest number of bytes in use at once.
        peak_bytes_by_class: bytes of each class at the peak.
        peak: what the rank was doing at the peak; empty: nothing is recorded.
    """

    rank: int
    health: Health
    where: str
    host: str
    device: str
    pid: int
    num_bytes: tuple[int, ...]
    in_use: int
    peak_bytes: int
    peak_bytes_by_class: tuple[int, ...]
    peak: str


@dataclass(frozen=True, kw_only=True)
class UnitInfo:
    """One unit of a sharded model: one ``fully_shard`` call, or one wrapper.

    Attributes:
        index: index of the unit.
        name: module path relative to its root, ``(root)`` for the root itself; its dots make the tree.
        root: index of the root unit of its model; -1: all parameters of the root are in other units.
        num_params: number of parameter tensors; of a flat parameter, of those inside it.
        is_flat: whether it has one flat parameter (classic API).
        bytes_unsharded: bytes of its full parameters.
        bytes_at_rest: bytes that each rank keeps between steps, padding included.
        bytes_padding: bytes of padding on all ranks of one copy.
        shard_size: number of ranks that share one copy.
        replicate_size: number of copies.
        reshard_after_forward: ``true``, ``false``, or the number of ranks that share it between forward and backward.
        compute_dtype: dtype of the all-gather, forward and backward, such as ``bfloat16``.
        reduce_dtype: dtype of the gradient reduction.
        offload: whether its shards stay in host memory between uses.
    """

    index: int
    name: str
    root: int
    num_params: int
    is_flat: bool
    bytes_unsharded: int
    bytes_at_rest: int
    bytes_padding: int
    shard_size: int
    replicate_size: int
    reshard_after_forward: str
    compute_dtype: str
    reduce_dtype: str
    offload: bool


@dataclass(frozen=True, kw_only=True)
class UnitStates:
    """The states of all units on some ranks that agree.

    Attributes:
        ranks: the ranks.
        states: one digit per unit, in the order of ``State.units``: 0 sharded, 1 all-gather in flight, 2 unsharded,
            3 reducing, as in the dashboard's ``UNIT_STATES``.
    """

    ranks: tuple[int, ...]
    states: str


@dataclass(frozen=True, kw_only=True)
class RequestState:
    """The request that the ranks are running.

    Attributes:
        line: its line, such as ``%fsdp step 40``, or ``a cell``.
        is_stopped: whether the ranks are stopped in it.
        stop: where they are stopped, one sentence; empty: they are not.
        reasons: why they are stopped, such as ``breakpoint 1: all_gather:blocks.2``.
        in_background: whether the notebook is free meanwhile.
        steps_done: steps that all ranks have finished; 0 if it is not a ``step``.
        steps_total: requested steps; 0 if it is not a ``step``.
    """

    line: str
    is_stopped: bool
    stop: str
    reasons: tuple[str, ...]
    in_background: bool
    steps_done: int
    steps_total: int


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """Progress of training.

    Attributes:
        step: number of the newest step that a rank has begun; -1: none has.
        loss: mean over the ranks, of the newest step with a loss.
        loss_step: number of that step; -1: none has a loss.
        steps_per_s: of the newest step that all ranks have finished, on the slowest rank.
        tokens_per_s: of all ranks together, if they log ``tokens``.
    """

    step: int = -1
    loss: float | NotFinite | None = None
    loss_step: int = -1
    steps_per_s: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ClockState:
    """A clock that is not rank 0's.

    Attributes:
        ranks: ranks that read it.
        error_ns: limit of the error of its offset since the last comparison.
        text: its offset and error.
    """

    ranks: tuple[int, ...]
    error_ns: int
    text: str


@dataclass(frozen=True, kw_only=True)
class State(PanelMessage):
    """Answer to :class:`GetState`: everything that a panel shows.

    Attributes:
        cluster: the cluster.
        ranks: the ranks, by number; empty if none are running.
        clocks: the clocks other than rank 0's.
        units: units of all sharded models, from the top of each; None: unchanged.
        unit_states: states of these units.
        breakpoints: in the order they were added, without that of ``step --until``.
        request: the running request; None: there is none.
        training: progress of training.
        ended: how the last request ended; None: none has yet.
        output: version of what the ranks printed; if it changes, there are new lines.
        is_recorded: whether there is something to draw and to export.
        record: name of the open trace file; empty: the ranks' own record.
        said: what is shown, or what to do first, one sentence; empty while ranks train.
        fault: name of the fault that is injected, ``random`` while it is hidden; empty: none is.
    """

    word: ClassVar[str] = "state"
    cluster: ClusterState
    ranks: tuple[RankState, ...]
    clocks: tuple[ClockState, ...]
    units: tuple[UnitInfo, ...] | None
    unit_states: tuple[UnitStates, ...]
    breakpoints: tuple[BreakpointState, ...]
    request: RequestState | None
    training: TrainingSummary
    ended: LastResult | None
    output: int
    is_recorded: bool
    record: str
    said: str
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class Model(ModelInfo):
    """A model that cells have created, as described by the first rank that has it.

    Attributes:
        ranks: ranks that have it; a model that is not on all ranks cannot be sharded.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Models(PanelMessage):
    """The models on the ranks.

    Attributes:
        models: the models, by name.
        has_step: whether all ranks have a ``train_step``.
        text: why there is no model and what to do, one sentence; empty if there is one.
    """

    word: ClassVar[str] = "models"
    models: tuple[Model, ...]
    has_step: bool = False
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class RestPreview(AtRest):
    """Bytes that ranks would hold between training steps with Adam.

    Attributes:
        ranks: ranks that would hold the same.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SentPreview:
    """The collectives of one kind in one training step, on each rank.

    Attributes:
        kind: such as ``all-gather``.
        num_ranks: number of ranks in each.
        calls: number of collectives.
        num_bytes: sum of their payloads.
        sent_bytes: bytes that one rank sends for them on a ring.
    """

    kind: str
    num_ranks: int
    calls: int
    num_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class Preview(PanelMessage):
    """The result that a command would have; nothing was done.

    Attributes:
        line: its ``%fsdp`` line.
        problem: why it would fail, one sentence, and the other fields are empty. Empty: it would not.
        units: names of the units, ``(root)`` for the root itself.
        bytes_unsharded: bytes of the whole model.
        bytes_ignored: bytes of parameters in no unit, which each rank keeps in full.
        at_rest: bytes that each rank would hold; those parameters count, their gradients and Adam's state do not.
        sent: the collectives of a step with one forward and one backward.
        sent_bytes: bytes that one rank sends for all of them.
    """

    word: ClassVar[str] = "preview"
    line: str
    problem: str = ""
    units: tuple[str, ...] = ()
    bytes_unsharded: int = 0
    bytes_ignored: int = 0
    at_rest: tuple[RestPreview, ...] = ()
    sent: tuple[SentPreview, ...] = ()
    sent_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """A parameter of a unit.

    Attributes:
        fqn: name relative to the root of its model; ``inspect`` takes it.
        shape: of the full parameter.
        dtype: such as ``float32``.
        bytes_unsharded: bytes of the full parameter.
        bytes_at_rest: bytes that each rank keeps, padding included; in a flat parameter, the largest of any rank.
        rows_per_rank: rows of its shard dim on each shard rank; in a flat parameter, elements.
        is_trainable: whether it requires a gradient.
        flat: name of the flat parameter that contains it; empty: none.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    bytes_unsharded: int
    bytes_at_rest: int
    rows_per_rank: tuple[int, ...]
    is_trainable: bool
    flat: str = ""


@dataclass(frozen=True, kw_only=True)
class Params(PanelMessage):
    """The parameters of a unit.

    Attributes:
        unit: index of the unit.
        params: in the unit's order, a flat parameter before those inside it; empty if the unit no longer exists.
    """

    word: ClassVar[str] = "params"
    unit: int
    params: tuple[ParamInfo, ...]


@dataclass(frozen=True, kw_only=True)
class CommandLine(PanelMessage):
    """A command as a line.

    Attributes:
        line: such as ``%fsdp shard model --wrap Block``.
    """

    word: ClassVar[str] = "line"
    line: str


@dataclass(frozen=True, kw_only=True)
class CommandOutput(PanelMessage):
    """The output of a command.

    Attributes:
        line: its ``%fsdp`` line, as in the history.
        text: its result or error; the first line is a summary.
        is_error: whether it failed.
        data: its figure or table, by MIME type, as a cell shows it; empty if it failed or has only text.
    """

    word: ClassVar[str] = "said"
    line: str
    text: str
    is_error: bool
    data: Any


@dataclass(frozen=True, kw_only=True)
class CommandHistory(PanelMessage):
    """The commands of this notebook; ``%fsdp history`` shows the same.

    Attributes:
        commands: the commands, oldest first.
    """

    word: ClassVar[str] = "recalled"
    commands: tuple[PastCommand, ...]


@dataclass(frozen=True, kw_only=True)
class OutputTail(PanelMessage):
    """The newest lines that ranks printed; ``%fsdp output`` shows the same.

    Attributes:
        lines: at most :data:`OUTPUT_LINES`, the oldest first.
        is_cut: whether there are older lines.
    """

    word: ClassVar[str] = "lines"
    lines: tuple[OutputLine, ...]
    is_cut: bool


# ---- answers to a view


@dataclass(frozen=True, kw_only=True)
class RankHealth:
    """Ranks in the same state now.

    Attributes:
        label: the ranks as text, such as ``ranks 0-2``.
        ranks: the ranks.
        state: what they are doing.
        where: the event before which they are stopped; empty: they are not.
    """

    label: str
    ranks: tuple[int, ...]
    state: Health
    where: str


@dataclass(frozen=True, kw_only=True)
class RanksAt:
    """Ranks in the same state at a time.

    Attributes:
        ranks: the ranks.
        label: the ranks as text.
        doing: their last event.
        units: state of each unit, by index.
        bytes: live bytes of each class, in the order of ``CATEGORIES``.
        in_use: sum of these without what pools keep for reuse.
    """

    ranks: tuple[int, ...]
    label: str
    doing: str
    units: tuple[UnitState, ...]
    bytes: tuple[int, ...]
    in_use: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of all ranks at a time.

    Attributes:
        t_us: the time.
        rank: rank of the last event.
        seq: number of that event's row.
        step: its step; -1: none.
        event: the event as text.
        ranks: all ranks, in groups of the same state.
    """

    t_us: float
    rank: int
    seq: int
    step: int
    event: str
    ranks: tuple[RanksAt, ...]


@dataclass(frozen=True, kw_only=True)
class PeakInfo:
    """The highest memory peak so far of a group of ranks.

    Attributes:
        num_bytes: bytes in use.
        t_us: the time.
        step: its step; -1: none.
        text: what the rank was doing.
    """

    num_bytes: int
    t_us: float
    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class MovedCursor:
    """The cursor's position set by ``%fsdp back``.

    Attributes:
        t_us: its time.
        moment: the state of all ranks there; None: nothing is recorded.
    """

    t_us: float
    moment: Moment | None


@dataclass(frozen=True, kw_only=True)
class OpenSpan:
    """A span that has begun and not ended.

    Attributes:
        track: number of its track.
        kind: its kind.
        unit: index of its unit; -1: none.
        start: its begin.
        bytes: its payload.
    """

    track: int
    kind: Kind
    unit: int
    start: float
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Number of entries of each table in the buffer.

    Attributes:
        spans, memory, states, steps: entries of this table.
    """

    spans: int
    memory: int
    states: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of the run.

    Attributes:
        word: the status; ``empty``: nothing is recorded yet; ``over``: no ranks are running, and their record is shown.
        why: the reason; empty: there is none.
        can_go_on: whether ``continue`` works; a notebook learns of a stop a moment after the ranks have stopped.
        fault: name of the fault that is injected, ``random`` while it is hidden; empty: none is.
    """

    word: Literal["training", "stuck", "stopped", "idle", "recorded", "over", "dead", "empty"]
    why: str
    can_go_on: bool = False
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Time and memory of some steps.

    Attributes:
        num_steps: number of steps.
        ms: median time of a step, in milliseconds.
        exposed: median share of a step in which compute waited.
        peak_bytes: peak bytes in use during the last few of them.
    """

    num_steps: int
    ms: float
    exposed: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class KnobEffect:
    """The effect of the last changed setting.

    Attributes:
        what: the change as text.
        at_step: the first step after the change.
        before: the last steps before it.
        after: the last steps since.
    """

    what: str
    at_step: int
    before: Costs
    after: Costs


@dataclass(frozen=True, kw_only=True)
class FeedUpdate(ViewMessage):
    """New data for a view. Its buffer has all tables.

    Attributes:
        restart: drop everything received before, except the steps.
        another: drop the steps as well: the ranks are different ones.
        exact: the tables have every change; otherwise they have only extremes.
        groups: groups of ranks that behave alike; the first of each is drawn.
        tracks: ranks with tracks in the timeline.
        open: spans that have not ended; replaces the last ``open``.
        counts: sizes of the tables.
        begin_us: begin of the kernel's record; negative before the first step.
        health: current state of the ranks, in groups; empty without ranks.
        breakpoints: in the order they were added, without that of ``step --until``.
        status: status of the run.
        whose: which ranks these are, as text.
        said: what is shown, one sentence; empty while ranks train.
        clock: clock of the timeline and clock of the other panels; empty if there is one clock.
        units: names of all units, by index; None: unchanged.
        order: indices of the units still sharded, from the top; comes with ``units``.
        holds: times at which ranks were held or idle, ``[[at, length], ...]``; None: unchanged.
        now: state of all ranks at the newest event; None: unchanged.
        peaks: peak of each group; None: nothing was recorded since.
        late: the rank that waits least in the newest finished step, as text; empty: none; None: no step finished since.
        change: effect of the last changed setting; None: unknown or unchanged.
        has_moved: whether ``%fsdp back`` has moved the cursor.
        cursor: its position then; None: the newest event.
    """

    word: ClassVar[str] = "feed"
    restart: bool
    another: bool
    exact: bool
    groups: tuple[tuple[int, ...], ...]
    tracks: tuple[int, ...]
    open: tuple[OpenSpan, ...]
    counts: Counts
    begin_us: float
    health: tuple[RankHealth, ...]
    breakpoints: tuple[BreakpointState, ...]
    status: RunStatus
    whose: str
    said: str
    clock: tuple[str, ...]
    units: tuple[str, ...] | None = None
    order: tuple[int, ...] | None = None
    holds: tuple[tuple[float, ...], ...] | None = None
    now: Moment | None = None
    peaks: tuple[PeakInfo, ...] | None = None
    late: str | None = None
    change: KnobEffect | None = None
    has_moved: bool = False
    cursor: MovedCursor | None = None


@dataclass(frozen=True, kw_only=True)
class MomentReply(TraceMessage):
    """The state of all ranks at the requested time.

    Attributes:
        moment: the state; None: nothing is recorded there.
    """

    word: ClassVar[str] = "moment"
    moment: Moment | None


@dataclass(frozen=True, kw_only=True)
class WindowDetail(TraceMessage):
    """The events of a time window. Its buffer has all tables, without steps.

    Attributes:
        from_us, to_us: the requested window.
        exact: the tables have every change; otherwise they have only extremes.
        counts: sizes of the tables.
    """

    word: ClassVar[str] = "window"
    from_us: float
    to_us: float
    exact: bool
    counts: Counts


@dataclass(frozen=True, kw_only=True)
class ButtonResult(ViewMessage):
    """The result of a button.

    Attributes:
        button: the button.
        text: the result in one line; empty: the view shows it.
    """

    word: ClassVar[str] = "pressed"
    button: str
    text: str


PanelQuestion = (
    Hello | GetState | FindModels | PreviewCommand | FindParams | FormatCommand | RunCommand | GetHistory | GetOutput
)
PanelAnswer = (
    Welcome | State | Models | Preview | Params | CommandLine | CommandOutput | CommandHistory | OutputTail | Refused
)
ViewQuestion = AskFeed | AskAt | AskBeside | AskWindow | RunButton | CloseView
ViewAnswer = FeedUpdate | MomentReply | WindowDetail | ButtonResult | Refused
Question = PanelQuestion | ViewQuestion
Answer = PanelAnswer | ViewAnswer

QUESTIONS: dict[str, type] = {question.word: question for question in get_args(Question)}
VIEW_QUESTIONS: dict[str, type] = {question.word: question for question in get_args(ViewQuestion)}


def read_question(data: Any, known: dict[str, type] = QUESTIONS) -> Any:  # noqa: ANN401 - any JSON may come
    """Return ``data`` as a question.

    Args:
        data: what the browser sent.
        known: the questions to accept, by word.

    Raises:
        ValueError: ``data`` is none of them, or a field is missing or of another type.
    """
    return decode_named(known, data, "question", fill=True)


def refusal(data: Any, error: Exception) -> Refused:  # noqa: ANN401 - any JSON may come
    """Return the answer to ``data``, which is malformed or was refused with ``error``."""
    sent = data if isinstance(data, dict) else {}
    number, view = sent.get("number"), sent.get("view")
    return Refused(
        number=number if type(number) is int else -1, text=str(error), view=view if isinstance(view, str) else ""
    )
