"""The traces of many ranks are valid, and have their documented properties."""

import numpy as np
import pytest

from tests.helpers.many_ranks import LONG, WIDE, Scale, trace_of
from workbench.events import Category, Kind
from workbench.replay.spans import total_ns
from workbench.trace import check, steps

FEW = Scale(num_ranks=48, num_units=3, steps=4, late=30, ended=7, larger=41)


@pytest.mark.parametrize("copies", [1, 6])
def test_it_obeys_the_rules(copies):
    trace = trace_of(Scale(**vars(FEW) | {"copies": copies}))
    assert check(trace) == []
    assert steps(trace) == [0, 1, 2, 3]
    assert [info.host for info in trace.header.ranks[7:9]] == ["node00", "node01"]
    groups = {int(rank.rows["comm_group"].max()) for rank in trace.ranks}
    assert len(groups) == (1 if copies == 1 else 48 // copies)


def test_three_ranks_are_odd():
    trace = trace_of(FEW)
    waited = [total_ns(rank, Kind.WAIT) for rank in trace.ranks if rank.rank != FEW.ended]
    assert int(np.argmin(waited)) == FEW.late - 1
    assert 2 * min(waited) < np.median(waited)
    lengths = {len(rank.rows) for rank in trace.ranks}
    assert len(lengths) == 2
    assert len(trace.rank(FEW.ended).rows) == min(lengths)
    whole = [rank.rows["num_bytes"][rank.rows["category"] == Category.UNSHARDED_PARAMS].max() for rank in trace.ranks]
    assert np.flatnonzero(np.array(whole) > whole[0]).tolist() == [FEW.larger]


def test_the_large_traces_have_the_requested_size():
    assert (WIDE.num_ranks, WIDE.num_units) == (512, 128)
    assert (LONG.num_ranks, LONG.steps) == (512, 200)
