"""Every refusal of the public API: the right exception, the bad value, the allowed values, and no partial effect.

``test_errors.py`` covers modules, parameters and trees that cannot be sharded. This file covers the arguments, the
setters and the checks at the first forward. Each row lists words that the message must contain, in any order.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.engine.test_errors import Pair, fingerprint
from tests.helpers.forked_ranks import on_one_rank, run_ranks, simulated_rank
from workbench.engine import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    fully_shard,
    reshard_module,
    unshard_module,
)
from workbench.engine.backends.gloo import GlooReduceScatter
from workbench.engine.comm import DefaultAllGather
from workbench.engine.mesh import FSDPMeshInfo

Words = tuple[str, ...]


def refused(call: Callable[[], object], error: type[Exception], words: Words, module: nn.Module) -> None:
    """Expect exactly ``error``, with every word in its message and ``module`` unchanged."""
    before = fingerprint(module)
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error, repr(caught.value)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert fingerprint(module) == before


# ---- arguments of fully_shard

WRONG_ARGUMENTS: dict[str, tuple[dict[str, object], type[Exception], Words]] = {
    "mesh of another type": ({"mesh": "cpu"}, TypeError, ("mesh", "DeviceMesh", "str")),
    "mesh as numbers": ({"mesh": [0, 1, 2, 3]}, TypeError, ("mesh", "DeviceMesh", "list")),
    "reshard 0": ({"reshard_after_forward": 0}, ValueError, ("reshard_after_forward", "0", "4")),
    "reshard negative": ({"reshard_after_forward": -2}, ValueError, ("reshard_after_forward", "-2", "4")),
    "reshard 3 of 4": ({"reshard_after_forward": 3}, ValueError, ("reshard_after_forward", "3", "4")),
    "reshard 8 of 4": ({"reshard_after_forward": 8}, ValueError, ("reshard_after_forward", "8", "4")),
    "reshard word": ({"reshard_after_forward": "yes"}, TypeError, ("reshard_after_forward", "'yes'", "True", "False")),
    "reshard fraction": ({"reshard_after_forward": 2.0}, TypeError, ("reshard_after_forward", "2.0", "int")),
    "precision as dtype": (
        {"mp_policy": torch.bfloat16},
        TypeError,
        ("mp_policy", "MixedPrecisionPolicy", "torch.bfloat16"),
    ),
    "precision None": ({"mp_policy": None}, TypeError, ("mp_policy", "MixedPrecisionPolicy", "None")),
    "precision class": ({"mp_policy": MixedPrecisionPolicy}, TypeError, ("mp_policy", "MixedPrecisionPolicy", "type")),
    "torch's precision": (
        {"mp_policy": torch_fsdp.MixedPrecisionPolicy()},
        TypeError,
        ("mp_policy", "workbench.engine", "torch.distributed.fsdp"),
    ),
    "offload as flag": ({"offload_policy": True}, TypeError, ("offload_policy", "OffloadPolicy", "bool")),
    "offload None": ({"offload_policy": None}, TypeError, ("offload_policy", "OffloadPolicy", "NoneType")),
    "torch's offload": (
        {"offload_policy": torch_fsdp.CPUOffloadPolicy()},
        TypeError,
        ("offload_policy", "workbench.engine", "torch.distributed.fsdp"),
    ),
    "policies exchanged": (
        {"mp_policy": OffloadPolicy(), "offload_policy": MixedPrecisionPolicy()},
        TypeError,
        ("mp_policy", "OffloadPolicy"),
    ),
    "placement itself": ({"shard_placement_fn": Shard(0)}, TypeError, ("shard_placement_fn", "Shard")),
    "placement int": (
        {"shard_placement_fn": lambda _: 1},
        TypeError,
        ("shard_placement_fn", "'a.weight'", "may return None, Shard(dim)", "returned 1"),
    ),
    "placement word": (
        {"shard_placement_fn": lambda _: "0"},
        TypeError,
        ("shard_placement_fn", "'a.weight'", "returned '0'"),
    ),
    "placement replicate": (
        {"shard_placement_fn": lambda _: Replicate()},
        TypeError,
        ("shard_placement_fn", "'a.weight'", "Replicate"),
    ),
    "placement of the second": (
        {"shard_placement_fn": lambda p: None if p.ndim == 2 else (0, 1)},
        TypeError,
        ("shard_placement_fn", "'a.bias'", "returned (0, 1)"),
    ),
    "placement's mesh": (
        {"shard_placement_fn": lambda _: ShardPlacementResult(placement=Shard(0), mesh_info=None)},
        TypeError,
        ("'a.weight' a mesh_info of type NoneType", "FSDPMeshInfo"),
    ),
    "placement's placement": (
        {"shard_placement_fn": lambda _: ShardPlacementResult(placement=0, mesh_info=None)},
        TypeError,
        ("shard_placement_fn", "'a.weight'"),
    ),
    "dim out of range": (
        {"shard_placement_fn": lambda p: Shard(2)},
        ValueError,
        ("Shard(2)", "'a.weight' of shape [2, 2]", "its dims are 0 to 1"),
    ),
    "uneven": (
        {"shard_placement_fn": lambda p: Shard(1) if p.ndim > 1 else None},
        ValueError,
        ("'a.weight' of shape [2, 2] cannot be split along dim 1", "by 4 ranks, and only dim 0 may be uneven"),
    ),
    "ignored parameter alone": (
        {"ignored_params": nn.Parameter(torch.ones(2))},
        TypeError,
        ("ignored_params takes a set of parameters", "{"),
    ),
    "ignored module": ({"ignored_params": [nn.Linear(1, 1)]}, TypeError, ("ignored_params", "Linear")),
    "ignored number": ({"ignored_params": 3}, TypeError, ("ignored_params", "int")),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_a_wrong_argument_of_fully_shard(case):
    run_ranks(1, wrong_argument, case)


def wrong_argument(case: str) -> None:
    dist.destroy_process_group()
    options, error, words = WRONG_ARGUMENTS[case]
    with simulated_rank(1, 4):
        model = Pair()
        refused(lambda: fully_shard(model, **options), error, words, model)
        fully_shard(model)  # the refusal leaves nothing behind


WRONG_MESHES = {
    "3-D": ((2, 2, 1), ("a", "b", "c"), ("3-D", "(2, 2, 1)")),
    "unnamed": ((2, 2), None, ("2-D", "mesh_dim_names")),
}


def wrong_mesh(case: str) -> None:
    dist.destroy_process_group()
    shape, names, words = WRONG_MESHES[case]
    with simulated_rank(0, 4):
        model = Pair()
        before = fingerprint(model)
        with pytest.raises(ValueError, match=words[0]) as caught:
            fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
        assert fingerprint(model) == before


@pytest.mark.parametrize("case", WRONG_MESHES)
def test_a_mesh_that_is_neither_fsdp_nor_hsdp(case):
    run_ranks(1, wrong_mesh, case)


WRONG_PRECISION = {
    "name of a dtype": ({"param_dtype": "bfloat16"}, TypeError, ("param_dtype", "'bfloat16'", "torch.dtype")),
    "reduce number": ({"reduce_dtype": 16}, TypeError, ("reduce_dtype", "16", "torch.dtype")),
    "output flag": ({"output_dtype": True}, TypeError, ("output_dtype", "True", "torch.dtype")),
    "cast word": ({"cast_forward_inputs": "yes"}, TypeError, ("cast_forward_inputs", "'yes'", "bool")),
    "integers": ({"param_dtype": torch.int8}, ValueError, ("param_dtype", "torch.int8", "floating")),
}


@pytest.mark.parametrize("case", WRONG_PRECISION)
@on_one_rank
def test_a_precision_policy_of_something_else(case):
    fields, error, words = WRONG_PRECISION[case]
    model = Pair()
    refused(lambda: fully_shard(model, mp_policy=MixedPrecisionPolicy(**fields)), error, words, model)


@on_one_rank
def test_an_offload_policy_of_something_else():
    model = Pair()
    words = ("pin_memory", "'yes'", "bool")
    refused(lambda: fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory="yes")), TypeError, words, model)


# ---- communication


class OwnAllGather(DefaultAllGather):
    pass


def allocates_by_itself(enable: bool) -> None:
    model = fully_shard(Pair())
    own = OwnAllGather()
    model.set_custom_all_gather(own)
    words = ("communicates with a custom OwnAllGather", "allocate their own buffers", "set_custom_all_gather")
    refused(lambda: model.set_allocate_memory_from_process_group_for_comm(enable), ValueError, words, model)
    model(torch.ones(1, 2)).sum().backward()
    assert model._get_fsdp_state()._fsdp_param_group.comm.gather is own


@pytest.mark.parametrize("enable", [True, False])
def test_memory_of_the_group_for_collectives_of_ones_own(enable):
    run_ranks(2, allocates_by_itself, enable)


@on_one_rank
def test_a_mesh_info_without_an_axis_to_shard_over():
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="FSDPMeshInfo needs shard_mesh_dim, the axis to shard over"):
        FSDPMeshInfo(mesh=mesh)


@pytest.mark.parametrize("op", [dist.ReduceOp.MAX, dist.ReduceOp.AVG])
@on_one_rank
def test_a_reduction_other_than_sum(op):
    like = torch.ones(2)
    with pytest.raises(ValueError, match="GlooReduceScatter supports SUM only, got"):
        GlooReduceScatter()(like, like, dist.group.WORLD, op)


# ---- at the first forward


@on_one_rank
def test_a_parameter_tied_over_two_units_after_they_were_sharded():
    model = Pair()
    fully_shard(model.a)
    fully_shard(model.b)
    fully_shard(model)
    model.b.weight = model.a.weight
    with pytest.raises(ValueError, match="were tied after fully_shard; tie them before") as caught:
        model(torch.ones(1, 2))
    assert all(word in str(caught.value) for word in ("'a.weight'", "'b.weight'", "one unit")), str(caught.value)


@on_one_rank
def test_a_parameter_replaced_by_one_of_another_shape():
    model = fully_shard(Pair())
    like = model.a.weight
    other = fully_shard(nn.Linear(3, 3))
    model.a.weight = other.weight
    with pytest.raises(ValueError, match=r"'a\.weight'") as caught:
        model(torch.ones(1, 2))
    assert all(word in str(caught.value) for word in ("[3, 3]", "[2, 2]")), str(caught.value)
    model.a.weight = like
    assert model(torch.ones(1, 2)).shape == (1, 2)


# ---- reshard_module


@on_one_rank
def test_reshard_module_of_a_plain_module():
    model = Pair()
    refused(lambda: reshard_module(model, reshard_after_forward=True), ValueError, ("Pair", "fully_shard"), model)


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        ({"mesh": 3}, TypeError, ("mesh", "DeviceMesh", "int")),
        ({"mp_policy": torch.bfloat16}, TypeError, ("mp_policy", "MixedPrecisionPolicy")),
        ({"offload_policy": True}, TypeError, ("offload_policy", "OffloadPolicy")),
        ({"reshard_after_forward": "yes"}, TypeError, ("reshard_after_forward", "'yes'")),
        ({"reshard_after_forwards": True}, TypeError, ("reshard_after_forwards",)),
    ],
)
@on_one_rank
def test_reshard_module_with_a_wrong_policy(policy, error, words):
    model = fully_shard(Pair())
    model(torch.ones(1, 2)).sum().backward()
    refused(lambda: reshard_module(model, **policy), error, words, model)
    assert isinstance(model, FSDPModule)
    model(torch.ones(1, 2)).sum().backward()
    unshard_module(model)
