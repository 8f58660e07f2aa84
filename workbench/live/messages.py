"""All messages between a browser and the kernel: questions of the browser, and the answers.

The browser asks; the kernel answers and sends nothing unasked, so what nobody sees costs nothing. A message is plain
data with the fields of one of the classes below and its ``word``. Fields with a default may be left out of a question.
A malformed question is answered with :class:`Refused`.

A browser opens a comm of the target :data:`TARGET`, whose first question is :class:`Hello`. On it a *panel* asks about
the cluster and runs commands, and *views* of a dashboard ask what they draw. The dashboard as a widget sends the
questions of views over the widget's own comm. The answer bears the ``number`` that the browser chose for the question.
A question of a view names the ``view``, and so does its answer.

Times of views are microseconds from the view's origin, without the time in which ranks were held or idle. Numbers are
in a buffer next to the message, in the order of :data:`workbench.live.packing.COLUMNS`. Answers hold plain text: it is
shown as text and never as HTML. A command is one of the words of ``%fsdp``, as plain data: ``{"word": "shard",
"model": "model", "wrap": ["Block"]}``.

``extension/src/protocol.ts`` has the same types for the front end, made of these by
``python -m workbench.generate_front_end``.

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
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from workbench.codec import NotFinite, decode_named
from workbench.events import Kind, UnitState
from workbench.protocol.rank_messages import ModelInfo
from workbench.reports.results import PastCommand
from workbench.reports.stop_positions import State as Health
from workbench.session.snapshot import Exchange, LastResult

TARGET = "workbench"
"""Name of the comm target."""

VERSION = 3
"""Version of these messages. It changes with every change that an earlier front end could not read."""

COMMAND = {"typescript": "Command"}
"""Metadata of a field that holds a command as plain data: its type in TypeScript."""

Panel = Literal["ranks", "memory", "units", "timeline"]


# ---- questions of a panel


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Who asks. What it has never changes, so that any two versions understand each other this far.

    Attributes:
        number: comes back with the answer.
        version: the browser's :data:`VERSION`.
        extension: version of the JupyterLab extension, such as ``0.2.0``.
    """

    word: ClassVar[str] = "hello"
    number: int
    version: int
    extension: str


@dataclass(frozen=True, kw_only=True)
class GetState:
    """Asks how everything is.

    Attributes:
        number: comes back with the answer.
        wait: answer as soon as something is new, after a second at the latest, and without the units that were told
            before; a new question like this takes the place of the last one. Else: at once, and everything.
    """

    word: ClassVar[str] = "look"
    number: int
    wait: bool = False


@dataclass(frozen=True, kw_only=True)
class FindModels:
    """Asks which models the ranks' cells have made.

    Attributes:
        number: comes back with the answer.
    """

    word: ClassVar[str] = "find models"
    number: int


@dataclass(frozen=True, kw_only=True)
class PreviewCommand:
    """Asks what a command ``shard`` or ``reshard`` would come to, before it is done.

    Attributes:
        number: comes back with the answer.
        command: a command; of a word that cannot be tried the answer says so.
    """

    word: ClassVar[str] = "try"
    number: int
    command: Any = field(metadata=COMMAND)


@dataclass(frozen=True, kw_only=True)
class FindParams:
    """Asks for the parameters of a unit.

    Attributes:
        number: comes back with the answer.
        unit: index of the unit.
    """

    word: ClassVar[str] = "find params"
    number: int
    unit: int


@dataclass(frozen=True, kw_only=True)
class FormatCommand:
    """Asks for the line that one could have typed for a command.

    Attributes:
        number: comes back with the answer.
        command: a command.
    """

    word: ClassVar[str] = "spell"
    number: int
    command: Any = field(metadata=COMMAND)


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Asks for a command to be done, as the line typed into a cell would be.

    Attributes:
        number: comes back with the answer.
        command: a command.
    """

    word: ClassVar[str] = "do"
    number: int
    command: Any = field(metadata=COMMAND)


@dataclass(frozen=True, kw_only=True)
class GetHistory:
    """Asks which commands were done in this notebook.

    Attributes:
        number: comes back with the answer.
    """

    word: ClassVar[str] = "recall"
    number: int


# ---- questions of a view


@dataclass(frozen=True, kw_only=True)
class AskFeed:
    """Asks what is new.

    Attributes:
        view: who asks.
        wait: answer as soon as there is something, or after a while.
    """

    word: ClassVar[str] = "feed"
    view: str = ""
    wait: bool = False


@dataclass(frozen=True, kw_only=True)
class AskAt:
    """Asks for all ranks at a time.

    Attributes:
        view: who asks.
        number: comes back with the answer.
        t_us: the time.
    """

    word: ClassVar[str] = "at"
    view: str = ""
    number: int = 0
    t_us: float | int  # JSON has no float that is whole

    def __post_init__(self) -> None:
        _require_finite(self.t_us)


@dataclass(frozen=True, kw_only=True)
class AskBeside:
    """Asks for all ranks some events after a row.

    Attributes:
        view: who asks.
        number: comes back with the answer.
        rank: whose row it is.
        seq: number of the row.
        by: how many events after it; negative: before it.
    """

    word: ClassVar[str] = "beside"
    view: str = ""
    number: int = 0
    rank: int
    seq: int
    by: int


@dataclass(frozen=True, kw_only=True)
class AskWindow:
    """Asks for all that happened in a part of time.

    Attributes:
        view: who asks.
        number: comes back with the answer.
        from_us: where it begins.
        to_us: where it ends.
    """

    word: ClassVar[str] = "window"
    view: str = ""
    number: int = 0
    from_us: float | int
    to_us: float | int

    def __post_init__(self) -> None:
        _require_finite(self.from_us)
        _require_finite(self.to_us)


@dataclass(frozen=True, kw_only=True)
class RunButton:
    """Asks for what a button says.

    Attributes:
        view: who asks.
        button: its name, one of ``InitialState.buttons``; or ``break on``, ``break off`` or ``break clear``.
        argument: up to the next what ``next`` goes; where ``break`` stops; which breakpoint, by number, is switched or
            taken away; else empty.
    """

    word: ClassVar[str] = "press"
    view: str = ""
    button: str
    argument: str = ""


@dataclass(frozen=True, kw_only=True)
class CloseView:
    """Says that a view is gone.

    Attributes:
        view: which.
    """

    word: ClassVar[str] = "bye"
    view: str = ""


def _require_finite(time_us: float) -> None:
    if not math.isfinite(time_us):
        raise ValueError(f"a time is {time_us}, expected a finite number")


# ---- parts of answers


@dataclass(frozen=True, kw_only=True)
class BreakpointState:
    """A breakpoint.

    Attributes:
        id: its number, which ``break clear``, ``break on`` and ``break off`` take.
        text: as it was written, such as ``all_gather:blocks.2 --rank 1``.
        is_on: whether it stops ranks.
    """

    id: int
    text: str
    is_on: bool


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """What the browser has to know from the beginning.

    Attributes:
        buttons: that the ranks can be told things with.
        panels: to be shown.
        sizes: how far ``next`` can go.
    """

    buttons: tuple[str, ...]
    panels: tuple[Panel, ...]
    sizes: tuple[str, ...] = ()


# ---- answers to a panel


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Who answers.

    Attributes:
        number: of the question.
        version: the kernel's :data:`VERSION`.
        workbench: version of the Python package.
        dashboard: what a view of the dashboard needs from the beginning.
        problem: a sentence with both versions and what to do, if they do not fit: all further questions are refused
            then. Empty: they fit.
    """

    word: ClassVar[str] = "welcome"
    number: int
    version: int
    workbench: str
    dashboard: InitialState
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A question that is malformed, or that cannot be answered; nothing was done.

    Attributes:
        number: of the question; -1: it has none.
        text: why, a sentence.
        view: that asks; empty: it is no question of a view.
    """

    word: ClassVar[str] = "refused"
    number: int
    text: str
    view: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """Whose ranks they are.

    Attributes:
        is_running: whether there are any.
        exchange: word of the command that starts or stops them at this moment, or opens a file: until it has ended,
            others like it are refused. Empty: none.
        waits_for: what a start waits for, in a sentence; empty: it says nothing.
        num_ranks: how many there are, or there would be with ``start`` and no number.
        device: where they were asked to compute: ``auto``, or a kind of device.
        profile: IPython profile that they were started with; empty: none.
        host: machine of the notebook's kernel.
        kernel_pid: its process.
        outlives: whether the ranks' processes were there before: they can be left, and stay.
        held_by: who else commands the ranks, in words; they can be looked at only then. Empty: nobody.
        is_free: whether the notebook that commanded them has let go of them, so that they can be attached here.
        cores: of the machine of the kernel, that ranks started there share.
    """

    is_running: bool
    exchange: Exchange
    waits_for: str
    num_ranks: int
    device: str
    profile: str
    host: str
    kernel_pid: int
    outlives: bool
    held_by: str
    is_free: bool
    cores: int


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank now.

    Attributes:
        rank: which.
        health: what it is doing; ``gone``: its process is; ``no answer``: it is there and has not answered in time.
        where: where it stands, in words, such as ``before all-gather of blocks.2, step 3``; of a rank that is gone, how
            it was lost.
        host: its machine.
        device: such as ``cpu`` or ``cuda:0``.
        pid: of its process.
        num_bytes: live bytes of each memory class, in the order of the classes (``CATEGORIES`` of the dashboard).
        in_use: those bytes together, what pools keep for reuse left out.
        peak_bytes: most bytes in use there were at once.
        peak_bytes_by_class: each class at that moment.
        peak: what the rank was doing then, in words; empty: nothing is recorded.
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
        index: which.
        name: module path relative to its root, ``(root)`` for the root's own; its dots make the tree.
        root: index of the root unit of its model; -1: all its parameters are in other units.
        num_params: parameters (tensors); those in a flat one, not that.
        is_flat: whether they lie in one flat parameter, of the classic API.
        bytes_unsharded: all its parameters in full.
        bytes_at_rest: what each rank keeps of them between steps, padding included.
        bytes_padding: of that what is padding, over the ranks that share one copy together.
        shard_size: ranks that share one copy.
        replicate_size: copies.
        reshard_after_forward: ``true``, ``false``, or the number of ranks that share it from forward to backward.
        compute_dtype: of the all-gather and of forward and backward, such as ``bfloat16``.
        reduce_dtype: of gradients on their way.
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
    """Where the units are on ranks that have them alike.

    Attributes:
        ranks: these ranks.
        states: one digit a unit, in the order of ``State.units``: its number in ``UNIT_STATES`` of the dashboard (0
            sharded, 1 all-gather in flight, 2 unsharded, 3 reducing).
    """

    ranks: tuple[int, ...]
    states: str


@dataclass(frozen=True, kw_only=True)
class RequestState:
    """What the ranks were asked and have not ended.

    Attributes:
        line: such as ``%fsdp step 40``, or ``a cell``.
        is_stopped: whether they stand still inside it.
        stop: where they stand, a sentence; empty: they do not.
        reasons: because of what, such as ``breakpoint 1: all_gather:blocks.2``.
        in_background: whether the notebook is free meanwhile.
        steps_done: steps that all ranks have finished; 0 if it is no ``step``.
        steps_total: steps asked for; 0 if it is no ``step``.
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
    """How training goes.

    Attributes:
        step: number of the newest step that a rank has begun, -1 before the first.
        loss: mean over the ranks, of the newest step that has one.
        loss_step: number of that step, -1 if none has a loss.
        steps_per_s: of the newest step that all ranks have finished, on the slowest of them.
        tokens_per_s: of all ranks together, where they log ``tokens``.
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
        ranks: those that read it.
        error_ns: how far it may be off from where it was found when the two were compared last.
        text: where that was, in words.
    """

    ranks: tuple[int, ...]
    error_ns: int
    text: str


@dataclass(frozen=True, kw_only=True)
class State:
    """How everything is.

    Attributes:
        number: of the question.
        cluster: whose ranks they are.
        ranks: one entry a rank, by number; none when none run.
        clocks: those that are not rank 0's.
        units: of all models that are sharded now, from the top of each; None: as they were told last.
        unit_states: where these units are.
        breakpoints: in the order they were added, but for that of ``step --until``.
        request: what is under way; None: nothing is.
        training: how training goes.
        ended: how the last request ended; None: none has yet.
        is_recorded: whether there is something to draw and to export.
        record: name of the file that is shown; empty: what ranks recorded.
        said: what there is to see, or what to do first, a sentence; empty while ranks train.
    """

    word: ClassVar[str] = "state"
    number: int
    cluster: ClusterState
    ranks: tuple[RankState, ...]
    clocks: tuple[ClockState, ...]
    units: tuple[UnitInfo, ...] | None
    unit_states: tuple[UnitStates, ...]
    breakpoints: tuple[BreakpointState, ...]
    request: RequestState | None
    training: TrainingSummary
    ended: LastResult | None
    is_recorded: bool
    record: str
    said: str


@dataclass(frozen=True, kw_only=True)
class Model(ModelInfo):
    """A model that the ranks' cells have made, as the first rank that has it describes it.

    Attributes:
        ranks: that have it; a model that is not on all of them cannot be sharded.
    """

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models on the ranks.

    Attributes:
        number: of the question.
        models: by name.
        has_step: whether all ranks have a ``train_step``.
        text: why there is none and what to do, a sentence; empty if there is one.
    """

    word: ClassVar[str] = "models"
    number: int
    models: tuple[Model, ...]
    has_step: bool = False
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class RestPreview:
    """What ranks would hold between steps of training with Adam, in bytes.

    Attributes:
        ranks: that hold equally much.
        params: their shards, padding included.
        grads: of the gradients.
        adam: of Adam's state.
    """

    ranks: tuple[int, ...]
    params: int
    grads: int
    adam: int


@dataclass(frozen=True, kw_only=True)
class SentPreview:
    """The collectives of one kind of one training step, on each rank.

    Attributes:
        kind: in words, such as ``all-gather``.
        num_ranks: that take part in each.
        calls: how many.
        num_bytes: their payloads together.
        sent_bytes: what one rank sends for them, on a ring.
    """

    kind: str
    num_ranks: int
    calls: int
    num_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a command would come to; nothing was done.

    Attributes:
        number: of the question.
        line: what one could have typed.
        problem: why it cannot be done, a sentence; all that follows is empty then. Empty: it can.
        units: names of the units that there would be, ``(root)`` for the root's own.
        bytes_unsharded: of the whole model.
        bytes_ignored: of those of its parameters that would be in no unit, which each rank keeps in full.
        at_rest: what each rank would hold, those parameters included; of gradients and Adam's state what units have.
        sent: the collectives of one step of one forward and one backward.
        sent_bytes: what one rank sends for all of them.
    """

    word: ClassVar[str] = "preview"
    number: int
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
        fqn: name relative to the root of its model, which ``inspect`` takes.
        shape: in elements, whole.
        dtype: such as ``float32``.
        bytes_unsharded: in full.
        bytes_at_rest: what each rank keeps of it, padding included; of one in a flat parameter, the most that one does.
        rows_per_rank: rows of its shard dim that each of the ranks that share it holds; of one in a flat parameter,
            elements.
        is_trainable: whether it takes a gradient.
        flat: name of the flat parameter that it lies in; empty: none.
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
class Params:
    """The parameters of a unit.

    Attributes:
        number: of the question.
        unit: index of the unit.
        params: in its order, a flat one before those that lie in it; none if there is no such unit any more.
    """

    word: ClassVar[str] = "params"
    number: int
    unit: int
    params: tuple[ParamInfo, ...]


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command as a line.

    Attributes:
        number: of the question.
        line: what one could have typed, such as ``%fsdp shard model --wrap Block``.
    """

    word: ClassVar[str] = "line"
    number: int
    line: str


@dataclass(frozen=True, kw_only=True)
class CommandOutput:
    """What a command said.

    Attributes:
        number: of the question.
        line: what one could have typed; it is in the history of commands.
        text: what came of it, or its error; the first line says it in one sentence.
        is_error: whether it failed.
        data: by MIME type what a cell would show of it: a figure, a table; none if it failed or there is only the text.
    """

    word: ClassVar[str] = "said"
    number: int
    line: str
    text: str
    is_error: bool
    data: Any


@dataclass(frozen=True, kw_only=True)
class CommandHistory:
    """The commands of this notebook; ``%fsdp history`` shows the same.

    Attributes:
        number: of the question.
        commands: the oldest first.
    """

    word: ClassVar[str] = "recalled"
    number: int
    commands: tuple[PastCommand, ...]


# ---- answers to a view


@dataclass(frozen=True, kw_only=True)
class RankHealth:
    """Ranks that are alike now.

    Attributes:
        label: which, in words.
        ranks: which.
        state: what they are doing.
        where: before what they are held; empty: they are not.
    """

    label: str
    ranks: tuple[int, ...]
    state: Health
    where: str


@dataclass(frozen=True, kw_only=True)
class RanksAt:
    """Ranks that were alike at a moment.

    Attributes:
        ranks: which.
        label: which, in words.
        doing: what they did last.
        units: state of each unit, by number.
        bytes: live bytes of each class, in the order of ``CATEGORIES``.
        in_use: these together, what is kept for reuse left out.
    """

    ranks: tuple[int, ...]
    label: str
    doing: str
    units: tuple[UnitState, ...]
    bytes: tuple[int, ...]
    in_use: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """All ranks at a moment.

    Attributes:
        t_us: when.
        rank: whose last event it is named after.
        seq: number of that event's row.
        step: in which it was, -1: in none.
        event: what it was, in words.
        ranks: all ranks, alike ones together.
    """

    t_us: float
    rank: int
    seq: int
    step: int
    event: str
    ranks: tuple[RanksAt, ...]


@dataclass(frozen=True, kw_only=True)
class PeakInfo:
    """The highest peak of memory so far of a group of ranks.

    Attributes:
        num_bytes: in use then.
        t_us: when.
        step: in which; -1: in none.
        text: what was going on, in words.
    """

    num_bytes: int
    t_us: float
    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class MovedCursor:
    """Where ``%fsdp back`` has put the cursor.

    Attributes:
        t_us: when that is.
        moment: all ranks there; None: nothing is recorded.
    """

    t_us: float
    moment: Moment | None


@dataclass(frozen=True, kw_only=True)
class OpenSpan:
    """Something that has begun and not ended.

    Attributes:
        track: number of its track.
        kind: of what.
        unit: -1: none.
        start: when it began.
        bytes: that it moves.
    """

    track: int
    kind: Kind
    unit: int
    start: float
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many entries each table in the buffer has.

    Attributes:
        spans, memory, states, steps: of this table.
    """

    spans: int
    memory: int
    states: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What the ranks do, in a word, and why.

    Attributes:
        word: ``empty``: nothing is recorded yet; ``over``: there are no ranks any more, and this is what they recorded.
        why: in words; empty: there is no more to say.
        can_go_on: whether the notebook knows of the stop, and ranks can be let go on; it learns of it after they stand.
    """

    word: Literal["training", "stuck", "stopped", "idle", "over", "dead", "empty"]
    why: str
    can_go_on: bool = False


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What some steps cost.

    Attributes:
        num_steps: how many.
        ms: of a step, in milliseconds, the median.
        exposed: share of it in which compute waited, the median.
        peak_bytes: most bytes in use in the last few of them.
    """

    num_steps: int
    ms: float
    exposed: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class KnobEffect:
    """What the last turn of a knob has changed.

    Attributes:
        what: was turned, in words.
        at_step: the first step after it.
        before: the last steps before it.
        after: the last steps since.
    """

    what: str
    at_step: int
    before: Costs
    after: Costs


@dataclass(frozen=True, kw_only=True)
class FeedUpdate:
    """What a view does not know yet. Its buffer has all tables.

    Attributes:
        view: whom it is for.
        restart: forget what was told before, but for the steps.
        another: these are other ranks than before: forget the steps as well.
        exact: every change is told, not extremes alone.
        groups: ranks, alike ones together; the first is drawn for all.
        tracks: the ranks with tracks in the timeline.
        open: what has not ended, in place of what was said to be so before.
        counts: of the tables.
        begin_us: where the record begins that the kernel has; negative where that is before the first step.
        health: how the ranks are, alike ones together; none without ranks.
        breakpoints: in the order they were added, but for that of ``step --until``.
        status: what they do, in a word, and why.
        whose: whose ranks these are, in words.
        said: a sentence about what there is to see; empty while ranks train.
        clock: whose times the timeline has, and whose the other panels; empty where there is one clock.
        units: names of the units, by number, if there are others than before.
        order: numbers of those that were not undone, from the top, together with ``units``.
        holds: where ranks were held or idle and for how long, ``[[at, length], ...]``, if there are others than before.
        now: all ranks at the newest event, if it is another one.
        peaks: of each group, if anything was recorded.
        late: which rank the others wait for in the newest finished step, in words; empty: none; None: no step has
            finished since the last time.
        change: what the last turn of a knob has changed, if that is known and new.
        has_moved: the cursor of ``%fsdp back`` is elsewhere than before.
        cursor: where it is then; None: at the newest event.
    """

    word: ClassVar[str] = "feed"
    view: str = ""
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
class MomentReply:
    """All ranks at a moment that was asked for.

    Attributes:
        view: whom it is for.
        number: of the question.
        moment: None: nothing is recorded there.
    """

    word: ClassVar[str] = "moment"
    view: str = ""
    number: int
    moment: Moment | None


@dataclass(frozen=True, kw_only=True)
class WindowDetail:
    """What happened in a part of time. Its buffer has all tables; there are no steps in it.

    Attributes:
        view: whom it is for.
        number: of the question.
        from_us, to_us: as it was asked.
        exact: every change is told, not extremes alone.
        counts: of the tables.
    """

    word: ClassVar[str] = "window"
    view: str = ""
    number: int
    from_us: float
    to_us: float
    exact: bool
    counts: Counts


@dataclass(frozen=True, kw_only=True)
class ButtonResult:
    """What came of a button.

    Attributes:
        view: whom it is for.
        button: its name.
        text: a line; empty: what came of it is seen.
    """

    word: ClassVar[str] = "pressed"
    view: str = ""
    button: str
    text: str


PanelQuestion = Hello | GetState | FindModels | PreviewCommand | FindParams | FormatCommand | RunCommand | GetHistory
PanelAnswer = Welcome | State | Models | Preview | Params | CommandLine | CommandOutput | CommandHistory | Refused
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
