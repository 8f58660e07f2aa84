"""The switch: alone with times from the test, and as a process between two namespaces."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import inf
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import ranks_on_hosts
from tests.helpers.network_hosts import find
from tests.helpers.network_switch import AHEAD_S, HEADER, Link, Switch, enter
from tests.helpers.waiting import PATIENCE_S, wait_until

EVERYONE = b"\xff" * 6
MANY = 3000


def address(port):
    return bytes([2, 0, 0, 0, 0, port])


def frame(source, target, number=0, size=60):
    to = EVERYONE if target is None else address(target)
    return bytes(HEADER) + (to + address(source) + number.to_bytes(4, "big")).ljust(size, b".")


def number_of(found):
    return int.from_bytes(found[HEADER + 12 : HEADER + 16], "big")


def acquainted(num_ports, link):
    """Return a switch that knows the port of every address."""
    switch = Switch(num_ports)
    for port in range(num_ports):
        switch.take(port, frame(port, None), -1.0)
    assert len(list(switch.due(inf))) == num_ports * (num_ports - 1)
    switch.become(link)
    return switch


def arrivals(switch):
    """Yield the time, port and number of each frame's arrival, with the clock moved from one to the next."""
    while (at_s := switch.next_s()) < inf:
        for port, found in switch.due(at_s):
            yield at_s, port, number_of(found)


SENT = st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(60, 60_000), st.floats(0, 0.01))
LINKS = st.builds(Link, st.sampled_from([1.0, 1000.0, inf]), st.floats(0, 20))


@given(link=LINKS, sent=st.lists(SENT, max_size=30))
def test_every_frame_arrives_once_in_order_and_no_sooner_than_rate_and_delay_allow(link, sent):
    switch, now_s, taken = acquainted(3, link), 0.0, []
    for number, (source, further, size, pause_s) in enumerate(sent):
        now_s = max(now_s + pause_s, switch.opens_s(source))
        switch.take(source, frame(source, (source + further) % 3, number, size), now_s)
        taken.append(now_s)
    found = list(arrivals(switch))
    assert sorted(number for *_, number in found) == list(range(len(sent)))
    of_ways, bits = {}, {}
    for at_s, port, number in found:
        source, further, size, _ = sent[number]
        assert port == (source + further) % 3
        assert at_s >= taken[number] + size * 8e-6 / link.rate_mbit + link.delay_ms / 1e3 - 1e-9
        of_ways.setdefault((source, port), []).append(number)
        bits[port] = bits.get(port, 0) + size * 8
        assert at_s >= bits[port] / 1e6 / link.rate_mbit - 1e-9  # from one host or several
    assert all(numbers == sorted(numbers) for numbers in of_ways.values())


def test_a_frame_is_accepted_shortly_before_it_can_leave():
    switch = acquainted(2, Link(rate_mbit=100))
    switch.take(0, frame(0, 1, size=50_000), 10.0)
    assert switch.opens_s(0) == pytest.approx(10.004 - AHEAD_S)
    switch.take(0, frame(0, 1, size=50_000), 10.002)
    assert [at_s for at_s, *_ in arrivals(switch)] == pytest.approx([10.004, 10.008])


def lost_of(switch, source):
    for number in range(10_000):
        switch.take(source, frame(source, 1 - source, number), 0.0)
    return set(range(10_000)) - {number for *_, number in arrivals(switch)}


def test_the_same_frames_are_lost_each_time_and_as_many_as_asked():
    lost = lost_of(acquainted(2, Link(loss=0.01)), 0)
    assert len(lost) == pytest.approx(100, abs=30)
    switch = acquainted(2, Link(loss=0.01))
    assert lost_of(switch, 1) != lost
    assert lost_of(switch, 0) == lost
    switch.become(Link())
    assert lost_of(switch, 0) == set()


@pytest.mark.parametrize("target", [None, 9])
def test_broadcast_and_unknown_destinations_go_to_all_other_ports(target):
    switch = acquainted(3, Link())
    switch.take(1, frame(1, target), 0.0)
    assert sorted(port for _, port, _ in arrivals(switch)) == [0, 2]


def test_an_unplugged_port_neither_sends_nor_receives():
    switch = acquainted(3, Link())
    switch.become(Link(), [2])
    for source, target in ((0, 2), (2, 0), (0, None), (1, 0)):
        switch.take(source, frame(source, target), 0.0)
    assert sorted(port for _, port, _ in arrivals(switch)) == [0, 1]


# ---- between namespaces

between = pytest.mark.needs("namespaces")


@pytest.fixture
def network():
    with ranks_on_hosts.network_of(2) as made:
        yield made


@pytest.fixture
def ends(network):
    """Datagram sockets, one on each host, each connected to the other."""
    with ExitStack() as last:
        found = [last.enter_context(on(seat, lambda: socket.socket(type=socket.SOCK_DGRAM))) for seat in network.hosts]
        for each, seat in zip(found, network.hosts, strict=True):
            each.setsockopt(socket.SOL_SOCKET, 33, 2**26)  # SO_RCVBUFFORCE: room for everything that is sent here
            each.settimeout(PATIENCE_S)
            each.bind((seat.address, 5000))
        for each, other in (found, reversed(found)):
            each.connect(other.getsockname())
        echo(*found)
        yield found


def on(seat, make):
    """Make something on a host: a socket stays in the namespace where it was made."""

    def made():
        enter(seat.namespace)
        return make()

    with ThreadPoolExecutor(1) as one:
        return one.submit(made).result()


def echo(here, there):
    here.send(b"?")
    assert there.recv(9) == b"?"
    there.send(b"!")
    assert here.recv(9) == b"!"


def pour(here, there):
    """Send many datagrams one way; return the numbers of those that arrive, in order of arrival."""
    for number in range(MANY):
        here.send(number.to_bytes(4, "big").ljust(1400, b"."))
    end = os.urandom(8)
    for _ in range(20):  # some of them will arrive
        here.send(end)
    chunks = iter(lambda: there.recv(2000), end)
    return [int.from_bytes(each[:4], "big") for each in chunks if len(each) == 1400]  # skip earlier end marks


@between
def test_all_that_is_sent_arrives_and_takes_its_time(network, ends):
    network.cables.become(Link(rate_mbit=1000, delay_ms=2))
    begin = time.perf_counter()
    echo(*ends)
    assert time.perf_counter() - begin >= 2 * 2e-3
    before, begin = network.cables.sent(), time.perf_counter()
    assert pour(*ends) == list(range(MANY))
    assert time.perf_counter() - begin >= MANY * 1400 * 8 / 1e9 + 2e-3
    sent = [after - b for after, b in zip(network.cables.sent(), before, strict=True)]
    assert sent[0] >= MANY * 1400 > 100 * sent[1]


@between
def test_one_of_a_hundred_is_lost_and_the_others_keep_their_order(network, ends):
    with network.cables.over(Link(rate_mbit=1000, delay_ms=2, loss=0.01)):
        found = pour(*ends)
    assert found == sorted(found)
    assert MANY - len(found) == pytest.approx(MANY / 100, abs=20)
    assert network.cables.num_lost() >= MANY - len(found)
    assert pour(*ends) == list(range(MANY))


@between
@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_a_connection_delivers_all_bytes_despite_losses(network, loss):
    network.cables.become(Link(rate_mbit=1000, delay_ms=2, loss=loss))
    here, there = network.hosts
    data = os.urandom(4_000_000)
    server = on(there, lambda: socket.create_server((there.address, 5001)))
    with server, on(here, lambda: socket.create_connection(server.getsockname(), PATIENCE_S)) as client:
        taken, _ = server.accept()
        sending = threading.Thread(target=client.sendall, args=(data,))
        sending.start()
        with taken, taken.makefile("rb") as file:
            assert file.read(len(data)) == data
        sending.join()


@between
def test_an_unplugged_host_has_no_carrier_and_receives_nothing(network, ends):
    carrier = [find("ip"), "netns", "exec", network.hosts[1].namespace, "cat", "/sys/class/net/eth0/carrier"]
    here, there = ends
    with network.cables.unplugged(1):
        assert subprocess.run(carrier, capture_output=True, check=True).stdout == b"0\n"
        here.send(b"nobody hears it")
        network.cables.sent()
    wait_until(lambda: subprocess.run(carrier, capture_output=True, check=True).stdout == b"1\n")
    wait_until(lambda: answered(here, there))


def answered(here, there):
    """Return whether a datagram came through: both ends have their carrier again."""
    here.send(b"again")
    there.settimeout(0.1)
    try:
        return there.recv(99) == b"again"
    except TimeoutError:
        return False


STARTED = """
import os, signal
from tests.helpers.network_switch import Port, joined
with joined([Port("", "wbtry0")]) as cables:
    print(cables._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@between
def test_it_ends_with_the_process_that_started_it_and_its_devices_with_it():
    output = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, check=False).stdout
    wait_until(lambda: not psutil.pid_exists(int(output)))
    wait_until(lambda: not Path("/sys/class/net/wbtry0").exists())
