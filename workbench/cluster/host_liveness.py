"""Detection of a lost host from another host.

The probe connects to a port on which nothing listens; a live host refuses the connection. Its operating system does so
independently of its processes, so a busy or stopped rank is never taken for a lost host. No data is sent.
"""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Mapping

from workbench.protocol.starting import Address

PERIOD_S, SILENCE_S = 0.25, 1.25
"""Probe period and timeout, in seconds."""

_MOST = 8
"""Limit of pending connection attempts: as many as fit into the timeout, and some more."""

_NOT_THERE = {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT}
"""Errors reported by this host or a router when the other host does not answer."""


class HostLiveness:
    """Liveness of one host. It reads no clock: the caller passes times, in seconds.

    Args:
        address: address to probe.
    """

    def __init__(self, address: Address) -> None:
        self._address = (address.host, address.port)
        self._attempts: list[socket.socket] = []
        self._asked_s: float | None = None  # first probe since its last answer
        self._was_heard = False

    def is_silent(self, now_s: float) -> bool:
        """Return whether the host has not answered for :data:`SILENCE_S`, and probe it again.

        A host that never answered is not silent: a firewall may drop the probes.
        """
        if self._is_heard():
            self._was_heard = True
            self.close()
        if self._asked_s is None:
            self._asked_s = now_s
        self._ask()
        return self._was_heard and now_s - self._asked_s >= SILENCE_S

    def _is_heard(self) -> bool:
        """Return whether the host has answered one of the pending attempts."""
        is_heard, under_way = False, []
        for attempt in self._attempts:
            outcome = _outcome(attempt)
            if outcome is None:
                under_way.append(attempt)
            else:
                attempt.close()
                is_heard = is_heard or outcome not in _NOT_THERE
        self._attempts = under_way
        return is_heard

    def _ask(self) -> None:
        if len(self._attempts) == _MOST:
            self._attempts.pop(0).close()
        attempt = socket.socket()
        attempt.setblocking(False)
        if attempt.connect_ex(self._address) in _NOT_THERE:
            attempt.close()
        else:
            self._attempts.append(attempt)

    def close(self) -> None:
        """Close all pending attempts."""
        for attempt in self._attempts:
            attempt.close()
        self._attempts, self._asked_s = [], None


def _outcome(attempt: socket.socket) -> int | None:
    """Return the result of a connection attempt, 0 or an ``errno``; None while it is pending."""
    poll = select.poll()
    poll.register(attempt, select.POLLOUT)
    return attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if poll.poll(0) else None


class HostMonitor:
    """Monitors other hosts in a separate thread.

    Args:
        hosts: address to probe of each host, by name.

    Attributes:
        silent: names of the silent hosts.
    """

    def __init__(self, hosts: Mapping[str, Address]) -> None:
        self._hosts = {name: HostLiveness(address) for name, address in hosts.items()}
        self.silent: tuple[str, ...] = ()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="workbench: host liveness", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            self.silent = tuple(name for name, host in self._hosts.items() if host.is_silent(time.monotonic()))
        for host in self._hosts.values():
            host.close()

    def close(self) -> None:
        """Stop monitoring."""
        self._is_over.set()
        self._thread.join()
