"""What this machine's kernel says of a rank's process, on Linux: one that writes nothing may be stopped, not killed."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

from workbench.base.clock import clock_here
from workbench.trace.recording import RunStart
from workbench.trace.schema import RankInfo

ProcessState = Literal["", "alive", "stopped"]
"""State of a process; empty: it is gone, or of another machine."""

_TICK_NS = 2_000_000_000
"""Limit of the time by which a process may seem to have begun after its recording."""


def process_state(info: RankInfo, start: RunStart) -> ProcessState:
    """Return the state of a rank's process.

    A process of the same number that began after the recording is another one.

    Args:
        info: the rank's entry in the header of its recording.
        start: how its recording began.
    """
    if info.host != socket.gethostname() or start.clock != clock_here():
        return ""
    folder = Path("/proc") / str(info.pid)
    try:
        text = (folder / "stat").read_text()
        command = (folder / "cmdline").read_bytes()
    except OSError:
        return ""
    state, *fields = text.rpartition(")")[2].split()
    began_ns = int(fields[18]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")  # the 22nd field of the line
    if not command or state in "ZX" or began_ns > start.t_ns + _TICK_NS:
        return ""
    return "stopped" if state in "Tt" else "alive"
