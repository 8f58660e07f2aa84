"""Odd models and optimizers, for which our wrapper does what torch's does, or loads what it has saved."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.engine.classic.test_optim_state import set_state_dict_type
from tests.engine.classic.test_tensor_parallel import layout, set_type, state_dicts, wrap
from tests.engine.test_tensor_parallel import DIM, FSDP_TP, PartlySplit, meshes
from tests.helpers.forked_ranks import run_cases
from tests.helpers.known_warnings import OLD_CALLS, SHARDED_TENSOR, ignoring_warnings
from tests.helpers.wrapped_models import OURS, THEIRS, assert_same_tree, kept

BOTH = (OURS, THEIRS)


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def wrapped(api: SimpleNamespace, model: nn.Module, **options: Any) -> nn.Module:
    """Wrap each linear layer, and the whole, which then has no parameters of its own."""
    cpu = torch.device("cpu")
    policy = api.ModuleWrapPolicy({nn.Linear})
    return api.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu, **options)


def inputs_are_cast() -> None:
    """A root without parameters of its own casts its inputs; a wrapper below it without parameters does not."""
    for options in ({}, {"cast_root_forward_inputs": False, "cast_forward_inputs": True}):
        outputs = []
        for api in BOTH:
            precision = api.MixedPrecision(param_dtype=torch.bfloat16, **options)
            model = nn.Sequential(nn.Identity(), linears())
            seen: list[torch.dtype] = []
            model[0].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].dtype))
            output = wrapped(api, model, mixed_precision=precision)(torch.ones(2, 4))
            outputs.append((output.detach().float(), output.dtype, seen))
        assert outputs[0][1:] == outputs[1][1:]
        torch.testing.assert_close(outputs[0][0], outputs[1][0])


@ignoring_warnings(*OLD_CALLS, ("optim_input is deprecated", FutureWarning))
def arguments_stay() -> None:
    """No function writes into groups, state dicts or policies that a caller passes."""
    plain = linears()
    model = wrapped(OURS, copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    wrapper, groups = OURS.FullyShardedDataParallel, [{"params": list(model.parameters()), "lr": 0.5}]
    full = wrapper.full_optim_state_dict(model, optimizer, rank0_only=False)
    by_number = wrapper.rekey_optim_state_dict(
        full, OURS.OptimStateKeyType.PARAM_ID, plain, optim_input=[{"params": list(plain.parameters())}]
    )
    calls = {
        "shard": lambda: wrapper.shard_full_optim_state_dict(full, model, groups),
        "scatter": lambda: wrapper.scatter_full_optim_state_dict(full, model, groups),
        "full": lambda: wrapper.full_optim_state_dict(model, optimizer, groups),
        "load": lambda: wrapper.optim_state_dict_to_load(model, optimizer, full, load_directly=True),
        "rekey": lambda: wrapper.rekey_optim_state_dict(
            by_number, OURS.OptimStateKeyType.PARAM_NAME, plain, optim_input=[{"params": list(plain.parameters())}]
        ),
    }
    before = kept((full, by_number))
    for name, call in calls.items():
        call()
        assert_same_tree(kept((full, by_number)), before)
        assert [list(group) for group in groups] == [["params", "lr"]], name


def order_is_the_same() -> None:
    """The optimizers of the ranks hold the same parameters in another order."""
    for use_orig_params in (False, True):
        model = wrapped(OURS, linears(), use_orig_params=use_orig_params)
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params[:: 1 - 2 * dist.get_rank()], lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            set_state_dict_type(model, kind)
            keys: list[Any] = [None, None]
            saved = OURS.FullyShardedDataParallel.optim_state_dict(model, optimizer)
            dist.all_gather_object(keys, list(saved["state"]))
            assert keys[0] == keys[1]


class Uneven(nn.Module):
    """A wrapped layer, and on the second rank a table that only this rank has."""

    def __init__(self, api: SimpleNamespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = api.FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        if dist.get_rank() == 1:
            self.table = nn.Embedding(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x + self.table(torch.tensor([1, 2])) if hasattr(self, "table") else x


def a_rank_alone_has_a_parameter() -> None:
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        model = Uneven(OURS)
        set_state_dict_type(model, kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        wrapper = OURS.FullyShardedDataParallel
        saved, values = wrapper.optim_state_dict(model, optimizer), model.state_dict()
        expected = copy.deepcopy(optimizer.state_dict()["state"])
        other = Uneven(OURS)
        set_state_dict_type(other, kind)
        other.load_state_dict(values)
        others = torch.optim.AdamW(other.parameters(), lr=0.1)
        others.load_state_dict(wrapper.optim_state_dict_to_load(other, others, saved))
        torch.testing.assert_close(others.state_dict()["state"], expected, rtol=0, atol=0)


@ignoring_warnings(*OLD_CALLS, *SHARDED_TENSOR)
def a_parameter_is_left_out() -> None:
    """The state dict was saved before the model had a parameter that is in no wrapper; torch's accepts it as well."""

    def make(api: SimpleNamespace) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(api.FullyShardedDataParallel(linears(), device_id=torch.device("cpu")), nn.Linear(4, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    for api in BOTH:
        model, optimizer = make(api)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        wrapper = api.FullyShardedDataParallel
        set_state_dict_type(model, "FULL_STATE_DICT", api)
        saved = wrapper.optim_state_dict(model, optimizer)
        for name in ("1.weight", "1.bias"):
            del saved["state"][name]
            saved["param_groups"][0]["params"].remove(name)
        loaded = wrapper.optim_state_dict_to_load(model, optimizer, saved)
        assert loaded["state"].keys() == {0}
        if api is OURS:
            make(OURS)[1].load_state_dict(loaded)  # torch's leaves the group one parameter short, which this refuses


@pytest.mark.parametrize(
    "case",
    [inputs_are_cast, arguments_stay, order_is_the_same, a_rank_alone_has_a_parameter, a_parameter_is_left_out],
    ids=lambda case: case.__name__,
)
def test_as_torchs(case):
    run_cases(2, {case.__name__: case})


@ignoring_warnings(*OLD_CALLS, *SHARDED_TENSOR)
def parameters_beside_split_ones() -> None:
    dp, tp = meshes(*FSDP_TP)
    found = []
    for api in BOTH:
        torch.manual_seed(0)
        model = parallelize_module(PartlySplit(), tp, {"up": ColwiseParallel(output_layouts=Replicate())})
        model = wrap(api, model, dp, auto_wrap_policy=None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, DIM)).sum().backward()
        optimizer.step()
        set_type(api, model, "Sharded")
        values, states = state_dicts(api, model, optimizer)
        found.append((layout(values), layout(states["state"])))
    assert found[0] == found[1]
    assert found[0][0]["scale"][0] == ("dp", "tp")


def test_a_parameter_that_tensor_parallelism_leaves_alone_is_on_the_whole_mesh():
    run_cases(4, {"": parameters_beside_split_ones})
