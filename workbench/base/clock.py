"""The identity of the clock that a process reads."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/time")


def clock_here() -> str:
    """Return an id of the clock behind ``time.monotonic_ns``; processes with equal ids read the same clock.

    On Linux this clock counts from boot. A time namespace, such as that of a container, shifts it.
    """
    try:
        namespace = os.stat(_NAMESPACE).st_ino if _NAMESPACE.exists() else 0  # Linux before 5.6 has no time namespaces
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {namespace}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode()}"
