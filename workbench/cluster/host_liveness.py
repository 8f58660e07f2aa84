"""Noticing from one host that another one is gone.

A host says that it is there by refusing a connection to a port at which nothing listens. Its kernel does so, whatever
its processes are doing: a rank that is busy, or stopped, is never taken for a host that is gone. Nothing is sent.
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
"""How often a host is asked for a sign of life, and how long it may take to give one, in seconds."""

_MOST = 8
"""Attempts to connect that are waited for at a time: as many as fit into a silence, and some."""

_NOT_THERE = {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT}
"""What is said, by this host or a router, where the other one has said nothing."""


class HostLiveness:
    """What one host has answered. It has no clock: times are told, in seconds.

    Args:
        address: where it is asked for a sign of life.
    """

    def __init__(self, address: Address) -> None:
        self._address = (address.host, address.port)
        self._attempts: list[socket.socket] = []
        self._asked_s: float | None = None  # the first time since its last sign of life
        self._was_heard = False

    def is_silent(self, now_s: float) -> bool:
        """Return whether it has given no sign of life for too long, and ask for one more.

        One that was never heard is not silent: there may be a firewall that lets nothing through.
        """
        if self._is_heard():
            self._was_heard = True
            self.close()
        if self._asked_s is None:
            self._asked_s = now_s
        self._ask()
        return self._was_heard and now_s - self._asked_s >= SILENCE_S

    def _is_heard(self) -> bool:
        """Return whether an attempt has ended in another way than it does at a host that is not there."""
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
        """Wait for no answer to what was asked so far."""
        for attempt in self._attempts:
            attempt.close()
        self._attempts, self._asked_s = [], None


def _outcome(attempt: socket.socket) -> int | None:
    """Return how an attempt to connect has ended, 0 or a number of ``errno``; None: it has not."""
    poll = select.poll()
    poll.register(attempt, select.POLLOUT)
    return attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if poll.poll(0) else None


class HostMonitor:
    """Looks in a thread of its own which hosts are silent.

    Args:
        hosts: where each is asked for a sign of life, by its name.

    Attributes:
        silent: the names of those that are.
    """

    def __init__(self, hosts: Mapping[str, Address]) -> None:
        self._hosts = {name: HostLiveness(address) for name, address in hosts.items()}
        self.silent: tuple[str, ...] = ()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="workbench: lookout", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            self.silent = tuple(name for name, host in self._hosts.items() if host.is_silent(time.monotonic()))
        for host in self._hosts.values():
            host.close()

    def close(self) -> None:
        """Look no more."""
        self._is_over.set()
        self._thread.join()
