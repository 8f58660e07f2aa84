"""How often ranks are polled for live views, on a fake cluster."""

from types import SimpleNamespace

import pytest

from tests.helpers.fake_cluster import FakeCluster, inside
from workbench.protocol.rank_messages import Drain
from workbench.session import trace_collector
from workbench.session.session import PULSE_S, REST_S
from workbench.workbench import Workbench


class WatchedWorkbench:
    """A workbench with viewers: its clock stands still unless the test moves it; counts the polls of ranks."""

    def __init__(self, monkeypatch):
        self.now_s, self.tick_s = 100.0, 0.0
        monkeypatch.setattr(trace_collector, "time", SimpleNamespace(monotonic=self._clock))
        self.workbench = Workbench(2, cluster_factory=self._make)
        self.workbench.start()

    def _make(self, **settings):
        self.fake = FakeCluster(**settings)
        self.fake.sharded()
        self.fake.script["step"] = inside
        return self.fake

    def _clock(self):
        self.now_s += self.tick_s
        return self.now_s

    def do(self, action):
        """Let time pass until the request is stopped or finished."""
        self.tick_s = 1.0
        try:
            return action()
        finally:
            self.tick_s = 0.0

    def asks(self, after_s):
        """Let time pass and look twice; return the number of polls of the ranks."""
        self.now_s += after_s
        before = self._num_drains()
        self.workbench.pulse()
        self.workbench.pulse()
        return self._num_drains() - before

    def _num_drains(self):
        return [word for word, _ in self.fake.patience].count(Drain.word)


@pytest.fixture
def watched(monkeypatch):
    found = WatchedWorkbench(monkeypatch)
    yield found
    found.workbench.stop()


def test_idle_ranks_are_polled_seldom(watched):
    assert watched.asks(0.0) == 1
    assert watched.asks(0.9 * REST_S) == 0
    assert watched.asks(0.2 * REST_S) == 1
    watched.workbench.break_add("all_gather")
    assert watched.asks(0.0) == 1
    assert watched.asks(2 * PULSE_S) == 0


def test_a_started_stopped_or_ended_request_polls_immediately(watched):
    watched.asks(0.0)
    watched.do(lambda: watched.workbench.step(1, until="all_gather"))
    assert watched.asks(0.0) == 1
    assert watched.asks(2 * PULSE_S) == 1, "it is under way: as often as ever"
    assert watched.asks(0.5 * PULSE_S) == 0
    watched.do(watched.workbench.resume)
    assert watched.asks(0.0) == 1
    assert watched.workbench.pulse().under_way is None
    assert watched.asks(2 * PULSE_S) == 0


def test_a_rank_without_an_answer_is_polled_as_often(watched):
    watched.asks(0.0)
    watched.fake.silent.add(1)
    assert watched.asks(1.1 * REST_S) == 1
    assert watched.asks(1.1 * PULSE_S) == 1
    watched.fake.silent.clear()
    assert watched.asks(1.1 * PULSE_S) == 1
    assert watched.asks(1.1 * PULSE_S) == 0


def test_a_lost_rank_is_reported_immediately_with_one_process_check(watched):
    watched.asks(0.0)
    looked, alive = [], watched.fake.alive
    watched.fake.alive = lambda: looked.append(0) or alive()
    watched.fake.lose(1)
    assert watched.workbench.pulse().states == {0: "idle", 1: "gone"}
    assert len(looked) == 1


def test_a_rank_lost_during_a_poll_is_gone_everywhere(watched):
    watched.fake.on_drain = lambda: watched.fake.lose(1)
    reported = watched.workbench.pulse()
    assert (reported.states[1], set(reported.losses)) == ("gone", {1})
