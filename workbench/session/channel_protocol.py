"""What of a cluster is needed to ask its ranks at their side doors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from workbench.protocol.commands import RankRequest

R = TypeVar("R")


class ControlChannel(Protocol):
    """What of a cluster is needed here."""

    def ask(
        self, request: RankRequest[R], ranks: Iterable[int] | None = None, timeout_s: float = ...
    ) -> Mapping[int, R | Exception]:
        """Put one request to the side doors of ``ranks`` at the same time."""


def answers(door: ControlChannel, request: RankRequest[R], ranks: Iterable[int], *, timeout_s: float) -> dict[int, R]:
    """Return what ``ranks`` answer at their side doors; one that does not in time is left out."""
    replies = door.ask(request, ranks, timeout_s=timeout_s)
    return {rank: reply for rank, reply in replies.items() if not isinstance(reply, Exception)}
