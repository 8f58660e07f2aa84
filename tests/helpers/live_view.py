"""One client of a live trace without a workbench: the test supplies traces and snapshots, and reads the answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from workbench.live.feed import Feed, Increment
from workbench.live.fold import HISTORY_ROWS, Fold
from workbench.live.live_trace import LiveTrace
from workbench.live.messages import ClusterState, State, UnitInfo
from workbench.live.panel_state import panel_state
from workbench.live.view_server import Looking, ViewServer
from workbench.session.snapshot import ClusterSnapshot
from workbench.trace.columns import Trace


class FeedView:
    """The feed of a trace that grows."""

    def __init__(self, history_rows: int = HISTORY_ROWS) -> None:
        self.fold, self.feed = Fold(history_rows), Feed()

    def take(self, trace: Trace, max_bytes: int = 1 << 20) -> Increment:
        """Return what is new in ``trace``, a later one than the last."""
        self.fold.update(trace)
        return self.feed.take(self.fold, max_bytes)


class DashboardView:
    """A view of a dashboard."""

    def __init__(self) -> None:
        self.live = LiveTrace()
        self.server = ViewServer(self.live)

    def answer(
        self, question: Looking, pulse: ClusterSnapshot, clock: Callable[[], float] = time.monotonic
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return the answer to a question at a snapshot, which is not older than the last one."""
        self.live.show(pulse)
        return self.server.answer(question, clock)


def state_at(pulse: ClusterSnapshot, *, num_ranks: int = 2, known: tuple[UnitInfo, ...] | None = None) -> State:
    """Return the state that a panel receives for a snapshot."""
    live = LiveTrace()
    live.show(pulse)
    return panel_state(1, live, ClusterState(num_ranks=num_ranks, device="cpu", profile=""), known)
