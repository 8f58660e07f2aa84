"""Parameters in every situation: tied, frozen, ignored, unused, on meta, converted, replaced."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, average_grads, check_parity, shard_net
from tests.helpers.recording_probe import ROOT, recording
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.unsharded_copy import train_both
from workbench.engine import fully_shard
from workbench.events import Kind


def tied_within_a_unit() -> None:
    model = shard_net(make_net(tied=True))
    assert model.embed.weight is model.head.weight
    assert isinstance(model.embed.weight, DTensor)
    assert len(model._get_fsdp_state()._fsdp_param_group.fsdp_params) == 2  # the tied parameter and scale
    model.unshard()
    assert model.embed.weight is model.head.weight
    assert not isinstance(model.embed.weight, DTensor)
    model.reshard()
    assert model.embed.weight is model.head.weight


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_tied_within_a_unit_stays_one(world_size):
    run_ranks(world_size, tied_within_a_unit)


def freezing(mode: str) -> None:
    plain = make_net(num_blocks=2)

    def freeze(model: nn.Module, step: int = -1) -> None:
        if mode == "some" and step < 0:
            model.blocks[0].norm.requires_grad_(False)
            model.embed.requires_grad_(False)
        if mode == "whole unit" and step < 0:
            model.blocks[0].requires_grad_(False)
        if mode == "between" and step >= 0:
            model.blocks[1].mlp.requires_grad_(step % 2 == 1)

    freeze(plain)
    sharded = shard_net(copy.deepcopy(plain))
    assert [p.requires_grad for p in sharded.parameters()] == [p.requires_grad for p in plain.parameters()]
    train_both(plain, sharded, 4, freeze)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mode", ["some", "whole unit", "between"])
def test_frozen_parameters(world_size, mode):
    run_ranks(world_size, freezing, mode)


def frozen_payload() -> dict[str, int]:
    model = make_net(num_blocks=2)
    model.blocks[1].mlp.requires_grad_(False)
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)  # no gradient goes below blocks.1, so that its backward needs no all-gather
    shard_net(model)
    with recording() as record:
        for step in range(2):
            loss_of(model, batch(0, step)).backward()
            if not step:
                record.clear()
    assert record.count(Kind.REDUCE_SCATTER) == {ROOT: 1, "blocks.1": 1}
    assert record.count(Kind.ALL_GATHER) == {ROOT: 1, "blocks.0": 1, "blocks.1": 2}
    rows = record.rows
    return {record.name(unit): num_bytes for kind, _, unit, num_bytes, *_ in rows if kind is Kind.REDUCE_SCATTER}


def test_only_trainable_elements_are_reduced_and_frozen_units_are_not_prefetched():
    norm = 2 * 3  # weight and bias of 5, 3 padded rows on 2 ranks
    trainable_root = 1 + 4 * 5  # scale, and the head's 7 rows as 4 padded
    assert run_ranks(2, frozen_payload)[0] == {"blocks.1": 2 * norm * 4, ROOT: 2 * trainable_root * 4}


def ignored() -> None:
    plain = make_net(num_blocks=2)
    sharded = copy.deepcopy(plain)
    kept = {name: p for name, p in sharded.named_parameters() if name in {"scale", "blocks.1.norm.weight"}}
    storage = {name: p.data_ptr() for name, p in kept.items()}
    shard_net(sharded, ignored_params=set(kept.values()))
    for step in range(2):
        for model in (plain, sharded):
            loss_of(model, batch(dist.get_rank(), step)).backward()
    for name, p in sharded.named_parameters():
        assert isinstance(p, DTensor) == (name not in kept)
        reference = plain.get_parameter(name)
        if name in kept:
            assert p is kept[name]
            assert p.data_ptr() == storage[name]
            torch.testing.assert_close(p.grad, reference.grad)  # this rank's gradient, not the mean
    average_grads(plain)
    torch.testing.assert_close(sharded.head.weight.grad.full_tensor(), plain.head.weight.grad)


@pytest.mark.parametrize("world_size", [1, 2])
def test_ignored_parameters_are_neither_touched_nor_moved(world_size):
    run_ranks(world_size, ignored)


class PartlyUsed(nn.Module):
    """A parameter and a block that only some forwards use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net(num_blocks=2)
        self.unused = nn.Linear(3, 3)
        self.use_second_block = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.net.blocks[0](self.net.embed(tokens))
        if self.use_second_block:
            x = self.net.blocks[1](x)
        return self.net.head(x)


def partly_used() -> None:
    torch.manual_seed(0)
    plain = PartlyUsed()
    sharded = copy.deepcopy(plain)
    for block in sharded.net.blocks:
        fully_shard(block)
    fully_shard(sharded)

    def switch(model: nn.Module, step: int) -> None:
        model.use_second_block = step % 2 == 0

    train_both(plain, sharded, 4, switch)
    assert sharded.unused.weight.grad is None


@pytest.mark.parametrize("world_size", [1, 2])
def test_unused_parameters_and_units_get_no_gradient(world_size):
    run_ranks(world_size, partly_used)


class IgnoresAnInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        assert unused.requires_grad
        return self.linear(x)


class UsesOneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.top = nn.Linear(4, 4), nn.Linear(4, 4), IgnoresAnInput()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.left(x), self.right(x))


def unused_input() -> None:
    torch.manual_seed(0)
    plain = UsesOneOfTwo()
    sharded = copy.deepcopy(plain)
    for module in (sharded.left, sharded.right, sharded.top, sharded):
        fully_shard(module)
    for model in (plain, sharded):
        model(torch.ones(2, 4)).sum().backward()
    assert plain.right.weight.grad is None
    assert sharded.right.weight.grad is None  # not zeros, which weight decay would act on
    assert_same_shards(sharded, plain)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_source_of_an_unused_input_gets_no_gradient(world_size):
    run_ranks(world_size, unused_input)


def converted(convert: str) -> None:
    plain = make_net(num_blocks=2)
    sharded = shard_net(copy.deepcopy(plain))
    params = list(sharded.parameters())
    if convert == "before the first forward":
        plain.double(), sharded.double()
    elif convert == "after a step":
        train_both(plain, sharded, 1)
        plain.double(), sharded.double()
    else:  # a conversion that bypasses fully_shard
        train_both(plain, sharded, 1)
        for model in (plain, sharded):
            for module in model.blocks[1].children():
                module.double()
            model.blocks[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
            model.blocks[1].register_forward_hook(lambda _, args, output: output.float())
    assert [id(p) for p in sharded.parameters()] == [id(p) for p in params]
    assert [p.dtype for p in sharded.parameters()] == [p.dtype for p in plain.parameters()]
    train_both(plain, sharded)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("convert", ["before the first forward", "after a step", "only submodules of a unit"])
def test_a_conversion_after_fully_shard_is_followed(world_size, convert):
    run_ranks(world_size, converted, convert)


def converted_while_accumulating() -> None:
    plain = make_net(num_blocks=1)
    sharded = shard_net(copy.deepcopy(plain))
    sharded.set_requires_gradient_sync(False)
    for model in (plain, sharded):
        loss_of(model, batch(dist.get_rank(), 0)).backward()
        model.double()
    sharded.set_requires_gradient_sync(True)
    train_both(plain, sharded, 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_conversion_keeps_gradients_that_are_not_reduced_yet(world_size):
    run_ranks(world_size, converted_while_accumulating)


def held_full_parameter() -> list[tuple[int, ...]]:
    model = shard_net(make_net(num_blocks=1))
    shapes = []
    for step in range(2):
        loss = loss_of(model, batch(0, step))
        held = model.head.weight
        shapes.append(tuple(held.shape))
        loss.backward()
        shapes.append(tuple(held.shape))
        assert repr(held) == "Parameter containing:\ntensor(nan, requires_grad=True)"  # reading it does not crash
        with pytest.raises(RuntimeError):
            held @ torch.ones(5)
        assert held.square().sum().isnan()  # never a plausible number
    return shapes


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_retained_full_parameter_cannot_be_read_after_reshard(world_size):
    assert run_ranks(world_size, held_full_parameter)[0] == [(7, 5), ()] * 2


def from_meta() -> None:
    plain = make_net(num_blocks=2)
    with torch.device("meta"):
        sharded = shard_net(make_net(num_blocks=2))
    assert all(p.is_meta for p in sharded.parameters())
    sharded.double().float()
    assert all(p.is_meta and isinstance(p, DTensor) for p in sharded.parameters())
    sharded.to_empty(device="cpu")
    with torch.no_grad():
        for param, source in zip(sharded.parameters(), plain.parameters(), strict=True):
            param.copy_(distribute_tensor(source.detach(), param.device_mesh, param.placements))
    train_both(plain, sharded)


@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_on_meta_then_filled(world_size):
    run_ranks(world_size, from_meta)


def test_empty_shards_on_eight_ranks():
    run_ranks(8, check_parity, functools.partial(make_net, dim=3, num_blocks=1), shard_net, 2)
