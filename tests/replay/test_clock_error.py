import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import example_trace
from workbench.replay.clock_error import DRIFT, error_ns, error_of, errors_of_ranks
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, ClockReading, Header, HostClock

S = 10**9


def clock_of(*readings, ranks=(1,)):
    return HostClock(ranks=ranks, readings=tuple(ClockReading(t_ns=t, offset_ns=o, error_ns=e) for t, o, e in readings))


def trace_of(*clocks, num_ranks=2, begin_ns=0, end_ns=0):
    rows = np.zeros(3, ROW_DTYPE)
    rows["t_ns"] = begin_ns, begin_ns, end_ns
    ranks = tuple(RankTrace(rank, rows) for rank in range(num_ranks))
    return Trace(Header(world_size=num_ranks, clocks=clocks), ranks)


def test_ranks_of_one_clock_have_no_error():
    assert error_ns(example_trace()) == 0
    assert error_ns(Trace.empty()) == 0
    clock = clock_of((0, 5, 400), ranks=(1, 2))
    trace = trace_of(clock, num_ranks=3)
    assert error_ns(Trace(trace.header, trace.ranks[1:])) == 0
    assert error_ns(trace) == 400


def test_the_first_and_the_last_time_of_any_rank_count():
    clock = clock_of((0, 5, 400))
    assert error_ns(trace_of(clock, end_ns=20 * S)) == 400 + DRIFT * 20 * S
    assert error_ns(trace_of(clock, begin_ns=-30 * S)) == 400 + DRIFT * 30 * S


def test_errors_of_two_other_clocks_add_up():
    clocks = clock_of((0, 5, 400)), clock_of((0, 7, 30), ranks=(2,)), clock_of((0, 7, 50), ranks=(3,))
    trace = trace_of(*clocks, num_ranks=4)
    assert error_ns(trace) == 450
    assert error_ns(Trace(trace.header, trace.ranks[:1] + trace.ranks[2:])) == 80
    assert error_ns(Trace(trace.header, trace.ranks[:2])) == 400


def test_ranks_with_another_clock_have_an_error():
    clocks = clock_of((0, 5, 400), ranks=(1, 3)), clock_of((0, 7, 30), ranks=(2,))
    assert errors_of_ranks(trace_of(*clocks, num_ranks=4)) == {1: 400, 3: 400, 2: 30}
    assert errors_of_ranks(trace_of(num_ranks=4)) == {}


@pytest.mark.parametrize(
    ("begin_ns", "end_ns", "expected_ns"),
    [
        (2 * S, 3 * S, 300 + 50),  # the clock drifted by 300 in this time
        (12 * S, 13 * S, 80),  # it did not drift
        (5 * S, 15 * S, 300 + 50),
        (22 * S, 22 * S, 80 + DRIFT * 2 * S),  # the next reading is unknown
        (-20 * S, -S, 40 + DRIFT * 20 * S),
    ],
)
def test_a_time_is_as_exact_as_the_readings_around_it(begin_ns, end_ns, expected_ns):
    clock = clock_of((0, 1000, 40), (10 * S, 1300, 50), (20 * S, 1300, 80))
    assert error_of(clock, begin_ns, end_ns) == expected_ns


@given(st.lists(st.integers(-500, 500), min_size=2, max_size=6), st.data())
def test_drift_between_readings_is_within_the_error(steps_ns, data):
    """A reading converts the times after it; the clock drifts evenly until the next reading."""
    offsets = np.cumsum([0, *steps_ns]).tolist()
    errors = [data.draw(st.integers(0, 300)) for _ in offsets]
    clock = clock_of(*((place * S, o, e) for place, (o, e) in enumerate(zip(offsets, errors, strict=True))))
    truths = [o + data.draw(st.integers(-e, e)) for o, e in zip(offsets, errors, strict=True)]
    at_ns = data.draw(st.integers(0, (len(offsets) - 1) * S - 1))
    place = at_ns // S
    truth = truths[place] + (truths[place + 1] - truths[place]) * (at_ns % S) / S
    assert abs(truth - offsets[place]) <= error_of(clock, at_ns, at_ns) + 1e-6
