"""The words of what happens on a rank: said by whoever runs the training, stored in traces, read by everything else.

A *source* of events calls a :class:`Probe`: the workbench's engine is one, a loop of one's own can be another. It says
what it does *before* it does it. Each word is one row of its enum, with all that is to be known of it, and whoever
treats some kinds alike asks what is known of them: a kind that is added has its row here and is missed nowhere. The
numbers are those of the trace file: they never change, and new ones come at the end. After a change,
``python -m workbench.widgets.generate_js`` tells the front end.

Words: *unit* is one ``fully_shard`` call, *rank* is a process of the training job, *payload* is the logical size of
a collective (all-gather: its whole output; reduce-scatter: its whole input; all-reduce: one rank's input), not the
bytes on the wire. All byte counts are logical bytes (elements x itemsize).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any, Protocol, Self


class Colour(Enum):
    """What is drawn in a colour of its own; :data:`workbench.views.theme.COLOURS` says in which."""

    SHARDED_PARAMS = auto()
    UNSHARDED_PARAMS = auto()
    ALL_GATHER = auto()
    UNSHARDED_GRADS = auto()
    REDUCE_SCATTER = auto()
    SHARDED_GRADS = auto()
    OPTIMIZER_STATE = auto()
    ACTIVATIONS = auto()
    RESERVED = auto()
    FORWARD = auto()
    BACKWARD = auto()
    OPTIMIZER = auto()
    COPY_IN = auto()
    COPY_OUT = auto()
    OFFLOAD = auto()
    WAIT = auto()
    GIVEN_UP = auto()
    PLAIN = auto()


class Track(Enum):
    """Where a timeline draws a span, from the top; the value is the track's name."""

    COMPUTE = "compute"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    OTHER = "other"
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True)
class WordInfo:
    """What is to be known of a word: ``words`` is how people write it."""

    words: str


class Word(IntEnum):
    """A value of a column of the trace: its row is its number, and its ``info`` what is to be known of it."""

    words: str

    def __new__(cls, *row: Any) -> Self:  # noqa: ANN401 - a number and an info; from a number alone members are found
        """Return the member that a row declares."""
        number, info = row
        member = int.__new__(cls, number)
        member._value_, member.words = number, info.words
        vars(member)["info"] = info
        return member

    @property
    def key(self) -> str:
        """How breakpoints, conditions and messages spell it: ``all_gather``."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class EdgeInfo(WordInfo):
    """An edge, and what a span does there."""

    verb: str


class Edge(Word):
    """Which end of a span a row is."""

    info: EdgeInfo

    BEGIN = 0, EdgeInfo(words="begin", verb="begins")
    END = 1, EdgeInfo(words="end", verb="ends")
    INSTANT = 2, EdgeInfo(words="instant", verb="")


@dataclass(frozen=True, kw_only=True)
class ColouredInfo(WordInfo):
    """A word that has a colour."""

    colour: Colour


class UnitState(Word):
    """Where a unit's parameters are."""

    info: ColouredInfo

    # each rank holds its shard only
    SHARDED = 0, ColouredInfo(words="sharded", colour=Colour.SHARDED_PARAMS)
    # shard, and an all-gather output filling up
    ALL_GATHER_IN_FLIGHT = 1, ColouredInfo(words="all-gather in flight", colour=Colour.ALL_GATHER)
    # shard and full parameters
    UNSHARDED = 2, ColouredInfo(words="unsharded", colour=Colour.UNSHARDED_PARAMS)
    # a gradient reduction of the unit is in flight (parameters may be sharded or not)
    REDUCING = 3, ColouredInfo(words="reducing", colour=Colour.REDUCE_SCATTER)


@dataclass(frozen=True, kw_only=True)
class KindInfo(ColouredInfo):
    """What is to be known of a kind of event.

    Attributes:
        is_span: its rows are BEGIN and END, in pairs; else INSTANT.
        is_event: it says where a rank is, and is counted; else it is told beside: bytes, what is logged, a hold.
        is_stop: a breakpoint can be set on it.
        track: where its spans are drawn; None: nowhere.
        is_work: what a step is for.
        is_collective: its rows bear ``comm_group`` and ``comm_seq``; its END may be earlier than the row before it.
        is_reduction: with a unit it is a gradient reduction of it.
        is_copy: it moves bytes within a rank; on a device, mostly beside compute.
        memory_sign: its ``num_bytes`` of ``category`` come to life (1) or die (-1).
        has_text: ``module`` names it.
        states: where the unit's parameters are after one of its edges.
        of: what joins its words and a unit's name: ``"all-gather of blocks.2"``.
    """

    is_span: bool
    is_event: bool
    is_stop: bool
    track: Track | None
    is_work: bool = False
    is_collective: bool = False
    is_reduction: bool = False
    is_copy: bool = False
    memory_sign: int = 0
    has_text: bool = False
    states: tuple[tuple[Edge, UnitState], ...] = ()
    of: str = "of"


def _span(words: str, colour: Colour, track: Track | None, **more: Any) -> KindInfo:  # noqa: ANN401 - fields
    """Return a kind that begins and ends, and at which breakpoints stop."""
    usual = {"is_span": True, "is_event": True, "is_stop": True}
    return KindInfo(words=words, colour=colour, track=track, **usual | more)


def _instant(words: str, colour: Colour, **more: Any) -> KindInfo:  # noqa: ANN401 - fields
    """Return a kind that is told beside the events, at once."""
    usual = {"is_span": False, "is_event": False, "is_stop": False, "track": None}
    return KindInfo(words=words, colour=colour, **usual | more)


class Kind(Word):
    """What a row is about; what else is to be known of each is said in :class:`KindInfo`."""

    info: KindInfo

    # one training step
    STEP = 0, _span("step", Colour.PLAIN, Track.COMPUTE)
    # a unit's forward
    FORWARD = 1, _span("forward", Colour.FORWARD, Track.COMPUTE, is_work=True)
    # a unit's backward: from the gradient of its output to the gradients of its parameters
    BACKWARD = 2, _span("backward", Colour.BACKWARD, Track.COMPUTE, is_work=True)
    # a step of the optimizer
    OPTIMIZER = 3, _span("optimizer", Colour.OPTIMIZER, Track.COMPUTE, is_work=True)
    # BEGIN: all-gather asked for; END: parameters usable. No picture: it is an all-gather, its wait and its copies
    UNSHARD = 4, _span("unshard", Colour.UNSHARDED_PARAMS, None, states=((Edge.END, UnitState.UNSHARDED),))
    # full parameters given up
    RESHARD = (
        5,
        _instant(
            "reshard",
            Colour.SHARDED_PARAMS,
            is_event=True,
            is_stop=True,
            states=((Edge.INSTANT, UnitState.SHARDED),),
        ),
    )
    # BEGIN: issued; END: its last byte arrived (may precede the row before it in time)
    ALL_GATHER = (
        6,
        _span(
            "all-gather",
            Colour.ALL_GATHER,
            Track.ALL_GATHER,
            is_collective=True,
            states=((Edge.BEGIN, UnitState.ALL_GATHER_IN_FLIGHT),),
        ),
    )
    REDUCE_SCATTER = (
        7,
        _span("reduce-scatter", Colour.REDUCE_SCATTER, Track.REDUCE_SCATTER, is_collective=True, is_reduction=True),
    )
    ALL_REDUCE = 8, _span("all-reduce", Colour.UNSHARDED_GRADS, Track.OTHER, is_collective=True, is_reduction=True)
    BROADCAST = 9, _span("broadcast", Colour.SHARDED_GRADS, Track.OTHER, is_collective=True, is_stop=False)
    # into a collective's input
    COPY_IN = 10, _span("copy-in", Colour.COPY_IN, Track.COMPUTE, is_copy=True)
    # out of a collective's output
    COPY_OUT = 11, _span("copy-out", Colour.COPY_OUT, Track.COMPUTE, is_copy=True)
    # compute blocked on communication: exposed communication
    WAIT = 12, _span("wait", Colour.WAIT, Track.WAIT)
    # num_bytes > 0 of category came to life
    ALLOC = 13, _instant("allocated", Colour.PLAIN, memory_sign=1)
    # num_bytes < 0 of category died
    FREE = 14, _instant("freed", Colour.PLAIN, memory_sign=-1)
    # copy between device and host for offloading
    OFFLOAD = 15, _span("offload", Colour.OFFLOAD, Track.COMPUTE, is_copy=True)
    # held by a breakpoint or a pause
    GATE = 16, _span("held at a gate", Colour.PLAIN, Track.COMPUTE, is_event=False, is_stop=False)
    # module names it, value holds it
    METRIC = 17, _instant("metric", Colour.SHARDED_PARAMS, has_text=True)
    # module holds the text
    LOG = 18, _instant("log", Colour.PLAIN, has_text=True)
    # the unit's iteration was given up: it is SHARDED and nothing of it is in flight
    RESET = (
        19,
        _instant(
            "step aborted",
            Colour.GIVEN_UP,
            is_event=True,
            states=((Edge.INSTANT, UnitState.SHARDED),),
            of="in",
        ),
    )
    # num_bytes (> 0) of the process are in memory, whoever owns them
    RESIDENT = 20, _instant("resident", Colour.PLAIN)
    # when a device came to what an earlier row told of: value holds the seq of that row, module names the stream
    DEVICE = 21, _instant("device", Colour.PLAIN, has_text=True)


def _kinds(**known: bool) -> Iterator[Kind]:
    """Yield the kinds of whose info all of ``known`` holds."""
    return (kind for kind in Kind if known.items() <= vars(kind.info).items())


COLLECTIVES = tuple(_kinds(is_collective=True))
REDUCTIONS = tuple(_kinds(is_reduction=True))
WORK = tuple(_kinds(is_work=True))
BESIDE = tuple(_kinds(is_event=False))
"""Kinds whose rows do not say where a rank is."""

STOPS = {kind.key: kind for kind in _kinds(is_stop=True)}
"""What a breakpoint can be set on, by the name it is given there."""

COPIES = tuple(_kinds(is_copy=True))
COMPUTE_STREAM = "compute"
"""The stream of a device in which it computes, as DEVICE rows name it."""

MOVES = tuple(kind for kind in Kind if kind.info.memory_sign)
"""Kinds whose rows are bytes of a class that come to life or die."""

STATE_AFTER = {(kind, edge): state for kind in Kind for edge, state in kind.info.states}
"""The rows that change where a unit's parameters are, and the state they leave it in."""


def on_track(track: Track) -> tuple[Kind, ...]:
    """Return the kinds whose spans are drawn on ``track``."""
    return tuple(kind for kind in Kind if kind.info.track is track)


@dataclass(frozen=True, kw_only=True)
class PhaseInfo(WordInfo):
    """A phase of a step.

    Attributes:
        part: the kind of work that it is a part of; None: of none.
        doing: what the rank does then, in words.
    """

    part: Kind | None
    doing: str


class Phase(Word):
    """Where in the step the rank was when the row was written."""

    info: PhaseInfo

    IDLE = 0, PhaseInfo(words="idle", part=None, doing="outside forward and backward")
    FORWARD = 1, PhaseInfo(words="forward", part=Kind.FORWARD, doing="forward")
    PRE_BACKWARD = 2, PhaseInfo(words="pre-backward", part=Kind.BACKWARD, doing="backward")
    BACKWARD = 3, PhaseInfo(words="backward", part=Kind.BACKWARD, doing="backward")
    POST_BACKWARD = 4, PhaseInfo(words="post-backward", part=Kind.BACKWARD, doing="end of backward")
    OPTIMIZER = 5, PhaseInfo(words="optimizer", part=Kind.OPTIMIZER, doing="optimizer step")


@dataclass(frozen=True, kw_only=True)
class CategoryInfo(ColouredInfo):
    """A memory class; ``is_engines``: told by what shards; else by the runtime around it."""

    is_engines: bool = True


class Category(Word):
    """Memory class of an ALLOC / FREE row: whose bytes they are."""

    info: CategoryInfo

    # this rank's shards, padded storage
    SHARDED_PARAMS = 0, CategoryInfo(words="sharded params", colour=Colour.SHARDED_PARAMS)
    # full parameters of a unit between unshard and reshard
    UNSHARDED_PARAMS = 1, CategoryInfo(words="unsharded params", colour=Colour.UNSHARDED_PARAMS)
    # input and output staging of an all-gather
    ALL_GATHER_BUFFERS = 2, CategoryInfo(words="all-gather buffers", colour=Colour.ALL_GATHER)
    # full gradients between backward and reduce-scatter
    UNSHARDED_GRADS = 3, CategoryInfo(words="unsharded grads", colour=Colour.UNSHARDED_GRADS)
    # staging of a reduce-scatter
    REDUCE_SCATTER_BUFFERS = 4, CategoryInfo(words="reduce-scatter buffers", colour=Colour.REDUCE_SCATTER)
    # this rank's part of the averaged gradients
    SHARDED_GRADS = 5, CategoryInfo(words="sharded grads", colour=Colour.SHARDED_GRADS)
    OPTIMIZER_STATE = 6, CategoryInfo(words="optimizer state", colour=Colour.OPTIMIZER_STATE, is_engines=False)
    # saved for backward
    ACTIVATIONS = 7, CategoryInfo(words="activations", colour=Colour.ACTIVATIONS, is_engines=False)
    OTHER = 8, CategoryInfo(words="other", colour=Colour.PLAIN, is_engines=False)
    # kept for reuse, and nobody's now: what of it is used counts elsewhere
    RESERVED = 9, CategoryInfo(words="reserved", colour=Colour.RESERVED)


@dataclass(frozen=True, kw_only=True)
class FlatPart:
    """One of the parameters that a flat one stands for.

    Attributes:
        fqn: name relative to the root module.
        shape: what the flat parameter has of it, in elements: under tensor parallelism this rank's part.
        global_shape: before tensor parallelism; equal to ``shape`` without.
        first: index of its first element in the flat parameter.
        trainable: whether it takes a gradient.
    """

    fqn: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    first: int
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Elements that the flat parameter has of it."""
        return math.prod(self.shape)

    def within(self, begin: int, end: int) -> tuple[int, int]:
        """Return which of the elements ``[begin, end)`` of the flat parameter are its own; they may be none.

        Example: one of 6 elements from 4 on, within ``[8, 16)`` -> ``(8, 10)``.
        """
        return within(self.first, self.first + self.numel, begin, end)


def within(first: int, last: int, begin: int, end: int) -> tuple[int, int]:
    """Return which of the elements ``[first, last)`` lie in ``[begin, end)``; they may be none."""
    return min(max(begin, first), last), max(min(end, last), first)


@dataclass(frozen=True, kw_only=True)
class Param:
    """One parameter of a unit.

    Attributes:
        fqn: name relative to the root module.
        shape: what FSDP shards, in elements: under tensor parallelism this rank's part.
        global_shape: before tensor parallelism; equal to ``shape`` without.
        dtype: e.g. ``"float32"``.
        itemsize: bytes per element.
        shard_dim: tensor dimension that is split.
        rows_per_rank: rows of ``shard_dim`` that each shard-rank really holds, without padding.
        padded_rows: rows of ``shard_dim`` each shard-rank's storage has room for; ``ceil(shape[shard_dim] / F)``.
        trainable: whether it takes a gradient.
        parts: the parameters it stands for, if it is a flat one; none: it is one itself.
        use_orig_params: of a flat one: whether optimizers have a piece of each part, and not the flat one.
    """

    fqn: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: str
    itemsize: int
    shard_dim: int
    rows_per_rank: tuple[int, ...]
    padded_rows: int
    trainable: bool = True
    parts: tuple[FlatPart, ...] = ()
    use_orig_params: bool = False


GLOO = "gloo"
"""What carries a unit's collectives if every rank sends to every other what is for it, over gloo."""

PER_HOST = "shared memory, gloo between hosts"
"""If what is for another host is sent there once."""

C10D = "c10d"
"""If torch's own collectives do."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One ``fully_shard`` call: one communication group of parameters.

    Attributes:
        index: the ``unit`` column's value; never reused within a trace.
        name: module path relative to the root, ``""`` for the root itself; :func:`unit_words` writes it.
        root: index of the root unit of its model (its own index for the root; -1 before the first forward).
        params: its parameters, in order.
        reshard_after_forward: the policy in force (``None`` resolved to a bool once the root is known); a number: after
            forward the parameters are sharded over that many of the F ranks only.
        shard_size: ranks that share one copy, F.
        replicate_size: copies whose gradients are averaged by an all-reduce, R; 1 without replication.
        compute_dtype: of the all-gather and of forward and backward, e.g. ``"bfloat16"``.
        reduce_dtype: of the gradients on their way.
        compute_itemsize: bytes per element of ``compute_dtype``.
        reduce_itemsize: bytes per element of ``reduce_dtype``.
        offload: whether shards, their gradients and the optimizer's state stay in host memory between uses.
        comm: what carries its collectives: :data:`GLOO`, ``"shared memory"``, :data:`PER_HOST`, :data:`C10D`,
            ``"custom"``; ``""`` on one rank or not known.
        retired: True once the unit was undone by ``unshard_module``.
        gone: True once nobody holds its model any more, as when the cell that makes it was run again.
    """

    index: int
    name: str
    root: int
    params: tuple[Param, ...]
    reshard_after_forward: bool | int
    shard_size: int
    replicate_size: int = 1
    compute_dtype: str
    reduce_dtype: str
    compute_itemsize: int
    reduce_itemsize: int
    offload: bool = False
    comm: str = ""
    retired: bool = False
    gone: bool = False

    @property
    def in_use(self) -> bool:
        """Whether it can still do something."""
        return not (self.retired or self.gone)


ROOT = "(root)"
"""How people write the name of a root unit, which is empty in descriptions."""


def unit_words(name: str) -> str:
    """Return how people write the unit called ``name``: its path, or :data:`ROOT`."""
    return name or ROOT


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Which collective a row belongs to: ``seq`` counts the collectives issued on ``group``."""

    group: int
    seq: int


@dataclass(frozen=True, kw_only=True)
class ParamTensors:
    """What a rank has of one parameter now; a tensor is anything that ``torch.as_tensor`` takes.

    Attributes:
        shard: this rank's rows, the very object that an optimizer was given.
        shard_rank: whose rows these are, a place in :attr:`Param.rows_per_rank`.
        full: the whole parameter; None: it is not in memory.
        full_grads: gradients of the whole parameter: the newest, and what was accumulated before it.
        sharded_grad: gradient of this rank's rows; None: there is none.
        places: modules that have it, with its name there; none: it is known by its ``fqn`` alone.
    """

    shard: object
    shard_rank: int
    full: object | None = None
    full_grads: tuple[object, ...] = ()
    sharded_grad: object | None = None
    places: tuple[tuple[object, str], ...] = ()


class Source(Protocol):
    """Who tells a probe what happens on a rank."""

    @property
    def name(self) -> str:
        """What it is called; it has no comma."""

    def has(self, unit: int) -> bool:
        """Tell whether a unit is one of the source's, and still there."""

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return what the rank has of the parameters of a unit, by their names; empty if it is none of the source's.

        Asked while the rank stands in an event, in the thread that told of it: it changes nothing and waits for nobody.
        """


class Probe(Protocol):
    """What a source calls, from the thread that trains; whoever listens implements it.

    It may block (a gate); it must not touch the source. A unit and a communication group are told of before anything
    that happens to them, an event before it happens. Steps and metrics are told by whoever knows of them: of our
    engine's training the runtime around it, of a loop of one's own the loop.
    """

    def source(self, source: Source) -> None:
        """Told who tells what follows; once, before anything else."""

    def begin_step(self) -> None:
        """Told that the next training step begins; one that is still open ends."""

    def end_step(self) -> None:
        """Told that the step has ended."""

    def metric(self, name: str, value: float) -> None:
        """Told a number of the step."""

    def event(self, kind: Kind, edge: Edge, unit: int, num_bytes: int, comm: Comm | None, t_ns: int | None) -> None:
        """Told of an event; ``t_ns`` is set when the event lies in the past (the true end of a collective)."""

    def issued(self, comm: Comm, wait: Callable[[], object]) -> None:
        """Told that a collective was issued on a device; ``wait()`` lets the current stream, not the host, wait for it.

        Not told of collectives between hosts, nor of those that nobody but the engine may wait for.
        """

    def memory(self, category: Category, unit: int, delta_bytes: int) -> None:
        """Told that ``delta_bytes`` (signed) of ``category`` came to life or died."""

    def phase(self, phase: Phase) -> None:
        """Told that another phase begins."""

    def unit(self, info: Unit) -> None:
        """Told of a new or changed unit."""

    def comm_group(self, index: int, ranks: tuple[int, ...]) -> None:
        """Told of a new communication group."""
