"""Loopback ports that stay free until the process that is to listen on them has started.

Jupyter and ipyparallel choose free ports themselves, and listen on them up to a second later; meanwhile the operating
system may give one to somebody else, or have given it to one who listens as late.
"""

from __future__ import annotations

import errno
import secrets
import socket
import sys

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

_PORTS = range(20_000, 32_768)
"""Below those that an operating system gives to whoever asks for any, and who may close it and come back for it."""
_TRIES = 1000
_OF_A_KERNEL = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


def reserved_port() -> int:
    """Return a port that, for a minute, only a socket that asks for it by number and has ``SO_REUSEADDR`` can have.

    ZeroMQ's sockets have it. On a port where the side that listened has just closed a connection (``TIME_WAIT``, RFC
    9293, section 3.3.2), the operating system gives nobody else a place.

    Raises:
        OSError: none is free.
    """
    for _ in range(_TRIES):
        port = secrets.choice(_PORTS)
        try:
            _reserve(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
    where = f"{_PORTS.start}-{_PORTS.stop - 1} on {LOOPBACK}"
    raise OSError(errno.EADDRINUSE, f"of the ports {where} {_TRIES} were tried, and all are in use")


def _reserve(port: int) -> None:
    """Take ``port`` from all who do not know it.

    Raises:
        OSError: somebody has it.
    """
    with socket.socket() as listener, socket.socket() as peer:
        listener.bind((LOOPBACK, port))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # earlier it would take what others have
        listener.listen(1)
        peer.connect(listener.getsockname())
        listener.accept()[0].close()  # before its peer: so the wait is on this side


def of_a_kernel() -> dict[str, int]:
    """Return settings of a Jupyter ``KernelManager``: a reserved port for each socket of its kernel.

    Without ``cache_ports=False`` it would choose others.
    """
    return {"cache_ports": False, **{name: reserved_port() for name in _OF_A_KERNEL}}
