"""Freeing a rank that blocks in a gloo collective, by shutting the peer sockets of its process groups.

A collective in the user's own code (a barrier, ``clip_grad_norm_``) blocks inside C++, where no Python flag is checked.
Shutting the sockets to the peers ends it at once with a Python error, and the process survives. Only reading is shut:
gloo takes the end of file for the end of the peer and fails everything pending, whereas a failed write would leave the
sender waiting forever. Never shut a listening socket: that ends the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator


def open_sockets() -> dict[int, int]:
    """Return the inode of every open socket of this process, by descriptor."""
    found = {}
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def _ports(fd: int) -> tuple[int, ...]:
    """Return the own and the peer's port of a connected TCP socket; empty for any other."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            is_tcp = sock.family in {socket.AF_INET, socket.AF_INET6}
            return (sock.getsockname()[1], sock.getpeername()[1]) if is_tcp else ()
    except OSError:
        return ()  # listening, not connected yet, or closed by another thread since the listing


class PeerSockets:
    """The sockets opened while process groups were made.

    Attributes:
        store_port: connections to or from this port belong to the store and are no peers.
    """

    def __init__(self) -> None:
        self.store_port = -1
        self._inodes: dict[int, int] = {}

    @contextlib.contextmanager
    def tracked(self) -> Iterator[None]:
        """Track the connected TCP sockets that the body opens as sockets to peers."""
        before = open_sockets()
        yield
        now = open_sockets()
        new = {fd: inode for fd, inode in now.items() if before.get(fd) != inode}
        self._inodes |= {fd: inode for fd, inode in new.items() if self._is_peer(fd)}

    def _is_peer(self, fd: int) -> bool:
        ports = _ports(fd)
        return bool(ports) and self.store_port not in ports

    def shut(self) -> int:
        """Shut every tracked socket that is still the same one, and forget all; return the number shut."""
        tracked, self._inodes = self._inodes, {}
        return sum(_shut(fd, inode) for fd, inode in tracked.items())

    def shut_store(self) -> int:
        """Shut this process's connections to the store, not those that it serves; return their number."""
        return sum(_shut(fd, inode) for fd, inode in open_sockets().items() if _ports(fd)[1:] == (self.store_port,))


def _shut(fd: int, inode: int) -> bool:
    """Shut the socket if descriptor ``fd`` still has ``inode``; return whether it had.

    c10d's threads close sockets at any time, and the number may already belong to another socket, so a duplicate of the
    descriptor is checked.
    """
    try:
        duplicate = os.dup(fd)
    except OSError:
        return False
    if os.fstat(duplicate).st_ino != inode:
        os.close(duplicate)
        return False
    with socket.socket(fileno=duplicate) as sock, contextlib.suppress(OSError):  # the peer may have been faster
        sock.shutdown(socket.SHUT_RD)
    return True
