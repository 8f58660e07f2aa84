from tests.fake_cluster import FakeCluster
from workbench.session.collect import Collector


def test_only_who_answered_when_asked_last_was_heard():
    cluster, collector = FakeCluster(2), Collector()
    cluster.start()
    collector.drain(cluster, range(2), timeout_s=1.0)
    assert set(collector.heard) == {0, 1}
    cluster.silent = {1}
    collector.drain(cluster, range(2), timeout_s=1.0)
    assert set(collector.heard) == {0}
    assert set(collector.positions) == {0, 1}
