"""A covering array contains every pair of values, for any number of axes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.pairwise import pairwise, quick, rows_of

axes_of_any_size = st.lists(st.integers(1, 6), min_size=2, max_size=6)


def pairs_in(row):
    return set(itertools.combinations(enumerate(row), 2))


@given(axes_of_any_size)
def test_every_pair_of_values_is_in_a_row(sizes):
    axes = [[f"{axis}.{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = pairwise(*axes)
    wanted = set().union(*map(pairs_in, itertools.product(*axes)))
    assert set().union(*map(pairs_in, rows)) == wanted
    assert len(set(rows)) == len(rows)
    assert all(value in axis for row in rows for value, axis in zip(row, axes, strict=True))
    assert pairwise(*axes) == rows


@given(axes_of_any_size)
def test_both_parts_are_the_whole_product(sizes):
    axes = [[[value] for value in range(size)] for size in sizes]  # values need no hash
    pairs, rest = (rows_of(part, *axes) for part in ("pairs", "rest"))
    assert sorted(pairs + rest) == sorted(itertools.product(*axes))
    assert len(pairs) == len(pairwise(*axes))


def test_there_are_not_many_more_rows_than_there_must_be():
    assert len(pairwise(range(3), range(5), range(6), range(2), range(2))) <= 33  # at least 5 x 6
    assert len(pairwise(*[range(2)] * 4)) <= 6


def test_values_that_are_not_chosen_are_left_to_ci_with_the_marks_they_had():
    skipped = pytest.param("c", marks=pytest.mark.skip)
    chosen, left, marked = quick(["a", "b", skipped], ["a"])
    assert chosen == "a"
    assert (left.values, [mark.name for mark in left.marks]) == (("b",), ["thorough"])
    assert (marked.values, [mark.name for mark in marked.marks]) == (("c",), ["skip", "thorough"])
