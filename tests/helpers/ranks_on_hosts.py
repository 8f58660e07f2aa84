"""Forked ranks on several hosts: network namespaces that a switch joins, over links as bad as one likes.

What :mod:`tests.helpers.network_hosts` has besides, an sshd and a way from this machine, ranks that are forked here do
not need: a network is there in a tenth of a second, and several can be there at once.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from tests.helpers import network_hosts
from tests.helpers.network_hosts import find
from tests.helpers.network_switch import Cables, Link, Port, enter, joined

NEEDED = ("ip",)
INTERFACE = "eth0"
_NETWORK = "10.203.8"  # nobody else sees it
MEASURED_ON = Link(rate_mbit=1000, delay_ms=2)
LOSSY = replace(MEASURED_ON, loss=0.01)
HOST = "WORKBENCH_TESTS_HOST"
"""Environment variable of a rank that sits somewhere: the identity of its host."""


def why_not() -> str:
    """Say what of this machine prevents it; empty: nothing."""
    return network_hosts.why_not(NEEDED)


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
        enter(self.namespace)
        os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, HOST: self.namespace}


@dataclass(frozen=True)
class Network:
    """Some hosts.

    Attributes:
        hosts: a seat on each.
        cables: what joins them, a port for each in their order.
    """

    hosts: tuple[Seat, ...]
    cables: Cables

    def seats(self, *num_ranks: int) -> list[Seat]:
        """Return where each rank sits, if so many are on each host."""
        return [seat for seat, count in zip(self.hosts, num_ranks, strict=True) for _ in range(count)]


@contextmanager
def network_of(num_hosts: int) -> Iterator[Network]:
    """Make hosts, and leave nothing of them; whoever took a seat has to have ended by then."""
    names = [f"wb{os.getpid()}-{number}" for number in range(1, num_hosts + 1)]
    seats = [Seat(name, f"{_NETWORK}.{number}") for number, name in enumerate(names, 1)]
    with ExitStack() as last:
        for name in names:
            _ip("netns", "add", name)
            last.callback(partial(_ip, "netns", "delete", name))
        cables = last.enter_context(joined([Port(name, INTERFACE) for name in names]))
        for seat in seats:
            network_hosts.bring_up(INTERFACE, seat.address, "-n", seat.namespace)
            _ip("-n", seat.namespace, "link", "set", "lo", "up")
        yield Network(tuple(seats), cables)


def _ip(*words: str) -> None:
    subprocess.run([find("ip") or "ip", *words], check=True, capture_output=True)
