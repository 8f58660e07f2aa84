"""The first messages between a cluster and its ranks: requests that make a process a rank, and their replies."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.protocol.commands import RankRequest, request


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where something listens.

    Attributes:
        host: its name or IP address.
        port: TCP port.
    """

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """A machine, as its ranks know it.

    Attributes:
        name: unique among the hosts of these ranks.
        identity: ranks with an equal identity may share memory.
        address: where its ranks listen for other ranks.
        interface: network interface of this address.
    """

    name: str
    identity: str
    address: str
    interface: str


@dataclass(frozen=True, kw_only=True)
class RankPast:
    """The record that a rank, or another process in its place, continues.

    Attributes:
        header: its header, without what is of one rank or model (:func:`workbench.trace.header.header_to_dict`).
        key_frame: the state after its last recorded row (:func:`workbench.trace.header.key_frame_to_dict`).
        next_step: number of the next step.
        next_unit: index of the next unit.
        optimizer_steps: number of optimizer steps.
    """

    header: dict[str, Any]
    key_frame: dict[str, Any]
    next_step: int
    next_unit: int
    optimizer_steps: int


@request("boot")
class Boot(RankRequest[Address | None]):
    """Makes a process a rank; rank 0 opens the store and replies with its address, at which all ranks meet.

    Attributes:
        rank: from 0.
        world_size: number of ranks.
        local_rank: index on its host, from 0; also of its device, unless ranks share one.
        local_world_size: number of ranks on its host.
        device: kind of its device, one of :data:`workbench.base.devices.DEVICES`.
        host: its machine.
        past: what it continues; None: nothing.
        session: a name that these ranks share with no others, for their files.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: str
    host: HostInfo
    past: RankPast | None = None
    session: str = ""


def private_file(session: str, rank: int) -> Path:
    """Return the file, on its host, in which a rank of a session keeps what only it holds of a training."""
    return Path(tempfile.gettempdir()) / f"fsdp-workbench-state-{session}-{rank}"


def crash_file() -> Path:
    """Return the file, on its host, into which this process writes its stacks when C code ends it."""
    return Path(tempfile.gettempdir()) / f"fsdp-workbench-crash-{socket.gethostname()}-{os.getpid()}"


def _crash_file_here() -> str:
    path = crash_file()
    return str(path) if path.exists() else ""


@dataclass(frozen=True, kw_only=True)
class ConnectReply:
    """A rank's description of itself.

    Attributes:
        rank: from 0.
        host: name of its machine.
        device: where it computes, such as ``cpu`` or ``cuda:1``.
        pid: id of its process.
        clock: id of its clock (:func:`workbench.base.clock.clock_here`).
        notice: a sentence for the user; may be empty.
        refuses: address at which its host refuses connections, a sign of life for other hosts; None: another rank of
            the host provides it, or there is no other host.
        crash_file: where its stacks are if C code has ended it; empty: in its log.
    """

    rank: int
    host: str
    device: str
    pid: int
    clock: str = ""
    notice: str = ""
    refuses: Address | None = None
    crash_file: str = field(default_factory=_crash_file_here)


@dataclass(frozen=True, kw_only=True)
class ClusterOwner:
    """The process that controls ranks, usually a notebook's kernel.

    Attributes:
        user: name of its user.
        host: name of its machine.
        identity: identity of that machine.
        pid: id of the process.
        created_s: start time, in seconds since 1970; with ``pid`` it identifies the process uniquely.
    """

    user: str
    host: str
    identity: str
    pid: int
    created_s: float

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"the notebook of {self.user} on {self.host} (process {self.pid})"


@dataclass(frozen=True, kw_only=True)
class World:
    """A description of all ranks, which each of them has for notebooks that attach later.

    Attributes:
        engines: session id of the engine of each rank.
        ranks: each rank's description of itself.
        holder: the process that controls them; None: none any more, and the ranks keep their variables.
    """

    engines: tuple[str, ...]
    ranks: tuple[ConnectReply, ...]
    holder: ClusterOwner | None


@request("connect")
class Connect(RankRequest[ConnectReply]):
    """Makes a rank join the others; collective.

    Attributes:
        address: address of the store.
    """

    address: Address
