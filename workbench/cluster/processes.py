"""The processes of a cluster: their environment, their membership, and how all of them are ended.

A process *belongs* to a cluster when it was adopted by it, descends from an adopted one, or has the cluster's marker in
its environment (so that workers started by a user's code on a rank belong to it too). A process is always a
:class:`psutil.Process`, identified by pid *and* creation time, so a reused pid is never signalled.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

MARKER = "WORKBENCH_CLUSTER_ID"

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)

_POLL_S = 0.02
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class ChildProcess:
    """A child process of ours and the thread that waits for its end.

    Args:
        popen: the process, just started.
        on_exit: called once, in the waiting thread, with the exit code (negative: the signal that ended it).

    Attributes:
        process: the psutil process.
        returncode: exit code, None while it runs.
    """

    def __init__(self, popen: subprocess.Popen[bytes], on_exit: Callable[[int], None]) -> None:
        self.process = psutil.Process(popen.pid)
        self.returncode: int | None = None
        self._popen = popen
        self._on_exit = on_exit
        self._thread = threading.Thread(target=self._watch, name=f"watch(pid={popen.pid})", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        self.returncode = self._popen.wait()
        self._on_exit(self.returncode)

    def join(self, timeout_s: float) -> None:
        """Wait for the process and the waiting thread to end."""
        self._thread.join(timeout_s)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores this process may use: its affinity, limited by a container's CPU quota, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Return the CPU quota of this container in cores; None without a quota or a cgroup (v2 or v1)."""
    try:
        words = (cgroup / "cpu.max").read_text().split()
    except OSError:
        try:
            words = [(cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        except OSError:
            return None
    return None if words[0] in ("max", "-1") else int(words[0]) / int(words[1])


def thread_limits(num_ranks: int, cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that keep ``num_ranks`` processes from oversubscribing ``cores`` cores.

    A lower number already in ``environ`` is kept.

    Example: 4 ranks, 8 cores, ``{"OMP_NUM_THREADS": "1"}`` -> OMP 1, the others 2.
    """
    share = max(1, cores // num_ranks)
    limits = {}
    for name in THREAD_VARIABLES:
        wanted = environ.get(name, "")
        limits[name] = str(min(share, int(wanted)) if wanted.isdecimal() and int(wanted) > 0 else share)
    return limits


def environment(cluster_id: str, num_ranks: int) -> dict[str, str]:
    """Return the environment of a cluster's processes: ours, with marker and thread limits, without ``IPP_*``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("IPP_")}
    return kept | thread_limits(num_ranks, usable_cores(), kept) | {MARKER: cluster_id}


def num_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the kernel of this machine has killed because memory ran out; None: it does not say."""
    with suppress(OSError, ValueError):
        counts = dict(line.split() for line in vmstat.read_text().splitlines())
        return int(counts["oom_kill"]) if "oom_kill" in counts else None
    return None


def is_running(process: psutil.Process) -> bool:
    """Return whether the process runs; False for a zombie."""
    return bool(process.is_running() and not has_ended(process))


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, zombies included, with a single query.

    A reused pid is not detected: use this only for processes whose end is reported at once.
    """
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def belonging(cluster_id: str, adopted: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Return all running processes that belong to the cluster, except the calling one."""
    found = set(adopted) | set(_marked(cluster_id))
    for process in tuple(found):
        try:
            found.update(process.children(recursive=True))
        except psutil.Error:  # just gone, or not ours to read
            continue
    found.discard(psutil.Process())
    return {process for process in found if is_running(process)}


def _marked(cluster_id: str) -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == cluster_id:
                yield process
        except (psutil.Error, OSError):  # not ours to read, or just gone: so not in the cluster
            continue


@contextmanager
def adopting_orphans() -> Iterator[Callable[[], set[psutil.Process]]]:
    """Make this process the parent of its descendants whose own parent ends, within the body; on Linux only.

    So those are found that have left their session and changed their environment.

    Yields:
        returns all processes below this one that have begun since.
    """
    me, is_linux, before_us = psutil.Process(), sys.platform == "linux", ctypes.c_int()
    before = set(me.children(recursive=True))
    if is_linux:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before_us), 0, 0, 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield lambda: set(me.children(recursive=True)) - before
    finally:
        for child in set(me.children()) - before:
            with suppress(OSError):  # one that its own waiting thread has asked for
                os.waitpid(child.pid, os.WNOHANG)
        if is_linux:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, before_us.value, 0, 0, 0)


def end(cluster_id: str, adopted: Iterable[psutil.Process], *, grace_s: float, deadline_s: float = 5.0) -> bool:
    """End every process that belongs to the cluster.

    Args:
        cluster_id: value of the marker.
        adopted: processes known to belong to it.
        grace_s: time in seconds between asking (SIGTERM) and killing (SIGKILL).
        deadline_s: time in seconds to keep sending SIGKILL to processes that do not end.

    Returns:
        True when none is left.
    """
    adopted = tuple(adopted)
    left = belonging(cluster_id, adopted)
    _signal(left, psutil.Process.terminate)
    wait_for_end(left, grace_s)
    deadline = time.monotonic() + deadline_s
    while (left := belonging(cluster_id, adopted)) and time.monotonic() < deadline:
        _signal(left, psutil.Process.kill)
        wait_for_end(left, 0.5)
    return not left


def _signal(processes: Iterable[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        try:
            send(process)
        except psutil.Error:  # just gone, or not ours to end
            continue


def wait_for_end(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """Wait until none of ``processes`` runs, ``timeout_s`` seconds at most."""
    # not psutil.wait_procs: it would reap our children, and their exit codes would be lost to ChildProcess
    deadline = time.monotonic() + timeout_s
    while any(is_running(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
