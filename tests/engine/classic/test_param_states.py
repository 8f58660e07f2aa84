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
    _states_of_pieces,
    split_states,
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


# ---- one rank's part

WHOLES = (torch.tensor([1.0, 2, 3]), torch.tensor([[4.0, 5], [6, 7]]))
OF_RANKS = [[1.0, 2], [3, 4], [5, 6], [7, 0]]  # with padding


def flat_on(rank: int, *, use_orig_params: bool, num_shards: int = 4) -> SimpleNamespace:
    """Return what the conversion asks of a flat parameter on a rank; it owns texts instead of parameters."""
    layout = FlatLayout.of([whole.shape for whole in WHOLES], num_shards, rank)
    names = ("bias", "weight")
    parts = [
        SimpleNamespace(index=i, fqn=name, global_shape=whole.shape, held=name, local_part=lambda value: value + 0)
        for i, (name, whole) in enumerate(zip(names, WHOLES, strict=True))
    ]
    owns_wholes = use_orig_params and num_shards == 1
    slot = torch.full((layout.slot_numel,), -1.0)
    about = {"use_orig_params": use_orig_params, "owns_wholes": owns_wholes, "fqn": "net._flat_param"}
    return SimpleNamespace(flat_layout=layout, parts=parts, slot=slot, sharded_param="flat", **about)


def test_a_rank_with_pieces_has_those_of_its_elements_and_every_number():
    numbers = [1]
    states = [{"step": numbers, "avg": whole} for whole in WHOLES]
    found = [split_states(flat_on(rank, use_orig_params=True), states) for rank in range(4)]
    assert [list(of_rank) for of_rank in found] == [["bias"], ["bias", "weight"], ["weight"], ["weight"]]
    pieces = [[value["avg"].tolist() for value in of_rank.values()] for of_rank in found]
    assert pieces == [[[1.0, 2]], [[3.0], [4.0]], [[5.0, 6]], [[7.0]]]
    assert all(list(value) == ["avg", "step"] for of_rank in found for value in of_rank.values())
    assert all(value["step"] == [1] and value["step"] is not numbers for of_rank in found for value in of_rank.values())
    assert list(split_states(flat_on(1, use_orig_params=True), [None, states[1]])) == ["weight"]


def test_values_are_fetched_in_the_same_order_on_every_rank():
    for use_orig_params in (True, False):
        for rank in range(4):
            fetched = []
            flat = flat_on(rank, use_orig_params=use_orig_params)
            states = [{"b": f"b of {part.fqn}", "a": f"a of {part.fqn}"} for part in flat.parts]
            split_states(flat, states, lambda name, fetched=fetched: fetched.append(name) or torch.tensor(1.0))
            by_part = ["a of bias", "b of bias", "a of weight", "b of weight"]
            assert fetched == (by_part if use_orig_params else [by_part[i] for i in (0, 2, 1, 3)])


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_with_a_flat_parameter_has_one_state_with_zeros_at_the_end(rank):
    flat = flat_on(rank, use_orig_params=False)
    found = split_states(flat, [{"avg": whole.double(), "step": torch.tensor(3.0)} for whole in WHOLES])
    assert list(found) == ["flat"]
    assert found["flat"]["avg"].tolist() == OF_RANKS[rank]
    assert found["flat"]["avg"].dtype == torch.float64
    assert found["flat"]["step"] == 3
    assert split_states(flat, [None, None]) == {}
    # back: its piece of each part, and the number for all
    pieces = _states_of_pieces(flat, found)
    assert [torch.equal(had["avg"], piece) for had, piece in zip(pieces, _pieces(flat), strict=True)] == [True, True]
    assert [had["step"] for had in pieces] == [3, 3]
    assert _states_of_pieces(flat, {}) == [None, None]
    assert _states_of_pieces(flat_on(rank, use_orig_params=True), {"weight": {"step": 1}}) == [None, {"step": 1}]


def _pieces(flat: SimpleNamespace) -> list[torch.Tensor]:
    return flat.flat_layout.pieces_of(torch.tensor(OF_RANKS[flat.flat_layout.rank], dtype=torch.float64))


def test_a_rank_that_has_wholes_keeps_state_of_any_shape():
    rows = torch.zeros(2)
    flat = flat_on(0, use_orig_params=True, num_shards=1)
    found = split_states(flat, [{"avg": WHOLES[0]}, {"avg": WHOLES[1], "rows": rows}])
    assert [found[name]["avg"].tolist() for name in found] == [whole.tolist() for whole in WHOLES]
    assert found["weight"]["rows"].shape == (2,)
    assert found["weight"]["rows"] is not rows


DIFFER = (
    "the parameters of flat parameter 'net._flat_param' differ in optimizer state 'a', but share one state; to keep it "
    "per parameter, wrap with use_orig_params=True"
)
KEEPS = (
    ": the parameters of a flat parameter share their optimizer state; to keep it per parameter, wrap with "
    "use_orig_params=True"
)


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ([{"a": 1}, {"a": 2}], DIFFER),
        ([{"a": 1}, {"a": 1.0}], DIFFER),
        ([{"a": WHOLES[0]}, {"a": 2}], DIFFER),
        ([{"a": 1}, {"a": WHOLES[1]}], DIFFER),
        ([{"a": WHOLES[0]}, {"a": WHOLES[1].double()}], DIFFER),
        (
            [{"a": WHOLES[0]}, {"a": WHOLES[1].reshape(4)}],
            "optimizer state 'a' of 'weight' has shape [4], the parameter [2, 2]: only a scalar, or state of the "
            "parameter's shape, can be sharded",
        ),
        (
            [{"b": 1, "a": 1}, None],
            f"'weight' has no state, and another parameter of its flat parameter has a, b{KEEPS}",
        ),
        ([{"a": 1}, {}], f"'weight' has empty state, and another parameter of its flat parameter has a{KEEPS}"),
        (
            [{"a": 1}, {"c": 1, "b": 1}],
            f"'weight' has state b, c, and another parameter of its flat parameter has a{KEEPS}",
        ),
    ],
)
def test_parameters_of_a_flat_one_cannot_differ_in_what_they_share(states, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        split_states(flat_on(0, use_orig_params=False), states)
