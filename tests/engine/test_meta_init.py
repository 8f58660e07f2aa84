"""Between ``fully_shard`` and the first forward: filling meta parameters, converting, replacing."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.unsharded_copy import train_both
from tests.helpers.waiting import eventually
from workbench.engine import fully_shard

# torch's warning at the first random initialisation of a DTensor on CPU
WITHOUT_A_CPU_RNG = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")


class WithBuffers(nn.Module):
    """A block with buffers of several kinds, which its forward uses and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.register_buffer("shift", torch.arange(5.0))
        self.register_buffer("table", torch.arange(7), persistent=False)

    def reset_parameters(self) -> None:
        self.shift.copy_(torch.arange(5.0))
        self.table.copy_(torch.arange(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x) + self.shift)


def meta_net() -> nn.Module:
    with torch.device("meta"):
        return make_net(num_blocks=2)


def full_state(seed: int = 3) -> dict[str, torch.Tensor]:
    return make_net(seed, num_blocks=2).state_dict()


def as_shards(full: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Distribute a full state dict like the parameters of ``model``."""
    likes = model.state_dict()
    return {
        name: distribute_tensor(value, likes[name].device_mesh, likes[name].placements) for name, value in full.items()
    }


def assert_all_on(model: nn.Module, device: str) -> None:
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        assert (param.device.type, param.to_local().device.type) == (device, device), name


# ---- sharded on meta, then filled


def reset_after_to_empty() -> list[float]:
    model = shard_net(meta_net())
    assert_all_on(model, "meta")
    model.to_empty(device="cpu")
    assert_all_on(model, "cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    nn.init.ones_(model.scale)
    plain = make_net(num_blocks=2)
    plain.load_state_dict({name: param.full_tensor() for name, param in model.state_dict().items()})
    train_both(plain, model)
    return [p.full_tensor().abs().sum().item() for p in model.parameters()]


@WITHOUT_A_CPU_RNG
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_to_empty_then_reset_parameters(world_size):
    results = run_ranks(world_size, reset_after_to_empty)
    assert all(result == results[0] for result in results)
    assert all(results[0])


def assigned(strict: bool) -> None:
    model = shard_net(meta_net())
    full = full_state()
    shards = as_shards(full, model)
    if strict:
        model.load_state_dict(shards, assign=True)
    else:  # one parameter at a time
        for name, shard in shards.items():
            model.load_state_dict({name: shard}, assign=True, strict=False)
    assert_all_on(model, "cpu")
    plain = make_net(num_blocks=2)
    plain.load_state_dict(full)
    train_both(plain, model)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strict", [True, False], ids=["at once", "in pieces"])
def test_load_state_dict_with_assign(world_size, strict):
    run_ranks(world_size, assigned, strict)


def frozen_on_meta() -> list[bool]:
    model = meta_net()
    model.embed.requires_grad_(False)
    shard_net(model)
    requires_grad = [p.requires_grad for p in model.parameters()]
    model.to_empty(device="cpu")
    assert [p.requires_grad for p in model.parameters()] == requires_grad
    return requires_grad


@on_one_rank
def test_frozen_parameters_stay_frozen_when_filled():
    requires_grad = frozen_on_meta()
    assert requires_grad.count(False) == 1


def still_on_meta() -> str:
    model = shard_net(meta_net())
    model.blocks[0].to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="meta") as error:
        loss_of(model, batch(0, 0))
    model.to_empty(device="cpu")
    model.load_state_dict(as_shards(full_state(), model))
    plain = make_net(3, num_blocks=2)
    train_both(plain, model, 1)
    return str(error.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_left_on_meta_are_listed_and_no_other(world_size):
    for message in run_ranks(world_size, still_on_meta):
        for name in ("scale", "embed.weight", "head.weight", "blocks.1.norm.weight", "blocks.1.mlp.2.bias"):
            assert name in message
        assert "blocks.0" not in message
        assert "to_empty" in message


def buffers_on_meta() -> None:
    with torch.device("meta"):
        model = WithBuffers()
    before = dict(model.named_buffers())
    fully_shard(model)
    assert {name: id(b) for name, b in model.named_buffers()} == {name: id(b) for name, b in before.items()}
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert model.shift.tolist() == [0, 1, 2, 3, 4]
    assert not any(isinstance(b, DTensor) for b in model.buffers())
    model(torch.ones(3, 5)).sum().backward()


@WITHOUT_A_CPU_RNG
@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_on_meta_are_filled_by_their_module(world_size):
    run_ranks(world_size, buffers_on_meta)


# ---- buffers


def buffers_untouched() -> None:
    torch.manual_seed(0)
    plain = WithBuffers()
    model = copy.deepcopy(plain)
    before = [(name, id(b), b.data_ptr(), b.dtype, b.shape) for name, b in model.named_buffers()]
    fully_shard(model)
    assert [(name, id(b), b.data_ptr(), b.dtype, b.shape) for name, b in model.named_buffers()] == before
    x = torch.randn(4, 5)
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))  # batch norm updates its statistics in place
    assert [(name, id(b), b.data_ptr(), b.dtype, b.shape) for name, b in model.named_buffers()] == before
    for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert set(model.state_dict()) == set(plain.state_dict())
    assert not isinstance(model.state_dict()["norm.running_mean"], DTensor)


@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_stay_the_same_objects_with_the_same_storage(world_size):
    run_ranks(world_size, buffers_untouched)


# ---- converted, swapped, replaced before the first forward


@contextmanager
def swapping() -> Iterator[None]:
    """Make ``nn.Module`` swap tensors when it converts or loads, instead of setting ``.data``."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def converted(how: str) -> None:
    plain = make_net(num_blocks=2)
    model = shard_net(copy.deepcopy(plain))
    if how == "swapped":
        with swapping():
            model.to(torch.float64)
    else:
        model.to(torch.float64)
    plain.to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {p.to_local().dtype for p in model.parameters()} == {torch.float64}
    assert_all_on(model, "cpu")
    train_both(plain, model)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["as ever", "swapped"])
def test_to_another_dtype(world_size, how):
    run_ranks(world_size, converted, how)


def replaced_by(replace: Callable[[nn.Module, str, DTensor], None]) -> None:
    plain = make_net(num_blocks=2)
    model = shard_net(copy.deepcopy(plain))
    full = full_state(7)
    for name in ("blocks.1.mlp.0.weight", "head.weight", "scale"):
        owner, _, last = name.rpartition(".")
        like = model.get_parameter(name)
        replace(model.get_submodule(owner), last, distribute_tensor(full[name], like.device_mesh, like.placements))
        with torch.no_grad():
            plain.get_parameter(name).copy_(full[name])
    train_both(plain, model)


def by_setattr(owner: nn.Module, name: str, dtensor: DTensor) -> None:
    setattr(owner, name, nn.Parameter(dtensor))


def by_swap_tensors(owner: nn.Module, name: str, dtensor: DTensor) -> None:
    torch.utils.swap_tensors(getattr(owner, name), nn.Parameter(dtensor))


def by_copy(owner: nn.Module, name: str, dtensor: DTensor) -> None:
    with torch.no_grad():
        getattr(owner, name).copy_(dtensor)


def by_loading(owner: nn.Module, name: str, dtensor: DTensor) -> None:
    with swapping():
        owner.load_state_dict({name: dtensor}, strict=False)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("replace", [by_setattr, by_swap_tensors, by_copy, by_loading])
def test_a_parameter_exchanged_before_the_first_forward(world_size, replace):
    run_ranks(world_size, replaced_by, replace)


def in_the_sharded_places() -> None:
    """Loading swaps a tied parameter; it must stay tied."""
    plain = make_net(num_blocks=1, tied=True)
    model = shard_net(copy.deepcopy(plain))
    full = make_net(9, num_blocks=1, tied=True).state_dict()
    with swapping():
        model.load_state_dict(as_shards(full, model))
    plain.load_state_dict(full)
    assert model.embed.weight is model.head.weight
    train_both(plain, model, 2)
    assert model.embed.weight is model.head.weight


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tied_parameter_stays_tied_when_it_is_swapped(world_size):
    run_ranks(world_size, in_the_sharded_places)


# ---- the originals


@contextmanager
def no_collector() -> Iterator[None]:
    """Inside, only the last reference frees an object."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held_after(shard: Callable[[nn.Module], object], model: nn.Module) -> list[str]:
    """Return the names of parameters whose object or storage outlives ``shard(model)``."""
    named = [(name, weakref.ref(p), StorageWeakRef(p.untyped_storage())) for name, p in model.named_parameters()]
    shard(model)
    return [name for name, param, storage in named if param() is not None or not storage.expired()]


def freed_at_once(shard: Callable[[nn.Module], object], make: Callable[[], nn.Module]) -> list[str]:
    with no_collector():
        return held_after(shard, make())


def net() -> nn.Module:
    return make_net(num_blocks=2)


def tied_net() -> nn.Module:
    return make_net(num_blocks=2, tied=True)


def as_list(model: nn.Module) -> None:
    fully_shard([model.embed, model.head])
    fully_shard(model)


def to_second_dim(model: nn.Module) -> None:
    fully_shard(model, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(p.ndim - 1))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("make", [net, tied_net])
@pytest.mark.parametrize("shard", [shard_net, fully_shard, as_list])
def test_the_full_parameters_are_freed_before_fully_shard_returns(world_size, make, shard):
    assert run_ranks(world_size, freed_at_once, shard, make) == [[]] * world_size


@on_one_rank
def test_retained_references_are_noticed():
    held: list[object] = []

    def keep(model: nn.Module) -> None:
        held.extend([model.scale, model.head.weight.untyped_storage(), model.embed.weight[0]])
        shard_net(model)

    assert sorted(held_after(keep, net())) == ["embed.weight", "head.weight", "scale"]


def split_freed_at_once() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with no_collector():
        model = parallelize_module(nn.Linear(4, 6), mesh["tp"], ColwiseParallel())
        locals_ = [StorageWeakRef(p.to_local().untyped_storage()) for p in model.parameters()]
        fully_shard(model, mesh=mesh["dp"])
        # gloo threads release the scattered tensors later
        assert eventually(lambda: [ref.expired() for ref in locals_] == [True, True])


def test_the_parts_of_tensor_parallelism_are_freed_too():
    run_ranks(4, split_freed_at_once)


def freed_on_refusal() -> None:
    """A refused call keeps no reference to the model."""
    with no_collector():
        model = make_net(num_blocks=1)
        model.head.gain = nn.Parameter(torch.tensor(1.0))
        refs = [weakref.ref(p) for p in model.parameters()]
        with pytest.raises(ValueError, match="scalar"):
            fully_shard(model)
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_a_refused_call_keeps_no_parameter_alive():
    run_ranks(1, freed_on_refusal)
