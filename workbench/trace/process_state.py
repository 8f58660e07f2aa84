"""State of a rank's process in this machine's kernel, on Linux: one that writes nothing may be stopped, or gone."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

from workbench.base.clock import clock_here
from workbench.trace.recording import RunStart
from workbench.trace.schema import RankInfo

ProcessState = Literal["", "alive", "stopped", "gone"]
"""State of a process; empty: unknown, as it is of another machine or container."""

_NAMESPACE = Path("/proc/self/ns/pid")
_TICK_NS = 2_000_000_000
"""Limit of the time by which a process may seem to have begun after its recording."""


def processes_here() -> str:
    """Return an id of the namespace that this process's number is of, such as of a container; empty if unknown."""
    try:
        return os.readlink(_NAMESPACE)
    except OSError:  # another system than Linux
        return ""


def process_state(info: RankInfo, start: RunStart) -> ProcessState:
    """Return the state of a rank's process.

    A process of the same number that began after the recording is another one.

    Args:
        info: the rank's entry in the header of its recording.
        start: how its recording began.
    """
    if info.host != socket.gethostname() or start.clock != clock_here():
        return ""
    gone: ProcessState = "gone" if start.processes and start.processes == processes_here() else ""
    folder = Path("/proc") / str(info.pid)
    try:
        text = (folder / "stat").read_text()
        command = (folder / "cmdline").read_bytes()
    except OSError:
        return "" if _exists(info.pid) else gone
    state, *fields = text.rpartition(")")[2].split()
    began_ns = int(fields[18]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")  # the 22nd field of the line
    if not command or state in "ZX" or began_ns > start.t_ns + _TICK_NS:
        return gone
    return "stopped" if state in "Tt" else "alive"


def _exists(pid: int) -> bool:
    """Return whether there is a process, perhaps of another user, of which /proc may show nothing."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
