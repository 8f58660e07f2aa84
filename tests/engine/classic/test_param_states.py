"""What ranks tell each other of optimizer state, and what becomes of it: without any rank."""

import re
from types import SimpleNamespace

import pytest
import torch

from workbench.engine.classic.flat_layout import FlatLayout
from workbench.engine.classic.param_states import (
    ReplicatedState,
    SplitState,
    UnknownState,
    _as_torchs,
    _described,
    _is_equal,
    _is_split,
    _joined,
)

CPU, META = torch.device("cpu"), torch.device("meta")
PART = SimpleNamespace(index=1, fqn="head.weight", global_shape=torch.Size([2, 2]))
FLAT = SimpleNamespace(flat_layout=FlatLayout.of([torch.Size([3]), torch.Size([2, 2])], 4, 0))  # 0, 1, 2, 1 elements
AVERAGE, STEP = SplitState(torch.float32), ReplicatedState(3)


@pytest.mark.parametrize(
    ("value", "numel", "told"),
    [
        (7, 2, ReplicatedState(7)),
        (torch.zeros(2, dtype=torch.float64), 2, SplitState(torch.float64)),
        (torch.zeros(1), 1, SplitState(torch.float32)),
        (torch.zeros(3), 2, UnknownState((3,), 2)),
        (torch.zeros(1, 3), 2, UnknownState((1, 3), 2)),
    ],
)
def test_state_is_split_like_its_parameter_or_the_same_everywhere_or_unknown(value, numel, told):
    assert _described(value, numel, CPU) == told


@pytest.mark.parametrize("value", [torch.tensor(5.0), torch.tensor([5.0])])
def test_a_number_in_a_tensor_goes_by_way_of_the_host(value):
    told = _described(value.requires_grad_(), 2, CPU)
    assert (told.value.item(), told.value.requires_grad, told.computes) == (5.0, False, True)
    assert not _described(value, 2, META).computes
    assert _described(torch.tensor(5.0), 1, CPU).value == 5  # without dims it is no element, even of one


def test_the_same_state_comes_as_a_copy_to_where_it_was():
    value = torch.tensor(5.0)
    for computes, device in ((True, META), (False, CPU)):
        found = ReplicatedState(value, computes).on(META)
        assert found.device == device
        assert found is not value
    numbers = [1]
    assert ReplicatedState(numbers).on(CPU) == numbers
    assert ReplicatedState(numbers).on(CPU) is not numbers


@pytest.mark.parametrize(
    ("of_ranks", "joined"),
    [
        ([None] * 4, None),
        ([{"step": STEP}, None, None, None], {"step": STEP}),  # a rank without elements tells if no other does
        ([{"old": STEP}, {"step": STEP}, None, None], {"step": STEP}),
        ([None, {"a": AVERAGE}, {"b": STEP}, None], {"a": AVERAGE, "b": STEP}),
        ([None, {"step": ReplicatedState(1)}, {"step": ReplicatedState(2)}, None], {"step": ReplicatedState(2)}),
        ([None, {"a": SplitState(torch.float64)}, {"a": AVERAGE}, None], {"a": SplitState(torch.float64)}),
        ([None, {"step": AVERAGE}, {"step": STEP}, None], {"step": STEP}),
        ([None, {"step": STEP}, {"step": AVERAGE}, None], {"step": STEP}),
    ],
)
def test_what_ranks_with_elements_tell_counts(of_ranks, joined):
    assert _joined(PART, FLAT, of_ranks) == joined


def test_state_that_is_neither_is_refused():
    says = (
        "optimizer state 'row' of 'head.weight' has shape [3, 1] on a rank with 2 elements of the parameter: only a "
        "scalar, or state with one value per element, can be gathered"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        _joined(PART, FLAT, [None, {"a": AVERAGE, "row": UnknownState((3, 1), 2)}, None, None])


@pytest.mark.parametrize(
    ("numbers_first", "order"), [(True, ["step", "z", "a", "b"]), (False, ["a", "b", "step", "z"])]
)
def test_keys_are_in_torchs_order(numbers_first, order):
    state = {"b": torch.zeros(2), "z": torch.tensor(1.0), "step": torch.tensor(1.0), "a": torch.zeros(1, 1)}
    assert list(_as_torchs(state, numbers_first=numbers_first)) == order
    assert _as_torchs({"b": 1, **state}, numbers_first=numbers_first)["b"] is state["b"]


def test_a_plain_number_is_before_one_in_a_tensor():
    state = {"b": torch.zeros(2), "a": torch.tensor(1.0), "c": 1}
    assert list(_as_torchs(state, numbers_first=True)) == ["c", "a", "b"]
    assert list(_as_torchs(state, numbers_first=False)) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("value", "is_split"),
    [(3, False), (torch.tensor(3.0), False), (torch.zeros(2, 2), True), (torch.zeros(1), False)],
)
def test_state_of_the_parameters_shape_is_split(value, is_split):
    assert _is_split(PART, "row", value) is is_split


def test_state_of_another_shape_cannot_be_split():
    says = (
        "optimizer state 'row' of 'head.weight' has shape [4], the parameter [2, 2]: only a scalar, or state of the "
        "parameter's shape, can be sharded"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        _is_split(PART, "row", torch.zeros(4))


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (1, 1, True),
        (1, 2, False),
        (1, 1.0, False),
        (torch.tensor(1.0), torch.tensor(1.0), True),
        (torch.tensor(1.0), torch.tensor(2.0), False),
        (torch.tensor(1.0), torch.tensor(1), False),
        (torch.tensor(1.0), 1.0, False),
    ],
)
def test_numbers_are_equal_by_type_and_value(one, other, is_equal):
    assert _is_equal(one, other) is is_equal
