from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import example_trace, setups, simulate, traces
from workbench.replay import grouping
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, GroupInfo, Header


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0, 1, 2, 5), "ranks 0-2, 5"),
        ((3,), "rank 3"),
        ((), "no rank"),
        ((5, 4, 9, 4), "ranks 4-5, 9"),
        (range(64), "ranks 0-63"),
        ((*range(7), *range(8, 64)), "ranks 0-6, 8-63"),
    ],
)
def test_label_formats_ranks_for_people(ranks, text):
    assert grouping.label(ranks) == text


@given(st.sets(st.integers(0, 200)))
def test_ranges_name_exactly_the_numbers_given(numbers):
    named = set()
    for part in filter(None, grouping.ranges(numbers).split(", ")):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == numbers


def test_ranks_with_equal_keys_are_one_group_and_the_largest_is_first():
    trace = example_trace(num_ranks=5)
    odd = trace.rank(2)
    changed = RankTrace(2, odd.rows[:-1], odd.start)
    trace = Trace(trace.header, (*(r for r in trace.ranks if r.rank != 2), changed))
    assert grouping.groups(trace, key=lambda r: len(r.rows)) == [(0, 1, 3, 4), (2,)]


def test_a_trace_without_ranks_has_no_groups():
    assert grouping.groups(Trace.empty(), key=lambda r: r.rank) == []


@given(st.lists(st.integers(0, 3), max_size=12))
def test_groups_hold_each_rank_once_and_only_equal_keys(keys):
    trace = Trace(
        Trace.empty().header, tuple(RankTrace(i, example_trace(1, 1, 0).rank(0).rows) for i in range(len(keys)))
    )
    groups = grouping.groups(trace, key=lambda r: keys[r.rank])
    assert sorted(rank for group in groups for rank in group) == list(range(len(keys)))
    assert all(len({keys[rank] for rank in group}) == 1 for group in groups)
    assert len(groups) == len(set(keys))


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        (["blocks.0.w", "blocks.1.w", "blocks.3.w"], "blocks.0-1,3.w"),
        (["a.0.b.1", "a.2.b.3"], "a.0,2.b.1,3"),
        (["norm.weight"], "norm.weight"),
        (["", ""], ""),
        (["conv1.w"], "conv1.w"),
    ],
)
def test_names_that_differ_in_numbers_are_joined(names, joined):
    assert grouping.join_names(names) == joined


@pytest.mark.parametrize("names", [[], ["a.0", "b.0"], ["a.0", "a.0.w"], ["conv1", "conv2"]])
def test_other_names_cannot_be_joined(names):
    with pytest.raises(ValueError, match="differ in their numbers only"):
        grouping.join_names(names)


def test_a_pattern_keeps_numbers_inside_words():
    assert grouping.pattern("layer1.0.conv2.weight") == "layer1.#.conv2.weight"


def test_of_many_pieces_some_ranks_are_counted():
    assert grouping.label(range(0, 16, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14"
    assert grouping.label([0, 1, *range(15, 512, 15)]) == "ranks 0-1, 15, 30 and 32 more"


@given(st.sets(st.integers(0, 511)))
def test_no_rank_is_lost_in_a_label(ranks):
    text = grouping.label(ranks)
    named, _, more = text.removeprefix("ranks ").removeprefix("rank ").partition(" and ")
    if ranks:
        pieces = [piece.partition("-") for piece in named.split(", ")]
        count = sum(int(last or first) - int(first) + 1 for first, _, last in pieces)
        assert count + int(more.partition(" ")[0] or 0) == len(ranks)
    assert len(text) <= 80


def test_a_collective_of_no_group_is_not_one_of_a_single_rank():
    header = Header(world_size=2, comm_groups=(GroupInfo(name="alone", ranks=(0,)), GroupInfo(name="w", ranks=(0, 1))))
    rows = np.zeros(1, ROW_DTYPE)
    keys = set()
    for group in (0, 1, -1):
        rows["comm_group"] = group
        keys.add(grouping.activity_key(header, rows))
    rows["comm_group"] = 9
    assert len(keys) == 3
    assert grouping.activity_key(header, rows) in keys, "a group that is not in the header is none"


@given(setups())
def test_ranks_of_one_job_did_the_same_whichever_groups_they_are_in(setup):
    trace = simulate(setup)
    assert len({grouping.activity_key(trace.header, rank.rows) for rank in trace.ranks}) <= 1


@given(traces(whole=True))
def test_those_that_did_the_same_have_equal_rows_but_for_times_and_groups(trace):
    if not trace.ranks:
        return
    first, other = trace.ranks[0], trace.ranks[-1]
    changed = other.rows.copy()
    places = np.flatnonzero(changed["unit"] >= 0)
    if len(places):
        changed["unit"][places[len(places) // 2]] -= 1
        assert grouping.activity_key(trace.header, changed) != grouping.activity_key(trace.header, first.rows)
    later = other.rows.copy()
    later["t_ns"] += 5
    assert grouping.activity_key(trace.header, later) == grouping.activity_key(trace.header, first.rows)
