"""Whether another host is alive: its kernel answers connection attempts, or does not."""

import errno
import socket

import pytest

from tests.helpers.waiting import wait_until
from workbench.cluster import host_liveness
from workbench.cluster.host_liveness import SILENCE_S, HostLiveness, HostMonitor
from workbench.cluster.rank_assignment import lookouts
from workbench.protocol.starting import Address, ConnectReply

HERE = "127.0.0.1"


def address_of(bound):
    return Address(host=HERE, port=bound.getsockname()[1])


@pytest.fixture
def refusing():
    """A port without a listener."""
    with socket.socket() as bound:
        bound.bind((HERE, 0))
        yield address_of(bound)


@pytest.fixture
def answers_once():
    """Accepts one connection; Linux then answers no others until the test accepts it."""
    with socket.create_server((HERE, 0), backlog=0) as listener:
        yield listener


@pytest.fixture
def knocking():
    made = []

    def make(address):
        made.append(HostLiveness(address))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_host_that_refuses_is_there(knocking, refusing):
    host = knocking(refusing)
    assert not any(host.is_silent(10.0 * second) for second in range(20))


def test_a_host_that_answers_no_more_is_silent_until_it_does(knocking, answers_once):
    host = knocking(address_of(answers_once))
    assert not host.is_silent(0.0)
    assert not host.is_silent(10.0)  # however late the answer is checked
    assert not host.is_silent(10.0 + 0.9 * SILENCE_S)
    assert host.is_silent(10.0 + SILENCE_S)
    assert host.is_silent(20.0)
    answers_once.accept()[0].close()
    wait_until(lambda: not host.is_silent(30.0))


def test_a_host_that_never_answered_is_not_lost_and_few_attempts_wait_for_it(knocking, answers_once):
    with socket.create_connection(answers_once.getsockname()):
        host = knocking(address_of(answers_once))
        assert not any(host.is_silent(float(second)) for second in range(50))
        assert len(host._attempts) == host_liveness._MOST


@pytest.mark.parametrize(("answer", "is_silent"), [(errno.EHOSTUNREACH, True), (errno.EADDRNOTAVAIL, False)])
def test_router_errors_do_not_prove_life_and_local_errors_do_not_prove_death(
    knocking, refusing, monkeypatch, answer, is_silent
):
    host = knocking(refusing)
    assert not host.is_silent(0.0)
    assert not host.is_silent(1.0)

    class Elsewhere(socket.socket):
        def connect_ex(self, address):
            return answer

    monkeypatch.setattr(socket, "socket", Elsewhere)
    assert not host.is_silent(2.0)  # the answer to the last attempt
    assert host.is_silent(2.0 + SILENCE_S) is is_silent


def test_a_silent_host_stays_silent_until_it_answers_again(refusing, answers_once, monkeypatch):
    monkeypatch.setattr(host_liveness, "PERIOD_S", 0.01)
    monkeypatch.setattr(host_liveness, "SILENCE_S", 0.1)
    looking = HostMonitor({"one": refusing, "two": address_of(answers_once)})
    wait_until(lambda: looking.silent == ("two",))
    answers_once.accept()[0].close()
    wait_until(lambda: looking.silent == ())
    looking.close()


def ranks_on(*hosts):
    """Return ranks on hosts of these names; the first of each has the address at which its host refuses."""
    return [
        ConnectReply(
            rank=rank,
            host=host,
            device="cpu",
            pid=1,
            refuses=None if host in hosts[:rank] else Address(host=host, port=rank),
        )
        for rank, host in enumerate(hosts)
    ]


def test_the_first_host_watches_the_others_and_the_second_watches_the_first():
    found = lookouts(ranks_on("a", "a", "b", "b", "c"))
    a, b, c = (Address(host=host, port=port) for host, port in (("a", 0), ("b", 2), ("c", 4)))
    assert found == {0: {"b": b, "c": c}, 2: {"a": a}}
    assert lookouts(ranks_on("a", "b")) == {0: {"b": Address(host="b", port=1)}, 1: {"a": a}}


def test_a_single_host_is_not_watched():
    assert lookouts(ranks_on("a", "a")) == {}
