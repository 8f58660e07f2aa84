"""The user's references to a parameter's memory stay valid, whatever happens to the model meanwhile.

The oracle of each step is an unsharded copy that takes the same steps.
"""

import copy
import gc
import os
from collections.abc import Callable, MutableMapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.helpers.forked_ranks import in_turn, run_ranks
from tests.helpers.pairwise import quick
from workbench.engine import (
    MixedPrecisionPolicy,
    fully_shard,
    process_groups,
    rebuild_groups,
    reshard_module,
    reshard_unit,
    unshard_module,
)
from workbench.engine.backends import page_pool
from workbench.engine.classic import FullyShardedDataParallel, StateDictType
from workbench.engine.classic.flat_param import FlatParam
from workbench.engine.fsdp_state import states_below, units_of

COMMS = pytest.mark.parametrize("comm", ["", "gloo"], ids=["shared memory", "gloo"])
NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")
Handles = dict[str, dict[str, torch.Tensor]]


@pytest.fixture
def over(environ: MutableMapping[str, str], comm: str) -> str:
    environ["WORKBENCH_COMM"] = comm
    return "gloo" if comm or dist.is_initialized() else "shared memory"


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4))  # 7 rows: uneven on 2 ranks


def shard(model: nn.Module) -> nn.Module:
    for linear in model:
        fully_shard(linear)
    return fully_shard(model)


def train(model: nn.Module, plain: nn.Module, num_steps: int = 2) -> None:
    """Step both models manually; an optimizer would hold parameters too."""
    for _ in range(num_steps):
        for each in (model, plain):
            each(torch.linspace(-1, 1, 12).view(3, 4)).square().mean().backward()
            with torch.no_grad():
                for param in each.parameters():
                    param.sub_(0.1 * param.grad)
                    param.grad = None


def locals_of(plain: nn.Module, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the expected local shard of each parameter."""
    likes = model.state_dict()
    return {
        name: distribute_tensor(value.clone(), likes[name].device_mesh, likes[name].placements).to_local()
        for name, value in plain.state_dict().items()
    }


def taken_from(model: nn.Module) -> Handles:
    """Return every kind of reference to every parameter, as plain tensors over its memory."""
    params = dict(model.named_parameters())
    handles = {
        "state_dict": {name: value.to_local() for name, value in model.state_dict().items()},
        "to_local": {name: p.to_local() for name, p in params.items()},
        "detach": {name: p.detach().to_local() for name, p in params.items()},
        "data": {name: p.data.to_local() for name, p in params.items()},
        "view": {name: p.to_local().view(-1).detach() for name, p in params.items()},
    }
    with torch.no_grad():
        handles["the local tensor itself"] = {name: p.to_local() for name, p in params.items()}
    return handles


def assert_live(handles: Handles, model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    """Check that every reference shows the model's values and points to the model's memory."""
    for kind, tensors in handles.items():
        for name, tensor in tensors.items():
            local = model.get_parameter(name).to_local()
            label = f"{kind} of {name}"
            found = tensor.data.view(local.shape)  # autograd forbids computing with a tensor that was stepped in place
            torch.testing.assert_close(found, wanted[name], msg=lambda m, s=label: f"{s}: {m}")
            assert not local.numel() or tensor.data_ptr() == local.data_ptr(), label


# ---- events in between


def nothing(_model: nn.Module) -> None:
    """Do nothing, so that references are taken after fully_shard or after the steps so far."""


def new_groups(_model: nn.Module) -> None:
    """Rebuild the groups, as after an abort."""
    rebuild_groups()


def given_up(model: nn.Module) -> None:
    """Raise within an iteration, then rebuild the groups."""
    handle = model[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 4))
    handle.remove()
    rebuild_groups()
    model.reset_iter_state()


def kept_after_forward(model: nn.Module) -> None:
    model.set_reshard_after_forward(False)


def one_unit_changed(model: nn.Module) -> None:
    reshard_unit(model[0], reshard_after_forward=False)


def another_precision(model: nn.Module) -> None:
    """Change the precision for one step only."""
    reshard_module(model, mp_policy=MixedPrecisionPolicy(torch.float64, torch.float64))
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.float64))
    reshard_module(model, mp_policy=MixedPrecisionPolicy())


def wrapped_otherwise(model: nn.Module) -> None:
    reshard_module(model, wrap=lambda _: False)


def wrapped_as_before(model: nn.Module) -> None:
    wrapped_otherwise(model)
    reshard_module(model, wrap=lambda module: isinstance(module, nn.Linear))


def loaded_in_place(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def unsharded_by_hand(model: nn.Module) -> None:
    model.unshard()
    model.reshard()


MOMENTS = (
    nothing,
    new_groups,
    given_up,
    kept_after_forward,
    one_unit_changed,
    another_precision,
    wrapped_otherwise,
    wrapped_as_before,
    loaded_in_place,
    unsharded_by_hand,
)


def follows(happens: Callable[[nn.Module], None]) -> None:
    plain = plain_net()
    model = shard(copy.deepcopy(plain))
    sets = [taken_from(model)]  # before the first forward
    happens(model)
    for _ in range(2):
        train(model, plain)
        sets.append(taken_from(model))
        happens(model)
        wanted = locals_of(plain, model)
        for handles in sets:
            assert_live(handles, model, wanted)
    assert {unit.comm.name for unit in units_of(states_below(model)) if unit.comm} <= expected_comms()


def expected_comms() -> set[str]:
    if dist.get_world_size() == 1 or os.environ["WORKBENCH_COMM"]:
        return {"gloo"}
    return {"shared memory"}


@COMMS
@pytest.mark.parametrize("world_size", [1, 2])
def test_handles_follow_the_training_from_any_moment_on(world_size, over):
    run_ranks(world_size, in_turn, {happens.__name__: lambda h=happens: follows(h) for happens in MOMENTS})


# ---- the user's own memory


def assigned(model: nn.Module, values: dict[str, DTensor]) -> None:
    model.load_state_dict(values, assign=True)


def assigned_one_by_one(model: nn.Module, values: dict[str, DTensor]) -> None:
    for name, value in values.items():
        model.load_state_dict({name: value}, assign=True, strict=False)


def one_assigned(model: nn.Module, values: dict[str, DTensor]) -> None:
    """Assign one value; the other parameters keep their memory."""
    name, value = next(iter(values.items()))
    for other in list(values)[1:]:
        with torch.no_grad():
            model.get_parameter(other).copy_(values[other])
        values[other] = model.get_parameter(other)
    model.load_state_dict({name: value}, assign=True, strict=False)


def set_anew(model: nn.Module, values: dict[str, DTensor]) -> None:
    for name, value in values.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(value))


def swapped(model: nn.Module, values: dict[str, DTensor]) -> None:
    for name, value in values.items():
        torch.utils.swap_tensors(model.get_parameter(name), nn.Parameter(value))


def put_in_place(put: Callable[[nn.Module, dict[str, DTensor]], None], *, on_meta: bool, after: int) -> None:
    plain, other = plain_net(), plain_net()
    with torch.device("meta") if on_meta else torch.device("cpu"):
        model = shard(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4)))
    if after:
        train(model, other, after)
    likes = dict(model.named_parameters())
    values = {
        name: distribute_tensor(value.clone(), likes[name].device_mesh, likes[name].placements)
        for name, value in plain.state_dict().items()
    }
    held = {name: value.to_local() for name, value in values.items()}
    del likes
    put(model, values)
    held |= {name: value.to_local() for name, value in values.items()}
    sets = [{"what was put there": held}, taken_from(model)]
    for happens in (nothing, new_groups, wrapped_otherwise):
        train(model, plain)
        happens(model)
        wanted = locals_of(plain, model)
        for handles in sets:
            assert_live(handles, model, wanted)


PUTS = (assigned, assigned_one_by_one, one_assigned, set_anew, swapped)


@COMMS
@pytest.mark.parametrize("world_size", quick([1, 2], [1]))
def test_training_continues_in_memory_provided_by_the_user(world_size, over):
    cases = {
        f"{put.__name__}, after {after} steps": lambda p=put, a=after: put_in_place(p, on_meta=False, after=a)
        for put in PUTS
        for after in (0, 1)
    }
    cases["on meta"] = lambda: put_in_place(assigned, on_meta=True, after=0)
    cases["on meta, one by one"] = lambda: put_in_place(assigned_one_by_one, on_meta=True, after=0)
    run_ranks(world_size, in_turn, cases)


def put_on_one_rank() -> None:
    """Only rank 0 assigns memory: the ranks must agree on the comm and compute the right values."""
    plain = plain_net()
    model = shard(copy.deepcopy(plain))
    if dist.get_rank() == 0:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    handles = taken_from(model)
    train(model, plain)
    assert_live(handles, model, locals_of(plain, model))


@COMMS
def test_ranks_agree_if_only_one_has_its_own_memory(over):
    run_ranks(2, put_on_one_rank)


def filled_and_converted() -> None:
    """``to_empty`` and ``.to`` allocate new memory, in which shards are contiguous again and share pages."""
    plain = plain_net()
    with torch.device("meta"):
        model = shard(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4)))
    model.to_empty(device="cpu")
    handles = taken_from(model)
    with torch.no_grad():
        for name, local in locals_of(plain, model).items():
            model.get_parameter(name).to_local().copy_(local)
    train(model, plain)
    assert_live(handles, model, locals_of(plain, model))
    wrapped_otherwise(model)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        plain.to(dtype)
    handles = taken_from(model)
    train(model, plain)
    assert_live(handles, model, locals_of(plain, model))
    (unit,) = units_of(states_below(model))
    assert unit.shards.region is not None
    assert unit.comm.name in expected_comms()


@COMMS
def test_new_memory_of_to_empty_and_to_is_followed_from_then_on(over):
    run_ranks(2, filled_and_converted)


# ---- an optimizer over local views


def over_views() -> None:
    plain = plain_net()
    model = shard(copy.deepcopy(plain))
    views = {name: p.to_local().detach() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(views.values(), lr=0.1)
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    for step in range(4):
        for each in (model, plain):
            each(torch.linspace(-1, 1, 12).view(3, 4)).square().mean().backward()
        for name, view in views.items():
            param = model.get_parameter(name)
            view.grad, param.grad = param.grad.to_local(), None
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        if step == 1:
            wrapped_otherwise(model)
    for name, value in locals_of(plain, model).items():
        torch.testing.assert_close(model.get_parameter(name).to_local(), value)


@COMMS
def test_an_optimizer_over_local_views_trains_the_model(over):
    run_ranks(2, over_views)


# ---- the wrapper


def flat_handles(model: FullyShardedDataParallel) -> dict[str, torch.Tensor]:
    handles: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        handles |= {f"{name}: detach": param.detach(), f"{name}: data": param.data}
        handles[f"{name}: view"] = param.view(-1).detach()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        for name, value in model.state_dict().items():
            shards = getattr(value, "local_shards", None)
            handles[f"{name}: state dict"] = value if shards is None else shards()[0].tensor
    return handles


def wrap(model: nn.Module, *, orig: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, use_orig_params=orig)


def flats_of(model: FullyShardedDataParallel) -> list[FlatParam]:
    return [param for unit in units_of(states_below(model)) for param in unit.fsdp_params]


def wrapper_given_up(model: FullyShardedDataParallel) -> None:
    rebuild_groups()
    for state in states_below(model):
        state.reset_iter_state()


def loaded_into_wrapper(model: FullyShardedDataParallel) -> None:
    model.load_state_dict(model.state_dict())


def summoned(model: FullyShardedDataParallel) -> None:
    with FullyShardedDataParallel.summon_full_params(model):
        pass


def wrapper_follows(happens: Callable[[FullyShardedDataParallel], None], *, orig: bool) -> None:
    plain = plain_net()
    model = wrap(copy.deepcopy(plain), orig=orig)
    sets = [flat_handles(model)]
    for _ in range(2):
        happens(model)
        train_wrapper(model, plain)
        happens(model)
        now = flat_handles(model)
        sets.append(now)
        (flat,) = flats_of(model)
        whole = torch.cat([value.reshape(-1) for value in plain.state_dict().values()])
        first, last = flat.flat_layout.bounds
        torch.testing.assert_close(flat.slot[: flat.flat_layout.own_numel], whole[first:last])
        for handles in sets:
            for name, handle in handles.items():
                torch.testing.assert_close(handle, now[name], msg=name)
                assert not handle.numel() or handle.data_ptr() == now[name].data_ptr(), name


def train_wrapper(model: nn.Module, plain: nn.Module) -> None:
    for each in (model, plain):
        each(torch.linspace(-1, 1, 12).view(3, 4)).square().mean().backward()
        with torch.no_grad():
            for param in each.parameters():
                if param.grad is not None:
                    param.sub_(0.1 * param.grad)
                    param.grad = None


@COMMS
@pytest.mark.parametrize("world_size", [1, 2])
def test_handles_on_a_flat_parameter_follow_the_training(world_size, over):
    moments = (nothing, new_groups, wrapper_given_up, loaded_into_wrapper, summoned)
    cases = {
        f"{happens.__name__}, use_orig_params={orig}": lambda h=happens, o=orig: wrapper_follows(h, orig=o)
        for happens in moments
        for orig in (False, True)
    }
    run_ranks(world_size, in_turn, cases)


def wrapper_converted(*, orig: bool) -> None:
    plain = plain_net()
    model = wrap(copy.deepcopy(plain), orig=orig)
    train_wrapper(model, plain)
    model.double()
    plain.double()
    handles = flat_handles(model)
    for each in (model, plain):
        each(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)).square().mean().backward()
        with torch.no_grad():
            for param in each.parameters():
                if param.grad is not None:
                    param.sub_(0.1 * param.grad)
                    param.grad = None
    now = flat_handles(model)
    for name, handle in handles.items():
        assert handle.dtype == torch.float64
        torch.testing.assert_close(handle, now[name], msg=name)


def data_of_the_users(model_dtype: torch.dtype) -> None:
    """The user replaces the flat parameter's data, and training continues in it, as with torch's wrapper."""
    plain = plain_net()
    model = wrap(copy.deepcopy(plain), orig=False)
    (param,) = model.parameters()
    held = param.detach().clone().to(model_dtype)
    param.data = held
    train_wrapper(model, plain)
    (flat,) = flats_of(model)
    assert held.data_ptr() == flat.slot.data_ptr()
    whole = torch.cat([value.reshape(-1) for value in plain.state_dict().values()])
    torch.testing.assert_close(held[: flat.flat_layout.own_numel], whole[slice(*flat.flat_layout.bounds)])


@COMMS
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_converted_wrapper_and_one_with_memory_of_the_users(world_size, over):
    cases = {f"orig={orig}": lambda o=orig: wrapper_converted(orig=o) for orig in (False, True)}
    cases["data"] = lambda: data_of_the_users(torch.float32)
    run_ranks(world_size, in_turn, cases)


# ---- leftovers


def mapped() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split("memfd:")[1].split()[0] for line in lines if "memfd:workbench-" in line}


def gone_after() -> None:
    before = set(os.listdir("/dev/shm"))
    plain = plain_net()
    model = shard(copy.deepcopy(plain))
    train(model, plain)
    held = model[0].weight.to_local().detach()
    assert mapped()
    value = held.clone()
    unshard_module(model)
    process_groups.forget_all()
    del model
    assert torch.equal(held, value)  # no longer any model's memory, but still valid
    del held
    gc.collect()
    assert mapped() == set()
    assert set(os.listdir("/dev/shm")) == before


@pytest.mark.parametrize("comm", [""])
def test_nothing_is_left_once_all_references_are_gone(over):
    run_ranks(2, gone_after)


def test_values_survive_a_change_of_the_pages():
    for numel in (1, 1000, page_pool._ALIGNMENT // 4 + 5):
        region = page_pool.Region(numel, torch.float32)
        assert not region.tensor.any()
        region.tensor.copy_(torch.arange(numel))
        alias = region.tensor.detach()[-1:]
        for _ in range(2):
            shared = torch.zeros(numel + 1024).share_memory_()[:numel]
            region.lie_on(shared)
            assert torch.equal(region.tensor, torch.arange(numel, dtype=torch.float32))
            shared[-1] = 7
            assert alias.item() == 7
            alias.fill_(numel - 1)
            assert shared[-1] == numel - 1
