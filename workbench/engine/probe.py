"""The engine's one way to tell what it does, *before* it does it.

:data:`active` is ``None`` by default; then every announcement costs one comparison. The words here are the engine's
own: whoever plugs a probe in translates them. All byte counts are logical bytes (elements x itemsize).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Protocol


class Kind(IntEnum):
    """What an event is about."""

    FORWARD = auto()
    BACKWARD = auto()
    UNSHARD = auto()
    RESHARD = auto()
    ALL_GATHER = auto()
    REDUCE_SCATTER = auto()
    ALL_REDUCE = auto()
    COPY_IN = auto()
    COPY_OUT = auto()
    WAIT = auto()
    OFFLOAD = auto()
    RESET = auto()


class Edge(IntEnum):
    """Which end of a span an event is."""

    BEGIN = auto()
    END = auto()
    INSTANT = auto()


class Phase(IntEnum):
    """What a rank's engine is busy with."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    BACKWARD = auto()
    POST_BACKWARD = auto()


class Category(IntEnum):
    """Whose bytes they are. RESERVED: what pools keep and nobody uses now; the classes add up."""

    SHARDED_PARAMS = auto()
    UNSHARDED_PARAMS = auto()
    ALL_GATHER_BUFFERS = auto()
    UNSHARDED_GRADS = auto()
    REDUCE_SCATTER_BUFFERS = auto()
    SHARDED_GRADS = auto()
    RESERVED = auto()


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """One parameter of a unit.

    ``shape`` in elements is what the unit splits along ``shard_dim``, ``global_shape`` what it was before tensor
    parallelism; ``rows_per_rank`` of the shard dim are without padding.
    """

    fqn: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: str
    itemsize: int
    shard_dim: int
    rows_per_rank: tuple[int, ...]
    padded_rows: int
    trainable: bool


@dataclass(frozen=True, kw_only=True)
class UnitInfo:
    """One unit as it is now; announced when made, when its root names it, when its policy changes, when undone.

    ``comm`` says how its bytes travel: "gloo", "shared memory", "c10d", "custom", "" for a single rank.
    """

    index: int
    name: str
    root: int
    params: tuple[ParamInfo, ...]
    reshard_after_forward: bool | int
    shard_size: int
    replicate_size: int
    compute_dtype: str
    reduce_dtype: str
    compute_itemsize: int
    reduce_itemsize: int
    offload: bool
    comm: str
    retired: bool


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

    def unit(self, info: UnitInfo) -> None:
        """Told of a new or changed unit."""

    def comm_group(self, index: int, ranks: tuple[int, ...]) -> None:
        """Told of a new communication group."""


active: Probe | None = None


def event(
    kind: Kind, edge: Edge, unit: int, num_bytes: int = 0, comm: Comm | None = None, t_ns: int | None = None
) -> None:
    """Announce an event to the probe, if there is one."""
    if active is not None:
        active.event(kind, edge, unit, num_bytes, comm, t_ns)


def memory(category: Category, unit: int, delta_bytes: int) -> None:
    """Announce bytes that came to life (positive) or died (negative)."""
    if active is not None and delta_bytes:
        active.memory(category, unit, delta_bytes)


def phase(new: Phase) -> None:
    """Announce a change of phase."""
    if active is not None:
        active.phase(new)


class Lease:
    """Bytes that die with the last reference to this object.

    Attached to tensors whose life the engine does not end itself (gradients are dropped by the user). A probe that was
    not told of the birth is not told of the death.
    """

    __slots__ = ("_category", "_num_bytes", "_probe", "_unit")

    def __init__(self, category: Category, unit: int, num_bytes: int) -> None:
        self._category, self._unit, self._num_bytes = category, unit, num_bytes
        self._probe = active
        memory(category, unit, num_bytes)

    @property
    def is_told(self) -> bool:
        """True if the probe that was told of the birth still listens."""
        return self._probe is active

    def __del__(self) -> None:
        if self.is_told:
            memory(self._category, self._unit, -self._num_bytes)
