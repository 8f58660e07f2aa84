"""Machines of a plan: hosts, links, and what is refused."""

import pytest

from workbench.base.machines import MACHINES
from workbench.errors import UsageError
from workbench.protocol.planning import planned_ranks

H100 = MACHINES["h100-80gb"]


@pytest.mark.parametrize(("num_ranks", "num_hosts", "per_host"), [(1, 1, 1), (8, 1, 8), (16, 2, 8), (64, 8, 8)])
def test_there_are_as_few_hosts_as_their_devices_need(num_ranks, num_hosts, per_host):
    ranks = planned_ranks("h100-80gb", num_ranks, None)
    assert (ranks.num_hosts, ranks.ranks_per_host) == (num_hosts, per_host)


@pytest.mark.parametrize(
    ("device", "num_ranks", "num_hosts", "sentence"),
    [
        ("h100", 8, None, "no figures of a device 'h100'"),
        ("h100-80gb", 0, None, "at least 1 rank, not 0"),
        ("h100-80gb", 8, 0, "8 ranks do not divide into 0 hosts"),
        ("h100-80gb", 9, None, "9 ranks do not divide into 2 hosts"),
    ],
)
def test_what_no_cluster_is_like_is_refused(device, num_ranks, num_hosts, sentence):
    with pytest.raises(UsageError, match=sentence):
        planned_ranks(device, num_ranks, num_hosts)


def test_a_ring_is_as_slow_as_its_slowest_link():
    ranks = planned_ranks("h100-80gb", 16, 2)
    latency = H100.latency_ns / 1e9
    assert ranks.seconds(450e9, range(8)) == pytest.approx(1 + 7 * latency)
    assert ranks.seconds(50e9, (0, 8)) == pytest.approx(1 + latency)
    assert ranks.seconds(1e9, (3,)) == 0
