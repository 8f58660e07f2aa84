"""What is kept when a cluster stops: the zygote that its ranks were forked from.

The next start of this process then forks its ranks at once, where it would first have to import torch. One is kept at
most, for ten minutes, and as long as this process lasts. It serves no start for which something is otherwise than when
it was started: a variable of the environment, the directory, what is installed; its place is taken by a new one then.
So what a start finds is the same with a zygote that was kept and with a new one, but for files of the workbench itself,
or of torch, that were changed in place: as for the kernel, it takes a restart of the kernel until they are read again.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from workbench.cluster.zygote import Zygote, inherited

IDLE_S = 600.0
_END_S = 2.0


class ZygoteCache:
    """Keeps a zygote that is idle; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Zygote | None = None
        self._timer: threading.Timer | None = None
        self._not_ours: Zygote | None = None

    def forget(self) -> None:
        """Keep nothing in a forked child: what its parent keeps is not its own, and not for it to end."""
        self._not_ours = self._kept
        self._lock, self._kept, self._timer = threading.Lock(), None, None

    @property
    def processes(self) -> tuple[psutil.Process, ...]:
        """The zygote that is kept and its reaper; nothing when none is."""
        kept = self._kept
        return () if kept is None else kept.processes

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that ends the zygote that is kept when nobody has wanted it for long."""
        return self._timer

    def take(self, environment: Mapping[str, str], preload: Sequence[str], log: Path) -> Zygote:
        """Return a zygote, which is the caller's until :meth:`keep`: the one that is kept, if it will do, or a new one.

        Args:
            environment: that ranks are to have.
            preload: modules that they need.
            log: file for what a new one writes until it is asked for ranks.

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
        """Keep a zygote once its ranks have ended; one that is not idle within ``timeout_s`` seconds is ended."""
        zygote.join(timeout_s)
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
        """End the zygote that is kept, if there is one."""
        kept = self._let_go()
        if kept is not None:
            kept.end(_END_S)

    def _expire(self, zygote: Zygote) -> None:
        kept = self._let_go(zygote)
        if kept is not None:
            kept.end(_END_S)

    def _let_go(self, only: Zygote | None = None) -> Zygote | None:
        """Take what is kept out of here; with ``only``, nothing else than that."""
        with self._lock:
            if only is not None and only is not self._kept:
                return None
            kept, timer = self._kept, self._timer
            self._kept = self._timer = None
        if timer is not None:
            timer.cancel()
        return kept


KEEPER = ZygoteCache()
"""That of this process."""

atexit.register(KEEPER.end)  # after clusters that are stopped at the exit: they are started later than this is imported
os.register_at_fork(after_in_child=KEEPER.forget)
