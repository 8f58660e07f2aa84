"""Modules of every kind: in lists, shared, nested, reused, with unusual inputs and outputs, recomputed."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.expected_sizes import FP32, slots
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, average_grads, shard_net
from tests.helpers.recording_probe import ROOT, Recording, recording
from tests.helpers.small_models import Block, batch, loss_of, make_net
from tests.helpers.unsharded_copy import DIM, Outer, blocks, compare, data, squares
from workbench.engine import fully_shard
from workbench.events import Category, Edge, Kind

# ---- lists


def first_and_last_in_one_unit(with_root: bool) -> Recording:
    def shard(model: nn.Module) -> None:
        fully_shard(model[1])
        fully_shard([model[0], model[2]])
        if with_root:
            fully_shard(model)

    return compare(blocks, shard, squares)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_list_of_modules_is_one_unit(world_size):
    record = run_ranks(world_size, first_and_last_in_one_unit, True)[0]
    assert record.count(Kind.FORWARD) == {"0, 2": 1, "1": 1}
    assert record.count(Kind.FORWARD, Edge.END) == record.count(Kind.FORWARD)
    if world_size > 1:
        # one reduction although its backward has two parts, and kept in between
        assert record.count(Kind.REDUCE_SCATTER) == {"0, 2": 1, "1": 1}
        assert record.count(Kind.ALL_GATHER) == {"0, 2": 2, "1": 2}


def test_a_list_can_be_its_own_root():
    record = run_ranks(2, first_and_last_in_one_unit, False)[0]
    names = {unit.name: [p.fqn for p in unit.params][:1] for unit in record.units.values()}
    assert names == {"": ["norm.weight"], "0, 1": ["0.norm.weight"]}


class SomeOfTheList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(DIM), Block(DIM), Block(DIM)
        self.used = "abc"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.used:
            x = self.get_submodule(name)(x)
        return x


def some_of_a_list_run() -> None:
    def shard(model: nn.Module) -> None:
        fully_shard([model.a, model.c])
        fully_shard(model.b)
        fully_shard(model)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        model.used = ["abc", "ab", "bc", "b", "cba", "abca"][step]
        return squares(model, step)

    compare(SomeOfTheList, shard, loss, 6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_some_modules_of_a_list_run(world_size):
    run_ranks(world_size, some_of_a_list_run)


def some_of_a_list_run_in_eval() -> None:
    torch.manual_seed(0)
    plain = SomeOfTheList()
    model = copy.deepcopy(plain)
    fully_shard([model.a, model.c])
    fully_shard(model)
    for used in ("ab", "cb", "abc"):
        model.used = plain.used = used
        with torch.no_grad():
            torch.testing.assert_close(model(data(0)), plain(data(0)))
        assert all(isinstance(p, DTensor) for m in (model.a, model.c) for p in m.parameters())


def test_a_list_of_which_only_some_ran_is_sharded_after_an_eval_forward():
    run_ranks(2, some_of_a_list_run_in_eval)


# ---- the same module in several places, or several times


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(DIM)
        self.between = nn.Linear(DIM, DIM)
        self.again = self.block  # a shared module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.between(self.block(x)))


def shared_module(own_unit: bool) -> list[str]:
    def shard(model: nn.Module) -> None:
        if own_unit:
            fully_shard(model.block)
        fully_shard(model)

    record = compare(Twice, shard, squares)
    return [p.fqn for unit in record.units.values() for p in unit.params]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("own_unit", [True, False])
def test_a_shared_module_is_sharded_once_and_may_run_twice(world_size, own_unit):
    fqns = run_ranks(world_size, shared_module, own_unit)[0]
    assert len(fqns) == len(set(fqns)) == 8
    assert {fqn.split(".")[0] for fqn in fqns} == {"block", "between"}


def shared_between_parents() -> int:
    def make() -> nn.Module:
        model = Outer()
        model.middle[1].inner = model.middle[0].inner
        return model

    record = compare(make, fully_shard, squares)
    return len(next(iter(record.units.values())).params)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_with_two_parents_within_a_unit(world_size):
    assert run_ranks(world_size, shared_between_parents)[0] == 2 * 4 + 6 + 2  # linears, one block, the last linear


# ---- several forwards, several backwards


def two_forwards(model: nn.Module, step: int) -> torch.Tensor:
    return model(data(step)).square().mean() + model(data(step + 50)).mean()


def retained(model: nn.Module, step: int) -> torch.Tensor:
    loss = squares(model, step)
    loss.backward(retain_graph=True)  # the caller runs the second one
    return loss


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loss", [two_forwards, retained])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_two_forwards_or_two_backwards(world_size, loss, reshard):
    def shard(model: nn.Module) -> None:
        for block in model:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)

    run_ranks(world_size, compare, blocks, shard, loss)


def losses_backward_one_by_one() -> None:
    plain = make_net()
    sharded = shard_net(copy.deepcopy(plain))
    for model in (plain, sharded):
        losses = [loss_of(model, batch(dist.get_rank(), step)) for step in range(3)]
        losses.pop(1)  # never run backward
        losses.pop().backward()
        losses.pop().backward()
    average_grads(plain)
    assert_same_shards(sharded, plain)


@pytest.mark.parametrize("world_size", [1, 2])
def test_backwards_in_another_order_than_the_forwards(world_size):
    run_ranks(world_size, losses_backward_one_by_one)


# ---- no gradients


def warmed_up(reshard: bool | None) -> tuple[int, int, int]:
    """Run the root without autograd, then inner modules that read the root's own parameters, then train."""
    plain = make_net(num_blocks=2)
    model = shard_net(copy.deepcopy(plain), reshard_after_forward=reshard)
    tokens = batch(dist.get_rank(), 0)
    with recording() as record:
        with torch.no_grad():
            model(tokens)
        kept = record.alive.get(Category.UNSHARDED_PARAMS, 0)
        if reshard is None:
            with torch.no_grad():  # bypasses the root's forward
                logits = model.head(model.blocks[1](model.embed(tokens)) * model.scale)
                torch.testing.assert_close(logits, plain.head(plain.blocks[1](plain.embed(tokens)) * plain.scale))
        unit = fully_shard.state(model)._fsdp_param_groups[0]
        assert unit.is_unsharded == (reshard is None)
        loss_of(model, tokens).backward()
        loss_of(plain, tokens).backward()
        average_grads(plain)
        assert_same_shards(model, plain)
        assert unit.is_sharded
        of_the_root = tuple(p.shape for name, p in plain.named_parameters() if not name.startswith("blocks."))
        full = 2 * slots(2, of_the_root) * FP32
        return kept, full, record.alive.get(Category.UNSHARDED_PARAMS, 0)


@pytest.mark.parametrize("reshard", [None, True])
def test_a_root_keeps_its_parameters_after_a_forward_without_gradients_until_a_backward(reshard):
    for kept, full, after in run_ranks(2, warmed_up, reshard):
        assert kept == (full if reshard is None else 0)  # the root's parameters count as live bytes
        assert after == 0


def without_gradients(reshard: bool | None, inference: bool) -> Recording:
    plain = make_net(num_blocks=2)
    model = shard_net(copy.deepcopy(plain), reshard_after_forward=reshard)
    mode = torch.inference_mode if inference else torch.no_grad
    tokens = batch(dist.get_rank(), 0)
    with recording() as record, mode():
        for _ in range(2):
            record.clear()
            torch.testing.assert_close(loss_of(model.eval(), tokens), loss_of(plain.eval(), tokens))
    kept = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    of_the_root = {name for name, _ in model.named_parameters() if not name.startswith("blocks.")}
    assert kept == {None: of_the_root, True: set(), False: set(dict(model.named_parameters()))}[reshard]
    loss_of(model.train(), tokens).backward()
    loss_of(plain.train(), tokens).backward()
    average_grads(plain)
    assert_same_shards(model, plain)
    return record


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("inference", [False, True])
def test_forward_without_gradients(reshard, inference):
    (record, _) = run_ranks(2, without_gradients, reshard, inference)
    blocks = {"blocks.0": 1, "blocks.1": 1}
    # kept by the root, or all by the policy, they need no gather in the second forward
    assert record.count(Kind.ALL_GATHER) == {None: blocks, True: {ROOT: 1, **blocks}, False: {}}[reshard]
    assert record.count(Kind.BACKWARD) == {}
