"""Leak checks: a test may leave nothing behind.

A census lists what belongs to this test run: processes below this one and orphans (found by a marker in their
environment), threads, listening ports, torch's process group. It excludes what is kept for the next start of a cluster
or for the next test.

``tests/conftest.py`` compares the census before and after every test, every test module, and the whole run, after which
nothing is kept. It checks for orphans only after every module, as this reads the environment of every process of the
machine.
"""

import os
import socket
import sys
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from workbench.cluster.zygote_cache import KEEPER
from workbench.runtime.sockets import open_sockets

MARKER = "WORKBENCH_TEST_RUN"
KEPT = []
"""Other keepers of processes for the next test: each has ``processes`` and ``end()``."""
_INTERNET = {socket.AF_INET, socket.AF_INET6}


@dataclass(frozen=True)
class Census:
    processes: frozenset
    threads: frozenset
    ports: frozenset
    groups: frozenset

    def describe_beyond(self, before):
        """Return a description of everything in this census that is not in ``before``."""
        return [
            *(f"process {p.pid}: {_command(p)}" for p in self.processes - before.processes),
            *(f"thread {t.name}" for t in self.threads - before.threads),
            *(f"listening port {port}" for port in self.ports - before.ports),
            *(f"process group of {module}" for module in self.groups - before.groups),
        ]


def mark():
    """Mark this test run: processes started from now on inherit the marker."""
    os.environ[MARKER] = uuid.uuid4().hex


def census(*, with_orphans=True):
    kept = (keeper.processes for keeper in (KEEPER, *KEPT))
    found = (_descendants() | (_orphans() if with_orphans else set())).difference(*kept)
    return Census(
        processes=frozenset(p for p in found if is_running(p)),
        threads=frozenset(threading.enumerate()) - {KEEPER.thread},
        ports=frozenset(_listening()),
        groups=frozenset(_process_groups()),
    )


def left_over(before, deadline_s=30.0, *, with_orphans=True):
    """Return the new items since ``before``; those that are ending have ``deadline_s`` seconds to do so."""
    deadline = time.monotonic() + deadline_s
    while (left := census(with_orphans=with_orphans).describe_beyond(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@contextmanager
def guard(*, with_orphans=True):
    """Fail if the body leaves something behind."""
    before = census(with_orphans=with_orphans)
    yield
    left = left_over(before, with_orphans=with_orphans)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


def _descendants():
    """Return all descendants from /proc: psutil reads every process of the machine, which adds up at twice per test."""
    if not Path("/proc/thread-self/children").exists():  # not Linux
        return set(psutil.Process().children(recursive=True))
    found, parents = set(), [os.getpid()]
    while parents:
        for pid in _children(parents.pop()):
            with suppress(psutil.NoSuchProcess):
                found.add(psutil.Process(pid))
            parents.append(pid)
    return found


def _children(pid):
    found = []
    with suppress(OSError):  # the process is ending
        for thread in os.listdir(f"/proc/{pid}/task"):  # a glob takes twice as long, and every test runs this
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as children:
                found += map(int, children.read().split())
    return found


def _orphans():
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == os.environ[MARKER]:
                found.add(process)
        except (psutil.Error, OSError):
            continue
    return found - {psutil.Process()}


def _listening():
    """Yield this process's listening ports from its sockets: psutil's list covers the whole machine and takes 10 ms."""
    return {port for fd in open_sockets() if (port := _port_of(fd)) is not None}


def _port_of(fd):
    """Return the port on which a socket listens; None if it does not listen."""
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return found.getsockname()[1] if listens and found.family in _INTERNET else None
    except OSError:  # closed meanwhile
        return None


def is_running(process):
    """Return whether a process runs, and is not only waiting for its parent to ask how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process):
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "just ended"


def _process_groups():
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        yield "torch.distributed"
