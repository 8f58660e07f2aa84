"""Forked ranks on several simulated hosts: network namespaces joined by a switch, over links of any quality.

Forked ranks need neither the sshd nor the route from this machine of :mod:`tests.helpers.network_hosts`: a network
takes a tenth of a second to create, and several can exist at once.
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
_NETWORK = "10.203.8"  # visible only in the namespaces
MEASURED_ON = Link(rate_mbit=1000, delay_ms=2)
LOSSY = replace(MEASURED_ON, loss=0.01)
HOST = "WORKBENCH_TESTS_HOST"
"""Environment variable of a rank on a seat: the identity of its host."""


def why_not() -> str:
    """Return why this machine cannot simulate hosts; empty if it can."""
    return network_hosts.why_not(NEEDED)


@dataclass(frozen=True)
class Seat:
    """The host of a rank.

    Attributes:
        namespace: the network namespace that simulates the host.
        address: of that host.
    """

    namespace: str
    address: str

    def take(self) -> None:
        """Move this thread, and those that it starts, to the host; set the variables for gloo and the host's identity.

        Raises:
            OSError: the namespace no longer exists.
        """
        enter(self.namespace)
        os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, HOST: self.namespace}


@dataclass(frozen=True)
class Network:
    """Some hosts.

    Attributes:
        hosts: a seat on each.
        cables: the switch, with a port per host, in order.
    """

    hosts: tuple[Seat, ...]
    cables: Cables

    def seats(self, *num_ranks: int) -> list[Seat]:
        """Return the seat of each rank, given the number of ranks on each host."""
        return [seat for seat, count in zip(self.hosts, num_ranks, strict=True) for _ in range(count)]


@contextmanager
def network_of(num_hosts: int) -> Iterator[Network]:
    """Create hosts for the body. Processes on their seats must end before the body does."""
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


def _ip(*arguments: str) -> None:
    subprocess.run([find("ip") or "ip", *arguments], check=True, capture_output=True)
