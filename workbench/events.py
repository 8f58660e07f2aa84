"""The vocabulary of events on a rank: emitted by the training code, stored in traces, read by everything else.

A *source* of events calls a :class:`Probe`: the workbench's engine is one source, a user's own loop can be another. A
source announces an event *before* it happens. Each word is one row of its enum, with all its properties. Code that
handles several kinds selects them by these properties, so a new kind needs only its row here. The numbers are those of
the trace file: they never change, and new ones are appended. After a change, run
``python -m workbench.cli.generate_front_end`` to update the front end.

Terms: *unit* is one ``fully_shard`` call, *rank* is a process of the training job, *payload* is the logical size of
a collective (all-gather: its whole output; reduce-scatter: its whole input; all-reduce: one rank's input), not the
bytes on the wire. All byte counts are logical bytes (elements x itemsize).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, auto
from typing import Any, Protocol, Self


class Colour(Enum):
    """Names of the colours that views use; :data:`workbench.views.theme.COLOURS` defines them."""

    SHARDED_PARAMS = auto()
    UNSHARDED_PARAMS = auto()
    ALL_GATHER = auto()
    UNSHARDED_GRADS = auto()
    REDUCE_SCATTER = auto()
    SHARDED_GRADS = auto()
    OPTIMIZER_STATE = auto()
    ACTIVATIONS = auto()
    SNAPSHOTS = auto()
    RESERVED = auto()
    FORWARD = auto()
    BACKWARD = auto()
    OPTIMIZER = auto()
    COPY_IN = auto()
    COPY_OUT = auto()
    OFFLOAD = auto()
    RECEIVED = auto()
    WAIT = auto()
    READERS = auto()
    GIVEN_UP = auto()
    PLAIN = auto()


class Track(Enum):
    """A row of a rank in the timeline, in order from the top; the value is its name. :func:`on_track` has its kinds."""

    COMPUTE = "compute"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    OTHER = "other"
    WAIT = "wait"
    # of a device: copies on its streams other than compute
    COPIES = "copies"
    # of a device: when its host enqueued the work
    HOST = "host"


DEVICE_TRACKS = (Track.COPIES, Track.HOST)
"""Tracks that only the ranks on a device have, in addition to :data:`RANK_TRACKS`."""

RANK_TRACKS = tuple(track for track in Track if track not in DEVICE_TRACKS)
"""Tracks of every rank."""


@dataclass(frozen=True, kw_only=True)
class WordInfo:
    """Properties of a word; ``words`` is its display text."""

    words: str


class Word(IntEnum):
    """Value of a column of the trace; its row gives its number and its ``info``."""

    words: str

    def __new__(cls, *row: Any) -> Self:  # noqa: ANN401 - a number and an info; a number alone looks a member up
        """Return the member that a row declares."""
        number, info = row
        member = int.__new__(cls, number)
        member._value_, member.words = number, info.words
        vars(member)["info"] = info
        return member

    @property
    def key(self) -> str:
        """The spelling in breakpoints, conditions and messages: ``all_gather``."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class EdgeInfo(WordInfo):
    """An edge; ``verb`` is what a span does there."""

    verb: str


class Edge(Word):
    """The end of a span that a row marks."""

    info: EdgeInfo

    BEGIN = 0, EdgeInfo(words="begin", verb="begins")
    END = 1, EdgeInfo(words="end", verb="ends")
    INSTANT = 2, EdgeInfo(words="instant", verb="")


@dataclass(frozen=True, kw_only=True)
class ColouredInfo(WordInfo):
    """A word that has a colour."""

    colour: Colour


class UnitState(Word):
    """State of a unit's parameters."""

    info: ColouredInfo

    # each rank holds its shard only
    SHARDED = 0, ColouredInfo(words="sharded", colour=Colour.SHARDED_PARAMS)
    # each rank holds its shard, and an all-gather fills its output
    ALL_GATHER_IN_FLIGHT = 1, ColouredInfo(words="all-gather in flight", colour=Colour.ALL_GATHER)
    # shard and full parameters
    UNSHARDED = 2, ColouredInfo(words="unsharded", colour=Colour.UNSHARDED_PARAMS)
    # a gradient reduction of the unit is in flight (parameters may be sharded or not)
    REDUCING = 3, ColouredInfo(words="reducing", colour=Colour.REDUCE_SCATTER)


@dataclass(frozen=True, kw_only=True)
class KindInfo(ColouredInfo):
    """Properties of a kind of event.

    Attributes:
        is_span: its rows are pairs of BEGIN and END; else INSTANT.
        is_event: it marks the progress of a rank and is counted; else it is side information: bytes, logs, holds.
        is_stop: a breakpoint can be set on it.
        track: entry of :data:`RANK_TRACKS` that shows its spans; None if none does.
        is_work: it is forward, backward or an optimizer step.
        is_collective: its rows have ``comm_group`` and ``comm_seq``; its END may be earlier than the row before it.
        is_point_to_point: it is to or from one other rank. If that is known, its rows have ``comm_group``, whose ranks
            are the sender and the receiver, and ``comm_seq``.
        has_root: one rank of the group is its source or its destination.
        is_reduction: if the row has a unit, it is a gradient reduction of that unit.
        is_copy: it moves bytes within a rank; on a device, mostly in parallel to compute.
        memory_sign: its ``num_bytes`` of ``category`` are allocated (1) or freed (-1).
        has_text: ``module`` is the index of its text.
        states: state of the unit's parameters after an edge.
        of: preposition between its words and a unit's name: ``"all-gather of blocks.2"``.
    """

    is_span: bool
    is_event: bool
    is_stop: bool
    track: Track | None
    is_work: bool = False
    is_collective: bool = False
    is_point_to_point: bool = False
    has_root: bool = False
    is_reduction: bool = False
    is_copy: bool = False
    memory_sign: int = 0
    has_text: bool = False
    states: tuple[tuple[Edge, UnitState], ...] = ()
    of: str = "of"


def _span(words: str, colour: Colour, track: Track | None, **more: Any) -> KindInfo:  # noqa: ANN401 - fields
    """Return a kind that begins and ends and at which breakpoints can stop."""
    usual = {"is_span": True, "is_event": True, "is_stop": True}
    return KindInfo(words=words, colour=colour, track=track, **usual | more)


def _instant(words: str, colour: Colour, **more: Any) -> KindInfo:  # noqa: ANN401 - fields
    """Return an instantaneous kind that is side information, not an event."""
    usual = {"is_span": False, "is_event": False, "is_stop": False, "track": None}
    return KindInfo(words=words, colour=colour, **usual | more)


class Kind(Word):
    """Kind of a row; :class:`KindInfo` holds its properties."""

    info: KindInfo

    # one training step
    STEP = 0, _span("step", Colour.PLAIN, Track.COMPUTE)
    # a unit's forward
    FORWARD = 1, _span("forward", Colour.FORWARD, Track.COMPUTE, is_work=True)
    # a unit's backward: from the gradient of its output to the gradients of its parameters
    BACKWARD = 2, _span("backward", Colour.BACKWARD, Track.COMPUTE, is_work=True)
    # a step of the optimizer
    OPTIMIZER = 3, _span("optimizer", Colour.OPTIMIZER, Track.COMPUTE, is_work=True)
    # BEGIN: requested; END: parameters usable. Not drawn: its all-gather, wait and copies are
    UNSHARD = 4, _span("unshard", Colour.UNSHARDED_PARAMS, None, states=((Edge.END, UnitState.UNSHARDED),))
    # full parameters freed
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
    BROADCAST = (
        9,
        _span("broadcast", Colour.SHARDED_GRADS, Track.OTHER, is_collective=True, has_root=True, is_stop=False),
    )
    # into a collective's input
    COPY_IN = 10, _span("copy-in", Colour.COPY_IN, Track.COMPUTE, is_copy=True)
    # out of a collective's output
    COPY_OUT = 11, _span("copy-out", Colour.COPY_OUT, Track.COMPUTE, is_copy=True)
    # compute blocks on communication: exposed communication
    WAIT = 12, _span("wait", Colour.WAIT, Track.WAIT)
    # num_bytes > 0 of category were allocated
    ALLOC = 13, _instant("allocated", Colour.PLAIN, memory_sign=1)
    # num_bytes < 0 of category were freed
    FREE = 14, _instant("freed", Colour.PLAIN, memory_sign=-1)
    # copy between device and host for offloading
    OFFLOAD = 15, _span("offload", Colour.OFFLOAD, Track.COMPUTE, is_copy=True)
    # held by a breakpoint or a pause
    GATE = 16, _span("held at a gate", Colour.PLAIN, Track.COMPUTE, is_event=False, is_stop=False)
    # module is its name, value its value
    METRIC = 17, _instant("metric", Colour.SHARDED_PARAMS, has_text=True)
    # module is the text
    LOG = 18, _instant("log", Colour.PLAIN, has_text=True)
    # the unit's iteration was aborted: it is SHARDED and has nothing in flight
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
    # num_bytes (> 0) is the resident memory of the process
    RESIDENT = 20, _instant("resident", Colour.PLAIN)
    # when a device reached an earlier row: value is the seq of that row, module the name of the stream
    DEVICE = 21, _instant("device", Colour.PLAIN, has_text=True)
    ALL_TO_ALL = 22, _span("all-to-all", Colour.UNSHARDED_GRADS, Track.OTHER, is_collective=True)
    REDUCE = 23, _span("reduce", Colour.UNSHARDED_GRADS, Track.OTHER, is_collective=True, has_root=True)
    GATHER = 24, _span("gather", Colour.ALL_GATHER, Track.OTHER, is_collective=True, has_root=True)
    SCATTER = 25, _span("scatter", Colour.SHARDED_GRADS, Track.OTHER, is_collective=True, has_root=True)
    BARRIER = 26, _span("barrier", Colour.PLAIN, Track.OTHER, is_collective=True)
    SEND = 27, _span("send", Colour.SHARDED_GRADS, Track.OTHER, is_point_to_point=True)
    RECV = 28, _span("recv", Colour.RECEIVED, Track.OTHER, is_point_to_point=True)
    # until other ranks have read shared memory; not an event, because only a rank that is ahead waits. The value of END
    # is the last of these ranks
    READERS = 29, _span("wait for readers", Colour.READERS, Track.COMPUTE, is_event=False, is_stop=False)


def _kinds(**known: bool) -> Iterator[Kind]:
    """Yield the kinds whose properties equal ``known``."""
    return (kind for kind in Kind if known.items() <= vars(kind.info).items())


COLLECTIVES = tuple(_kinds(is_collective=True))
NUMBERED = (*COLLECTIVES, *_kinds(is_point_to_point=True))
"""Kinds whose rows are numbered within a group of ranks, so that those of different ranks belong together."""

ROOTED = tuple(_kinds(has_root=True))
REDUCTIONS = tuple(_kinds(is_reduction=True))
WORK = tuple(_kinds(is_work=True))
BESIDE = tuple(_kinds(is_event=False))
"""Kinds whose rows do not mark the progress of a rank."""

STOPS = {kind.key: kind for kind in _kinds(is_stop=True)}
"""Kinds that a breakpoint can be set on, by the name used in breakpoints."""

COPIES = tuple(_kinds(is_copy=True))
COMPUTE_STREAM = "compute"
"""Name of a device's compute stream in DEVICE rows."""

MOVES = tuple(kind for kind in Kind if kind.info.memory_sign)
"""Kinds whose rows allocate or free bytes."""

STATE_AFTER = {(kind, edge): state for kind in Kind for edge, state in kind.info.states}
"""State of a unit's parameters after a row, by its kind and edge."""


def on_track(track: Track) -> tuple[Kind, ...]:
    """Return the kinds of the spans on ``track``."""
    if track is Track.COPIES:
        return COPIES
    own = Track.COMPUTE if track is Track.HOST else track
    return tuple(kind for kind in Kind if kind.info.track is own)


@dataclass(frozen=True, kw_only=True)
class PhaseInfo(WordInfo):
    """A phase of a step.

    Attributes:
        part: the kind of work that contains it; None: none.
        doing: what the rank does in it, as a phrase.
    """

    part: Kind | None
    doing: str


class Phase(Word):
    """Phase of the step in which the row was written."""

    info: PhaseInfo

    IDLE = 0, PhaseInfo(words="idle", part=None, doing="outside forward and backward")
    FORWARD = 1, PhaseInfo(words="forward", part=Kind.FORWARD, doing="forward")
    PRE_BACKWARD = 2, PhaseInfo(words="pre-backward", part=Kind.BACKWARD, doing="backward")
    BACKWARD = 3, PhaseInfo(words="backward", part=Kind.BACKWARD, doing="backward")
    POST_BACKWARD = 4, PhaseInfo(words="post-backward", part=Kind.BACKWARD, doing="end of backward")
    OPTIMIZER = 5, PhaseInfo(words="optimizer", part=Kind.OPTIMIZER, doing="optimizer step")


@dataclass(frozen=True, kw_only=True)
class CategoryInfo(ColouredInfo):
    """A memory class; ``is_engines``: the engine reports it, else the runtime does."""

    is_engines: bool = True


class Category(Word):
    """Memory class of an ALLOC or FREE row."""

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
    # this rank's shard of the averaged gradients
    SHARDED_GRADS = 5, CategoryInfo(words="sharded grads", colour=Colour.SHARDED_GRADS)
    OPTIMIZER_STATE = 6, CategoryInfo(words="optimizer state", colour=Colour.OPTIMIZER_STATE, is_engines=False)
    # what autograd keeps for backward, and of checkpoints their inputs; see Activation
    ACTIVATIONS = 7, CategoryInfo(words="activations", colour=Colour.ACTIVATIONS, is_engines=False)
    # copies of the training state in the host's memory, from which a lost rank is healed
    SNAPSHOTS = 8, CategoryInfo(words="snapshots", colour=Colour.SNAPSHOTS, is_engines=False)
    # kept for reuse and not in use; bytes in use count in their own class
    RESERVED = 9, CategoryInfo(words="reserved", colour=Colour.RESERVED)


OFFLOADED = (Category.SHARDED_PARAMS, Category.SHARDED_GRADS, Category.OPTIMIZER_STATE)
"""Classes of bytes that offloading keeps in the host's memory."""

NOT_SPLIT = "of no sharded parameter"
"""Owner of optimizer state whose parameters are in no sharded unit: each rank has all of what its optimizer has."""


@dataclass(frozen=True, kw_only=True)
class Activation:
    """Owner of a storage that autograd keeps for backward.

    Attributes:
        module: path of the module whose forward made it. What has no gradient, such as a mask, indices or the batch,
            belongs to the first module that keeps it.
        op: the operation that made it, such as ``"addmm"``; for what has no gradient, the one that keeps it.
        kept_by: path of the first module that keeps it.
    """

    module: str
    op: str
    kept_by: str

    @property
    def text(self) -> str:
        """The owner as a string of the trace."""
        return "\t".join((self.module, self.op, self.kept_by))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the owner that a string of the trace names; the names are empty if it names none."""
        module, op, kept_by, *_ = (*text.split("\t"), "", "")
        return cls(module=module, op=op, kept_by=kept_by)


@dataclass(frozen=True, kw_only=True)
class FlatPart:
    """One of the parameters inside a flat parameter.

    Attributes:
        fqn: name relative to the root module.
        shape: shape inside the flat parameter, in elements: under tensor parallelism this rank's part.
        global_shape: shape before tensor parallelism; equal to ``shape`` without.
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
        """Number of its elements in the flat parameter."""
        return math.prod(self.shape)

    def within(self, begin: int, end: int) -> tuple[int, int]:
        """Return the elements ``[begin, end)`` of the flat parameter that belong to this part; may be empty.

        Example: a part of 6 elements that starts at 4, within ``[8, 16)`` -> ``(8, 10)``.
        """
        return within(self.first, self.first + self.numel, begin, end)


def within(first: int, last: int, begin: int, end: int) -> tuple[int, int]:
    """Return the elements of ``[first, last)`` that lie in ``[begin, end)``; may be empty."""
    return min(max(begin, first), last), max(min(end, last), first)


@dataclass(frozen=True, kw_only=True)
class Param:
    """One parameter of a unit.

    Attributes:
        fqn: name relative to the root module.
        shape: shape that FSDP shards, in elements: under tensor parallelism this rank's part.
        global_shape: shape before tensor parallelism; equal to ``shape`` without.
        dtype: e.g. ``"float32"``.
        itemsize: bytes per element.
        shard_dim: tensor dimension that is split.
        rows_per_rank: rows of ``shard_dim`` that each shard-rank holds, without padding.
        padded_rows: rows of ``shard_dim`` in each shard-rank's storage, with padding; ``ceil(shape[shard_dim] / F)``.
        trainable: whether it takes a gradient.
        parts: the parameters inside it, if it is flat; else empty.
        use_orig_params: for a flat parameter, whether optimizers hold a piece of each part, not the flat parameter.
        compute_itemsize: bytes per element in the all-gather; 0: those of its unit.
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
    compute_itemsize: int = 0


GLOO = "gloo"
"""Communication of a unit whose ranks send to each other directly, over gloo."""

PER_HOST = "shared memory, gloo between hosts"
"""Communication of a unit whose ranks send data for another host only once."""

C10D = "c10d"
"""Communication of a unit that uses torch's own collectives."""

UNWATCHED = "not watched"
"""Communication of a unit whose collectives were not seen, at least not all of them: what watched them failed."""

OWN_ENGINE = "workbench.engine"
TORCH_FULLY_SHARD = "torch.fully_shard"
TORCH_CLASSIC = "torch.FullyShardedDataParallel"
TORCH_DDP = "torch.DistributedDataParallel"
"""Names of sources of events: the workbench's engine, and torch's."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What an engine does that a unit's description does not say.

    Attributes:
        name: of its source of events.
        model: ``module:class`` of its models, the :class:`~workbench.models.sharded_model.ShardedModel`.
        splits: whether it shards parameters; else every rank has them whole.
        is_flat: whether it makes one flat parameter of all those of a unit.
        pads_for_copy: whether an all-gather over fewer ranks, as after forward, keeps the padding for all of a copy.
        can_reshard: whether ``%fsdp reshard`` can give a unit another policy.
        gathers_params: whether each parameter of a unit is gathered and reduced by itself, not all of them together.
        keeps_waiting_grads: whether gradients that wait for a reduction survive ``zero_grad``, if not flat.
        package: the package with its ``fully_shard`` and ``register_fsdp_forward_method``, if it has them.
    """

    name: str
    model: str = ""
    splits: bool = True
    is_flat: bool = False
    pads_for_copy: bool = False
    can_reshard: bool = False
    gathers_params: bool = False
    keeps_waiting_grads: bool = False
    package: str = ""

    @property
    def short_name(self) -> str:
        """Its name without its library's: ``"DistributedDataParallel"``."""
        return self.name.rpartition(".")[2]


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            name=OWN_ENGINE,
            model="workbench.models.ours:WorkbenchModel",
            can_reshard=True,
            keeps_waiting_grads=True,
            package="workbench.engine",
        ),
        Engine(
            name=TORCH_FULLY_SHARD,
            model="workbench.models.torch_fully_shard:FullyShardModel",
            pads_for_copy=True,
            keeps_waiting_grads=True,
            package="torch.distributed.fsdp",
        ),
        Engine(name=TORCH_CLASSIC, model="workbench.models.torch_wrapper:WrapperModel", is_flat=True),
        Engine(name=TORCH_DDP, model="workbench.models.torch_ddp:ReplicatedModel", splits=False),
    )
}
"""The engines that are known, by name; what is not true of others, such as one of your own, is the default."""


def engine_named(name: str) -> Engine:
    """Return an engine by the name in a unit's description, which is empty for the workbench's."""
    return ENGINES.get(name or OWN_ENGINE) or Engine(name=name)


MAX_EARLIER = 16
"""Policies of a unit that a trace keeps besides the newest: a program may change them in each step."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One ``fully_shard`` call: one communication group of parameters.

    Attributes:
        index: the ``unit`` column's value; never reused within a trace.
        name: module path relative to the root, ``""`` for the root itself; :func:`unit_words` writes it.
        root: index of the root unit of its model (its own index for the root; -1 before the first forward).
        params: its parameters, in order.
        reshard_after_forward: the policy in force (``None`` becomes a bool once the root is known); a number: after
            forward the parameters are sharded over only that many of the F ranks.
        shard_size: ranks that share one copy, F.
        replicate_size: copies whose gradients are averaged by an all-reduce, R; 1 without replication.
        compute_dtype: dtype of the all-gather and of forward and backward, e.g. ``"bfloat16"``.
        reduce_dtype: dtype in which gradients are reduced.
        compute_itemsize: bytes per element of ``compute_dtype``; of some parameters perhaps others.
        reduce_itemsize: bytes per element of ``reduce_dtype``.
        gather_nbytes: bytes that one all-gather makes on each rank, if its parameters define their own all-gather and
            have done one; 0: those of shapes and ``compute_dtype``.
        offload: whether shards, their gradients and the optimizer's state stay in host memory between uses.
        comm: its communication: :data:`GLOO`, ``"shared memory"``, :data:`PER_HOST`, :data:`C10D`, ``"custom"``,
            :data:`UNWATCHED`; ``""`` on one rank or if unknown.
        engine: name of the source that runs it, such as ``"torch.fully_shard"``; ``""``: the workbench's engine.
        num_reductions: all-reduces that average its gradients in one pass, each a part of them; 0: unknown.
        retired: True once ``unshard_module`` has undone the unit.
        gone: True once its model was garbage-collected, for example after its cell was run again.
        since_step: the first step under this policy; -1: not recorded.
        earlier: it under its last :data:`MAX_EARLIER` policies before this one, oldest first.
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
    gather_nbytes: int = 0
    offload: bool = False
    comm: str = ""
    engine: str = ""
    num_reductions: int = 1
    retired: bool = False
    gone: bool = False
    since_step: int = -1
    earlier: tuple[Unit, ...] = ()

    @property
    def is_flat(self) -> bool:
        """Whether its parameters are packed into a flat parameter."""
        return any(param.parts for param in self.params)

    @property
    def policy(self) -> tuple[object, ...]:
        """What decides its collectives and may change from step to step."""
        params = tuple((param.trainable, param.compute_itemsize) for param in self.params)
        return self.reshard_after_forward, self.compute_itemsize, self.reduce_itemsize, params

    def following(self, known: Unit | None, step: int) -> Unit:
        """Return this unit with the policies that it had before.

        Args:
            known: the unit as described so far; None for a new unit.
            step: the step that runs, or else the next one.
        """
        if known is None:
            return replace(self, since_step=step)
        if known.policy == self.policy:
            return replace(self, since_step=known.since_step, earlier=known.earlier)
        before = tuple(unit for unit in (*known.earlier, replace(known, earlier=())) if unit.since_step < step)
        return replace(self, since_step=step, earlier=before[-MAX_EARLIER:])

    def at_step(self, step: int) -> Unit:
        """Return it under the policy of a step; ``since_step`` is -1 if that is not recorded: then under the newest."""
        known = [unit for unit in (*self.earlier, self) if 0 <= unit.since_step <= step]
        return replace(known[-1] if known else self, since_step=known[-1].since_step if known else -1, earlier=())

    @property
    def runner(self) -> Engine:
        """The engine that runs it."""
        return engine_named(self.engine)

    def gathered_itemsize(self, param: Param) -> int:
        """Return the bytes per element that an all-gather moves of one of its parameters."""
        return param.compute_itemsize or self.compute_itemsize

    @property
    def in_use(self) -> bool:
        """Whether the unit can still run."""
        return not (self.retired or self.gone)


ROOT = "(root)"
"""Display name of a root unit, whose name is empty in descriptions."""


def unit_words(name: str) -> str:
    """Return the display name of the unit ``name``: its path, or :data:`ROOT`."""
    return name or ROOT


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Id of the collective of a row: ``seq`` counts the collectives issued on ``group``.

    Attributes:
        dtype: of its payload, ``"float32"``; empty: unknown.
        root: rank of its source or destination; -1: unknown or none.
    """

    group: int
    seq: int
    dtype: str = ""
    root: int = -1


@dataclass(frozen=True, kw_only=True)
class ParamTensors:
    """Current tensors of one parameter on a rank; a tensor is anything that ``torch.as_tensor`` takes.

    Attributes:
        shard: this rank's rows, the same object that an optimizer holds.
        shard_rank: index of these rows in :attr:`Param.rows_per_rank`.
        full: the whole parameter; None if it is not in memory.
        freed: the whole parameter that code may still hold from before it was freed, without values now; None if it is
            in memory, or never was.
        full_grads: gradients of the whole parameter: the newest, then what was accumulated before it.
        sharded_grad: gradient of this rank's rows; None if there is none.
        places: modules that have it, with its name there; empty if only its ``fqn`` is known.
    """

    shard: object
    shard_rank: int
    full: object | None = None
    freed: object | None = None
    full_grads: tuple[object, ...] = ()
    sharded_grad: object | None = None
    places: tuple[tuple[object, str], ...] = ()


class Indices:
    """Indices in this process, from 0.

    Attributes:
        next: the next index.
    """

    def __init__(self) -> None:
        self.next = 0

    def __next__(self) -> int:
        """Return a new index."""
        self.next += 1
        return self.next - 1


UNIT_INDICES = Indices()
"""Indices for the units of this process, whatever their source."""

GROUP_INDICES = itertools.count()
"""Indices for the communication groups of this process, whatever their source."""


class Source(Protocol):
    """Producer of the events on a rank, which it passes to a probe."""

    @property
    def name(self) -> str:
        """Name of the source, without commas."""

    def has(self, unit: int) -> bool:
        """Return whether a unit belongs to this source and still exists."""

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return the rank's tensors of a unit's parameters, by name; empty if the unit belongs to another source.

        Called while the rank is held in an event, in the thread that announced it: must change nothing and not block.
        """


class Probe(Protocol):
    """Receiver of a source's calls, which arrive in the training thread.

    A probe may block (a gate) but must not call the source. The source announces a unit and a communication group
    before their first event, and an event before it happens. Steps and metrics are announced by the runtime for the
    workbench's engine, and by the loop itself for a user's own loop.
    """

    def source(self, source: Source) -> None:
        """Register the source of the following calls; called once, first."""

    def begin_step(self) -> None:
        """Begin the next training step; end one that is still open."""

    def end_step(self) -> None:
        """End the step."""

    def metric(self, name: str, value: float) -> None:
        """Receive a number of the step."""

    def event(self, kind: Kind, edge: Edge, unit: int, num_bytes: int, comm: Comm | None, t_ns: int | None) -> None:
        """Receive an event; ``t_ns`` is set if the event lies in the past (the true end of a collective)."""

    def late_end(self, kind: Kind, unit: int, num_bytes: int, comm: Comm | None, t_ns: int) -> None:
        """A collective ended at ``t_ns`` for which no code that the source sees has waited.

        Ranks learn of it at different events, so it is no event of a rank's progress, and a probe must not block.
        """

    def readers(self, edge: Edge, rank: int = -1) -> None:
        """Begin or end a wait until other ranks have read shared memory; ``rank``, at the end, was the last of them.

        Only a rank that is ahead waits, so it is no event of a rank's progress, and a probe must not block.
        """

    def issued(self, comm: Comm, wait: Callable[[], object]) -> None:
        """A collective was issued on a device; ``wait()`` makes the current stream, not the host, wait for it.

        Not called for collectives between hosts, nor for collectives that only the engine may wait for.
        """

    def memory(self, category: Category, unit: int, delta_bytes: int, owner: str = "") -> None:
        """Receive that ``delta_bytes`` (signed) of ``category`` were allocated or freed.

        ``owner`` is :attr:`Activation.text` of activations.
        """

    def phase(self, phase: Phase) -> None:
        """Begin another phase."""

    def unit(self, info: Unit) -> None:
        """Receive a new or changed unit."""

    def comm_group(self, index: int, ranks: tuple[int, ...], name: str = "") -> None:
        """Receive a new communication group; ``name`` is the same on all its ranks, empty: its index is."""
