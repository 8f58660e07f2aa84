"""The schema of a trace: the fields of a row and of the header. Kinds and other enums are in :mod:`workbench.events`.

One row is one *instant* on one rank. A span is a BEGIN row and an END row, never one finished record, so that a hang
shows what was begun. Ranks pack rows with :data:`ROW`; the kernel reads them as :data:`ROW_DTYPE`. Both describe the
same 52 bytes.

A rank records times of its own clock. In a trace all times are on rank 0's clock: the session converts rows once, as
they arrive (:mod:`workbench.session.clock_sync`), and records the measured offsets in the header.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workbench.events import Category, Unit, UnitState

SCHEMA_VERSION = 9

ROW = struct.Struct("<qqqdiiihhBBBB")
"""One packed row: the fields of :data:`ROW_DTYPE` in their order, little-endian, no gaps."""

ROW_DTYPE = np.dtype(
    [
        ("seq", "<i8"),  # gap-free per rank, from 0
        ("t_ns", "<i8"),  # monotonic; an END, or DEVICE, may be earlier than the row before it
        ("num_bytes", "<i8"),  # payload of a collective or copy; signed delta of ALLOC / FREE; of RESIDENT; else 0
        # METRIC: number logged; DEVICE: seq of its row; END of READERS: the last rank; BEGIN of a collective: the rank
        # that is its source or destination; else NaN
        ("value", "<f8"),
        ("step", "<i4"),  # training step, from 0; -1 outside any step
        # index into Header.strings: metric name, log text, stream of a device, part of loading, dtype of a collective,
        # Activation.text of what autograd keeps, owner of optimizer state; -1 none
        ("module", "<i4"),
        ("comm_seq", "<i4"),  # n-th collective issued on comm_group; pairs it across ranks; -1 none
        ("unit", "<i2"),  # index into Header.units; -1 none
        ("comm_group", "<i2"),  # index into Header.comm_groups; -1 none
        ("kind", "u1"),  # Kind
        ("edge", "u1"),  # Edge
        ("phase", "u1"),  # Phase
        ("category", "u1"),  # Category; NO_CATEGORY where the row is not ALLOC / FREE
    ]
)

Rows = NDArray[np.void]
"""A 1-D array of :data:`ROW_DTYPE`."""

NO_CATEGORY = 255


@dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """Ranks that issue collectives together.

    Attributes:
        name: unique among all groups, also those with the same ranks.
        ranks: global ranks, in group order; empty if unknown.
    """

    name: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BufferSum:
    """Checksum of a rank's copy of a buffer of a sharded model; nothing keeps the copies equal.

    Attributes:
        name: starts with the variable of its model, ``"model.norm.running_mean"``.
        crc32: checksum of its bytes.
    """

    name: str
    crc32: int


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Host, process and device of one rank.

    Attributes:
        rank: global rank.
        host: its machine.
        device: e.g. ``"cpu"`` or ``"cuda:0"``.
        pid: of its process.
        baseline_bytes: memory of its process when it joined: the interpreter and libraries; 0 if unknown.
        device_error_ns: maximum error of the times of DEVICE rows on the rank's clock; 0 where the host computes.
        buffers: buffers of its sharded models, after its last cell or command.
        sees_cpp: whether collectives that C++ issues, outside of the workbench's engine, are among its events.
    """

    rank: int
    host: str
    device: str
    pid: int
    baseline_bytes: int = 0
    device_error_ns: int = 0
    buffers: tuple[BufferSum, ...] = ()
    sees_cpp: bool = True


@dataclass(frozen=True, kw_only=True, order=True)
class ClockReading:
    """One comparison of a clock with rank 0's.

    Attributes:
        t_ns: time of the comparison on rank 0's clock.
        offset_ns: nanoseconds by which the clock was ahead of rank 0's.
        error_ns: maximum error of the offset.
    """

    t_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """A clock that is not rank 0's.

    Attributes:
        ranks: the ranks that read it, ascending.
        readings: in the order of their times, at least one. Each gives the offset by which times of these ranks were
            converted, until the next.
    """

    ranks: tuple[int, ...]
    readings: tuple[ClockReading, ...]


@dataclass(frozen=True, kw_only=True)
class Header:
    """Everything about a trace that is not a row. The empty header is a valid one.

    Attributes:
        producer: the names of the sources of its events.
        world_size: ranks of the job, recorded or not.
        mesh_shape: ranks along each axis of the mesh.
        mesh_axes: names of these axes.
        ranks: host, process and device of each known rank.
        clocks: the clocks other than rank 0's; ranks that none of them lists read rank 0's clock.
        units: all units there ever were, by index.
        unmanaged: trainable parameters of sharded models in no unit, each name starting with the variable of its model,
            ``"model.scale"``: nothing averages their gradients.
        hooks: sharded parameters with a ``register_hook``, which is never called; named likewise.
        comm_groups: table that the column ``comm_group`` indexes.
        strings: table that the column ``module`` indexes.
        schema_version: of the file; only the current one can be read.
    """

    producer: str = ""
    world_size: int = 0
    mesh_shape: tuple[int, ...] = ()
    mesh_axes: tuple[str, ...] = ()
    ranks: tuple[RankInfo, ...] = ()
    clocks: tuple[HostClock, ...] = ()
    units: tuple[Unit, ...] = ()
    unmanaged: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    comm_groups: tuple[GroupInfo, ...] = ()
    strings: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @cached_property
    def info_of(self) -> Mapping[int, RankInfo]:
        """The entry of each known rank, by rank."""
        return {info.rank: info for info in self.ranks}

    @property
    def is_enqueued(self) -> bool:
        """True if ranks compute on a device: times are then the host's, which enqueues work and does not wait.

        A row has the time at which work was enqueued. A DEVICE row, later or never, has the time of the device.
        """
        without_clock = "cuda"  # a source may have no clock of the device, and then no error
        return any(info.device_error_ns or info.device.startswith(without_clock) for info in self.ranks)


@dataclass(frozen=True, kw_only=True)
class KeyFrame:
    """State of one rank just before row ``seq``: a fold can start here without the rows before it.

    Attributes:
        seq: the first row that is *not* included in this state.
        bytes_by_category: live bytes, indexed by :class:`Category`.
        unit_states: parameter state per unit index (never REDUCING).
        reducing: gradient reductions in flight per unit index.
    """

    seq: int = 0
    bytes_by_category: tuple[int, ...] = (0,) * len(Category)
    unit_states: dict[int, UnitState] = field(default_factory=dict)
    reducing: dict[int, int] = field(default_factory=dict)
