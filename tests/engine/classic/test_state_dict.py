"""State dicts of wrapped models, full, sharded and flat: saving, loading, and comparison with torch's wrapper."""

import copy
import functools
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import FROZEN_BESIDE_TRAINED, OLD_CALLS, SHARDED_TENSOR, ignoring_warnings
from tests.helpers.parity import assert_same_shards, shard_net
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import CPU, OURS, THEIRS, assert_same_values, wrap_net

FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"


def set_type(model: nn.Module, kind: str, api: SimpleNamespace = OURS, **config: bool) -> None:
    made = {FULL: api.FullStateDictConfig, SHARDED: api.ShardedStateDictConfig, LOCAL: api.LocalStateDictConfig}[kind]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"FSDP.state_dict_type\(\) and", FutureWarning)  # torch's deprecation warning
        api.FullyShardedDataParallel.set_state_dict_type(model, api.StateDictType[kind], made(**config))


def mesh_for(strategy: str):
    ranks = dist.get_world_size()
    if "HYBRID" in strategy:
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (ranks,))


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def values_of(plain: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in plain.named_parameters()}


CASES = [(n, s) for n in (1, 2, 4) for s in ("FULL_SHARD", "NO_SHARD")] + [(2, "HYBRID_SHARD"), (4, "HYBRID_SHARD")]


@pytest.mark.parametrize(("world_size", "strategy"), CASES)
def test_every_type_comes_back(world_size, strategy):
    run_ranks(world_size, every_type_comes_back, strategy)


def every_type_comes_back(strategy):
    mesh = mesh_for(strategy)
    plain = make_net(seed=1, num_blocks=1)
    for use_orig_params in (False, True):
        options = {"use_orig_params": use_orig_params, "device_mesh": mesh}
        for kind in (FULL, SHARDED, LOCAL):
            source = wrap_net(OURS, copy.deepcopy(plain), strategy, **options)
            target = wrap_net(OURS, make_net(seed=2, num_blocks=1), strategy, **options)
            names = [name for name, _ in source.named_parameters()]
            for model in (source, target):
                set_type(model, kind)
            state = source.state_dict()
            if kind != LOCAL or strategy == "NO_SHARD":
                assert list(state) == list(plain.state_dict())
                torch.testing.assert_close({n: full(v) for n, v in state.items()}, dict(plain.state_dict()))
            else:
                assert list(state) == ["_flat_param", "blocks.0._flat_param"]
            is_split = strategy != "NO_SHARD" and (kind == LOCAL or (kind == SHARDED and mesh.size(-1) > 1))
            assert {isinstance(value, DTensor) for value in state.values()} == {is_split}
            assert target.load_state_dict(state) == ([], [])
            assert_same_values(target, plain, rtol=0, atol=0)
            assert_same_values(source, plain, rtol=0, atol=0)
            for model in (source, target):
                assert [name for name, _ in model.named_parameters()] == names
                loss_of(model, batch(0, 0)).backward()
            assert loss_of(target, batch(0, 1)) == loss_of(plain, batch(0, 1))


class UnusualModel(nn.Module):
    """Has tied weights, a persistent and a non-persistent buffer, and an ignored module."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.inner = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
        self.last = nn.Linear(3, 5, bias=False)
        self.last.weight = self.first.weight
        self.own = nn.Parameter(torch.randn(1))
        self.ignored = nn.Linear(2, 2)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.norm(self.first(x)))) * self.own + self.table.sum()


def wrap_odd(api: SimpleNamespace, seed: int = 0, **options: object) -> nn.Module:
    model = UnusualModel(seed)
    given = {"device_id": torch.device("cpu"), **options}
    model.inner = api.FullyShardedDataParallel(model.inner, **given)
    return api.FullyShardedDataParallel(model, ignored_modules=[model.ignored], **given)


def test_torchs_wrapper_gives_and_takes_the_same():
    run_ranks(2, is_as_theirs)


def is_as_theirs():
    mesh = mesh_for("FULL_SHARD")
    bf16 = torch.bfloat16
    for use_orig_params in (False, True):
        for low in (False, True):
            for kind in (FULL, SHARDED):
                models = [
                    wrap_odd(
                        api,
                        use_orig_params=use_orig_params,
                        device_mesh=mesh,
                        mixed_precision=api.MixedPrecision(param_dtype=bf16, buffer_dtype=bf16) if low else None,
                    )
                    for api in (OURS, THEIRS)
                ]
                for model, api in zip(models, (OURS, THEIRS), strict=True):
                    model.eval()(torch.ones(2, 3))  # casts the buffers to the low precision
                    set_type(model, kind, api)
                ours, theirs = (model.state_dict() for model in models)
                assert list(ours) == list(theirs) == list(UnusualModel().state_dict())
                for name, value in ours.items():
                    check_same(name, value, theirs[name])
                assert ours["first.weight"].data_ptr() == ours["last.weight"].data_ptr() or kind == SHARDED
                for model, state in zip(models, (theirs, ours), strict=True):  # each loads the other's
                    with torch.no_grad():
                        changed = {name: torch.ones_like(value) for name, value in state.items()}
                    assert model.load_state_dict(changed) == ([], [])
                    assert all((full(v) == 1).all() for v in model.state_dict().values())


def test_sharded_tensors_of_torchs_wrapper_are_taken():
    run_ranks(2, takes_old_shards)


@ignoring_warnings(*SHARDED_TENSOR)
def takes_old_shards():
    theirs = wrap_net(THEIRS, make_net(seed=1, num_blocks=1))  # without a device mesh
    set_type(theirs, SHARDED, THEIRS)
    state = theirs.state_dict()
    assert isinstance(state["head.weight"], ShardedTensor)
    ours = wrap_net(OURS, make_net(num_blocks=1))
    set_type(ours, SHARDED)
    assert ours.load_state_dict(state) == ([], [])
    assert_same_values(ours, make_net(seed=1, num_blocks=1), rtol=0, atol=0)


def check_same(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert isinstance(ours, DTensor) == isinstance(theirs, DTensor), name
    if isinstance(ours, DTensor):
        assert (ours.device_mesh, ours.placements) == (theirs.device_mesh, theirs.placements), name
        torch.testing.assert_close(ours.to_local(), theirs.to_local(), rtol=0, atol=0, msg=name)
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=name)


def test_in_a_module_of_another_kind_names_are_those_of_the_plain_model():
    run_ranks(2, is_in_another)


def is_in_another():
    plain = nn.Sequential(UnusualModel(1), nn.Linear(2, 2), nn.Sequential(UnusualModel(2)))
    model = nn.Sequential(wrap_odd(OURS, 1), copy.deepcopy(plain[1]), nn.Sequential(wrap_odd(OURS, 2)))
    expected = plain.state_dict(prefix="model.")
    found = model.state_dict(prefix="model.")
    torch.testing.assert_close(dict(found), dict(expected))
    assert found._metadata == expected._metadata
    other = nn.Sequential(wrap_odd(OURS, 3), nn.Linear(2, 2), nn.Sequential(wrap_odd(OURS, 4)))
    part = dict(plain.state_dict())
    del part["0.inner.0.bias"], part["0.norm.running_mean"], part["2.0.own"]
    part |= {"0.inner.0.new": torch.ones(1), "0.newer": torch.ones(1), "2.0._flat_param": torch.ones(1)}
    before = other.state_dict()
    assert other.load_state_dict(part, strict=False) == nn.Sequential(
        UnusualModel(3), nn.Linear(2, 2), nn.Sequential(UnusualModel(4))
    ).load_state_dict(part, strict=False)
    after = other.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(after[name], value if name in part else before[name], rtol=0, atol=0, msg=name)
    with pytest.raises(RuntimeError) as strictly:
        other.load_state_dict(part)
    assert "_fsdp_wrapped_module" not in str(strictly.value)
    assert '"0.inner.0.bias"' in str(strictly.value)


def test_only_rank_0_gets_a_full_state_dict_if_configured():
    run_ranks(4, on_rank_0)


def on_rank_0():
    is_first = dist.get_rank() == 0
    for strategy in ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"):
        model = nn.Sequential(wrap_net(OURS, make_net(num_blocks=1), strategy, device_mesh=mesh_for(strategy)))
        set_type(model, FULL, rank0_only=True, offload_to_cpu=True)
        mine = {"mine": torch.ones(1)}
        assert list(model[0].state_dict(destination=mine)) == [
            "mine",
            *(make_net(num_blocks=1).state_dict() if is_first else ()),
        ]
        assert len(model.state_dict()) == (len(make_net(num_blocks=1).state_dict()) if is_first else 0)


def test_the_type_is_set_for_all_wrappers_for_a_time_or_for_good():
    run_ranks(1, sets_types)


def sets_types():
    fsdp = OURS.FullyShardedDataParallel
    model = nn.Sequential(wrap_net(OURS, make_net(num_blocks=1)))
    first = fsdp.get_state_dict_type(model)
    assert first == OURS.StateDictSettings.of(OURS.StateDictType.FULL_STATE_DICT)
    config = OURS.ShardedStateDictConfig(offload_to_cpu=True)
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(KeyError))
        stack.enter_context(fsdp.state_dict_type(model, OURS.StateDictType.SHARDED_STATE_DICT, config))
        inside = fsdp.get_state_dict_type(model)
        assert inside.state_dict_config == config
        assert all(module._state.settings is inside for module in fsdp.fsdp_modules(model))
        raise KeyError
    assert fsdp.get_state_dict_type(model) == first
    assert fsdp.set_state_dict_type(model, OURS.StateDictType.LOCAL_STATE_DICT) == first
    assert "0._flat_param" in model.state_dict()
    with pytest.raises(ValueError, match="with FULL_STATE_DICT pass FullStateDictConfig"):
        fsdp.set_state_dict_type(model, OURS.StateDictType.FULL_STATE_DICT, config)
    with pytest.raises(ValueError, match="contains no FullyShardedDataParallel"):
        fsdp.set_state_dict_type(nn.Linear(1, 1), OURS.StateDictType.FULL_STATE_DICT)
    assert "0._flat_param" in model.state_dict()


@contextmanager
def nothing_changes(model: nn.Module) -> Iterator[None]:
    slots = [state.flat.slot.clone() for state in model._state.tree]
    names = [(name, param.shape) for name, param in model.named_parameters()]
    yield
    assert [(name, param.shape) for name, param in model.named_parameters()] == names
    for slot, state in zip(slots, model._state.tree, strict=True):
        assert torch.equal(state.flat.slot, slot)
    loss_of(model, batch(0, 0)).backward()


def test_mismatches_are_refused_before_anything_changes():
    run_ranks(2, refuses)


def refuses():
    for use_orig_params in (False, True):
        model = wrap_net(OURS, make_net(), use_orig_params=use_orig_params)
        assert model.check_is_root()
        state = dict(make_net(seed=2).state_dict())
        state["blocks.1.norm.bias"] = torch.ones(4)
        state["head.weight"] = torch.ones(5, 7)
        with nothing_changes(model), pytest.raises(RuntimeError, match="nothing was loaded") as wrong:
            model.load_state_dict(state, strict=False)
        assert "in the state dict 'head.weight' has shape [5, 7] and its parameter [7, 5]; " in str(wrong.value)
        assert "'blocks.1.norm.bias' has shape [4] and its parameter [5]" in str(wrong.value)
        set_type(model, LOCAL)
        with nothing_changes(model), pytest.raises(RuntimeError, match="the state dict has no flat parameter '_flat"):
            model.load_state_dict(state)
        local = model.state_dict()
        for block in (0, 1):  # each rank in its own group: another sharding
            group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
            alone = wrap_net(OURS, make_net(), process_group=group, use_orig_params=use_orig_params)
            set_type(alone, LOCAL)
            local[f"blocks.{block}._flat_param"] = alone.state_dict()[f"blocks.{block}._flat_param"]
            expected = f"flat parameter 'blocks.{block}._flat_param' has 191 elements, .* it has 191 over 1 ranks, 191"
            with nothing_changes(model), pytest.raises(RuntimeError, match=expected):
                model.load_state_dict(local)
            local = model.state_dict()


def test_no_state_dict_within_an_iteration():
    run_ranks(1, within_forward)


def within_forward():
    model = wrap_net(OURS, make_net())
    model.head.register_forward_hook(lambda *_: model.state_dict())
    with pytest.raises(RuntimeError, match="state_dict: the forward or backward of Net is running"):
        model(batch(0, 0))


def test_within_summon_full_params_the_summoned_values_are_saved():
    run_ranks(2, is_summoned)


def is_summoned():
    plain = make_net(seed=1)
    for use_orig_params in (False, True):
        model = wrap_net(OURS, make_net(), use_orig_params=use_orig_params)
        set_type(model, SHARDED)
        with type(model).summon_full_params(model):
            assert model.load_state_dict(plain.state_dict()) == ([], [])
            torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
            assert model.module.head.weight.data_ptr() == model.state_dict()["head.weight"].data_ptr()
        assert_same_values(model, plain, rtol=0, atol=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Return the folder to which 4 ranks saved, sharded and flat."""
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks(4, saves, folder)
    return folder


def saves(folder):
    for kind in (SHARDED, LOCAL):
        model = wrap_net(OURS, make_net(seed=1, num_blocks=1), "HYBRID_SHARD", device_mesh=mesh_for("HYBRID_SHARD"))
        set_type(model, kind, offload_to_cpu=True)
        dcp.save(model.state_dict(), checkpoint_id=folder / kind)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_checkpoint_loads_on_another_number_of_ranks(world_size, checkpoint):
    run_ranks(world_size, loads, checkpoint)


def loads(folder):
    plain = make_net(seed=1, num_blocks=1)
    for use_orig_params in (False, True):
        for kind in (SHARDED, LOCAL):  # loading reshards a flat state dict
            model = wrap_net(OURS, make_net(num_blocks=1), use_orig_params=use_orig_params)
            set_type(model, kind)
            state = model.state_dict()
            dcp.load(state, checkpoint_id=folder / kind)
            model.load_state_dict(state)
            assert_same_values(model, plain, rtol=0, atol=0)
    second = shard_net(make_net(num_blocks=1))
    state = second.state_dict()
    dcp.load(state, checkpoint_id=folder / SHARDED)
    second.load_state_dict(state)
    assert_same_shards(second, plain, rtol=0, atol=0)
    first = wrap_net(OURS, make_net(num_blocks=1))
    assert first.load_state_dict(second.state_dict()) == ([], [])  # loads DTensors in any type
    assert_same_values(first, plain, rtol=0, atol=0)


def test_the_functions_of_torchs_checkpoints_take_and_give_it():
    run_ranks(2, takes_functions)


def takes_functions():
    everywhere = StateDictOptions(full_state_dict=True)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    plain = make_net(seed=1, num_blocks=1)
    for use_orig_params in (False, True):
        for kind in (FULL, SHARDED):
            model = wrap_net(OURS, make_net(num_blocks=1), use_orig_params=use_orig_params)
            set_type(model, kind)
            assert set_model_state_dict(model, dict(plain.state_dict()), options=everywhere) == ([], [])
            assert_same_values(model, plain, rtol=0, atol=0)
            found = get_model_state_dict(model, options=everywhere)
            torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=0)
            state = get_model_state_dict(model)  # the call's options choose the type, not set_type
            assert all(isinstance(value, DTensor) for value in state.values())
            other = wrap_net(OURS, make_net(num_blocks=1), use_orig_params=use_orig_params)
            assert set_model_state_dict(other, state) == ([], [])
            assert_same_values(other, plain, rtol=0, atol=0)
            given = dict(make_net(seed=3, num_blocks=1).state_dict()) if dist.get_rank() == 0 else {}
            assert set_model_state_dict(model, given, options=from_rank_0) == ([], [])
            assert_same_values(model, make_net(seed=3, num_blocks=1), rtol=0, atol=0)
            given = {name: value for name, value in plain.state_dict().items() if name != "head.weight"}
            for options in (everywhere, from_rank_0):
                with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "head.weight"'):
                    set_model_state_dict(model, dict(given), options=options)
            options = StateDictOptions(full_state_dict=True, strict=False)
            assert set_model_state_dict(model, dict(given), options=options) == (["head.weight"], [])


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_functions_of_torchs_checkpoints_leave_frozen_parameters_out(use_orig_params):
    run_ranks(2, leaves_frozen_out, use_orig_params)


def leaves_frozen_out(use_orig_params):
    in_a_plain_root(use_orig_params)
    without_frozen = StateDictOptions(ignore_frozen_params=True)
    plain = make_net(num_blocks=2)
    plain.blocks[0].requires_grad_(False)
    plain.extra = nn.Linear(3, 3).requires_grad_(False)  # ignored: whole on every rank
    kept = {name for name in plain.state_dict() if not name.startswith(("blocks.0.", "extra."))}
    model = wrap_net(OURS, plain, use_orig_params=use_orig_params, ignored_modules=[plain.extra])
    for kind in (FULL, SHARDED):
        set_type(model, kind)
        assert set(get_model_state_dict(model, options=without_frozen)) == kept
    on_rank_0 = StateDictOptions(ignore_frozen_params=True, full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(model, options=on_rank_0)
    assert set(found) == (kept if dist.get_rank() == 0 else set())


@ignoring_warnings(*FROZEN_BESIDE_TRAINED, *OLD_CALLS, *SHARDED_TENSOR)
def in_a_plain_root(use_orig_params):
    """As with torch's wrapper."""
    found = []
    for api in (OURS, THEIRS):
        wrap = functools.partial(api.FullyShardedDataParallel, use_orig_params=use_orig_params, device_id=CPU)
        inner = nn.Sequential(nn.Linear(3, 3), wrap(nn.Linear(3, 3)).requires_grad_(False))
        model = nn.Sequential(
            wrap(nn.Linear(3, 3).requires_grad_(False)), wrap(inner), nn.Linear(2, 2).requires_grad_(False)
        )
        set_type(model, FULL, api)
        found.append(get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True)))
    assert list(found[0]) == list(found[1]) == ["1.0.weight", "1.0.bias"]


class Versioned(nn.Linear):
    """Halves the weight, named "twice", that an older version saved."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "twice") / 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_modules_load_in_their_own_ways():
    run_ranks(2, loads_own_ways)


def loads_own_ways():
    wrap = OURS.FullyShardedDataParallel
    for use_orig_params in (False, True):
        options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
        plain = nn.Sequential(Versioned(3, 3), nn.Linear(3, 3))
        model = wrap(nn.Sequential(wrap(Versioned(3, 3), **options), checkpoint_wrapper(nn.Linear(3, 3))), **options)
        state = plain.state_dict()
        for assign in (False, True):
            assert model.load_state_dict(state, assign=assign) == ([], [])
            torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
        assert model.state_dict()._metadata[""] == state._metadata[""]
        assert model.state_dict()._metadata["0"] == {"version": 2}
        old = {**{name: value for name, value in state.items() if name != "0.weight"}, "0.twice": state["0.weight"] * 4}
        assert model.load_state_dict(old) == ([], [])
        torch.testing.assert_close(model.state_dict()["0.weight"], state["0.weight"] * 2)
        with pytest.raises(RuntimeError, match=r"size mismatch: in the state dict '1\.bias' has shape"):
            model.load_state_dict({**state, "1.bias": torch.ones(2)})
        with pytest.raises(KeyError, match="twice"):  # raised by a module before others have loaded
            model.load_state_dict(dict(state))
        torch.testing.assert_close(model.state_dict()["0.weight"], state["0.weight"] * 2)
        model(torch.ones(2, 3)).sum().backward()
