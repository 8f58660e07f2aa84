"""Reserved ports are given to one caller only."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from workbench import ports
from workbench.ports import LOOPBACK, reserved_port


def test_a_reserved_port_is_for_those_who_reuse_addresses():
    port = reserved_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((LOOPBACK, port))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://{LOOPBACK}:{port}")


def test_nobody_who_asks_for_any_port_is_given_a_reserved_one():
    reserved = {reserved_port() for _ in range(15)}
    assert len(reserved) == 15
    others = []
    for _ in range(500):
        others.append(socket.socket())
        others[-1].bind((LOOPBACK, 0))
    found = {other.getsockname()[1] for other in others}
    for other in others:
        other.close()
    assert found.isdisjoint(reserved)


def test_a_reserved_port_is_none_that_somebody_was_given_and_closed():
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, given.read_text().split()) if given.exists() else (49152, 65535)
    assert not {reserved_port() for _ in range(50)} & set(range(first, last + 1))


def test_many_who_reserve_at_the_same_time_have_ports_of_their_own():
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: reserved_port(), range(200)))
    assert len(set(found)) == 200


def test_a_port_that_is_in_use_is_not_reserved_and_if_all_are_it_says_so(monkeypatch):
    taken = reserved_port()
    monkeypatch.setattr(ports, "_PORTS", range(taken, taken + 1))
    monkeypatch.setattr(ports, "_TRIES", 1)
    with pytest.raises(OSError, match=f"all 1 ports tried in {taken}-{taken} on 127.0.0.1 are in use"):
        reserved_port()


def test_a_kernel_has_a_port_for_each_of_its_sockets():
    found = ports.of_a_kernel()
    assert found.pop("cache_ports") is False
    assert len(set(found.values())) == 5
    assert all(name.endswith("_port") for name in found)
