"""The open requests at a rank's doors; needs no ranks."""

import pytest

from workbench.cluster.channels import Channels
from workbench.cluster.pending_replies import settle
from workbench.protocol.rank_messages import Shut


class FakeWire:
    """A wire that never answers."""

    def exchange(self, rank, answer):
        return answer

    def cell(self, engine, code, exchange):
        self.answer = exchange


def test_a_rank_whose_answer_is_here_is_not_busy_even_if_nobody_has_noted_it_yet(monkeypatch):
    monkeypatch.setattr(
        Channels, "_dismiss", lambda *_: None
    )  # the thread that received the answer does this a moment later
    wire = FakeWire()
    doors = Channels(wire, ["engine"])
    pending = doors.cell("pass", [0])
    assert doors.is_busy(0)
    settle(wire.answer.future, None)
    assert pending.done(0)
    assert not doors.is_busy(0)


class Numbering:
    """A wire that two threads must not use at once: a session numbers its messages without a lock."""

    doors = None

    def exchange(self, rank, answer):
        return answer

    def forget(self, message_id):
        pass

    def call(self, engine, name, args, exchange):
        assert self.doors._sending.locked()
        settle(exchange.future, None)

    def cell(self, engine, code, exchange):
        self.call(engine, code, (), exchange)

    def ask(self, engine, rank, kind, request, future):
        assert self.doors._sending.locked()
        settle(future, (None, ()))


@pytest.mark.parametrize(
    "send",
    [
        lambda doors: doors.call("a:b", {0: ()}),
        lambda doors: doors.cell("pass", [0]),
        lambda doors: doors.ask(Shut(), [0], 1.0),
        lambda doors: doors.interrupt([0], 1.0),
    ],
    ids=["call", "cell", "ask", "interrupt"],
)
def test_one_at_a_time_sends(send):
    wire = Numbering()
    wire.doors = Channels(wire, ["engine"])
    send(wire.doors)
