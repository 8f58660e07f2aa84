"""Ports that nobody else is given."""

import socket

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


def test_a_kernel_has_a_port_for_each_of_its_sockets():
    found = ports.of_a_kernel()
    assert found.pop("cache_ports") is False
    assert len(set(found.values())) == 5
    assert all(name.endswith("_port") for name in found)
