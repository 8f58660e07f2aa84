"""Large sets of ranks are named by their exceptions, and by their hosts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.trace.schema import Header, RankInfo
from workbench.views.rank_labels import MANY, hosts_of, several, who


def header(num_hosts=64, ranks_per_host=8, name="node{:02}"):
    ranks = range(num_hosts * ranks_per_host)
    infos = (RankInfo(rank=r, host=name.format(r // ranks_per_host), device="cpu", pid=r) for r in ranks)
    return Header(world_size=len(ranks), ranks=tuple(infos))


@pytest.mark.parametrize(
    ("ranks", "everyone", "expected"),
    [
        ([37], (), "rank 37 on node04"),
        ([300, 37], (), "ranks 37 on node04, 300 on node37"),
        (range(96, 104), (), "ranks 96-103, all of node12"),
        (range(96, 112), (), "ranks 96-111, all of node12 and node13"),
        ([*range(37), *range(38, 512)], range(512), "all 512 ranks but 37"),
        ([*range(37), *range(38, 512)], (), "ranks 0-36, 38-511"),
        (range(512), range(512), "ranks 0-511"),
        (range(0, 512, 16), range(512), "ranks 0, 16, 32 and 29 more"),
        ([600], (), "rank 600"),
    ],
)
def test_ranks_of_many_hosts(ranks, everyone, expected):
    assert who(header(), ranks, everyone) == expected


def test_on_one_host_ranks_are_labelled_without_the_host():
    one = header(num_hosts=1, ranks_per_host=MANY)
    assert who(one, [3]) == "rank 3"
    assert who(one, [*range(5), *range(6, MANY)], range(MANY)) == "ranks 0-4, 6-15"


def test_a_long_name_of_a_host_is_shortened():
    assert len(who(header(name="h" * 400 + "{}"), [1, 2, 30])) < 120


def test_of_many_groups_some_are_counted():
    groups = [[1], [9], [17], [25], [33], [41]]
    assert several(header(), groups, most=2) == "rank 1 on node00; rank 9 on node01 and 4 more groups of ranks"
    assert several(header(), groups[:1]) == "rank 1 on node00"


@given(st.sets(st.integers(0, 63), min_size=1))
def test_labels_stay_short(ranks):
    assert len(who(header(num_hosts=8), ranks, range(64))) <= 60


def test_every_rank_is_on_one_host():
    found = hosts_of(header())
    assert sorted(rank for ranks in found.values() for rank in ranks) == list(range(512))
    assert hosts_of(replace(header(), ranks=())) == {}
