"""The cache of the zygote: kept when a cluster stops, for the next start.

The next start in this process then forks its ranks at once, without importing torch first. At most one zygote is kept,
for ten minutes at most, and it ends with this process. If the environment variables, the directory or the installed
packages differ from those at its start, it is replaced by a new one. A cached zygote thus behaves like a new one, with
one exception: source files of the workbench or torch edited in place are read again only after a restart of the kernel,
as in the kernel itself.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from workbench.cluster.zygote import Zygote, inherited

IDLE_S = 600.0
_END_S = 2.0


class ZygoteCache:
    """Cache of one idle zygote. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Zygote | None = None
        self._timer: threading.Timer | None = None
        self._not_ours: Zygote | None = None

    def forget(self) -> None:
        """Empty the cache in a forked child without ending the zygote, which belongs to the parent."""
        self._not_ours = self._kept
        self._lock, self._kept, self._timer = threading.Lock(), None, None

    @property
    def processes(self) -> tuple[psutil.Process, ...]:
        """The cached zygote and its reaper; empty when there is none."""
        kept = self._kept
        return () if kept is None else kept.processes

    @property
    def thread(self) -> threading.Thread | None:
        """The timer thread that ends the cached zygote after :data:`IDLE_S`; None without one."""
        return self._timer

    def take(self, environment: Mapping[str, str], preload: Sequence[str], log: Path) -> Zygote:
        """Return a zygote that the caller owns until :meth:`keep`: the cached one if it matches, else a new one.

        Args:
            environment: environment of the ranks.
            preload: modules that they need.
            log: file for a new zygote's output until its first request.

        Raises:
            ClusterError: its reaper did not start.
        """
        kept = self._let_go()
        if kept is not None:
            if kept.is_idle and kept.inherited == inherited(environment, preload):
                return kept
            kept.end(_END_S)
        return Zygote(environment, preload, log)

    def keep(self, zygote: Zygote, timeout_s: float) -> None:
        """Cache a zygote once its ranks have ended; end it if it is not idle within ``timeout_s`` seconds."""
        with ExitStack() as on_error:
            on_error.callback(zygote.end, _END_S)
            zygote.join(timeout_s)
            on_error.pop_all()
        timer = threading.Timer(IDLE_S, self._expire, [zygote])
        timer.name, timer.daemon = f"keeper of zygote(pid={zygote.process.pid})", True
        before = self._let_go()
        if before is not None:
            before.end(_END_S)
        if not zygote.is_idle:
            zygote.end(_END_S)
            return
        with self._lock:
            self._kept, self._timer = zygote, timer
        try:
            timer.start()
        except RuntimeError:  # Python is about to end
            self._expire(zygote)

    def end(self) -> None:
        """End the cached zygote, if there is one."""
        kept = self._let_go()
        if kept is not None:
            kept.end(_END_S)

    def _expire(self, zygote: Zygote) -> None:
        kept = self._let_go(zygote)
        if kept is not None:
            kept.end(_END_S)

    def _let_go(self, only: Zygote | None = None) -> Zygote | None:
        """Remove the cached zygote and return it; with ``only``, only if it is that one."""
        with self._lock:
            if only is not None and only is not self._kept:
                return None
            kept, timer = self._kept, self._timer
            self._kept = self._timer = None
        if timer is not None:
            timer.cancel()
        return kept


KEEPER = ZygoteCache()
"""The cache of this process."""

atexit.register(KEEPER.end)  # clusters register later, when they start, so they are stopped before
os.register_at_fork(after_in_child=KEEPER.forget)
