import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.events import FlatPart, Param, Unit
from workbench.protocol.policy import (
    DTYPES,
    STRATEGIES,
    PrecisionNames,
    as_mesh,
    as_reshard_after_forward,
    check_mesh_fits,
    check_reshard_fits,
    mesh_words,
    meshes_that_fit,
    policy_words,
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
        ("bf16,keep=*.norm*|head.*", PrecisionNames(param="bf16", keep="*.norm*|head.*")),
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


@given(*[st.sampled_from(["", *DTYPES])] * 3, st.sampled_from(["", "*.norm*", "a|b.?"]))
def test_the_text_of_a_precision_parses_to_itself(param, reduce, output, keep):
    precision = PrecisionNames(param=param, reduce=reduce, output=output, keep=keep)
    assert PrecisionNames.parse(str(precision)) == precision


@pytest.mark.parametrize(
    ("value", "mesh"), [(4, (4,)), ("4", (4,)), ("2x3", (2, 3)), ([2, 3], (2, 3)), ((8,), (8,)), ("1x2x3", (1, 2, 3))]
)
def test_a_mesh_is_read(value, mesh):
    assert as_mesh(value) == mesh


@pytest.mark.parametrize("value", ["", "x", "2x", "-4", "2*2", 2.0, True, None])
def test_invalid_meshes(value):
    with pytest.raises(ValueError, match="such as 4 or 2x2") as caught:
        as_mesh(value)
    assert str(caught.value) == (
        "mesh is hosts (one replica per host), a number of shard ranks, or replicas x shard ranks, such as 4 or 2x2, "
        f"not {str(value)!r}"
    )


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
    with pytest.raises(ValueError, match=r"^mesh 3 does not match the number of ranks, 4; these fit: 4, 2x2, 4x1$"):
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


def make_unit(shard_size=4, replicate_size=1, policy=True, compute="float32", reduce="float32", **fields):
    """Return a unit with one parameter in float32."""
    param = Param(
        **{"fqn": "w", "shape": (8,), "global_shape": (8,), "dtype": "float32", "itemsize": 4, "shard_dim": 0},
        **{"rows_per_rank": (2,) * 4, "padded_rows": 2},
    )
    more = {name: fields.pop(name) for name in ("parts", "use_orig_params") if name in fields}
    return Unit(
        **{"index": 0, "name": "", "root": 0, "params": (replace(param, **more),)},
        **{"shard_size": shard_size, "replicate_size": replicate_size, "reshard_after_forward": policy},
        **{"compute_dtype": compute, "reduce_dtype": reduce, "compute_itemsize": 4, "reduce_itemsize": 4},
        **fields,
    )


FLAT = (FlatPart(fqn="w", shape=(8,), global_shape=(8,), first=0),)


@pytest.mark.parametrize(
    ("units", "prefetch", "phrases"),
    [
        ([make_unit()], 0, []),
        ([make_unit(parts=FLAT)], 0, ["classic: one flat parameter per unit"]),
        (
            [make_unit(), make_unit(parts=FLAT, use_orig_params=True)],
            0,
            ["classic: one flat parameter per unit", "optimizers have a shard of each parameter"],
        ),
        ([make_unit(2, 2)], 0, ["HSDP 2x2: 2 replicas, each sharded over 2 ranks"]),
        ([make_unit(1, 4)], 0, ["4 replicas, none of them sharded"]),
        ([make_unit(policy=False)], 0, ["unsharded from forward to backward"]),
        ([make_unit(policy=False), make_unit()], 0, []),
        ([make_unit(policy=4), make_unit(policy=2), make_unit()], 0, ["on 2 and 4 ranks after forward"]),
        ([make_unit(compute="bfloat16", reduce="bfloat16")], 0, ["compute in bfloat16"]),
        ([make_unit(compute="bfloat16")], 0, ["compute in bfloat16", "reduce in float32"]),
        (
            [make_unit(), make_unit(compute="bfloat16", reduce="bfloat16")],
            0,
            ["compute in bfloat16 and float32"],
        ),
        ([make_unit(), make_unit(offload=True)], 1, ["shards kept in host memory (offload)", "gathers 1 unit ahead"]),
        ([make_unit()], 2, ["gathers 2 units ahead"]),
    ],
)
def test_what_is_not_the_default_is_told_in_a_phrase(units, prefetch, phrases):
    assert policy_words(units, prefetch) == phrases


def test_a_dtype_of_outputs_is_told_where_they_are_cast():
    halved = [make_unit(compute="bfloat16", reduce="bfloat16")]
    assert policy_words(halved, output="float32") == ["compute in bfloat16", "outputs in float32"]
    assert policy_words(halved, output="bfloat16") == ["compute in bfloat16"]


@pytest.mark.parametrize(("copies", "words"), [(1, "4"), (2, "2x4")])
def test_one_copy_is_not_written_in_a_mesh(copies, words):
    assert mesh_words(copies, 4) == words


def test_the_wrapper_has_a_name_for_each_strategy():
    assert STRATEGIES == {
        **{"full": "FULL_SHARD", "grad": "SHARD_GRAD_OP", "none": "NO_SHARD"},
        **{"hybrid": "HYBRID_SHARD", "hybrid2": "_HYBRID_SHARD_ZERO2"},
    }
