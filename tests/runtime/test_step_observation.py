"""Ratios and differences of tensors, as verify measures them."""

import math

import pytest
import torch

from workbench.runtime.step_observation import grouped, ratio, relative


def test_a_ratio_of_nearly_all_elements():
    expected = torch.linspace(-1, 1, 200, dtype=torch.float64)
    assert ratio(2 * expected, expected, 1e-3) == pytest.approx(2)
    assert ratio(expected * (1 + 1e-5), expected, 1e-3) == 1.0
    one_differs = 2 * expected
    one_differs[0] = 7
    assert ratio(one_differs, expected, 1e-3) == pytest.approx(2)
    one_differs[:20] = 7
    assert ratio(one_differs, expected, 1e-3) is None
    assert math.isnan(ratio(expected, torch.zeros(200), 1e-3))
    assert math.isnan(ratio(expected[:0], expected[:0], 1e-3))


def test_ratios_are_grouped_by_value():
    found = grouped({"a": 2.0, "b": 2.0001, "c": None, "d": math.nan, "e": 1.0, "f": None}, 1e-3)
    assert [(group.ratio, group.num_params, group.first) for group in found] == [
        (2.0, 2, "a"),
        (None, 2, "c"),
        (1.0, 1, "e"),
    ]


def test_a_relative_difference():
    ones = torch.ones(4)
    assert relative(ones, ones) == 0.0
    assert relative(2 * ones, ones) == 1.0
    assert relative(ones, 0 * ones) == math.inf
    assert relative(ones * math.nan, ones) == math.inf
    assert relative(ones * math.nan, ones * math.nan) == 0.0
    assert relative(ones * math.nan, 0 * ones) == math.inf
    assert relative(ones[:0], ones[:0]) == 0.0
