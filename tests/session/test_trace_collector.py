import pytest

from tests.helpers.fake_cluster import FakeCluster
from workbench.session import trace_collector
from workbench.session.trace_collector import TraceCollector


def test_only_ranks_of_the_last_reply_count_as_heard():
    cluster, collector = FakeCluster(2), TraceCollector()
    cluster.start()
    collector.drain(cluster, range(2), timeout_s=1.0)
    assert set(collector.heard) == {0, 1}
    cluster.silent = {1}
    collector.drain(cluster, range(2), timeout_s=1.0)
    assert set(collector.heard) == {0}
    assert set(collector.positions) == {0, 1}


@pytest.mark.parametrize(
    ("num_ranks", "took_s", "rests_s"),
    [(2, 0.001, 0.02), (2, 0.04, 0.06), (8, 0.04, 0.24), (2, 0.2, 0.25), (2, 3.0, 3.0)],
)
def test_many_or_slow_ranks_are_polled_less_often(monkeypatch, num_ranks, took_s, rests_s):
    now = [100.0]

    def pass_time():
        now[0] += took_s

    monkeypatch.setattr(trace_collector.time, "monotonic", lambda: now[0])
    cluster, collector = FakeCluster(num_ranks), TraceCollector()
    cluster.start()
    cluster.on_drain = pass_time
    collector.drain(cluster, range(num_ranks), timeout_s=1.0, max_age_s=0.02)
    requested = len(cluster.patience)
    now[0] += rests_s - 0.001
    collector.drain(cluster, range(num_ranks), timeout_s=1.0, max_age_s=0.02)
    assert len(cluster.patience) == requested
    collector.drain(cluster, range(num_ranks), timeout_s=1.0)  # without max_age_s, the drain is immediate
    assert len(cluster.patience) == requested + 1
    now[0] += rests_s + 0.001
    collector.drain(cluster, range(num_ranks), timeout_s=1.0, max_age_s=0.02)
    assert len(cluster.patience) == requested + 2
