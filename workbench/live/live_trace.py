"""The newest snapshot of a workbench and the fold of its trace, which all its dashboards and panels share."""

from __future__ import annotations

import threading
import time
from weakref import WeakKeyDictionary

from workbench.live.fold import HISTORY_ROWS, Fold
from workbench.live.long_poll import LOOK_S, WatchedWorkbench
from workbench.live.messages import KnobEffect
from workbench.live.overview import PolicyEffect
from workbench.session.snapshot import ClusterSnapshot

MAX_AGE_S = 0.9 * LOOK_S
"""Age up to which clients that wait share a snapshot: each of them looks every LOOK_S."""


class LiveTrace:
    """The newest snapshot of a cluster and the fold of its trace. Thread-safe.

    Args:
        history_rows: rows of each rank that a client receives when it opens.

    Attributes:
        lock: held while a client reads the others.
        fold: of the trace of the newest snapshot.
        pulse: the newest snapshot; None: none was taken yet.
        change: effect of the last change of a setting, and how many steps had finished then; None: none to compare.
        num_news: number of snapshots that had new rows.
    """

    def __init__(self, history_rows: int = HISTORY_ROWS) -> None:
        self.lock, self._polling = threading.RLock(), threading.Lock()
        self.fold = Fold(history_rows)
        self.pulse: ClusterSnapshot | None = None
        self.change: tuple[KnobEffect, int] | None = None
        self.num_news = 0
        self._epoch, self._ends = self.fold.epoch, dict[int, int]()
        self._turns = PolicyEffect()
        self._taken_s, self._activity = float("-inf"), object()

    def poll(self, workbench: WatchedWorkbench, max_age_s: float = 0.0) -> ClusterSnapshot:
        """Return a snapshot of ``workbench``, after it was folded.

        Args:
            workbench: the one that all calls are about.
            max_age_s: seconds for which a snapshot, taken by any client, may be used again; a request that has started,
                stopped or ended since is never missing.
        """
        with self._polling:
            activity = workbench.activity()
            with self.lock:
                if (
                    self.pulse is not None
                    and activity == self._activity
                    and time.monotonic() - self._taken_s < max_age_s
                ):
                    return self.pulse
            pulse = workbench.pulse()
            self._activity, self._taken_s = activity, time.monotonic()
            self.show(pulse)
            return pulse

    def show(self, pulse: ClusterSnapshot) -> None:
        """Make ``pulse`` the newest snapshot and fold its rows; no-op if it is."""
        with self.lock:
            if pulse is self.pulse:
                return
            self.pulse = pulse
            new = self.fold.update(pulse.trace, pulse.record)
            ends = {rank_trace.rank: rank_trace.end_seq for rank_trace in pulse.trace.ranks}
            self.num_news += ends != self._ends
            self._ends = ends
            if self.fold.epoch != self._epoch:
                self._epoch, self._turns, self.change = self.fold.epoch, PolicyEffect(), None
            change = self._turns.take(self.fold, pulse.policies, new) if self.fold.groups else None
            self.change = self.change if change is None else (change, self.fold.steps.count)


_SHARED: WeakKeyDictionary[object, LiveTrace] = WeakKeyDictionary()
_MAKING = threading.Lock()


def live_trace_of(workbench: WatchedWorkbench) -> LiveTrace:
    """Return the live trace that all clients of ``workbench`` share."""
    with _MAKING:
        return _SHARED.setdefault(workbench, LiveTrace())
