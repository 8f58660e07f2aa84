"""Only sockets opened in the tracked body are shut, never a listening one or the store's."""

import os
import socket

import pytest

from workbench.runtime import sockets as sockets_module
from workbench.runtime.sockets import PeerSockets


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def connect(server):
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    return client, accepted


def test_tracked_sockets_end_and_others_live(listener):
    sockets = PeerSockets()
    outside = connect(listener)
    with sockets.tracked():
        inside = connect(listener)
        with socket.create_server(("127.0.0.1", 0)) as second:
            pass
    assert sockets.shut() == 2
    assert inside[0].recv(1) == b""
    outside[0].sendall(b"x")
    assert outside[1].recv(1) == b"x"
    connect_again = connect(listener)
    for sock in (*outside, *inside, *connect_again, second):
        sock.close()


def test_the_stores_connections_are_not_shut(listener):
    sockets = PeerSockets()
    sockets.store_port = listener.getsockname()[1]
    with sockets.tracked():
        client, accepted = connect(listener)
    assert sockets.shut() == 0
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"
    assert sockets.shut_store() == 1
    assert client.recv(1) == b""  # a client that waits for an answer
    client.sendall(b"x")
    assert accepted.recv(1) == b"x"  # the store serves the other ranks
    client.close()
    accepted.close()


def test_a_socket_that_another_thread_closes_while_sockets_are_listed_is_no_peer(listener, monkeypatch):
    sockets, listed = PeerSockets(), sockets_module.open_sockets

    def list_and_close():
        found = listed()
        client.close()
        return found

    with sockets.tracked():
        client, accepted = connect(listener)
        monkeypatch.setattr(sockets_module, "open_sockets", list_and_close)
    assert sockets.shut() == 1
    accepted.close()


def test_a_descriptor_that_was_reused_is_left_alone(listener):
    sockets = PeerSockets()
    with sockets.tracked():
        client, accepted = connect(listener)
    left, right = socket.socketpair()
    number = client.fileno()
    client.close()
    accepted.close()
    os.dup2(left.fileno(), number)
    assert sockets.shut() == 0
    right.sendall(b"x")
    assert left.recv(1) == b"x"
    os.close(number)
    left.close()
    right.close()


def test_shutting_twice_does_nothing(listener):
    sockets = PeerSockets()
    with sockets.tracked():
        client, accepted = connect(listener)
    assert sockets.shut() == 2
    assert sockets.shut() == 0
    client.close()
    accepted.close()
