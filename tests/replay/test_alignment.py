from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import Setup, example_trace, simulate, traces
from workbench.events import BESIDE, Category, Edge, Kind
from workbench.replay import memory
from workbench.replay.alignment import _longest_rising, align
from workbench.trace.columns import RankTrace, Trace


def aligned(a: Trace, b: Trace, rank: int = 0):
    return align((a.header, a.rank(rank)), (b.header, b.rank(rank)))


def without(trace: Trace, place: int) -> Trace:
    """Return the trace without one row of rank 0."""
    rows = np.delete(trace.rank(0).rows, place)
    rows["seq"] = np.arange(len(rows))
    return Trace(trace.header, (RankTrace(0, rows), *trace.ranks[1:]))


def later(trace: Trace) -> Trace:
    """Return the same trace on a slower clock with another start."""
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["t_ns"] = rows["t_ns"] * 3 + 10**15
        ranks.append(RankTrace(rank.rank, rows, rank.start))
    return Trace(trace.header, tuple(ranks))


@given(traces())
def test_a_trace_and_itself_at_another_time_are_the_same_event_for_event(trace):
    for rank in trace.ranks:
        found = aligned(trace, later(trace), rank.rank)
        assert (found.in_a == found.in_b).all()
        assert found.first_difference == -1
        assert found.num_moved == 0
        assert len(found.in_a) == len(found.a.place)


@given(traces(), traces())
def test_every_event_of_both_traces_is_on_the_axis_once_and_in_order(a, b):
    found = aligned(a, b)
    for number, side in ((found.in_a, found.a), (found.in_b, found.b)):
        assert number[number >= 0].tolist() == list(range(len(side.place)))
    assert ((found.in_a >= 0) | (found.in_b >= 0)).all()


@given(traces(), traces())
def test_events_at_one_position_are_the_same_logical_event(a, b):
    found = aligned(a, b)
    both = (found.in_a >= 0) & (found.in_b >= 0)
    in_a, in_b = found.in_a[both], found.in_b[both]
    assert (found.a.step[in_a] == found.b.step[in_b]).all()
    assert (found.a.unit[in_a] == found.b.unit[in_b]).all()
    for name in ("kind", "edge"):
        assert (found.a.rows[name][found.a.place[in_a]] == found.b.rows[name][found.b.place[in_b]]).all()


@given(traces())
def test_the_curve_has_the_peak_and_no_more(trace):
    part = trace.slice(first=0)
    for rank in part.ranks:
        found = aligned(part, part, rank.rank)
        if len(found.in_a):
            top = memory.advance(memory.start(rank.start), rank.rows).peak_bytes
            assert max(found.curves()[0]) <= top
            assert found.a.total.max() <= top


def test_holds_and_measurements_are_not_aligned():
    rows = example_trace().rank(0).rows
    found = aligned(example_trace(), example_trace())
    assert not np.isin(rows["kind"][found.a.place], BESIDE).any()
    assert {Kind.GATE, Kind.RESIDENT, Kind.METRIC, Kind.ALLOC} <= set(BESIDE)


def test_an_event_that_one_side_lacks_is_the_first_difference():
    trace = example_trace()
    rows = trace.rank(0).rows
    place = int(np.flatnonzero((rows["kind"] == Kind.OPTIMIZER) & (rows["step"] == 1))[0])
    found = aligned(trace, without(trace, place))
    assert found.a.place[found.in_a[found.first_difference]] == place
    assert ((found.in_b < 0).sum(), found.num_moved) == (1, 0)
    back = aligned(without(trace, place), trace)
    assert back.first_difference == found.first_difference


def test_units_are_known_by_name_and_steps_counted_from_the_first():
    trace = example_trace()
    renamed = tuple(replace(unit, name=f"x{unit.name}") for unit in trace.header.units)
    found = aligned(trace, Trace(replace(trace.header, units=renamed), trace.ranks))
    assert found.first_difference == 1  # after the step's begin: its first unit has another name
    assert aligned(trace.slice(step=1), trace.slice(step=2)).first_difference == -1


def test_another_number_of_bytes_is_a_difference_too():
    trace = example_trace()
    rows = trace.rank(0).rows.copy()
    place = int(np.flatnonzero((rows["kind"] == Kind.ALL_GATHER) & (rows["edge"] == Edge.BEGIN))[3])
    rows["num_bytes"][place] += 4
    found = aligned(trace, Trace(trace.header, (RankTrace(0, rows),)))
    assert found.a.place[found.first_difference] == place


def test_pooled_bytes_are_not_in_use():
    trace = example_trace()
    rows = trace.rank(0).rows.copy()
    rows["category"][rows["category"] == Category.ACTIVATIONS] = Category.RESERVED
    found = aligned(trace, Trace(trace.header, (RankTrace(0, rows),)))
    assert found.first_difference == -1


def test_prefetched_events_are_matched():
    found = aligned(*(simulate(Setup(prefetch=early)) for early in (False, True)))
    assert found.num_moved > 0
    assert (found.in_a < 0).sum() == (found.in_b < 0).sum() == found.num_moved


@given(st.permutations(range(8)))
def test_the_longest_rising_part_is_as_long_as_any(values):
    places = _longest_rising(np.array(values))
    assert (np.diff(np.array(values)[places]) > 0).all()
    best = [1] * len(values)
    for i, value in enumerate(values):
        best[i] = 1 + max((best[j] for j in range(i) if values[j] < value), default=0)
    assert len(places) == max(best)


@pytest.mark.parametrize("steps", [0, 1])
def test_rows_outside_steps_count_only_where_there_are_no_steps(steps):
    trace = example_trace(steps=steps)
    found = aligned(trace, trace)
    assert (found.a.rows["step"][found.a.place] >= 0).all() == bool(steps) or not len(found.a.place)
