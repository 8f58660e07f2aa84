"""Having ranks leave what they do, more and more firmly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from workbench.cluster.pending_replies import PendingReplies
from workbench.protocol.commands import RankRequest
from workbench.protocol.rank_messages import GiveUp, Shut

SHUT_AFTER_S = 0.35
"""How long after an abort a rank may still run before its process groups' sockets are shut, in seconds.

By then the engine's waits have ended, and who still runs computes or is blocked in a collective of the user's own.
Shutting while ranks still exchange data could leave one waiting for ever inside that exchange.
"""

SIGNAL_AFTER_S = 0.5
"""How long after an abort a rank in a step may still run before it is sent SIGINT, in seconds."""


_ASK_S = 1.0  # how long a rank may take to answer at its side door


class Releasable(Protocol):
    """What of a cluster, or of the doors of its ranks, is needed here."""

    def ask(self, request: RankRequest[Any], ranks: Iterable[int], timeout_s: float) -> Mapping[int, object]:
        """Put a request to the side doors of ``ranks``."""

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Send SIGINT to ``ranks``."""


def late(pending: PendingReplies, ranks: Iterable[int]) -> list[int]:
    """Return which of ``ranks`` were asked and have not answered."""
    return [rank for rank in ranks if rank in pending.ranks and not pending.done(rank)]


def free(
    door: Releasable,
    ranks: Sequence[int],
    pending: PendingReplies,
    reason: str,
    *,
    store: bool,
    interrupts: bool = True,
) -> None:
    """Free ``ranks`` from what they do until ``pending`` is done; what comes of the last means is not waited for.

    Args:
        door: to the ranks.
        ranks: who is told to give up, whether or not it does something.
        pending: what they do, or what they were asked after it.
        reason: why; they say it.
        store: whether they may not even wait for the store any more, for good.
        interrupts: whether SIGINT is the last means; it could end as well what they were asked after that.
    """
    door.ask(GiveUp(reason=reason), ranks, _ASK_S)
    if not pending.wait(SHUT_AFTER_S):
        door.ask(Shut(store=store), late(pending, ranks), _ASK_S)
    if interrupts and not pending.wait(SIGNAL_AFTER_S - SHUT_AFTER_S):
        door.interrupt(late(pending, ranks))
