"""The reaper: a small process that outlives the notebook's kernel just long enough to clean up after it.

It is started before any other process of a cluster, is told of each one (a JSON line on its stdin), and waits for the
kernel to end: by end of file on its stdin, or by becoming somebody else's child (a forked child of the kernel may keep
the pipe open). Then it ends whatever still belongs to the cluster, removes the cluster's private files, and ends.
After a normal stop there is nothing left for it to do but to end.

Run as ``python -m workbench.cluster.reaper CLUSTER_ID PARENT_PID PATH ...``.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from workbench.cluster import processes
from workbench.errors import ClusterError

GRACE_S = 2.0
_PARENT_POLL_S = 0.5


class Reaper:
    """The kernel's handle on its reaper.

    Args:
        cluster_id: value of the marker in the environment of the cluster's processes.
        paths: the cluster's private files and directories, removed with it.
    """

    def __init__(self, cluster_id: str, *paths: Path) -> None:
        own = [cluster_id, str(os.getpid()), *map(str, paths)]
        command = [sys.executable, "-m", "workbench.cluster.reaper", *own]
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )

    @property
    def pid(self) -> int:
        """Process id of the reaper."""
        return self._popen.pid

    def adopt(self, process: psutil.Process) -> None:
        """Tell the reaper of a process it will have to end.

        Raises:
            ClusterError: the reaper is gone.
        """
        line = json.dumps({"pid": process.pid, "created_s": process.create_time()}) + "\n"
        pipe = self._popen.stdin
        try:
            if pipe is not None:
                pipe.write(line.encode())
        except OSError as error:
            raise ClusterError("the process that cleans up after a cluster has ended early; start again") from error

    def close(self, timeout_s: float) -> None:
        """Let the reaper do what is left to do and end; kill it when that takes longer than ``timeout_s`` seconds."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def parse(line: bytes) -> psutil.Process | None:
    """Return the process a line names; None when it no longer runs.

    Example: ``{"pid": 12, "created_s": 1700000000.25}`` -> process 12 if it was created at that time.
    """
    named = json.loads(line)
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


def main(cluster_id: str, parent_pid: int, *paths: str) -> None:
    """Wait for the end of the process ``parent_pid``, then clean up (see the module's text)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    adopted = [process for line in _lines(sys.stdin.fileno(), parent_pid) if (process := parse(line)) is not None]
    processes.end(cluster_id, adopted, grace_s=GRACE_S)
    for path in map(Path, paths):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a directory with all that is in it; one that is gone is fine."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
