"""The interface for requests to the ranks' control channels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from workbench.protocol.commands import RankRequest

R = TypeVar("R")


class ControlChannel(Protocol):
    """The part of a cluster used here."""

    def ask(
        self, request: RankRequest[R], ranks: Iterable[int] | None = None, timeout_s: float = ...
    ) -> Mapping[int, R | Exception]:
        """Send a request to the control channels of ``ranks`` in parallel."""


def answers(
    channel: ControlChannel, request: RankRequest[R], ranks: Iterable[int], *, timeout_s: float
) -> dict[int, R]:
    """Return the control-channel replies of ``ranks``, without those of ranks that failed or timed out."""
    replies = channel.ask(request, ranks, timeout_s=timeout_s)
    return {rank: reply for rank, reply in replies.items() if not isinstance(reply, Exception)}
