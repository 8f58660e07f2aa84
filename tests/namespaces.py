"""Forked ranks on several hosts: network namespaces that a switch joins, over links as slow as one likes.

What :mod:`tests.hosts` has besides, an sshd and a way from this machine, ranks that are forked here do not need: a
network is there in a tenth of a second, and several can be there at once.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests import hosts
from tests.hosts import find

NEEDED = ("ip",)
INTERFACE = "eth0"
_NETWORK = "10.203.8"  # nobody else sees it
_NEW_NET = 0x40000000  # CLONE_NEWNET of Linux; os.setns is there from Python 3.12 on
RATE_MBIT, DELAY_MS = 1000, 1.0
"""Of the links that are measured on, out of a host and into one: 2 ms from one to another."""
HOST = "WORKBENCH_TESTS_HOST"
"""Environment variable of a rank that sits somewhere: the identity of its host."""


def why_not() -> str:
    """Say what of this machine prevents it; empty: nothing."""
    return hosts.why_not(NEEDED)


@dataclass(frozen=True)
class Seat:
    """Where a rank is.

    Attributes:
        namespace: the network namespace that is its host.
        address: of that host.
    """

    namespace: str
    address: str

    def take(self) -> None:
        """Be there from now on, this thread and those it starts; gloo listens there, and variables say so.

        Raises:
            OSError: there is no such namespace any more.
        """
        with Path("/run/netns", self.namespace).open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self.namespace)
        os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, HOST: self.namespace}


@dataclass(frozen=True)
class Network:
    """Some hosts.

    Attributes:
        switch: the namespace of what joins them.
        hosts: a seat on each.
    """

    switch: str
    hosts: tuple[Seat, ...]

    def seats(self, *num_ranks: int) -> list[Seat]:
        """Return where each rank sits, if so many are on each host."""
        return [seat for seat, count in zip(self.hosts, num_ranks, strict=True) for _ in range(count)]

    def shape(self, rate_mbit: int, delay_ms: float = 0) -> str:
        """Let what leaves a host, and what reaches it, pass at so many Mbit/s, and take a while; returns what it does.

        Where the kernel cannot delay packets (it has no netem), only the rate is as asked.
        """
        ways = {
            f"{rate_mbit} Mbit/s, {delay_ms:g} ms": f"netem rate {rate_mbit}mbit delay {delay_ms}ms limit 100000",
            f"{rate_mbit} Mbit/s, no delay": f"tbf rate {rate_mbit}mbit burst 256kb latency 200ms",
        }
        ends = [(seat.namespace, INTERFACE) for seat in self.hosts]
        ends += [(self.switch, port) for port in _ports(len(self.hosts))]
        done = [next((way for way, words in ways.items() if _shaped(*end, words)), "as fast as it can") for end in ends]
        return ", ".join(dict.fromkeys(done))

    def sent(self) -> list[int]:
        """Return the bytes that have left each host so far, headers of packets included."""
        counters = [f"/sys/class/net/{port}/statistics/rx_bytes" for port in _ports(len(self.hosts))]
        return [int(number) for number in _ip("netns", "exec", self.switch, "cat", *counters).split()]


def _ports(num_hosts: int) -> list[str]:
    return [f"port{number}" for number in range(1, num_hosts + 1)]


def _shaped(namespace: str, device: str, words: str) -> bool:
    command = [find("tc") or "tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *words.split()]
    return find("tc") is not None and not subprocess.run(command, capture_output=True, check=False).returncode


@contextmanager
def network_of(num_hosts: int) -> Iterator[Network]:
    """Make hosts, and leave nothing of them; whoever took a seat has to have ended by then."""
    names = [f"wb{os.getpid()}-{number}" for number in range(num_hosts + 1)]
    seats = [Seat(name, f"{_NETWORK}.{number}") for number, name in enumerate(names[1:], 1)]
    with ExitStack() as last:
        for name in names:
            _ip("netns", "add", name)
            last.callback(partial(_ip, "netns", "delete", name))
        switch = partial(_ip, "-n", names[0])
        switch("link", "add", "switch", "type", "bridge")
        switch("link", "set", "switch", "up")
        for seat, port in zip(seats, _ports(num_hosts), strict=True):
            switch("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", seat.namespace)
            switch("link", "set", port, "master", "switch", "up")
            _ip("-n", seat.namespace, "address", "add", f"{seat.address}/24", "dev", INTERFACE)
            for device in (INTERFACE, "lo"):
                _ip("-n", seat.namespace, "link", "set", device, "up")
        yield Network(names[0], tuple(seats))


def _ip(*words: str) -> str:
    return subprocess.run([find("ip") or "ip", *words], check=True, capture_output=True, text=True).stdout
