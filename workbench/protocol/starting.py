"""What a process is asked to become a rank, and what it answers: the first words between a cluster and its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.protocol.commands import Request


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
class Boot(Request[Address | None]):
    """Makes a process a rank; answered with where all ranks meet by rank 0, which opens it.

    Attributes:
        rank: from 0.
        world_size: number of ranks.
        device: ``auto``, ``cpu`` or ``cuda``.
    """

    word: ClassVar[str] = "boot"
    reply: ClassVar[Any] = Address | None
    rank: int
    world_size: int
    device: str


@dataclass(frozen=True, kw_only=True)
class Connected:
    """What a rank says of itself.

    Attributes:
        rank: from 0.
        host: name of its machine.
        device: where it computes, such as ``cpu`` or ``cuda:1``.
        pid: of its process.
        notice: what the user should know, a sentence; empty: nothing.
    """

    rank: int
    host: str
    device: str
    pid: int
    notice: str = ""


@dataclass(frozen=True, kw_only=True)
class Connect(Request[Connected]):
    """Has a rank join the others; all ranks together.

    Attributes:
        address: where they meet.
    """

    word: ClassVar[str] = "connect"
    reply: ClassVar[Any] = Connected
    address: Address
