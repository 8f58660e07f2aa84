"""Aborting the current work of ranks, with escalating means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.cluster.channel_protocol import Interruptible
from workbench.cluster.pending_replies import PendingReplies
from workbench.protocol.rank_messages import GiveUp, Shut

SHUT_AFTER_S = 0.35
"""Time in seconds after an abort before the sockets of the process groups of ranks still running are shut.

After this time the engine's waits have ended, and a rank still running computes or is blocked in a collective of the
user's code. Shutting sockets while ranks still exchange data could leave one waiting for ever inside that exchange.
"""

SIGNAL_AFTER_S = 0.5
"""Time in seconds after an abort before a rank still running in a step is sent SIGINT."""


_ASK_S = 1.0  # timeout of a control-channel request


def late(pending: PendingReplies, ranks: Iterable[int]) -> list[int]:
    """Return those of ``ranks`` that were asked in ``pending`` and have not answered."""
    return [rank for rank in ranks if rank in pending.ranks and not pending.done(rank)]


def free(
    channel: Interruptible,
    ranks: Sequence[int],
    pending: PendingReplies,
    reason: str,
    *,
    interrupts: bool = True,
) -> None:
    """Abort the current work of ``ranks``, escalating until ``pending`` completes; do not wait after the last step.

    Args:
        channel: channels to the ranks.
        ranks: the ranks to abort, idle ones included.
        pending: their current request, or one queued after it.
        reason: reason of the abort, which the ranks report.
        interrupts: whether to send SIGINT as the last step; it could also end a request queued after ``pending``.
    """
    channel.ask(GiveUp(reason=reason), ranks, _ASK_S)
    if not pending.wait(SHUT_AFTER_S):
        channel.ask(Shut(), late(pending, ranks), _ASK_S)
    if interrupts and not pending.wait(SIGNAL_AFTER_S - SHUT_AFTER_S):
        channel.interrupt(late(pending, ranks))
