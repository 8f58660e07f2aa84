"""Ratios and differences of tensors, as verify measures them."""

import math

import pytest
import torch

from workbench.runtime.step_observation import GradObserver, grouped, ratio, relative, scaled_after_backward


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


def observed(after_backward, norms):
    found = GradObserver([], dict, keeps=False)
    found.after_backward = {name: torch.tensor(norm) for name, norm in after_backward.items()}
    found.norms = {name: torch.tensor(norm) for name, norm in norms.items()}
    return found


@pytest.mark.parametrize(
    ("own", "norms", "factor"),
    [
        ({"a": 2.0, "b": 4.0}, {"a": 1.0, "b": 2.0}, 1.0),
        ({"a": 2.0, "b": 4.0}, {"a": 3.0, "b": 6.0}, 3.0),
        ({"a": 2.0, "b": 4.0}, {"a": 3.0, "b": 5.0}, None),
        ({"a": 2.1, "b": 4.0}, {"a": 3.0, "b": 6.0}, None),
        ({"a": float("nan"), "b": 4.0}, {"a": 3.0, "b": 6.0}, None),
        ({"a": 2.0}, {"a": 3.0}, None),
    ],
)
def test_a_step_that_scales_all_gradients_alike_after_backward(own, norms, factor):
    copy = observed({"a": 2.0, "b": 4.0}, {"a": 1.0, "b": 2.0})
    found = scaled_after_backward(observed(own, norms), copy, 1e-3)
    assert found == (factor if factor is None else pytest.approx(factor))


def test_without_gradients_no_factor_is_known():
    assert math.isnan(scaled_after_backward(observed({}, {}), observed({}, {}), 1e-3))
