"""Requests of a notebook on the control channel of a rank, and the replies: small frozen dataclasses.

The rank serves this channel in its own thread, also while it is busy: a request reads state, sets a flag or queues a
job. The user commands ``Pause``, ``Next`` and ``Continue`` are also requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from workbench.base.codec import decode_named
from workbench.events import Edge, Kind, Phase, Unit
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.commands import Continue, Evaluate, Inspect, Next, Pause, RankRequest, Reshard, Shard, request
from workbench.protocol.inspect_reply import InspectReply
from workbench.protocol.policy import ModelPolicy


@dataclass(frozen=True, order=True)
class StepPosition:
    """A position in training: before the ``ordinal``-th event of a step. Later positions are greater.

    Attributes:
        step: training step, -1 outside.
        ordinal: number of earlier events in the step.
    """

    step: int
    ordinal: int


NOWHERE = StepPosition(-1, -1)
"""The position before all others."""


@dataclass(frozen=True, kw_only=True)
class EventInfo:
    """An event of a rank.

    Attributes:
        kind, edge: its kind and edge.
        phase: phase of the rank.
        unit: index of its unit, -1 without.
        since_ns: its time, or the time since which the rank is held before it, in nanoseconds of the rank's clock.
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
        place: its position.
        num_bytes: its payload.
        breakpoint: number of the breakpoint that holds the rank; None: no breakpoint does.
        because: the values of gradients that its condition met, as text.
        synchronised: whether the rank synchronised its device first.
    """

    place: StepPosition
    num_bytes: int = 0
    breakpoint: int | None = None
    because: str = ""
    synchronised: bool = False


@dataclass(frozen=True, kw_only=True)
class JobError:
    """The exception of a job.

    Attributes:
        ename: class name of the exception.
        evalue: its message.
        traceback: the text to show.
    """

    ename: str
    evalue: str = ""
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class JobReply:
    """Result of a job on one rank.

    Attributes:
        text: its value as text, or its output.
        inspected: result of an inspection.
        error: its exception; None: it succeeded.
    """

    text: str = ""
    inspected: InspectReply | None = None
    error: JobError | None = None


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a rank is.

    Attributes:
        rank: the rank.
        now_ns: time of its clock.
        doing: word of the current command, empty between commands.
        commands: number of commands it has begun.
        place: position of the event before which it is held, else of the next event.
        held: the event before which it is held; None: it is not held.
        waiting: whether it waits for other ranks.
        newest: the newest event that it recorded.
        raised_in: index of the unit whose forward raised, until the next forward; -1: none did.
        unfinished: number of collectives begun but not ended.
        given_up: whether it was aborted and its groups have not been rebuilt since.
        optimizer_steps: number of optimizer steps since its start.
        saving: how far the checkpoint is that it writes, as text; empty: it writes none.
        snapshot_bytes: bytes of the snapshots that it keeps.
        fault: name of the fault that is injected, ``random`` while it is hidden; empty: none is.
        tickets: results of jobs, by ticket, until a ``Forget``.
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
    saving: str = ""
    snapshot_bytes: int = 0
    fault: str = ""
    tickets: dict[str, JobReply] = field(default_factory=dict)


@request("locate", looks=True)
class Locate(RankRequest[Position]):
    """Asks where a rank is."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One active function call.

    Attributes:
        text: such as ``model.py:12 in forward: x = f(x)``.
        number: index among the user's frames of its thread, 0 the innermost, for ``%fsdp eval --frame``; None: it
            belongs to a library.
        is_python: whether it belongs to Python's standard library.
    """

    text: str
    number: int | None = None
    is_python: bool = False


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One Python thread of a rank.

    Attributes:
        name: its name in Python.
        is_main: whether it is the main thread.
        frames: its calls, innermost first.
    """

    name: str
    is_main: bool
    frames: tuple[Frame, ...]


@request("stacks", looks=True)
class Stacks(RankRequest[tuple[Thread, ...]]):
    """Asks for the stacks of a rank's Python threads, the main thread first."""


@dataclass(frozen=True, kw_only=True)
class CellLine:
    """The current line of a running cell or script.

    Attributes:
        line: line number in it.
        function: name of the function; ``<module>``: the cell or the script itself.
        text: text of the line.
        script: name of the script's file; empty: a cell.
        frames: the calls of the user's code, the innermost last, as :mod:`workbench.trace.frames` has them.
        ago_ns: time since it has raised, which ended what the rank ran; 0: it runs.
        inside: ``cell`` or ``expression`` if that runs inside a stopped step; empty: other code.
    """

    line: int
    function: str
    text: str
    script: str = ""
    frames: tuple[str, ...] = ()
    ago_ns: int = 0
    inside: str = ""


@request("line", looks=True)
class LocateLine(RankRequest[CellLine | None]):
    """Asks for the line that the main thread runs in a cell or script, or in which its newest one raised.

    The reply is None if there is no such line.
    """


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names in the namespace of one rank.

    Attributes:
        modules: variables that hold a ``torch.nn.Module``.
        variables: all variables.
        classes: classes of modules with parameters inside those modules.
        steps: variables whose call has stepped an optimizer of a script.
    """

    modules: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()


@request("names", looks=True)
class ListNames(RankRequest[Names]):
    """Asks for the names in a rank's namespace."""


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
        never_cleared: its optimizers, by variable, whose newest steps used gradients of the step before again.
        has_optimizer: whether a variable is an optimizer of it.
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
    never_cleared: tuple[str, ...] = ()
    has_optimizer: bool = False


@request("models", looks=True)
class ListModels(RankRequest[tuple[ModelInfo, ...]]):
    """Asks for the models that a rank's cells have made."""


@request("preview", looks=True)
class PreviewUnits(RankRequest[tuple[Unit, ...]]):
    """Asks which units a command would make, without any change.

    Attributes:
        command: the command.
    """

    command: Shard | Reshard


@dataclass(frozen=True, kw_only=True)
class RecordSummary:
    """The part of a rank's record that the notebook already has.

    Attributes:
        next_seq: number of the first missing row.
        header_version: version of the header it has; 0: none.
    """

    next_seq: int = 0
    header_version: int = 0


@dataclass(frozen=True, kw_only=True)
class DrainReply:
    """The rows that a rank recorded since the last drain.

    Attributes:
        rows: packed rows, as in :mod:`workbench.trace.row_compression`.
        lost: number of rows that were overwritten before they could be read.
        key_frame: as :mod:`workbench.trace.header` writes it.
        header: likewise. It has only the units that changed since the notebook's version; None if nothing did.
        header_version: version of the current header.
        position: where the rank is.
    """

    rows: memoryview
    lost: int
    key_frame: Any
    header: Any
    header_version: int
    position: Position


@request("drain", looks=True)
class Drain(RankRequest[DrainReply]):
    """Asks for everything recorded since the last drain.

    Attributes:
        known: what the notebook already has, by rank; one request serves all ranks, and each reads its own entry.
    """

    known: dict[int, RecordSummary]


@dataclass(frozen=True, kw_only=True, order=True)
class SnapshotMark:
    """When a snapshot was taken: marks of one program are in the order of time.

    Attributes:
        entry: number of entries of the program that were done.
        count: number of steps of the next one that were done.
    """

    entry: int
    count: int


@dataclass(frozen=True, kw_only=True)
class ReplicaMark:
    """The state that a rank holds for its replicas.

    Attributes:
        step: number of steps that led to it.
        mark: when, inside a ``step`` command; entry -1: outside.
        ranks: the ranks that hold the same parameters and optimizer state, this one included.
    """

    step: int
    mark: SnapshotMark
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The snapshots that a rank keeps.

    Attributes:
        own: its own.
        held: those of the rank before it.
        replica: what it holds for its replicas; None: it has none, or a step has changed a part of the state.
    """

    own: tuple[SnapshotMark, ...]
    held: tuple[SnapshotMark, ...]
    replica: ReplicaMark | None = None


@request("give up")
class GiveUp(RankRequest[None]):
    """Aborts what a rank is doing.

    Attributes:
        reason: the reason, as a sentence.
    """

    reason: str


@request("shut")
class Shut(RankRequest[None]):
    """Shuts a rank's sockets to its peers and to the store, which ends what blocks in the user's own code."""


@request("run to")
class RunTo(RankRequest[None]):
    """Continues a rank up to a position, unless it is there or further.

    Attributes:
        place: the position to stop at.
    """

    place: StepPosition


@request("breakpoints")
class SetBreakpoints(RankRequest[None]):
    """Replaces the breakpoints of a rank with all current ones, including those of other ranks.

    Attributes:
        breakpoints: in the order in which they were added.
    """

    breakpoints: tuple[Breakpoint, ...]


@dataclass(frozen=True, kw_only=True)
class RunCell:
    """A cell to run inside the step in which a rank is held.

    Attributes:
        code: as in a notebook.
    """

    word: ClassVar[str] = "cell"
    code: str


@request("job")
class Job(RankRequest[bool]):
    """Queues work for a held rank in its step's own thread; the reply says whether the rank is held and will run it.

    Attributes:
        ticket: key of the result in the rank's :class:`Position`.
        work: the work.
        ranks: the ranks that run it.
        alone: end of a sentence on why the work cannot wait for other ranks: which ranks run it, and what to do
            instead; empty: all ranks run it, or it waits for no rank.
    """

    ticket: str
    work: Inspect | Evaluate | RunCell
    ranks: tuple[int, ...] = ()
    alone: str = ""


@request("forget")
class Forget(RankRequest[None]):
    """Makes a rank forget results of jobs.

    Attributes:
        tickets: the tickets to forget.
    """

    tickets: tuple[str, ...]


REQUESTS: dict[str, type[RankRequest[Any]]] = {
    cls.word: cls
    for cls in (
        *(Locate, Stacks, LocateLine, ListNames, ListModels, PreviewUnits, Drain, GiveUp, Shut),
        *(Pause, RunTo, Continue, Next, SetBreakpoints, Job, Forget),
    )
}


def read_request(data: Any) -> RankRequest[Any]:  # noqa: ANN401 - anything may come
    """Return the request in ``data``.

    Raises:
        ValueError: it is not a request.
    """
    request: RankRequest[Any] = decode_named(REQUESTS, data, "request")
    return request
