"""The reaper: a small process that outlives the notebook's kernel just long enough to clean up after it.

It is the first process of a cluster and receives a JSON line on its stdin for each further one. It detects the end of
the kernel by end of file on its stdin, or by a new parent process (a forked child of the kernel may keep the pipe
open). Then it ends the processes that still belong to the cluster, runs the commands that end a queue's job or engines
on other hosts, removes the cluster's private files, and exits. After a normal stop it just exits.

Run as ``python -m workbench.cluster.reaper CLUSTER_ID PARENT_PID PATTERN ...``.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from workbench.cluster import processes
from workbench.errors import ClusterError

GRACE_S = 2.0

COMMANDS_S = 15.0
"""Timeout in seconds of all cleanup commands together."""

_PARENT_POLL_S = 0.5


class Reaper:
    """The kernel's handle on its reaper.

    Args:
        cluster_id: value of the marker in the environment of the cluster's processes.
        patterns: :func:`glob.glob` patterns of the cluster's private files and directories, which the reaper removes.
    """

    def __init__(self, cluster_id: str, *patterns: str) -> None:
        own = [cluster_id, str(os.getpid()), *patterns]
        command = [sys.executable, "-m", "workbench.cluster.reaper", *own]
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )

    @property
    def pid(self) -> int:
        """Process id of the reaper."""
        return self._popen.pid

    def adopt(self, process: psutil.Process) -> None:
        """Register a process that the reaper has to end.

        Raises:
            ClusterError: the reaper is gone.
        """
        self._report({"pid": process.pid, "created_s": process.create_time()})

    def leave(self, commands: Sequence[Sequence[str]], paths: Sequence[Path] = ()) -> None:
        """Set the further cleanup of the reaper, replacing that of an earlier call.

        Args:
            commands: end jobs and engines elsewhere; run in parallel.
            paths: files to remove.

        Raises:
            ClusterError: the reaper is gone.
        """
        self._report({"commands": [list(command) for command in commands], "paths": [str(path) for path in paths]})

    def _report(self, what: dict[str, Any]) -> None:
        pipe = self._popen.stdin
        try:
            if pipe is not None:
                pipe.write(json.dumps(what).encode() + b"\n")
        except OSError as error:
            raise ClusterError("the cleanup process of the cluster ended early: start again") from error

    def close(self, timeout_s: float) -> None:
        """Let the reaper finish its cleanup; kill it after ``timeout_s`` seconds."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def process_of(named: Mapping[str, Any]) -> psutil.Process | None:
    """Return the process with this pid and creation time; None when it no longer runs.

    Example: ``{"pid": 12, "created_s": 1700000000.25}`` -> process 12 if it was created at that time.
    """
    try:
        process = psutil.Process(named["pid"])
    except psutil.NoSuchProcess:
        return None
    return process if process.create_time() == named["created_s"] else None


def _lines(descriptor: int, parent_pid: int) -> Iterator[bytes]:
    """Yield complete lines until end of file or until ``parent_pid`` is no longer our parent."""
    pending = b""
    while os.getppid() == parent_pid:
        ready, _, _ = select.select([descriptor], [], [], _PARENT_POLL_S)
        if not ready:
            continue
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return
        *complete, pending = (pending + chunk).split(b"\n")
        yield from complete


def main(cluster_id: str, parent_pid: int, *patterns: str) -> None:
    """Wait for the end of the process ``parent_pid``, then clean up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    adopted: list[psutil.Process] = []
    left: dict[str, Any] = {"commands": [], "paths": []}
    for record in map(json.loads, _lines(sys.stdin.fileno(), parent_pid)):
        if "pid" not in record:
            left = record
        elif (process := process_of(record)) is not None:
            adopted.append(process)
    processes.end(cluster_id, adopted, grace_s=GRACE_S)
    _run_all(left["commands"])
    for path in (*chain.from_iterable(map(glob, patterns)), *left["paths"]):
        remove(Path(path))


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run commands in parallel and discard their output."""
    nowhere, begun = subprocess.DEVNULL, []
    for command in commands:
        with suppress(OSError):
            begun.append(subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere))
    until = time.monotonic() + COMMANDS_S
    for each in begun:
        try:
            each.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.kill()
            each.wait()


def remove(path: Path) -> None:
    """Remove a file or a directory tree, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
