"""Loopback ports that stay reserved until the process that will listen on them has started.

Jupyter and ipyparallel choose free ports but listen on them up to a second later. Meanwhile the operating system may
give such a port to another process, or may have done so already.
"""

from __future__ import annotations

import errno
import secrets
import socket
import sys

from workbench.errors import ClusterError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

_PORTS = range(20_000, 32_768)
"""Below the ephemeral ports of the operating system, which a process may close and use again."""
_TRIES = 1000
_OF_A_KERNEL = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


def reserved_port() -> int:
    """Return a port that, for a minute, only a socket with ``SO_REUSEADDR`` that names the port can bind.

    ZeroMQ sets ``SO_REUSEADDR``. The reservation is a connection that the listening side has just closed
    (``TIME_WAIT``, RFC 9293, section 3.3.2): the operating system lets no socket without it bind the port.

    Raises:
        ClusterError: no port is free, or this machine has no IPv4 loopback address.
    """
    for _ in range(_TRIES):
        port = secrets.choice(_PORTS)
        try:
            _reserve(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ClusterError(
                    f"cannot use a port of {LOOPBACK} ({error.strerror}): ranks and kernels on one machine need its "
                    f"IPv4 loopback; in a terminal, as root: ip link set {LOOPBACK_INTERFACE} up; "
                    f"ip addr add {LOOPBACK}/8 dev {LOOPBACK_INTERFACE}"
                ) from error
        else:
            return port
    where = f"{_PORTS.start}-{_PORTS.stop - 1} on {LOOPBACK}"
    raise ClusterError(f"all {_TRIES} ports tried in {where} are in use")


def _reserve(port: int) -> None:
    """Put ``port`` into ``TIME_WAIT``.

    Raises:
        OSError: the port is in use.
    """
    with socket.socket() as listener, socket.socket() as peer:
        listener.bind((LOOPBACK, port))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # set before bind it would allow ports in use
        listener.listen(1)
        peer.connect(listener.getsockname())
        listener.accept()[0].close()  # closed before its peer, so TIME_WAIT is on this side


def of_a_kernel() -> dict[str, int]:
    """Return settings of a Jupyter ``KernelManager``: a reserved port for each socket of its kernel.

    Without ``cache_ports=False`` the manager would choose other ports.
    """
    return {"cache_ports": False, **{name: reserved_port() for name in _OF_A_KERNEL}}
