"""The interface for requests to the ranks' side doors."""

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
        """Send a request to the side doors of ``ranks`` in parallel."""


def answers(door: ControlChannel, request: RankRequest[R], ranks: Iterable[int], *, timeout_s: float) -> dict[int, R]:
    """Return the side-door replies of ``ranks``, without those of ranks that failed or timed out."""
    replies = door.ask(request, ranks, timeout_s=timeout_s)
    return {rank: reply for rank, reply in replies.items() if not isinstance(reply, Exception)}
