"""The module that a call belongs to: wrappers that forward attributes, containers, torch's ``replicate``."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.helpers.both_engines import APIS, SAME, double_net, one_batch, train_all
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import average_grads
from tests.helpers.small_models import Block, Net, batch, loss_of
from tests.helpers.unsharded_copy import DIM, data
from workbench import engine
from workbench.engine.fsdp_state import state_of, states_below
from workbench.engine.unsharding import plain_copy

# ---- wrappers that forward the attributes of the wrapped module


class Forwarding(nn.Module):
    """Forwards missing attributes to the inner module, as torch's and PEFT's wrappers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def wrapped_blocks(wrap: Callable[[nn.Module], nn.Module], inside: bool, outside: bool) -> None:
    def make() -> Net:
        model = double_net(num_blocks=2)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(block)
        return model

    def shard(api: ModuleType, model: Net) -> None:
        for wrapper in model.blocks:
            if inside:
                api.fully_shard(next(wrapper.children()))
            if outside:
                api.fully_shard(wrapper)
        api.fully_shard(model)
        for module in model.modules():
            assert ("FSDP" in type(module).__name__) == (api.fully_shard.state(module) is not None)

    train_all(make, shard, one_batch, 2)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, Forwarding])
@pytest.mark.parametrize(("inside", "outside"), [(True, False), (False, True), (True, True)])
def test_a_wrapper_that_forwards_attributes_is_a_module_of_its_own(wrap, inside, outside):
    run_ranks(2, wrapped_blocks, wrap, inside, outside)


def wrapped_whole(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(engine.fully_shard(Block(DIM)))
    assert state_of(model) is None
    assert len(states_below(model)) == 1
    outer = engine.fully_shard(model)
    assert outer is model
    assert state_of(model) is not state_of(next(model.children()))
    engine.unshard_module(model)
    assert states_below(model) == []


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, Forwarding, compiled])
def test_the_call_on_a_module_inside_is_not_the_wrappers(wrap):
    run_ranks(1, wrapped_whole, wrap)


class Encoder(nn.Linear):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def registered_twice() -> None:
    inner = engine.fully_shard(Encoder(DIM, DIM))
    engine.register_fsdp_forward_method(inner, "encode")
    first = inner.encode
    engine.register_fsdp_forward_method(inner, "encode")
    assert inner.encode is first  # registering it twice changes nothing
    outer = engine.fully_shard(Forwarding(inner))
    engine.register_fsdp_forward_method(outer, "encode")
    assert vars(outer)["encode"] is not first
    torch.testing.assert_close(outer.encode(data(0)), outer(data(0)))


def test_a_method_registered_inside_is_not_the_wrappers():
    run_ranks(1, registered_twice)


# ---- containers


class Chain(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


class Named(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["second"](self["first"](x))


def make_chain() -> nn.Module:
    torch.manual_seed(0)
    return Chain([Block(DIM), Block(DIM)]).double()


def make_named() -> nn.Module:
    torch.manual_seed(0)
    return Named({"first": Block(DIM), "second": Block(DIM)}).double()


def containers(make: Callable[[], nn.Module]) -> None:
    def shard(api: ModuleType, model: nn.Module) -> None:
        api.fully_shard(next(iter(model.children())))
        api.fully_shard(model)

    def run(model: nn.Module, step: int) -> None:
        model(data(step).double()).square().mean().backward()

    train_all(make, shard, run, 2)


@pytest.mark.parametrize("make", [make_chain, make_named])
def test_a_container_with_a_forward_of_its_own_is_a_module_like_any(make):
    run_ranks(2, containers, make)


class NoForward(nn.ModuleList):
    pass


@pytest.mark.parametrize("make", [NoForward, nn.ModuleDict])
def test_a_container_without_one_is_refused(make):
    with pytest.raises(ValueError, match="it has no forward; call it on each of its children"):
        engine.fully_shard(make())


# ---- a root without parameters


def devices() -> list[str]:
    """Shard the root on a mesh of the meta device, the only device besides the CPU that always exists."""
    model = nn.Sequential(Block(DIM), Block(DIM))
    for block in model:
        engine.fully_shard(block)
    engine.fully_shard(model, mesh=DeviceMesh("meta", [0], _init_backend=False))
    assert state_of(model)._fsdp_param_groups == []
    return [state._comm_ctx.device.type for state in states_below(model)]


def test_a_root_without_parameters_communicates_on_the_device_of_its_mesh():
    assert run_ranks(1, devices) == [["meta", "cpu", "cpu"]]


# ---- torch's replicate


def replicated(where: str) -> dict[str, torch.Tensor]:
    """Train a partly replicated model; return the full parameters of both engines."""
    trained = {}
    for api in APIS:
        model = double_net(num_blocks=2)
        if where == "inside":
            replicate(model.blocks[0])
            api.fully_shard(model.blocks[1])
            api.fully_shard(model)
            assert not any(isinstance(p, DTensor) for p in model.blocks[0].parameters())
        else:
            for block in model.blocks:
                api.fully_shard(block)
            replicate(model)
        assert all(isinstance(p, DTensor) for p in model.blocks[1].parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            loss_of(model, batch(dist.get_rank(), step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained[api.__name__] = {
            name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()
        }
    ours, theirs = trained[engine.__name__], trained[fsdp.__name__]
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **SAME)
    return ours


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_replicate_and_fully_shard_ignore_each_others_modules(where):
    first, second = run_ranks(2, replicated, where)
    for name in first:
        torch.testing.assert_close(first[name], second[name], **SAME)


def both_on_one() -> None:
    for api in APIS:
        with pytest.raises(RuntimeError, match="Cannot apply `replicate"):
            replicate(api.fully_shard(Block(DIM)))
    model = engine.fully_shard(Block(DIM))
    copied = plain_copy(model, {})
    assert vars(copied).keys() == vars(Block(DIM)).keys()
    engine.unshard_module(model)
    for plain in (copied, model):
        replicate(plain)(data(0)).sum().backward()
    average_grads(copied)


def test_an_unsharded_module_can_be_replicated():
    run_ranks(2, both_on_one)
