"""unshard_module, plain_copy and remap_optimizer: back to a plain model."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.engine.test_errors import fingerprint
from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.parity import assert_same_shards, average_grads, check_parity, shard_net
from tests.helpers.recording_probe import Recording, recording
from tests.helpers.small_models import adamw, batch, loss_of, make_net
from workbench.engine import fully_shard, unshard_module, unsharding
from workbench.engine.fsdp_state import roots
from workbench.engine.unsharding import plain_copy, remap_optimizer

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)


def hooks_of(model: nn.Module) -> list[int]:
    return [len(getattr(m, name)) for m in model.modules() for name in HOOKS]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, plain: bool) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, batch(dist.get_rank(), step))
        loss.backward()
        if plain:
            average_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW with two groups, as is common."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return adamw([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}])


def undone_is_plain() -> None:
    plain = make_net(tied=True)
    plain.blocks[1].norm.requires_grad_(False)
    model = copy.deepcopy(plain)
    classes, hooks = [type(m) for m in model.modules()], hooks_of(model)
    shard_net(model)
    assert hooks_of(model) != hooks
    for m in (plain, model):
        loss_of(m, batch(dist.get_rank(), 0)).backward()
    average_grads(plain)
    sharded = list(model.parameters())
    mapping = unshard_module(model)
    assert [mapping[p] for p in sharded] == list(model.parameters())
    assert [type(m) for m in model.modules()] == classes
    assert hooks_of(model) == hooks
    assert model.head.weight is model.embed.weight
    assert not any("_workbench" in name for m in model.modules() for name in vars(m))
    for (name, value), named in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        reference = named[1]
        assert name == named[0]
        assert type(value) is nn.Parameter
        assert torch.equal(value, reference)
        assert value.requires_grad == reference.requires_grad
        assert (value.grad is None) == (reference.grad is None)
        if reference.grad is not None:
            torch.testing.assert_close(value.grad, reference.grad)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_plain_module_is_back(world_size):
    run_ranks(world_size, undone_is_plain)


def goes_on_bit_identically() -> None:
    """Shard for a while, then train unsharded; with gradients averaged manually on two ranks, all bits are equal."""
    reference, model = make_net(), shard_net(make_net())
    optimizers = [optimizer_of(m) for m in (reference, model)]
    expected = train(reference, optimizers[0], range(6), plain=True)
    losses = train(model, optimizers[1], range(3), plain=False)
    unshard_module(model, [optimizers[1]])
    assert not any(isinstance(v, DTensor) for s in optimizers[1].state.values() for v in s.values())
    assert [g["lr"] for g in optimizers[1].param_groups] == [1e-2, 3e-3]
    losses += train(model, optimizers[1], range(3, 6), plain=True)
    assert losses == expected
    for value, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_continues_bit_identically(world_size):
    run_ranks(world_size, goes_on_bit_identically)


def there_and_back() -> Recording:
    """Shard, undo, shard again, and carry the optimizer along each time."""
    reference, model = make_net(), make_net()
    optimizers = [optimizer_of(m) for m in (reference, model)]
    expected = train(reference, optimizers[0], range(6), plain=True)
    with recording() as record:
        losses = []
        for step in range(0, 6, 2):
            before = dict(model.named_parameters())
            shard_net(model, reshard_after_forward=step != 2)
            remap_optimizer(optimizers[1], {before[name]: p for name, p in model.named_parameters()})
            losses += train(model, optimizers[1], range(step, step + 2), plain=False)
            unshard_module(model, [optimizers[1]])
    assert losses == expected
    return record


@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_again_with_new_indices_and_the_optimizer_carried_both_ways(world_size):
    record = run_ranks(world_size, there_and_back)[0]
    units = list(record.units)
    assert units == list(range(units[0], units[0] + 12))  # 3 times 4 units, no index twice
    assert sorted(record.retired) == units
    assert [u.reshard_after_forward for u in record.units.values()] == [True] * 4 + [False] * 4 + [True] * 4
    assert all(u.retired and u.params for u in record.units.values())


def not_run_yet() -> None:
    plain = make_net(num_blocks=1)
    model = copy.deepcopy(plain)
    unshard_module(shard_net(model))
    for value, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, wanted)
    check_parity(lambda: model, shard_net, 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_unsharded_before_the_first_run(world_size):
    run_ranks(world_size, not_run_yet)


def part_of_a_plain_module() -> None:
    model = make_net(num_blocks=2)
    for block in model.blocks:
        fully_shard(block)  # each is a separate root below a plain module
    loss_of(model, batch(0, 0)).backward()
    assert len(roots) == 2
    unshard_module(model.blocks[0])
    assert type(model.blocks[0].norm.weight) is nn.Parameter
    assert isinstance(model.blocks[1].norm.weight, DTensor)
    unshard_module(model)
    assert len(roots) == 0  # recovery must not see undone roots
    loss_of(model, batch(0, 0)).backward()


def test_each_of_several_roots_below_a_plain_module():
    run_ranks(2, part_of_a_plain_module)


def on_meta() -> None:
    with torch.device("meta"):
        model = shard_net(make_net(num_blocks=1))
    unshard_module(model)
    assert all(p.is_meta and type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_undone_on_meta(world_size):
    run_ranks(world_size, on_meta)


def hooked() -> None:
    """Post-accumulate-grad hooks move along, and the user's handles still remove them."""
    model, called = shard_net(make_net(num_blocks=1)), []
    handle = model.scale.register_post_accumulate_grad_hook(called.append)
    loss_of(model, batch(0, 0)).backward()
    sharded = list(model.parameters())
    unshard_module(model)
    assert all(p.grad is None for p in sharded)  # the gradients have moved
    assert all(p.grad is not None for p in model.parameters())
    loss_of(model, batch(0, 0)).backward()
    assert [p is model.scale for p in called] == [False, True]
    handle.remove()
    loss_of(model, batch(0, 0)).backward()
    assert len(called) == 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_of_parameters_go_along(world_size):
    run_ranks(world_size, hooked)


def fails_midway(at: int) -> None:
    model, twin = shard_net(make_net()), shard_net(make_net())
    optimizers = [optimizer_of(m) for m in (model, twin)]
    assert train(model, optimizers[0], range(2), plain=False) == train(twin, optimizers[1], range(2), plain=False)
    before, states, real = (
        fingerprint(model),
        {p: dict(s) for p, s in optimizers[0].state.items()},
        unsharding.state_like,
    )
    calls: list[int] = []

    def state_like(*args):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return real(*args)

    unsharding.state_like = state_like
    with pytest.raises(KeyboardInterrupt):
        unshard_module(model, [optimizers[0]])
    unsharding.state_like = real
    assert fingerprint(model) == before
    assert {p: dict(s) for p, s in optimizers[0].state.items()} == states
    assert train(model, optimizers[0], range(2, 4), plain=False) == train(twin, optimizers[1], range(2, 4), plain=False)


@pytest.mark.parametrize("at", [1, 10, 40])
def test_a_failure_in_the_middle_leaves_the_model_sharded(at):
    run_ranks(2, fails_midway, at)


@on_one_rank
def test_an_invalid_list_of_optimizers_is_refused():
    model = shard_net(make_net(num_blocks=1))
    before = fingerprint(model)
    for wrong in (torch.optim.SGD(model.parameters()), [model], 3):
        with pytest.raises(TypeError, match=r"unshard_module takes optimizers as a list of torch.optim.Optimizer, got"):
            unshard_module(model, wrong)
    assert fingerprint(model) == before


def other_state() -> None:
    """State with another shape than its parameter is replicated, not split; counters do not change."""
    model = shard_net(make_net(num_blocks=1))
    factor = distribute_tensor(torch.arange(5.0), model.scale.device_mesh, [Shard(0)], src_data_rank=None)
    weight = model.head.weight
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    target = nn.Parameter(distribute_tensor(torch.zeros(7, 5), mesh, [Replicate(), Shard(0)], src_data_rank=None))
    again = unsharding.state_like(target, factor)
    assert again.placements == (Replicate(), Replicate())
    assert again.to_local().tolist() == [0, 1, 2, 3, 4]
    step = torch.tensor(3.0)
    assert unsharding.state_like(target, step) is step
    assert unsharding.state_like(target, "text") == "text"
    assert torch.equal(unsharding.state_like(nn.Parameter(torch.zeros(7, 5)), weight), weight.full_tensor())
    whole = torch.arange(35.0).view(7, 5)
    split = unsharding.state_like(target, whole)
    assert split.placements == target.placements
    assert torch.equal(split.full_tensor(), whole)
    assert split.to_local().untyped_storage().nbytes() == split.to_local().nbytes  # not a view of the whole


def test_state_of_any_shape_follows_its_parameter():
    run_ranks(2, other_state)


def copied(reshard: bool | None) -> None:
    plain = make_net(tied=True)
    model = shard_net(copy.deepcopy(plain), reshard_after_forward=reshard)
    hooks, classes = hooks_of(model), [type(m) for m in model.modules()]
    for m in (plain, model):
        loss_of(m, batch(dist.get_rank(), 0)).backward()
    average_grads(plain)
    model(batch(0, 0))  # leaves at least the root unsharded
    memo = {}
    twin = plain_copy(model, memo)
    assert [type(m) for m in twin.modules()] == [type(m) for m in plain.modules()]
    assert hooks_of(twin) == hooks_of(plain)
    assert twin.head.weight is twin.embed.weight
    assert memo[id(model)] is twin
    for value, wanted in zip(twin.parameters(), plain.parameters(), strict=True):
        assert type(value) is nn.Parameter
        assert torch.equal(value, wanted)
        torch.testing.assert_close(value.grad, wanted.grad)
    # the original is unchanged, and trains on
    assert (hooks_of(model), [type(m) for m in model.modules()]) == (hooks, classes)
    assert_same_shards(model, plain)
    for m in (plain, twin, model):
        m.zero_grad()
        loss_of(m, batch(dist.get_rank(), 1)).backward()
    average_grads(plain)
    assert_same_shards(model, plain)
    average_grads(twin)
    torch.testing.assert_close(twin.head.weight.grad, plain.head.weight.grad)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reshard", [None, False])
def test_plain_copy_leaves_the_original_as_it_was(world_size, reshard):
    run_ranks(world_size, copied, reshard)


def copied_with_ignored() -> None:
    plain = make_net(num_blocks=1)
    model = copy.deepcopy(plain)
    shard_net(model, ignored_params={model.scale})
    twin = plain_copy(model, {})
    assert twin.scale is not model.scale
    for value, wanted in zip(twin.parameters(), plain.parameters(), strict=True):
        assert torch.equal(value, wanted)
        assert value.grad is None


@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_copy_copies_what_was_never_sharded(world_size):
    run_ranks(world_size, copied_with_ignored)
