"""Properties of the benchmarks' statistics."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.stats import median_interval, spread

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(VALUES)
def test_quartiles_lie_around_the_median_and_within_the_samples(values):
    found = spread(values)
    rounding = 1e-9 * max(values)
    ordered = (min(values), found.lower, found.median, found.upper, max(values))
    assert all(a <= b + rounding for a, b in pairwise(ordered))
    assert found.count == len(values)


def test_a_spread_by_hand():
    assert spread([5, 1, 3, 2, 4]).as_dict() == {"median": 3, "lower": 2, "upper": 4, "count": 5}
    assert spread([7]).as_dict() == {"median": 7, "lower": 7, "upper": 7, "count": 1}


@given(VALUES)
def test_the_interval_holds_the_median_and_consists_of_samples(values):
    low, high = median_interval(values)
    assert {low, high} <= set(values)
    assert low <= spread(values).median * (1 + 1e-9)
    assert spread(values).median <= high * (1 + 1e-9)
