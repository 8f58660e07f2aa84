"""The words of what happens on a rank: said by whoever runs the training, stored in traces, read by everything else.

A *source* of events calls a :class:`Probe`: the workbench's engine is one, a loop of one's own can be another. It says
what it does *before* it does it. The numbers are those of the trace file: they never change, new ones come at the end.

Words: *unit* is one ``fully_shard`` call, *rank* is a process of the training job, *payload* is the logical size of
a collective (all-gather: its whole output; reduce-scatter: its whole input; all-reduce: one rank's input), not the
bytes on the wire. All byte counts are logical bytes (elements x itemsize).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Kind(IntEnum):
    """What a row is about. BEGIN / END come in pairs except where the comment says INSTANT."""

    STEP = 0  # one training step
    FORWARD = 1  # a unit's forward
    BACKWARD = 2  # a unit's backward: from the gradient of its output to the gradients of its parameters
    OPTIMIZER = 3  # optimizer.step()
    UNSHARD = 4  # BEGIN: all-gather asked for; END: parameters usable
    RESHARD = 5  # INSTANT: full parameters given up
    ALL_GATHER = 6  # BEGIN: issued; END: its last byte arrived (may precede the row before it in time)
    REDUCE_SCATTER = 7
    ALL_REDUCE = 8
    BROADCAST = 9
    COPY_IN = 10  # into a collective's input
    COPY_OUT = 11  # out of a collective's output
    WAIT = 12  # compute blocked on communication: exposed communication
    ALLOC = 13  # INSTANT: num_bytes > 0 of category came to life
    FREE = 14  # INSTANT: num_bytes < 0 of category died
    OFFLOAD = 15  # copy between device and host for offloading
    GATE = 16  # held by a breakpoint or a pause
    METRIC = 17  # INSTANT: module names it, value holds it
    LOG = 18  # INSTANT: module holds the text
    RESET = 19  # INSTANT: the unit's iteration was given up: it is SHARDED and nothing of it is in flight
    RESIDENT = 20  # INSTANT: num_bytes of the process are in memory, whoever owns them


COLLECTIVES = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.BROADCAST)


class Edge(IntEnum):
    """Which end of a span a row is."""

    BEGIN = 0
    END = 1
    INSTANT = 2


class Phase(IntEnum):
    """Where in the step the rank was when the row was written."""

    IDLE = 0
    FORWARD = 1
    PRE_BACKWARD = 2
    BACKWARD = 3
    POST_BACKWARD = 4
    OPTIMIZER = 5


class Category(IntEnum):
    """Memory class of an ALLOC / FREE row: whose bytes they are."""

    SHARDED_PARAMS = 0  # this rank's shards, padded storage
    UNSHARDED_PARAMS = 1  # full parameters of a unit between unshard and reshard
    ALL_GATHER_BUFFERS = 2  # input and output staging of an all-gather
    UNSHARDED_GRADS = 3  # full gradients between backward and reduce-scatter
    REDUCE_SCATTER_BUFFERS = 4  # staging of a reduce-scatter
    SHARDED_GRADS = 5  # this rank's part of the averaged gradients
    OPTIMIZER_STATE = 6
    ACTIVATIONS = 7  # saved for backward
    OTHER = 8
    RESERVED = 9  # kept by pools for reuse, and nobody's now: what a slot holds while it is taken counts elsewhere


class UnitState(IntEnum):
    """Where a unit's parameters are; :class:`KeyFrame` and the ``states`` fold use it."""

    SHARDED = 0  # each rank holds its shard only
    ALL_GATHER_IN_FLIGHT = 1  # shard, and an all-gather output filling up
    UNSHARDED = 2  # shard and full parameters
    REDUCING = 3  # a gradient reduction of the unit is in flight (parameters may be sharded or not)


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


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One ``fully_shard`` call: one communication group of parameters.

    Attributes:
        index: the ``unit`` column's value; never reused within a trace.
        name: module path relative to the root, ``""`` for the root itself.
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
        comm: what carries its collectives: ``"gloo"``, ``"shared memory"``, ``"c10d"``, ``"custom"``; ``""`` on one
            rank or not known.
        retired: True once the unit was undone by ``unshard_module``.
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


@dataclass(frozen=True, kw_only=True)
class Comm:
    """Which collective a row belongs to: ``seq`` counts the collectives issued on ``group``."""

    group: int
    seq: int


class Probe(Protocol):
    """What a listener implements. It may block (a gate); it must not touch the engine."""

    def event(self, kind: Kind, edge: Edge, unit: int, num_bytes: int, comm: Comm | None, t_ns: int | None) -> None:
        """Told of an event; ``t_ns`` is set when the event lies in the past (the true end of a collective)."""

    def memory(self, category: Category, unit: int, delta_bytes: int) -> None:
        """Told that ``delta_bytes`` (signed) of ``category`` came to life or died."""

    def phase(self, phase: Phase) -> None:
        """Told that the engine's phase changed."""

    def unit(self, info: Unit) -> None:
        """Told of a new or changed unit."""

    def comm_group(self, index: int, ranks: tuple[int, ...]) -> None:
        """Told of a new communication group."""
