"""Optimizer state dicts equal those of torch's wrapper, and load into any other sharding and into a plain model."""

import copy
import itertools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.engine.classic.test_unwrapping import train, two_groups, wrapped
from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.known_warnings import OLD_CALLS, SHARDED_TENSOR, ignoring_warnings
from tests.helpers.pairwise import quick
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import OURS, THEIRS, adam, assert_same_values, wrap_net
from workbench.engine.classic.state_dict_settings import settings_of

FSDP, Keys = OURS.FullyShardedDataParallel, OURS.OptimStateKeyType


def set_state_dict_type(model: nn.Module, kind: str, api: SimpleNamespace = OURS, **options: Any) -> None:
    """Set a state dict type, with options for the optimizer's state."""
    _, config = OURS.StateDictSettings.of(OURS.StateDictType[kind]).configs()
    chosen = getattr(api, config.__name__)(**options)
    api.FullyShardedDataParallel.set_state_dict_type(model, api.StateDictType[kind], None, chosen)


def trained_plain(steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_net()
    optimizer = adam(model.parameters())
    train(model, optimizer, range(steps), plain=True)
    return model, optimizer


def as_plain(state_dict: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return FSDP.rekey_optim_state_dict(state_dict, Keys.PARAM_ID, model, optim=optimizer)


def whole_of(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def wholes_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: {key: whole_of(value) for key, value in own.items()} for name, own in state.items()}


def every_form_of_it() -> None:
    """For each sharding and type, the state equals the plain model's and loads into the next sharding."""
    plain, plain_optimizer = trained_plain()
    expected = plain_optimizer.state_dict()
    saved = [FSDP.rekey_optim_state_dict(expected, Keys.PARAM_NAME, plain, optim=plain_optimizer)]
    size = dist.get_world_size()
    ways = [("FULL_SHARD", False), ("FULL_SHARD", True), ("SHARD_GRAD_OP", True), ("NO_SHARD", False)]
    for strategy, use_orig_params in [*ways, *([("HYBRID_SHARD", True)] if size > 1 else [])]:
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            model = wrapped(make_net(), strategy, use_orig_params=use_orig_params)
            optimizer = adam(model.parameters())
            FSDP.optim_state_dict_to_load(model, optimizer, saved[-1], load_directly=True)
            set_state_dict_type(model, kind)
            saved.append(FSDP.optim_state_dict(model, optimizer))
            state = saved[-1]["state"]
            splits = kind != "FULL_STATE_DICT" and not (use_orig_params and size == 1)
            assert all(isinstance(s["exp_avg"], DTensor) == splits for s in state.values())
            whole = wholes_of(state)
            kept = copy.deepcopy(whole)
            train(model, optimizer, range(2, 3))
            torch.testing.assert_close(wholes_of(state), kept, rtol=0, atol=0)  # it shares no memory with the optimizer
            got = as_plain({**saved[-1], "state": whole}, plain, plain_optimizer)
            torch.testing.assert_close(got["state"], expected["state"], rtol=0, atol=0)
            assert got["param_groups"] == expected["param_groups"]


@pytest.mark.parametrize("world_size", quick([1, 2, 4], [1, 2]))
def test_every_way_of_sharding_has_the_plain_models_state(world_size):
    run_ranks(world_size, every_form_of_it)


def torchs_and_ours() -> None:
    """Run the same script with both: keys, values and groups are equal, and each loads the other's state."""
    precisions = ({}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32})
    kinds = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for use_orig_params, precision, kind in itertools.product((False, True), precisions, kinds):
        saved, models, optimizers = [], [], []
        for api in (OURS, THEIRS):
            plain = make_net(num_blocks=2)
            plain.blocks[1].requires_grad_(False)
            model = wrap_net(
                api,
                plain,
                use_orig_params=use_orig_params,
                ignored_states=[] if precision else [plain.scale],  # it would make the head's input fp32 again
                mixed_precision=api.MixedPrecision(**precision),
                device_mesh=mesh,  # otherwise torch's wrapper makes ShardedTensors
            )
            if use_orig_params:
                optimizer = two_groups(model)
            else:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            loss_of(model, batch(dist.get_rank(), 0)).backward()
            optimizer.step()
            set_state_dict_type(
                model, kind, api, offload_to_cpu=False
            )  # torch's next gather overwrites offloaded values
            models.append(model)
            optimizers.append(optimizer)
            saved.append(api.FullyShardedDataParallel.optim_state_dict(model, optimizer))
        ours, theirs = saved
        assert_same_states(ours["state"], theirs["state"])
        assert ours["param_groups"] == theirs["param_groups"]
        orders = []
        for model, optimizer, other in zip(models, optimizers, reversed(saved), strict=True):
            given = {"state": copy.copy(other["state"])}
            loaded = model.optim_state_dict_to_load(model, optimizer, given)
            orders.append(list(loaded["state"]))
            groups = optimizer.state_dict()["param_groups"]
            optimizer.state.clear()
            optimizer.load_state_dict({**loaded, "param_groups": groups})
            again = model.optim_state_dict(model, optimizer)
            assert_same_states(again["state"], other["state"], rtol=0, atol=0)
        both = set(orders[0]) & set(orders[1])  # pieces have other borders where torch's flat parameter has gaps
        assert [key for key in orders[0] if key in both] == [key for key in orders[1] if key in both]


def assert_same_states(ours: dict[str, Any], theirs: dict[str, Any], **tolerance: float) -> None:
    """Check that states are equal, in the same order, and sharded alike."""
    assert list(ours) == list(theirs)
    for name, state in ours.items():
        assert [(key, type(value)) for key, value in state.items()] == [(k, type(v)) for k, v in theirs[name].items()]
        for key, value in state.items():
            torch.testing.assert_close(whole_of(value), whole_of(theirs[name][key]), **tolerance)


@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type.. and FSDP.set_state_dict_type:FutureWarning")
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`:UserWarning")  # of torch's wrapper
@pytest.mark.filterwarnings("ignore:Multiple backends are registered:UserWarning")
@pytest.mark.parametrize("world_size", quick([2, 4], [2]))
def test_it_is_what_torchs_wrapper_makes(world_size):
    run_ranks(world_size, torchs_and_ours)


def save_some() -> bytes | None:
    """Train on all ranks; return the whole state on rank 0."""
    model = wrapped(make_net(), "FULL_SHARD", use_orig_params=True)
    optimizer = two_groups(model)
    train(model, optimizer, range(2))
    saved = FSDP.full_optim_state_dict(model, optimizer)
    assert bool(saved) == (dist.get_rank() == 0)
    return pickle.dumps(saved) if saved else None


def load_some(given: bytes) -> bytes | None:
    """Load state that only rank 0 has."""
    saved = pickle.loads(given) if dist.get_rank() == 0 else None
    model = wrapped(make_net(), "FULL_SHARD", use_orig_params=True)
    optimizer = two_groups(model)
    optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(saved, model, optim=optimizer))
    set_state_dict_type(model, "FULL_STATE_DICT", rank0_only=True)
    before = FSDP.optim_state_dict(model, optimizer)
    FSDP.optim_state_dict_to_load(model, optimizer, before, load_directly=True)
    again = FSDP.optim_state_dict(model, optimizer)
    torch.testing.assert_close(again.get("state"), before.get("state"), rtol=0, atol=0)
    return pickle.dumps(again) if again else None


def test_from_four_ranks_to_two_to_one():
    first, *_ = run_ranks(4, save_some)
    second, *_ = run_ranks(2, load_some, first)
    third, *_ = run_ranks(1, load_some, second)
    ours, last = pickle.loads(first), pickle.loads(third)
    torch.testing.assert_close(last["state"], ours["state"], rtol=0, atol=0)
    assert last["param_groups"] == ours["param_groups"]
    assert {int(state["step"]) for state in last["state"].values()} == {2}


def saves_by_checkpoint(folder: Path) -> bytes | None:
    model = wrapped(make_net(), "FULL_SHARD")
    optimizer = adam(model.parameters())
    train(model, optimizer, range(2))
    set_state_dict_type(model, "SHARDED_STATE_DICT")
    dcp.save({"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=folder)
    whole = FSDP.full_optim_state_dict(model, optimizer)
    return pickle.dumps(whole) if whole else None


@ignoring_warnings(*SHARDED_TENSOR, *OLD_CALLS)
def resumes_by_checkpoint(folder: Path) -> bytes | None:
    """As torch's examples do: by its function, which makes ShardedTensors whatever was saved."""
    for use_orig_params in (True, False):
        model = wrapped(make_net(), "FULL_SHARD", use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        set_state_dict_type(model, "SHARDED_STATE_DICT")
        state = load_sharded_optimizer_state_dict(model.state_dict(), "optim", dcp.FileSystemReader(folder))
        assert any(isinstance(v, ShardedTensor) for v in state["optim"]["state"]["head.weight"].values())
        FSDP.optim_state_dict_to_load(model, optimizer, state["optim"], load_directly=True)
    whole = FSDP.full_optim_state_dict(model, optimizer)
    return pickle.dumps(whole) if whole else None


def test_optimizer_state_loaded_by_torchs_checkpoints_is_accepted(tmp_path):
    saved, *_ = run_ranks(4, saves_by_checkpoint, tmp_path)
    loaded, *_ = run_ranks(2, resumes_by_checkpoint, tmp_path)
    torch.testing.assert_close(pickle.loads(loaded)["state"], pickle.loads(saved)["state"], rtol=0, atol=0)


def without_state_and_with_some() -> None:
    for use_orig_params in (False, True):
        model = wrapped(make_net(), "FULL_SHARD", use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, batch(0, 0)).backward()
        optimizer.step()
        saved = FSDP.optim_state_dict(model, optimizer)
        assert saved["state"] == {}
        assert set(saved["param_groups"][0]["params"]) == {name for name, _ in make_net().named_parameters()}
        FSDP.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
        plain = make_net()
        assert as_plain(saved, plain, adam(plain.parameters()))["param_groups"][0]["params"] == list(range(21))
        set_state_dict_type(model, "LOCAL_STATE_DICT")
        momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        momentum.step()
        local = FSDP.optim_state_dict(model, momentum)
        torch.testing.assert_close(local["state"], momentum.state_dict()["state"])
        assert FSDP.optim_state_dict_to_load(model, momentum, local)["state"].keys() == local["state"].keys()
        key = next(iter(local["state"]))
        local["state"][key] = {"momentum_buffer": torch.zeros(1000)}
        with pytest.raises(ValueError, match="a LOCAL_STATE_DICT loads into the same sharding only"):
            FSDP.optim_state_dict_to_load(model, momentum, local)


def test_without_state_and_in_the_local_type():
    run_ranks(2, without_state_and_with_some)


class Keyed(torch.optim.AdamW):
    """Keys parameters by name, and has state for empty pieces too."""

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        self.named = named
        super().__init__(named.values(), lr=1e-2)

    def step(self, closure: Any = None) -> Any:
        for param in self.named.values():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        own, names = super().state_dict(), list(self.named)
        groups = [{**group, "params": [names[i] for i in group["params"]]} for group in own["param_groups"]]
        return {"state": {names[i]: state for i, state in own["state"].items()}, "param_groups": groups}


def keyed() -> None:
    for use_orig_params in (False, True):
        model = wrapped(make_net(), "FULL_SHARD", use_orig_params=use_orig_params)
        params = dict(model.named_parameters())
        optimizer = Keyed(params)
        loss_of(model, batch(0, 0)).backward()
        optimizer.step()
        saved = FSDP.optim_state_dict(model, optimizer)
        assert saved["state"].keys() == {name for name, _ in make_net().named_parameters()}
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, saved, is_named_optimizer=True)
        torch.testing.assert_close(loaded["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
        assert {k for g in loaded["param_groups"] for k in g["params"]} == set(params)


def test_a_keyed_optimizer():
    run_ranks(2, keyed)


def from_a_plain_model() -> None:
    """Load a plain model's state into wrappers; they train on as it does."""
    plain, plain_optimizer = trained_plain()
    named = FSDP.rekey_optim_state_dict(plain_optimizer.state_dict(), Keys.PARAM_NAME, plain, optim=plain_optimizer)
    assert FSDP.rekey_optim_state_dict(named, Keys.PARAM_NAME, plain) is named
    for use_orig_params in (False, True):
        model = wrapped(copy.deepcopy(plain), "FULL_SHARD", use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        optimizer.load_state_dict(FSDP.shard_full_optim_state_dict(named, model, optim=optimizer))
        saved = FSDP.sharded_optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FSDP.flatten_sharded_optim_state_dict(saved, model, optimizer))
        reference, _ = trained_plain(4)
        train(model, optimizer, range(2, 4))
        assert_same_values(model, reference, rtol=0, atol=0)


def test_from_a_plain_model_and_back():
    run_ranks(2, from_a_plain_model)


@on_one_rank
def test_mismatches_are_reported():
    model = wrap_net(OURS, make_net())
    optimizer = adam(model.parameters())
    train(model, optimizer, range(1))
    saved = FSDP.optim_state_dict(model, optimizer)
    plain = make_net()
    places = as_plain(saved, plain, adam(plain.parameters()))

    def load(given: dict[str, Any]) -> None:
        FSDP.optim_state_dict_to_load(model, optimizer, given)

    with pytest.raises(ValueError, match="an optimizer's state dict has the key 'state'; this one has 'a'"):
        load({"a": 1})
    with pytest.raises(ValueError, match="this state dict is keyed by parameter index"):
        load(places)
    with pytest.raises(ValueError, match="the state dict has 2 parameter groups, the optimizer 1"):
        load({**saved, "param_groups": saved["param_groups"] * 2})
    for names, message in ((["a"], "holds 'a', which the optimizer does not have"), (["scale"], "hold different par")):
        with pytest.raises(ValueError, match=message):
            load({**saved, "param_groups": [{"params": names}]})
    odd = {**saved["state"], "scale": {**saved["state"]["scale"], "exp_avg": torch.zeros(3)}}
    with pytest.raises(ValueError, match=r"optimizer state 'exp_avg' of 'scale' has shape \[3\], the parameter \[1\]"):
        load({**saved, "state": odd})
    with pytest.raises(ValueError, match=r"not in FullyShardedDataParallel, \d+ in all, one of shape"):
        FSDP.optim_state_dict(model, adam(plain.parameters()))
    with pytest.raises(ValueError, match="rekey_optim_state_dict takes a model without wrappers"):
        FSDP.rekey_optim_state_dict(saved, Keys.PARAM_ID, model)
    with pytest.raises(ValueError, match="keys must be all names or all indices"):
        FSDP.rekey_optim_state_dict({**saved, "state": {0: {}}}, Keys.PARAM_ID, plain)
    with pytest.raises(ValueError, match="Linear and its optimizer have no parameter"):
        FSDP.rekey_optim_state_dict(saved, Keys.PARAM_ID, nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"must be a workbench.engine.classic.OptimStateKeyType"):
        FSDP.rekey_optim_state_dict(saved, THEIRS.FullyShardedDataParallel, plain)
    assert settings_of(model).state_dict_type is OURS.StateDictType.FULL_STATE_DICT


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = checkpoint_wrapper(nn.Linear(2, 2))


@on_one_rank
def test_names_are_those_of_the_models_state_dict():
    for use_orig_params in (False, True):
        model = OURS.FullyShardedDataParallel(Checkpointed(), use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        names = FSDP.optim_state_dict(model, optimizer)["param_groups"][0]["params"]
        assert names == list(model.state_dict()) == ["inner.weight", "inner.bias"]
