"""Which clock a process reads."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/time")


def clock_here() -> str:
    """Name the clock that ``time.monotonic_ns`` reads here: processes with an equal answer read the same one.

    On Linux it runs since the machine was started, and a time namespace, as a container may have, shifts it.
    """
    try:
        namespace = os.stat(_NAMESPACE).st_ino if _NAMESPACE.exists() else 0  # none before Linux 5.6
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {namespace}"
    except OSError:  # no Linux
        return f"{socket.gethostname()} {uuid.getnode()}"
