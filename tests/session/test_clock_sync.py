from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.fake_cluster import FakeCluster
from workbench.errors import ClusterError
from workbench.protocol.rank_messages import Position
from workbench.replay.clock_error import DRIFT, error_of
from workbench.session import clock_sync
from workbench.session.clock_sync import EVERY_S, STEEPEST, ClockFit, ClockSync
from workbench.session.trace_collector import TraceCollector
from workbench.trace.schema import ROW_DTYPE

S = 10**9
HOUR = 3600 * S


@dataclass
class Hosts:
    """Hosts whose clocks started at different times and run at different rates; messages take time.

    ``now_ns`` is the true time, that of the notebook's clock. By host, ``ahead_ns`` is how far its clock was ahead at
    0, and ``faster`` by what share it runs faster. ``silent`` ranks do not answer.
    """

    host_of: dict[int, str]
    ahead_ns: dict[str, int] = field(default_factory=dict)
    faster: dict[str, float] = field(default_factory=dict)
    takes_ns: int = 2_000_000
    random: Random = field(default_factory=lambda: Random(0))
    now_ns: int = 5 * HOUR
    silent: set[int] = field(default_factory=set)
    sent: list[tuple[int, ...]] = field(default_factory=list)

    def shows(self, rank, t_ns=None):
        """Return the time of a rank's clock at a true time."""
        host, t_ns = self.host_of[rank], self.now_ns if t_ns is None else t_ns
        return t_ns + self.ahead_ns.get(host, 0) + round(self.faster.get(host, 0.0) * t_ns)

    def ask(self, request, ranks=None, timeout_s=2.0):
        self.sent.append(tuple(ranks))
        replies = {}
        for rank in ranks:
            self.now_ns += self.random.randrange(self.takes_ns)
            replies[rank] = Position(rank=rank, now_ns=self.shows(rank))
            if rank in self.silent:
                replies[rank] = ClusterError("no answer")
            self.now_ns += self.random.randrange(self.takes_ns)
        return replies

    def clocks(self):
        return ClockSync(self.host_of, "here", lambda: self.now_ns)


def converted(found, rank, t_ns):
    rows = np.zeros(len(t_ns), ROW_DTYPE)
    rows["t_ns"] = t_ns
    return np.frombuffer(found.on_rank_0s(rank, rows.tobytes()), ROW_DTYPE)["t_ns"].tolist()


def test_ranks_on_rank_0s_clock_are_not_queried_and_keep_their_times():
    hosts = Hosts({0: "far", 1: "far"})
    found = hosts.clocks()
    assert not found.compare(hosts, range(2), timeout_s=1.0)
    assert (hosts.sent, found.readings) == ([], ())
    assert found.knows(1)
    assert converted(found, 1, [5, 3]) == [5, 3]


@pytest.mark.parametrize("first", ["here", "there"])
def test_times_of_other_hosts_become_rank_0s_within_the_error(first):
    hosts = Hosts({0: first, 1: "a", 2: "a", 3: "b"}, {"there": -2 * HOUR, "a": 3 * HOUR, "b": -4 * HOUR})
    found = hosts.clocks()
    assert not found.knows(1)
    assert found.compare(hosts, range(4), timeout_s=1.0)
    of_a, of_b = found.readings
    assert (of_a.ranks, of_b.ranks) == ((1, 2), (3,))
    for clock in found.readings:
        (reading,) = clock.readings
        for rank in clock.ranks:
            true_ns = hosts.shows(0, hosts.now_ns)
            (told_ns,) = converted(found, rank, [hosts.shows(rank)])
            assert abs(told_ns - true_ns) <= reading.error_ns < hosts.takes_ns * 4
            assert abs(reading.offset_ns - (hosts.shows(rank) - true_ns)) <= reading.error_ns


def test_one_rank_of_each_host_is_queried_several_times_and_again_later():
    hosts = Hosts({rank: "ab"[rank // 2] for rank in range(4)})
    hosts.host_of[0] = hosts.host_of[1] = "here"
    found = hosts.clocks()
    found.compare(hosts, range(4), timeout_s=1.0)
    assert hosts.sent == [(2,)] * clock_sync.TIMES
    hosts.now_ns += S
    assert not found.compare(hosts, range(4), timeout_s=1.0)
    hosts.now_ns += round(EVERY_S * S)
    assert found.compare(hosts, range(4), timeout_s=1.0)
    assert hosts.sent == [(2,)] * clock_sync.TIMES * 2
    assert len(found.readings[0].readings) == 2


def test_if_a_rank_does_not_answer_the_next_of_its_host_is_queried():
    hosts = Hosts({0: "here", 1: "a", 2: "a"}, silent={1})
    found = hosts.clocks()
    assert not found.compare(hosts, range(3), timeout_s=1.0)
    assert not found.knows(1)
    assert found.compare(hosts, range(3), timeout_s=1.0)
    assert hosts.sent == [(1,), *[(2,)] * clock_sync.TIMES]
    assert found.knows(1)


def test_a_rank_with_an_unknown_clock_is_not_collected():
    cluster = FakeCluster(2)
    cluster.start()
    cluster.ranks[1].recorded = cluster.ranks[0].recorded = 50
    collector = TraceCollector(ClockSync({0: "here", 1: "there"}, "here"))
    cluster.silent = {1}
    collector.drain(cluster, range(2), timeout_s=1.0)
    assert [r.rank for r in collector.trace.ranks] == [0]
    cluster.silent = set()
    collector.drain(cluster, range(2), timeout_s=1.0)
    assert [len(r.rows) for r in collector.trace.ranks] == [50, 50]
    (clock,) = collector.trace.header.clocks
    assert clock.ranks == (1,)
    (reading,) = clock.readings  # the fake rank's clock always shows 0
    moved = collector.trace.rank(1).rows["t_ns"] - cluster.ranks[1].whole.rows["t_ns"][:50]
    assert set(moved.tolist()) == {-reading.offset_ns}


def test_a_slow_answer_does_not_replace_a_better_reading():
    hosts = Hosts({0: "here", 1: "a"}, {"a": HOUR})
    found = hosts.clocks()
    found.compare(hosts, range(2), timeout_s=1.0)
    hosts.takes_ns = S
    hosts.now_ns += round(EVERY_S * S)
    assert not found.compare(hosts, range(2), timeout_s=1.0)
    (clock,) = found.readings
    assert [reading.error_ns for reading in clock.readings] == [clock.readings[0].error_ns]


def test_many_slow_answers_are_not_waited_for():
    hosts = Hosts({0: "here", 1: "a", 2: "b"}, takes_ns=S)
    begin_ns, found = hosts.now_ns, hosts.clocks()
    assert found.compare(hosts, range(3), timeout_s=1.0)
    assert hosts.sent == [(1, 2)]
    assert found.knows(1)
    assert found.knows(2)
    assert all(0 < clock.readings[0].error_ns <= hosts.now_ns - begin_ns for clock in found.readings)


def test_readings_of_many_hours_stay_few(monkeypatch):
    monkeypatch.setattr(clock_sync, "KEPT", 8)
    hosts = Hosts({0: "here", 1: "a"}, faster={"a": 1e-6})
    found = hosts.clocks()
    for _ in range(50):
        found.compare(hosts, range(2), timeout_s=1.0)
        hosts.now_ns += round(EVERY_S * S)
    (clock,) = found.readings
    assert 3 < len(clock.readings) <= 8
    assert list(clock.readings) == sorted(clock.readings)
    assert clock.readings[-1].t_ns > hosts.now_ns - 2 * EVERY_S * S


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    faster=st.floats(-DRIFT, DRIFT),
    ahead_ns=st.integers(-(10**16), 10**16),
    pauses=st.lists(st.sampled_from([20_000_000, S, 11 * S, HOUR]), min_size=1, max_size=12),
)
def test_times_are_within_the_error_and_ordered_for_any_clocks(seed, faster, ahead_ns, pauses):
    """Two ranks of another host record at any time, and are drained after any pause."""
    hosts = Hosts({0: "here", 1: "a", 2: "a"}, {"a": ahead_ns}, {"a": faster}, random=Random(seed))
    found, reported = hosts.clocks(), {1: [], 2: []}
    for pause_ns in pauses:
        true_ns = {rank: sorted(hosts.now_ns + hosts.random.randrange(pause_ns) for _ in range(9)) for rank in reported}
        hosts.now_ns += pause_ns
        found.compare(hosts, range(3), timeout_s=1.0)
        for rank, times in true_ns.items():
            own = [hosts.shows(rank, t_ns) for t_ns in times]
            reported[rank] += zip(times, converted(found, rank, own), strict=True)
    (clock,) = found.readings
    for pairs in reported.values():
        assert [shown for _, shown in pairs] == sorted(shown for _, shown in pairs)
        for true_ns, shown_ns in pairs:
            low, high = sorted((true_ns, shown_ns))
            assert high - low <= error_of(clock, low, high) + 2


@given(
    bends=st.lists(st.tuples(st.integers(-(10**15), 10**15), st.integers(-(10**9), 10**9)), min_size=1, max_size=6),
    times=st.lists(st.integers(-(10**15), 10**15), min_size=2, max_size=9),
)
def test_a_line_never_turns_time_back_and_keeps_durations(bends, times):
    line, before, last = ClockFit(), None, None
    for (at_ns, offset_ns), some in zip(bends, np.array_split(np.sort(np.array(times)), len(bends)), strict=True):
        line.bend(at_ns, offset_ns)
        shown = line.on_rank_0s(some)
        every = shown if last is None else np.concatenate([before, shown])
        own = some if last is None else np.concatenate([last, some])
        assert (np.diff(every) >= 0).all()
        assert (np.abs(np.diff(every) - np.diff(own)) <= np.diff(own) / STEEPEST + 2).all()
        before, last = (every[-1:], own[-1:]) if len(own) else (None, None)
