from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import Setup, simulate
from tests.replay.test_memory import pooled
from workbench.events import Kind
from workbench.replay import process
from workbench.trace.columns import RankTrace


@given(pooled())
def test_owned_and_not_owned_add_up(trace):
    for rank in trace.ranks:
        found = process.series(trace.header, rank)
        assert len(found) == (rank.rows["kind"] == Kind.RESIDENT).sum()
        assert (np.minimum(found.owned, found.resident) + found.not_owned == found.resident).all()
        assert (found.baseline <= found.not_owned).all()


@given(pooled(), st.floats(0, 1))
def test_prefix_law(trace, part):
    for rank in trace.ranks:
        cut = rank.start.seq + round(part * len(rank.rows))
        whole = process.series(trace.header, rank)
        halves = [process.series(trace.header, rank.cut(0, cut)), process.series(trace.header, rank.cut(cut, 10**9))]
        for name in ("seq", "resident", "owned"):
            assert np.concatenate([getattr(half, name) for half in halves]).tolist() == getattr(whole, name).tolist()


def test_owned_bytes_are_all_classes_including_pools():
    trace = simulate(Setup(samples=True))
    rank = trace.rank(1)
    found = process.series(trace.header, rank)
    for seq, owned in zip(found.seq.tolist(), found.owned.tolist(), strict=True):
        assert sum(rank.cut(seq, seq).start.bytes_by_category) == owned


def test_untouched_memory_is_not_counted_twice():
    trace = simulate(Setup(samples=True))
    rows = trace.rank(0).rows.copy()
    rows["num_bytes"][rows["kind"] == Kind.RESIDENT] = 1
    found = process.series(trace.header, RankTrace(0, rows))
    assert found.not_owned.max() == 0
    assert found.baseline.max() == 0


def test_of_many_samples_few_are_kept_but_never_without_the_highest():
    trace = simulate(Setup(num_ranks=1, num_units=6, steps=20, samples=True))
    whole, few = (process.series(trace.header, trace.rank(0), most) for most in (None, 16))
    assert len(few) <= 16 < len(whole)
    assert few.resident.max() == whole.resident.max()


def test_parts_of_loading_have_the_most_of_their_samples():
    trace = simulate(Setup(samples=True))
    rows = trace.rank(0).rows.copy()
    places = np.flatnonzero(rows["kind"] == Kind.RESIDENT)[:3]
    rows["module"][places], rows["num_bytes"][places] = [1, 0, 1], [7, 9, 5]
    header = replace(trace.header, strings=("loading Net", "reading model.pt"))
    assert process.loading(header, RankTrace(0, rows)) == {"reading model.pt": 7, "loading Net": 9}
    assert process.loading(trace.header, trace.rank(0)) == {}


LOADS = {  # the most resident bytes of each rank after reading, and otherwise: whether loading is the peak, on which
    "not sampled": ([(0, 90), (0, 80)], None),
    "less": ([(80, 90), (90, 100)], None),
    "as much": ([(100, 100), (90, 100)], None),
    "a little more": ([(100, 100), (101, 100)], None),
    "more": ([(100, 100), (120, 100)], (1, 120, 100)),
    "more, but less than another rank": ([(130, 140), (120, 100)], None),
    "more on both": ([(130, 100), (120, 100)], (0, 130, 100)),
}


@pytest.mark.parametrize(("sizes", "expected"), LOADS.values(), ids=LOADS)
def test_loading_is_the_peak_of_a_process_if_no_other_moment_has_as_much(sizes, expected):
    found = process.loading_peak(*loaded(simulate(Setup(num_ranks=2, samples=True)), sizes), 0.01)
    assert (found and (found.rank, found.num_bytes, found.other_bytes)) == expected
    assert found is None or found.after == "reading model.pt"


def loaded(trace, sizes):
    """Return the header and the ranks of a trace whose first sample is after reading, with its bytes and others'."""
    ranks = []
    for rank, (after, others) in zip(trace.ranks, sizes, strict=True):
        rows = rank.rows.copy()
        first, *rest = np.flatnonzero(rows["kind"] == Kind.RESIDENT)
        rows["num_bytes"][rest] = others
        rows["num_bytes"][first], rows["module"][first] = (after, 0) if after else (others, -1)
        ranks.append(RankTrace(rank.rank, rows))
    return replace(trace.header, strings=("reading model.pt",)), tuple(ranks)
