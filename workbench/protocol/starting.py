"""What a process is asked to become a rank, and what it answers: the first words between a cluster and its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.protocol.commands import RankRequest


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where something listens.

    Attributes:
        host: its name or number.
        port: of TCP.
    """

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """A machine, as its ranks are told of it.

    Attributes:
        name: no other host of these ranks has it.
        identity: ranks that were told an equal one may share memory.
        address: where its ranks listen for other ranks.
        interface: of the network, that has this address.
    """

    name: str
    identity: str
    address: str
    interface: str


@dataclass(frozen=True, kw_only=True)
class Boot(RankRequest[Address | None]):
    """Makes a process a rank; answered with where all ranks meet by rank 0, which opens it.

    Attributes:
        rank: from 0.
        world_size: number of ranks.
        local_rank: its number on its host, from 0; that of its device, if ranks do not share one.
        local_world_size: number of ranks on its host.
        device: its kind, of :data:`workbench.devices.DEVICES`.
        host: where it is.
    """

    word: ClassVar[str] = "boot"
    reply: ClassVar[Any] = Address | None
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: str
    host: HostInfo


@dataclass(frozen=True, kw_only=True)
class ConnectReply:
    """What a rank says of itself.

    Attributes:
        rank: from 0.
        host: name of its machine.
        device: where it computes, such as ``cpu`` or ``cuda:1``.
        pid: of its process.
        clock: which it reads (:func:`workbench.clock.clock_here`).
        notice: what the user should know, a sentence; empty: nothing.
        refuses: where its host refuses connections, as a sign of life for other hosts; None: another rank of the host
            says so, or there is no other host.
    """

    rank: int
    host: str
    device: str
    pid: int
    clock: str = ""
    notice: str = ""
    refuses: Address | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterOwner:
    """The process that commands ranks, mostly a notebook's kernel.

    Attributes:
        user: whose it is.
        host: name of its machine.
        identity: of that machine.
        pid: of the process.
        created_s: when it began, in seconds since 1970; with ``pid`` it names the process for good.
    """

    user: str
    host: str
    identity: str
    pid: int
    created_s: float

    def __str__(self) -> str:
        """Name it, as in messages."""
        return f"the notebook of {self.user} on {self.host} (process {self.pid})"


@dataclass(frozen=True, kw_only=True)
class World:
    """What each rank knows of all of them, to tell those who come later.

    Attributes:
        engines: session id of the engine of each rank.
        ranks: what each says of itself.
        holder: who commands them; None: nobody does any more, and they keep their variables.
    """

    engines: tuple[str, ...]
    ranks: tuple[ConnectReply, ...]
    holder: ClusterOwner | None


@dataclass(frozen=True, kw_only=True)
class Connect(RankRequest[ConnectReply]):
    """Has a rank join the others; all ranks together.

    Attributes:
        address: where they meet.
    """

    word: ClassVar[str] = "connect"
    reply: ClassVar[Any] = ConnectReply
    address: Address
