"""What a panel in the browser and the kernel say to each other: questions and answers, all of them declared here.

The browser opens a comm of the target :data:`TARGET` and asks; the kernel answers, and sends nothing unasked, so that a
panel that nobody sees costs nothing. A message is the ``data`` of a ``comm_msg``: the fields of one of the classes
below, and its ``word``. A question bears a ``number`` of the browser's choice, and its answer bears the same one. Of a
question what has a default may be left out. ``extension/src/protocol.ts`` has the same types for TypeScript, made of
these by ``python -m workbench.panel.generate_protocol``.

=================== =================== =================================================================
question            answer              when
=================== =================== =================================================================
:class:`Hello`      :class:`Welcome`    at once; the first question of a comm, before which all are refused
:class:`GetState`       :class:`State`      at once, or with ``wait`` when there is something new
:class:`FindModels` :class:`Models`     at once
:class:`PreviewCommand`        :class:`Preview`    at once; nothing is changed
:class:`FindParams` :class:`Params`     at once
:class:`FormatCommand`      :class:`CommandLine`       at once: the line of a command, to copy
:class:`RunCommand`         :class:`CommandOutput`       when it is done; what takes long goes on in the background
:class:`GetHistory`     :class:`CommandHistory`   at once
any of them         :class:`Refused`    it cannot be read, or is of another version
=================== =================== =================================================================

A command is one of the words of ``%fsdp``, as plain data: ``{"word": "shard", "model": "model", "wrap": ["Block"]}``.
Every answer holds plain text: a panel shows it as text and never as HTML.

The dashboard is a comm of its own, of the target :data:`DASHBOARD_TARGET`: see :mod:`workbench.panel.dashboard_comm`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from workbench.codec import NotFinite
from workbench.live.dashboard_messages import BreakpointState
from workbench.protocol.rank_messages import ModelInfo
from workbench.reports.results import PastCommand
from workbench.reports.stop_positions import State as Health
from workbench.session.snapshot import Exchange, LastResult

TARGET = "workbench.panel"
"""Name of the comm target."""

DASHBOARD_TARGET = "workbench.dashboard"
"""Name of the comm target of a dashboard."""

VERSION = 2
"""Of this protocol. It changes with every change that a panel of before could not read; both sides say theirs."""

COMMAND = {"typescript": "Command"}
"""Of a field that holds a command as plain data: how TypeScript calls its type."""


# ---- questions


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


# ---- answers


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Who answers.

    Attributes:
        number: of the question.
        version: the kernel's :data:`VERSION`.
        workbench: version of the Python package.
        problem: a sentence with both versions and what to do, if they do not fit: all further questions are refused
            then. Empty: they fit.
    """

    word: ClassVar[str] = "welcome"
    number: int
    version: int
    workbench: str
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A question that has no answer.

    Attributes:
        number: of the question; -1 if it has none that can be read.
        text: why, a sentence.
    """

    word: ClassVar[str] = "refused"
    number: int
    text: str


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


Question = Hello | GetState | FindModels | PreviewCommand | FindParams | FormatCommand | RunCommand | GetHistory
Answer = Welcome | State | Models | Preview | Params | CommandLine | CommandOutput | CommandHistory | Refused
