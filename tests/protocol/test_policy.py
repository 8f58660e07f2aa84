import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.protocol.policy import (
    DTYPES,
    PrecisionNames,
    as_mesh,
    as_reshard_after_forward,
    check_mesh_fits,
    check_reshard_fits,
    meshes_that_fit,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", PrecisionNames()),
        ("bf16", PrecisionNames(param="bf16")),
        ("param=fp16", PrecisionNames(param="fp16")),
        ("bf16,reduce=fp32", PrecisionNames(param="bf16", reduce="fp32")),
        (" bf16 , output = fp32 , reduce=fp64 ", PrecisionNames(param="bf16", reduce="fp64", output="fp32")),
        ("reduce=fp32", PrecisionNames(reduce="fp32")),
    ],
)
def test_mixed_precision_is_read(text, expected):
    assert PrecisionNames.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp16", PrecisionNames(param="fp16", reduce="fp32", output="fp64")),
        ("reduce=off", PrecisionNames(param="bf16", output="fp64")),
        ("off,output=fp32", PrecisionNames(reduce="fp32", output="fp32")),
        ("off", PrecisionNames()),
    ],
)
def test_unnamed_dtypes_are_kept(text, expected):
    assert PrecisionNames(param="bf16", reduce="fp32", output="fp64").changed(text) == expected


@given(*[st.sampled_from(["", *DTYPES])] * 3)
def test_the_text_of_a_precision_parses_to_itself(param, reduce, output):
    precision = PrecisionNames(param=param, reduce=reduce, output=output)
    assert PrecisionNames.parse(str(precision)) == precision


@pytest.mark.parametrize(
    ("value", "mesh"), [(4, (4,)), ("4", (4,)), ("2x3", (2, 3)), ([2, 3], (2, 3)), ((8,), (8,)), ("1x2x3", (1, 2, 3))]
)
def test_a_mesh_is_read(value, mesh):
    assert as_mesh(value) == mesh


@pytest.mark.parametrize("value", ["", "x", "2x", "-4", "2*2", 2.0, True, None])
def test_invalid_meshes(value):
    with pytest.raises(ValueError, match="such as 4 or 2x2"):
        as_mesh(value)


@given(st.integers(1, 64))
def test_exactly_the_listed_meshes_fit(world_size):
    fitting = meshes_that_fit(world_size)
    assert fitting[0] == str(world_size)
    for text in fitting:
        assert math.prod(as_mesh(text)) == world_size
        check_mesh_fits(as_mesh(text), world_size)
    check_mesh_fits((), world_size)
    with pytest.raises(ValueError, match="these fit: ") as caught:
        check_mesh_fits((2, world_size), world_size)
    assert str(caught.value).endswith(", ".join(fitting))


def test_a_mesh_that_does_not_fit_lists_those_that_do():
    with pytest.raises(
        ValueError,
        match=r"^mesh 2x3 = 6 does not match the number of ranks, 4; these fit: 4, 2x2, "
        "4x1$",
    ):
        check_mesh_fits((2, 3), 4)
    with pytest.raises(ValueError, match=r"^mesh 3 does not match the number of ranks, 4; "):
        check_mesh_fits((3,), 4)


@pytest.mark.parametrize("value", ["auto", "true", "false", "", 2, 4])
def test_sizes_that_split_eight_ranks(value):
    check_reshard_fits(value, 8)


@pytest.mark.parametrize(("value", "size"), [(3, 8), (8, 8), (16, 8)])
def test_other_sizes_are_refused_with_those_that_fit(value, size):
    with pytest.raises(ValueError, match=r"these fit: 2, 4; or auto, true, false$"):
        check_reshard_fits(value, size)


def test_few_ranks_have_no_number_that_fits():
    with pytest.raises(ValueError, match=r"these fit: no number; auto, true, false$"):
        check_reshard_fits(2, 2)


def test_numbers_and_words_are_distinguished():
    assert [as_reshard_after_forward(text) for text in ("4", "auto", "-1")] == [4, "auto", "-1"]
