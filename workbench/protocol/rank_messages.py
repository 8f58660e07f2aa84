"""What a notebook asks a rank at its side door, and what the rank answers: small frozen requests and replies.

The side door is served in a thread of its own, also while the rank is busy: a request looks, sets a flag or leaves
something to be done. ``Pause``, ``Next`` and ``Continue`` are commands of a person that go this way as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from workbench.codec import decode_named
from workbench.events import Edge, Kind, Phase, Unit
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.commands import Continue, Evaluate, Inspect, Next, Pause, RankRequest, Reshard, Shard
from workbench.protocol.inspect_reply import InspectReply
from workbench.protocol.policy import Api, Strategy


@dataclass(frozen=True, order=True)
class StepPosition:
    """Where a rank is in its training: the ``ordinal``-th event of a step. Later places are greater.

    Attributes:
        step: training step, -1 outside.
        ordinal: events of the step before it.
    """

    step: int
    ordinal: int


NOWHERE = StepPosition(-1, -1)
"""Before all places."""


@dataclass(frozen=True, kw_only=True)
class EventInfo:
    """An event of a rank.

    Attributes:
        kind, edge: which it is.
        phase: in which the rank is.
        unit: index of its unit, -1 without.
        since_ns: when it was, or since when the rank is held before it, in nanoseconds of the rank's clock.
    """

    kind: Kind
    edge: Edge
    phase: Phase = Phase.IDLE
    unit: int = -1
    since_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Hold(EventInfo):
    """The event before which a rank is held.

    Attributes:
        place: which event of which step it is.
        num_bytes: its payload.
        breakpoint: number of the breakpoint that holds it; None: something else.
        synchronised: whether the rank waited for its device before.
    """

    place: StepPosition
    num_bytes: int = 0
    breakpoint: int | None = None
    synchronised: bool = False


@dataclass(frozen=True, kw_only=True)
class JobError:
    """What a job raised.

    Attributes:
        ename: class name of the exception.
        evalue: its message.
        traceback: what there is to read of it.
    """

    ename: str
    evalue: str = ""
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class JobReply:
    """How a job ended on one rank.

    Attributes:
        text: its value as text, or what it wrote.
        inspected: what an inspection found.
        error: what it raised; None: nothing.
    """

    text: str = ""
    inspected: InspectReply | None = None
    error: JobError | None = None


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a rank is.

    Attributes:
        rank: which.
        now_ns: what its clock shows.
        doing: word of the command under way, empty between commands.
        commands: how many it has begun.
        place: the event before which it is held, else the one that comes next.
        held: where it is held; None: it is not.
        waiting: whether it waits for other ranks.
        newest: the newest event that it recorded.
        raised_in: index of the unit whose forward raised, until the next forward; -1: none did.
        unfinished: collectives begun and not ended.
        given_up: whether it was told to give up, and has not been joined to the others again since.
        optimizer_steps: since it was started.
        tickets: jobs that have ended and that nobody has asked to forget.
    """

    rank: int = 0
    now_ns: int = 0
    doing: str = ""
    commands: int = 0
    place: StepPosition = NOWHERE
    held: Hold | None = None
    waiting: bool = False
    newest: EventInfo | None = None
    raised_in: int = -1
    unfinished: int = 0
    given_up: bool = False
    optimizer_steps: int = 0
    tickets: dict[str, JobReply] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Locate(RankRequest[Position]):
    """Asks where a rank is."""

    word: ClassVar[str] = "locate"
    looks: ClassVar[bool] = True
    reply: ClassVar[Any] = Position


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One function that is under way.

    Attributes:
        text: such as ``model.py:12 in forward: x = f(x)``.
        number: its place among the user's frames of its thread, 0 the innermost, which ``%fsdp eval --frame`` takes;
            None: it is a library's.
        is_python: whether it is of Python's own library.
    """

    text: str
    number: int | None = None
    is_python: bool = False


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One Python thread of a rank.

    Attributes:
        name: as Python has it.
        is_main: whether it is the main thread.
        frames: innermost first.
    """

    name: str
    is_main: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True)
class Stacks(RankRequest[tuple[Thread, ...]]):
    """Asks what a rank's Python threads run, the main one first."""

    word: ClassVar[str] = "stacks"
    looks: ClassVar[bool] = True
    reply: ClassVar[Any] = tuple[Thread, ...]


@dataclass(frozen=True, kw_only=True)
class CellLine:
    """A line of a cell that is running.

    Attributes:
        line: number in its cell.
        function: name of the function; ``<module>``: the cell itself.
        text: of the line.
    """

    line: int
    function: str
    text: str


@dataclass(frozen=True, kw_only=True)
class LocateLine(RankRequest[CellLine | None]):
    """Asks at which line of a cell the main thread is; None: no code of a cell runs."""

    word: ClassVar[str] = "line"
    looks: ClassVar[bool] = True
    reply: ClassVar[Any] = CellLine | None


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the namespace of one rank holds.

    Attributes:
        modules: variables that are a ``torch.nn.Module``.
        variables: all variables.
        classes: of modules with parameters inside of those modules.
    """

    modules: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ListNames(RankRequest[Names]):
    """Asks what a rank's namespace holds."""

    word: ClassVar[str] = "names"
    looks: ClassVar[bool] = True
    reply: ClassVar[Any] = Names


@dataclass(frozen=True, kw_only=True)
class WrapClass:
    """A class of modules that ``wrap`` may name.

    Attributes:
        name: of the class.
        count: modules of it inside the model.
        num_elements: of the parameters of all of them together, in elements.
    """

    name: str
    count: int
    num_elements: int


@dataclass(frozen=True, kw_only=True)
class ModelPolicy:
    """How a model is sharded, in the words that ``reshard`` takes; for what only the other API has, what is like it.

    Attributes:
        api: what it is sharded with.
        strategy: of the classic API; empty: its units differ, or it has nothing like what there is.
        orig_params: whether optimizers have pieces of the parameters; else, with the classic API, flat ones.
        wrap: classes whose modules are units, the model itself left out.
        mesh: such as ``4``, or ``2x2`` for two copies; empty: its units differ.
        reshard_after_forward: of ``fully_shard``: ``auto``, ``true``, ``false`` or a number; empty: its units differ.
        mp: such as ``bf16,reduce=fp32``, or ``off``; empty: its units differ, or there are no words for it.
        offload: whether shards stay in host memory; None: only those of some units.
        prefetch: units gathered ahead, as a command asked; 0: the engine's own order.
    """

    api: Api
    strategy: Strategy | Literal[""]
    orig_params: bool
    wrap: tuple[str, ...]
    mesh: str
    reshard_after_forward: str | int
    mp: str
    offload: bool | None
    prefetch: int


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A model that a rank's cells have made.

    Attributes:
        name: its variable.
        class_name: of its class.
        is_sharded: whether it is sharded.
        num_params: parameters (tensors).
        num_elements: of all parameters, in elements.
        num_bytes: of all parameters in full.
        classes: that ``wrap`` may name, by the most elements first.
        suggested: those that ``shard`` takes if none is named.
        policy: how it is sharded; None: it is not.
        units: its units, by the numbers that they have in a trace.
    """

    name: str
    class_name: str
    is_sharded: bool
    num_params: int
    num_elements: int
    num_bytes: int
    classes: tuple[WrapClass, ...]
    suggested: tuple[str, ...]
    policy: ModelPolicy | None = None
    units: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ListModels(RankRequest[tuple[ModelInfo, ...]]):
    """Asks which models a rank's cells have made."""

    word: ClassVar[str] = "models"
    looks: ClassVar[bool] = True
    reply: ClassVar[Any] = tuple[ModelInfo, ...]


@dataclass(frozen=True, kw_only=True)
class Plan(RankRequest[tuple[Unit, ...]]):
    """Asks which units a command would make; nothing is changed.

    Attributes:
        command: as it would be done.
    """

    word: ClassVar[str] = "plan"
    looks: ClassVar[bool] = True
    reply: ClassVar[Any] = tuple[Unit, ...]
    command: Shard | Reshard


@dataclass(frozen=True, kw_only=True)
class RecordSummary:
    """What is known of a rank's record.

    Attributes:
        next_seq: number of the first row that is not.
        header_version: of the header that is; 0: none.
    """

    next_seq: int = 0
    header_version: int = 0


@dataclass(frozen=True, kw_only=True)
class DrainReply:
    """What a rank recorded since.

    Attributes:
        rows: packed rows, as :mod:`workbench.trace.row_compression` has them.
        lost: rows that were overwritten before they could be read.
        key_frame, header: as :mod:`workbench.trace.header` writes them; no header: the one that is known holds.
        header_version: of the header that holds.
        position: where the rank is.
    """

    rows: memoryview
    lost: int
    key_frame: Any
    header: Any
    header_version: int
    position: Position


@dataclass(frozen=True, kw_only=True)
class Drain(RankRequest[DrainReply]):
    """Asks for what was recorded since.

    Attributes:
        known: by rank; one request serves all of them, and each finds in it what is known of itself.
    """

    word: ClassVar[str] = "drain"
    looks: ClassVar[bool] = True
    reply: ClassVar[Any] = DrainReply
    known: dict[int, RecordSummary]


@dataclass(frozen=True, kw_only=True)
class GiveUp(RankRequest[None]):
    """Frees a rank from what it does.

    Attributes:
        reason: why, a sentence.
    """

    word: ClassVar[str] = "give up"
    reason: str


@dataclass(frozen=True, kw_only=True)
class Shut(RankRequest[None]):
    """Shuts the sockets of a rank's process groups, to free it from collectives of the user's own.

    Attributes:
        store: shut the connection to the store as well: rank 0, which serves it, is gone, and its host may not say so.
    """

    word: ClassVar[str] = "shut"
    store: bool = False


@dataclass(frozen=True, kw_only=True)
class RunTo(RankRequest[None]):
    """Lets a rank go on and stop at a place, unless it is there or further.

    Attributes:
        place: where to.
    """

    word: ClassVar[str] = "run to"
    place: StepPosition


@dataclass(frozen=True, kw_only=True)
class SetBreakpoints(RankRequest[None]):
    """Gives a rank the breakpoints there are, those of other ranks included, in place of the ones before.

    Attributes:
        breakpoints: in the order they were added.
    """

    word: ClassVar[str] = "breakpoints"
    breakpoints: tuple[Breakpoint, ...]


@dataclass(frozen=True, kw_only=True)
class RunCell:
    """A cell to be run inside the step in which a rank is held.

    Attributes:
        code: as in a notebook.
    """

    word: ClassVar[str] = "cell"
    code: str


@dataclass(frozen=True, kw_only=True)
class Job(RankRequest[bool]):
    """Has a held rank do something in the thread of its step; answered with whether it is held, and so will.

    Attributes:
        ticket: under which the rank's :class:`Position` has how it ended.
        work: what to do.
        ranks: that do it.
        alone: who does it and what to do instead, the end of a sentence of why other ranks cannot be waited for; empty:
            all ranks do it, or it waits for nobody.
    """

    word: ClassVar[str] = "job"
    reply: ClassVar[Any] = bool
    ticket: str
    work: Inspect | Evaluate | RunCell
    ranks: tuple[int, ...] = ()
    alone: str = ""


@dataclass(frozen=True, kw_only=True)
class Forget(RankRequest[None]):
    """Has a rank forget how jobs ended.

    Attributes:
        tickets: of these.
    """

    word: ClassVar[str] = "forget"
    tickets: tuple[str, ...]


REQUESTS: dict[str, type[RankRequest[Any]]] = {
    cls.word: cls
    for cls in (
        *(Locate, Stacks, LocateLine, ListNames, ListModels, Plan, Drain, GiveUp, Shut),
        *(Pause, RunTo, Continue, Next, SetBreakpoints, Job, Forget),
    )
}


def read_request(data: Any) -> RankRequest[Any]:  # noqa: ANN401 - anything may come
    """Return the request that came as ``data``.

    Raises:
        ValueError: it is none.
    """
    request: RankRequest[Any] = decode_named(REQUESTS, data, "request")
    return request
