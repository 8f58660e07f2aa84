"""Reserved ports are given to one caller only."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from workbench.base import ports
from workbench.base.ports import LOOPBACK, reserved_port
from workbench.errors import ClusterError


def test_a_reserved_port_can_be_bound_with_reuse():
    port = reserved_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((LOOPBACK, port))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://{LOOPBACK}:{port}")


def test_a_reserved_port_is_never_assigned_as_a_free_one():
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


def test_a_reserved_port_is_not_a_recently_closed_one():
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, given.read_text().split()) if given.exists() else (49152, 65535)
    assert not {reserved_port() for _ in range(50)} & set(range(first, last + 1))


def test_concurrent_reservations_get_different_ports():
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: reserved_port(), range(200)))
    assert len(set(found)) == 200


def test_a_used_port_is_not_reserved_and_exhaustion_is_reported(monkeypatch):
    taken = reserved_port()
    monkeypatch.setattr(ports, "_PORTS", range(taken, taken + 1))
    monkeypatch.setattr(ports, "_TRIES", 1)
    with pytest.raises(ClusterError, match=f"all 1 ports tried in {taken}-{taken} on 127.0.0.1 are in use"):
        reserved_port()


def test_without_an_ipv4_loopback_the_error_says_how_to_add_it(monkeypatch):
    monkeypatch.setattr(ports, "LOOPBACK", "192.0.2.1")  # no address of this machine
    with pytest.raises(ClusterError, match=r"cannot use a port of 192.0.2.1 .*: ip link set lo\d? up; ip addr add 192"):
        reserved_port()


def test_a_kernel_has_a_port_for_each_of_its_sockets():
    found = ports.of_a_kernel()
    assert found.pop("cache_ports") is False
    assert len(set(found.values())) == 5
    assert all(name.endswith("_port") for name in found)
