"""What a request on the ranks' control channels needs of a cluster; a cluster and its channels have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from workbench.protocol.commands import RankRequest

R = TypeVar("R")


class ControlChannel(Protocol):
    """Sends requests to ranks, which answer while they are busy."""

    def ask(self, request: RankRequest[R], ranks: Iterable[int], timeout_s: float) -> Mapping[int, R | Exception]:
        """Send a request to ``ranks`` in parallel; return the reply or the exception of each."""


class Interruptible(ControlChannel, Protocol):
    """The same for ranks that may also be sent a signal."""

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Send SIGINT to ``ranks``."""


def answers(
    channel: ControlChannel, request: RankRequest[R], ranks: Iterable[int], *, timeout_s: float
) -> dict[int, R]:
    """Return the replies of ``ranks``, without those of ranks that failed or timed out."""
    replies = channel.ask(request, ranks, timeout_s=timeout_s)
    return {rank: reply for rank, reply in replies.items() if not isinstance(reply, Exception)}
