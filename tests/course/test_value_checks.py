"""Findings about values: equal on all ranks, or those of the unsharded run."""

import math
from fractions import Fraction

import numpy as np
import pytest

from workbench.course import agree, same
from workbench.course.value_checks import ratio_of

NAN = math.nan


@pytest.mark.parametrize("values", [{0: 1.0, 1: 1.0}, [1, 1], [[1, NAN]] * 3, {3: "a"}, [{"a": [1]}] * 2])
def test_equal_values_agree(values):
    assert agree(values).ok


def test_values_that_differ_are_shown_for_two_ranks():
    finding = agree({0: 0.5, 1: 0.5, 2: 0.25}, "the losses")
    assert finding.sentence.startswith(
        "the losses differ: rank 0 has 0.5, rank 2 has 0.25: what differs between ranks was not"
    )
    assert not agree([1.0, 1.0 + 1e-15]).ok
    assert not agree([[1], [1, 1]]).ok
    assert agree({}).sentence == "the values: no rank has any"


def test_long_values_are_cut():
    assert len(agree([list(range(100)), [1]]).sentence) < 250


@pytest.mark.parametrize(
    ("mine", "reference"),
    [
        (1.0, 1.0 + 5e-7),
        ([1, 2], np.array([1.0, 2.0])),
        ({"a": [1], "b": 2}, {"b": 2, "a": [1]}),
        ({0: [1.0]}, {0: [1.0]}),
        (NAN, NAN),
        (Fraction(1, 2), 0.5),
        ("yes", "yes"),
    ],
)
def test_values_of_the_reference_pass(mine, reference):
    assert same(mine, reference).ok


@pytest.mark.parametrize(
    ("mine", "reference", "why"),
    [
        (2.5, 1.0, "2.5, expected 1"),
        ([1.0, 3.0], [1.0, 2.5], "3 at [1], expected 2.5"),
        ({0: [1.0], 1: [[2.5]]}, {0: [1.0], 1: [[1.5]]}, "2.5 of rank 1 at [0, 0], expected 1.5"),
        ({"w": 1.0}, {"w": 3.7}, "1 of w, expected 3.7"),
        ({"a": 1}, {"b": 1}, "there are ['a'], expected ['b']"),
        ([1, 2], [1], "shape (2,), expected (1,)"),
        ("1", 1.0, "'1', expected 1"),
        ([None], [1.0], "[None], expected [1.0]"),
        ("no", "yes", "'no', expected 'yes'"),
        (NAN, 1.0, "nan, expected 1"),
        ([1, -2], [-1, 2], "1 at [0], expected -1 (all have the other sign)"),
        ([1, 1], [3, 3], "1 at [0], expected 3 (all are too small by a factor of 3)"),
        ({"a": 4.0, "b": [-8, 0]}, {"a": 1, "b": [-2, 0]}, "4 of a, expected 1 (all are 4 times as large)"),
    ],
)
def test_the_first_difference_is_said(mine, reference, why):
    finding = same(mine, reference, what="the losses")
    assert finding.sentence == f"the losses are not those of the reference: {why}"


def test_tolerances_are_those_that_are_given():
    assert same(1.0, 1.2, atol=0.3).ok
    assert same(100.0, 101.0, rtol=0.02).ok
    assert not same(1.0, 1.0 + 1e-5, atol=0, rtol=0).ok


@pytest.mark.parametrize(
    ("mine", "reference", "ratio"),
    [
        ([2, 4], [1, 2], 2),
        ([1, 2], [4, 8], 0.25),
        ([1, 3], [1, 2], 0),
        ([0], [1], 0),
        ([1], [1, 1], 0),
        ([-2], [1], -2),
        ([math.inf], [1], 0),
        ([math.inf, 2], [1, 1], 2),
    ],
)
def test_a_common_ratio_is_found(mine, reference, ratio):
    assert ratio_of(mine, reference) == ratio


@pytest.mark.parametrize("answer", [None, ..., [], {}, ""])
def test_no_answer_is_no_right_answer(answer):
    assert not same(answer, answer).ok


def test_an_object_that_equals_everything_is_not_the_reference():
    class Equal:
        def __eq__(self, other):
            return True

        __hash__ = object.__hash__

    assert not same(Equal(), "uneven-batches").ok


def test_a_wrong_answer_does_not_get_the_right_one():
    finding = same(3, 10.5e9, what="the bytes", look="count the optimizer's state")
    assert finding.sentence == "the bytes: 3 is not right: count the optimizer's state"
    assert "expected 1.05e+10" in finding.answer
