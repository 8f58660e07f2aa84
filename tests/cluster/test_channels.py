"""The open requests at a rank's channels; needs no ranks."""

import pytest

from workbench.cluster.channels import Channels
from workbench.cluster.cluster import Cluster
from workbench.cluster.pending_replies import settle
from workbench.protocol.rank_messages import Shut


class FakeWire:
    """A wire that never answers."""

    def exchange(self, rank, answer):
        return answer

    def cell(self, engine, code, exchange):
        self.answer = exchange


def test_a_rank_whose_reply_has_arrived_is_not_busy(monkeypatch):
    monkeypatch.setattr(
        Channels, "_dismiss", lambda *_: None
    )  # the thread that received the answer does this a moment later
    wire = FakeWire()
    channels = Channels(wire, ["engine"])
    pending = channels.cell("pass", [0])
    assert channels.is_busy(0)
    settle(wire.answer.future, None)
    assert pending.done(0)
    assert not channels.is_busy(0)


def test_a_rank_is_lost_for_the_first_reason_that_was_told():
    wire = FakeWire()
    channels = Channels(wire, ["engine"])
    pending, cluster, noted = channels.cell("pass", [0]), Cluster(1), []
    cluster.on_loss = lambda *loss: noted.append(loss)
    for how in ("was killed", "is gone as well"):
        cluster._lose(channels, 0, how, "")
    later = channels.cell("pass", [0])
    assert [str(each.error(0)) for each in (pending, later)] == ["rank 0 was killed"] * 2
    assert channels.losses == {0: "was killed"}
    assert noted == [(0, "was killed")]


class UnlockedWire:
    """A wire that two threads must not use at once: a session numbers its messages without a lock."""

    channels = None

    def exchange(self, rank, answer):
        return answer

    def forget(self, message_id):
        pass

    def call(self, engine, name, args, exchange):
        assert self.channels._sending.locked()
        settle(exchange.future, None)

    def cell(self, engine, code, exchange):
        self.call(engine, code, (), exchange)

    def ask(self, engine, rank, kind, request, future):
        assert self.channels._sending.locked()
        settle(future, (None, ()))


@pytest.mark.parametrize(
    "send",
    [
        lambda channels: channels.call("a:b", {0: ()}),
        lambda channels: channels.cell("pass", [0]),
        lambda channels: channels.ask(Shut(), [0], 1.0),
        lambda channels: channels.interrupt([0], 1.0),
    ],
    ids=["call", "cell", "ask", "interrupt"],
)
def test_one_at_a_time_sends(send):
    wire = UnlockedWire()
    wire.channels = Channels(wire, ["engine"])
    send(wire.channels)
