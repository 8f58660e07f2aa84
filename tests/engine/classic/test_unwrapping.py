"""unwrap, plain_copy and rewrap_optimizers: from wrappers to plain modules and back, with their optimizers."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.parity import average_grads, shard_net
from tests.helpers.small_models import Block, adamw, batch, loss_of, make_net
from tests.helpers.wrapped_models import OURS, adam, copies_of_shards, whole, wrap_net
from workbench.engine import fully_shard, unshard_module
from workbench.engine.classic import rewrap_optimizers, unwrap
from workbench.engine.classic.unwrapping import plain_copy
from workbench.engine.fsdp_state import roots
from workbench.engine.unsharding import remap_optimizer

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]


def wrapped(model: nn.Module, strategy: str, **options: Any) -> nn.Module:
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = copies_of_shards()
    return wrap_net(OURS, model, strategy, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, plain: bool = False) -> list[float]:
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


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, decay and another learning rate, for pieces or plain parameters."""
    params = dict(model.named_parameters())
    decayed = [p for name, p in params.items() if "mlp" in name or "_flat" in name]
    others = [p for name, p in params.items() if "mlp" not in name and "_flat" not in name]
    return adamw([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}])


def the_plain_module_is_back(strategy: str, use_orig_params: bool) -> None:
    plain = make_net(tied=True)
    model = copy.deepcopy(plain)
    modules, originals = list(model.modules()), list(model.parameters())
    model = wrapped(model, strategy, use_orig_params=use_orig_params)
    for m in (plain, model):
        loss_of(m, batch(dist.get_rank(), 0)).backward()
    average_grads(plain)
    owned = list(model.parameters())
    back, mapping = unwrap(model)
    assert list(back.modules()) == modules
    assert list(back.parameters()) == originals
    assert [new for old in owned for new in mapping[old]] == originals
    assert back.head.weight is back.embed.weight
    assert not any("_workbench" in name for m in (*modules, *originals) for name in vars(m))
    for (name, value), (expected_name, expected) in zip(back.named_parameters(), plain.named_parameters(), strict=True):
        assert name == expected_name
        assert torch.equal(value, expected)
        torch.testing.assert_close(value.grad, expected.grad)
    assert not any(root.overlaps([root]) for root in roots)
    loss_of(back, batch(0, 1)).backward()  # no hook remains


def every_way_back() -> None:
    for strategy in STRATEGIES if dist.get_world_size() > 1 else STRATEGIES[:3]:
        for use_orig_params in (False, True):
            the_plain_module_is_back(strategy, use_orig_params)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_plain_module_is_back(world_size):
    run_ranks(world_size, every_way_back)


def goes_on_as_before() -> None:
    """Plain, wrapped, plain, wrapped the other way, fully_shard: all bits equal those of a plain run."""
    for use_orig_params in (False, True):
        reference, model = make_net(), make_net()
        optimizers = [adam(m.parameters()) for m in (reference, model)]
        expected = train(reference, optimizers[0], range(10), plain=True)
        losses = train(model, optimizers[1], range(2), plain=True)
        for i, strategy in enumerate(["FULL_SHARD", "NO_SHARD"]):
            model = wrapped(model, strategy, use_orig_params=use_orig_params is bool(i))
            rewrap_optimizers(model, [optimizers[1]])
            losses += train(model, optimizers[1], range(2 + 2 * i, 4 + 2 * i))
            model, _ = unwrap(model, [optimizers[1]])
        losses += train(model, optimizers[1], range(6, 8), plain=True)
        before = dict(model.named_parameters())
        shard_net(model)
        remap_optimizer(optimizers[1], {before[name]: p for name, p in model.named_parameters()})
        losses += train(model, optimizers[1], range(8, 10))
        unshard_module(model, [optimizers[1]])
        assert losses == expected
        for value, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(value, wanted)


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_continues_bit_identically(world_size):
    run_ranks(world_size, goes_on_as_before)


def fused_ones_go_on() -> None:
    """A fused optimizer continues exactly, with shards on the CPU or not."""
    for use_orig_params, offload in itertools.product((False, True), (False, True)):
        reference, model = make_net(), make_net()
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (reference, model)]
        expected = train(reference, optimizers[0], range(6), plain=True)
        losses = train(model, optimizers[1], range(2), plain=True)
        model = wrapped(
            model, "FULL_SHARD", use_orig_params=use_orig_params, cpu_offload=OURS.CPUOffload(offload_params=offload)
        )
        rewrap_optimizers(model, [optimizers[1]])
        losses += train(model, optimizers[1], range(2, 4))
        model, _ = unwrap(model, [optimizers[1]])
        losses += train(model, optimizers[1], range(4, 6), plain=True)
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()))


def test_fused_optimizers_and_offloaded_shards_make_the_round_trip():
    run_ranks(2, fused_ones_go_on)


def groups_keep_their_options() -> None:
    """Unwrap an optimizer of pieces, some of which are empty on some ranks."""
    reference, model = make_net(), wrapped(make_net(), "FULL_SHARD", use_orig_params=True)
    optimizers = [two_groups(m) for m in (reference, model)]
    train(reference, optimizers[0], range(4), plain=True)
    train(model, optimizers[1], range(2))
    model, _ = unwrap(model, [optimizers[1]])
    assert [(g["lr"], g["weight_decay"]) for g in optimizers[1].param_groups] == [(1e-2, 0.1), (3e-3, 1e-2)]
    assert [p.shape for g in optimizers[1].param_groups for p in g["params"]] == [
        p.shape for g in optimizers[0].param_groups for p in g["params"]
    ]
    train(model, optimizers[1], range(2, 4), plain=True)
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()))
    steps = [state["step"] for state in optimizers[1].state.values()]
    assert [int(step) for step in steps] == [4] * len(list(reference.parameters()))
    assert len({id(step) for step in steps}) == len(steps)


@pytest.mark.parametrize("world_size", [2, 4])
def test_groups_keep_their_options(world_size):
    run_ranks(world_size, groups_keep_their_options)


def what_does_not_train_stays_so() -> None:
    for use_orig_params in (False, True):
        model = make_net()
        frozen = [p for b in model.blocks[1:] for p in b.parameters()]
        for p in frozen:
            p.requires_grad_(False)
        model = wrapped(model, "FULL_SHARD", use_orig_params=use_orig_params, ignored_modules=[model.head])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss_of(model, batch(0, 0)).backward()
        optimizer.step()
        head = model.head.weight
        model, _ = unwrap(model, [optimizer])
        assert model.head.weight is head
        trained = [p for p in model.parameters() if p.requires_grad]
        assert [id(p) for p in frozen] == [id(p) for p in model.parameters() if not p.requires_grad]
        assert all(p.grad is None for p in frozen)
        assert set(optimizer.state) == set(trained)
        assert all(optimizer.state[p]["momentum_buffer"].shape == p.shape for p in trained)


def test_frozen_parameters_stay_frozen():
    run_ranks(2, what_does_not_train_stays_so)


def buffers_have_their_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    precision = OURS.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    outer = nn.ModuleDict({"a": OURS.FullyShardedDataParallel(model, mixed_precision=precision)})
    outer["b"] = outer["a"]  # one wrapper in two places
    outer["a"](torch.ones(2, 2))
    assert model[1].running_mean.dtype == torch.bfloat16
    back, _ = unwrap(outer)
    assert back is outer
    assert outer["a"] is outer["b"] is model
    assert model[1].running_mean.dtype == torch.float32


def test_wrappers_in_a_plain_module_and_buffers_of_another_dtype():
    run_ranks(2, buffers_have_their_dtype)


def a_copy_is_plain() -> None:
    for use_orig_params in (False, True):
        model = wrapped(make_net(tied=True), "FULL_SHARD", use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        train(model, optimizer, range(2))
        loss_of(model, batch(dist.get_rank(), 2)).backward()
        memo: dict[int, Any] = {}
        copied, (copied_optimizer,) = plain_copy(model, memo, [optimizer])
        assert memo[id(model)] is copied
        assert copied.head.weight is copied.embed.weight
        assert [type(m) for m in copied.modules()] == [type(m) for m in make_net().modules()]
        torch.testing.assert_close(dict(copied.named_parameters()), whole(model), rtol=0, atol=0)
        for m, o in ((model, optimizer), (copied, copied_optimizer)):
            o.step()
            o.zero_grad()
            train(m, o, range(3, 5), plain=m is copied)
        torch.testing.assert_close(dict(copied.named_parameters()), whole(model), rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_is_plain_and_the_wrapped_model_continues(world_size):
    run_ranks(world_size, a_copy_is_plain)


def originals_are_empty() -> None:
    """Each rank keeps only its part, although optimizers may still hold the original parameters."""
    model = make_net()
    originals = list(model.parameters())
    numel = sum(p.numel() for p in originals)
    wrap_net(OURS, model)
    assert sum(p.untyped_storage().nbytes() for p in originals) == 0
    tied = make_net(tied=True)
    tied.head = OURS.FullyShardedDataParallel(tied.head)
    with pytest.raises(ValueError, match=r"parameter 'embed.weight' is tied to 'weight' of Linear"):
        OURS.FullyShardedDataParallel(tied)
    pieces = wrap_net(OURS, make_net(), use_orig_params=True)
    total = torch.tensor(sum(p.numel() for p in pieces.parameters()))
    dist.all_reduce(total)
    assert total == numel


def test_the_previous_flat_parameters_hold_no_memory():
    run_ranks(2, originals_are_empty)


@on_one_rank
def test_a_model_that_cannot_be_unwrapped_is_unchanged():
    model = wrap_net(OURS, make_net())
    with pytest.raises(
        ValueError,
        match=r"unshard_module is for fully_shard, but .* contains modules sharded by .*: call workbench.engine",
    ):
        unshard_module(model)
    with pytest.raises(ValueError, match="Linear contains no module that FullyShardedDataParallel was called on"):
        unwrap(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"unwrap is for FullyShardedDataParallel, .* call unshard_module"):
        unwrap(shard_net(make_net()))
    mixed = make_net()
    mixed.blocks[0] = OURS.FullyShardedDataParallel(mixed.blocks[0])
    fully_shard(mixed)
    with pytest.raises(ValueError, match="a model with both cannot be undone"):
        unwrap(mixed)
    with model.no_sync():
        loss_of(model, batch(0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"not reduced yet: .*; run a backward outside no_sync\(\)"):
        unwrap(model)
    with pytest.raises(ValueError, match="only a part of the FSDP root"):
        unwrap(model.blocks[0])
    loss_of(model, batch(0, 0)).backward()
    optimizer = adamw(model.parameters())
    optimizer.step()
    before = whole(model)
    optimizer.state[next(model.parameters())]["odd"] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"optimizer state 'odd' of 'scale' has shape \[2, 3\] on a rank with"):
        unwrap(model, [optimizer])
    assert whole(model).keys() == before.keys()
    assert isinstance(model.blocks[0], OURS.FullyShardedDataParallel)


@on_one_rank
def test_an_optimizer_that_does_not_fit_stays_as_it_is():
    plain = make_net()
    optimizer = two_groups(plain)
    train(plain, optimizer, range(1))
    before = [list(group["params"]) for group in optimizer.param_groups]
    model = wrap_net(OURS, plain)
    with pytest.raises(ValueError, match="holds the parameters of one flat parameter in several groups"):
        rewrap_optimizers(model, [optimizer])
    assert [list(group["params"]) for group in optimizer.param_groups] == before
    with pytest.raises(TypeError, match="rewrap_optimizers takes optimizers as a list"):
        rewrap_optimizers(model, [plain])


@on_one_rank
def test_state_that_one_flat_parameter_cannot_have():
    for change, message in (
        (lambda state: state["step"].add_(1), "differ in optimizer state 'step'"),
        (lambda state: state.pop("exp_avg"), "another parameter of its flat parameter has exp_avg"),
        (
            lambda state: state.update(exp_avg=torch.zeros(3, 3)),
            r"the parameter \[5\]: only a scalar, or state of the parameter's",
        ),
        (lambda state: state.update(exp_avg=state["exp_avg"].double()), "differ in optimizer state 'exp_avg'"),
    ):
        plain = Block(5)
        optimizer = adamw(plain.parameters())
        plain(torch.ones(5)).sum().backward()
        optimizer.step()
        change(optimizer.state[plain.norm.bias])
        model = OURS.FullyShardedDataParallel(plain)
        with pytest.raises(ValueError, match=message):
            rewrap_optimizers(model, [optimizer])
