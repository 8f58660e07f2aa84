"""A covering array contains every pair or triple of values, for any number of axes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.pairwise import covering, quick, rows_of

axes_of_any_size = st.lists(st.integers(1, 5), min_size=2, max_size=5)


def combinations_in(size, row):
    return set(itertools.combinations(enumerate(row), size))


@pytest.mark.parametrize("strength", [2, 3])
@given(axes_of_any_size)
def test_every_combination_of_so_many_values_is_in_a_row(strength, sizes):
    axes = [[f"{axis}.{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = covering(strength, *axes)
    size = min(strength, len(axes))
    wanted = set().union(*(combinations_in(size, row) for row in itertools.product(*axes)))
    assert set().union(*(combinations_in(size, row) for row in rows)) == wanted
    assert len(set(rows)) == len(rows)
    assert all(value in axis for row in rows for value, axis in zip(row, axes, strict=True))
    assert covering(strength, *axes) == rows


@given(axes_of_any_size)
def test_both_parts_are_the_rows_for_triples(sizes):
    axes = [[[value] for value in range(size)] for size in sizes]  # values need no hash
    pairs, triples = (rows_of(part, *axes) for part in ("pairs", "triples"))
    assert sorted(pairs + triples) == sorted(covering(3, *axes))
    assert sorted(pairs) == sorted(covering(2, *axes))


def test_there_are_not_many_more_rows_than_there_must_be():
    table = range(3), range(5), range(6), range(2), range(2)
    assert len(covering(2, *table)) <= 33  # at least 5 x 6
    assert len(covering(3, *table)) <= 110  # at least 3 x 5 x 6
    assert len(covering(2, *[range(2)] * 4)) <= 6


def test_values_that_are_not_chosen_are_left_to_ci_with_the_marks_they_had():
    skipped = pytest.param("c", marks=pytest.mark.skip)
    chosen, left, marked = quick(["a", "b", skipped], ["a"])
    assert chosen == "a"
    assert (left.values, [mark.name for mark in left.marks]) == (("b",), ["thorough"])
    assert (marked.values, [mark.name for mark in marked.marks]) == (("c",), ["skip", "thorough"])
