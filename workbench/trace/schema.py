"""What a trace is made of: what a row holds, and what the header says; its words are :mod:`workbench.events`.

One row is one *instant* on one rank. A span is a BEGIN row and an END row, never one finished record, so that a
hang shows what was begun. Rows are packed with :data:`ROW` on the rank and read as :data:`ROW_DTYPE` in the kernel;
the two describe the same 52 bytes.

A rank tells times of its own clock. In a trace all times are of rank 0's: whoever collects rows converts them once, as
they come (:mod:`workbench.session.clock_sync`), and says in the header what the clocks were found to differ by.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workbench.events import Category, Unit, UnitState

SCHEMA_VERSION = 8

ROW = struct.Struct("<qqqdiiihhBBBB")
"""One packed row: the fields of :data:`ROW_DTYPE` in their order, little-endian, no gaps."""

ROW_DTYPE = np.dtype(
    [
        ("seq", "<i8"),  # gap-free per rank, from 0
        ("t_ns", "<i8"),  # monotonic; an END, or DEVICE, may be earlier than the row before it
        ("num_bytes", "<i8"),  # payload of a collective or copy; signed delta of ALLOC / FREE; of RESIDENT; else 0
        ("value", "<f8"),  # METRIC: the number logged; DEVICE: seq of the row it tells of; else NaN
        ("step", "<i4"),  # training step, from 0; -1 outside any step
        ("module", "<i4"),  # index into Header.strings: metric name, log text, stream of a device; -1 none
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
        name: tells it from other groups, also from an earlier one of the same ranks.
        ranks: global ranks, in group order; none if not known.
    """

    name: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BufferSum:
    """What a rank holds of a buffer of a sharded model, which nothing keeps equal on the ranks.

    Attributes:
        name: after the variable that has its model, ``"model.norm.running_mean"``.
        crc32: checksum of its bytes.
    """

    name: str
    crc32: int


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Where one rank lives.

    Attributes:
        rank: global rank.
        host: its machine.
        device: e.g. ``"cpu"`` or ``"cuda:0"``.
        pid: of its process.
        baseline_bytes: memory of its process when it joined: the interpreter and libraries; 0 if not known.
        device_error_ns: how far times of DEVICE rows may be off the rank's clock; 0 where the host computes.
        buffers: of its sharded models, after its last cell or command.
    """

    rank: int
    host: str
    device: str
    pid: int
    baseline_bytes: int = 0
    device_error_ns: int = 0
    buffers: tuple[BufferSum, ...] = ()


@dataclass(frozen=True, kw_only=True, order=True)
class ClockReading:
    """What a comparison of a clock with rank 0's has found.

    Attributes:
        t_ns: when, on rank 0's clock.
        offset_ns: by how many nanoseconds the clock was ahead of rank 0's.
        error_ns: how far that may be off.
    """

    t_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """A clock that is not rank 0's.

    Attributes:
        ranks: those that read it, ascending.
        readings: in the order of their times, at least one. From each on until the next, times of these ranks were
            converted by what it has found.
    """

    ranks: tuple[int, ...]
    readings: tuple[ClockReading, ...]


@dataclass(frozen=True, kw_only=True)
class Header:
    """Everything about a trace that is not a row. The empty header is a valid one.

    Attributes:
        producer: the sources that told what happened, by the names they give themselves.
        world_size: ranks of the job, recorded or not.
        mesh_shape: ranks along each axis of the mesh.
        mesh_axes: names of these axes.
        ranks: where those that are known live.
        clocks: those that are not rank 0's; of a rank that has none of them the clock is rank 0's.
        units: all there ever were, by index.
        unmanaged: trainable parameters of sharded models that belong to no unit, each after the variable that has its
            model, ``"model.scale"``: nothing averages their gradients.
        hooks: sharded parameters with a ``register_hook``, which is never called; named likewise.
        comm_groups: what the column ``comm_group`` counts.
        strings: what the column ``module`` counts.
        schema_version: of the file; what is read has today's.
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
        """Where each rank lives of which that is known, by its number."""
        return {info.rank: info for info in self.ranks}

    @property
    def is_enqueued(self) -> bool:
        """True if ranks compute on a device: times are then the host's, which hands work over and does not wait.

        A row says when work was enqueued; a DEVICE row, that follows later or never, when the device came to it.
        """
        told_no_error = "cuda"  # before version 3 no rank told how far its device's times are off
        return any(info.device_error_ns or info.device.startswith(told_no_error) for info in self.ranks)


@dataclass(frozen=True, kw_only=True)
class KeyFrame:
    """State of one rank just before row ``seq``: a fold can start here without the rows before it.

    Attributes:
        seq: the first row that is *not* in this state.
        bytes_by_category: live bytes, indexed by :class:`Category`.
        unit_states: parameter state per unit index (never REDUCING).
        reducing: gradient reductions in flight per unit index.
    """

    seq: int = 0
    bytes_by_category: tuple[int, ...] = (0,) * len(Category)
    unit_states: dict[int, UnitState] = field(default_factory=dict)
    reducing: dict[int, int] = field(default_factory=dict)
