"""Gradient accumulation, the setters, and manual unshard and reshard."""

import copy
import functools
import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.expected_sizes import BLOCKS, FP32, NET, ROOT_SHAPES, UNITS, numel
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, average_grads, shard_net
from tests.helpers.recording_probe import ROOT, Recording, recording
from tests.helpers.small_models import adamw, batch, loss_of, make_net
from workbench.engine import MixedPrecisionPolicy, UnshardHandle, fully_shard
from workbench.events import Category, Kind

MICRO_BATCHES = 3


def accumulate(prepare: Callable[[nn.Module, int], None]) -> Recording:
    """Run two steps of three micro-batches; ``prepare`` sets up the sharded model before each micro-batch."""
    plain = make_net(**NET)
    with recording() as record:
        sharded = shard_net(copy.deepcopy(plain))
        optimizers = [adamw(m.parameters()) for m in (plain, sharded)]
        for step in range(2):
            record.clear()
            for micro in range(MICRO_BATCHES):
                prepare(sharded, micro)
                for model in (plain, sharded):
                    loss_of(model, batch(dist.get_rank(), MICRO_BATCHES * step + micro)).backward()
            average_grads(plain)
            assert_same_shards(sharded, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_shards(sharded, plain)
    return record


def always_sync(_model: nn.Module, _micro: int) -> None:
    pass


def sync_last(model: nn.Module, micro: int) -> None:
    model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)


def sync_last_and_keep(model: nn.Module, micro: int) -> None:
    sync_last(model, micro)
    model.set_reshard_after_backward(micro == MICRO_BATCHES - 1)


def sync_blocks_always(model: nn.Module, micro: int) -> None:
    model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1, recurse=False)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("prepare", [always_sync, sync_last, sync_last_and_keep, sync_blocks_always])
def test_accumulated_gradients_equal_the_reference(world_size, prepare):
    record = run_ranks(world_size, accumulate, prepare)[0]
    if world_size == 1:
        return
    per_unit = MICRO_BATCHES if prepare is always_sync else 1
    reduced = dict.fromkeys(UNITS, per_unit)
    if prepare is sync_blocks_always:
        reduced |= dict.fromkeys(UNITS[1:], MICRO_BATCHES)
    assert record.count(Kind.REDUCE_SCATTER) == reduced
    # kept after backward: gathered only in the first forward; each backward follows the policy
    kept = prepare is sync_last_and_keep
    root_gathers = 1 if kept else MICRO_BATCHES
    block_gathers = 2 * MICRO_BATCHES - (MICRO_BATCHES - 1 if kept else 0)
    assert record.count(Kind.ALL_GATHER) == dict.fromkeys(UNITS, block_gathers) | {ROOT: root_gathers}


def skipped_in_the_last_micro_batch() -> int:
    plain = make_net(**NET)
    with recording() as record:
        sharded = shard_net(copy.deepcopy(plain))
        for micro, last_block in enumerate((BLOCKS, BLOCKS - 1)):
            sharded.set_requires_gradient_sync(micro == 1)
            for model in (plain, sharded):
                blocks = list(model.blocks)[:last_block]
                model.forward = functools.partial(forward_through, model, blocks)
                loss_of(model, batch(dist.get_rank(), micro)).backward()
        average_grads(plain)
        assert_same_shards(sharded, plain)
    return record.count(Kind.REDUCE_SCATTER)["blocks.1"]


def forward_through(model: nn.Module, blocks: list[nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    x = model.embed(tokens)
    for block in blocks:
        x = block(x)
    return model.head(x * model.scale)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_that_the_last_micro_batch_skips_is_reduced_with_it(world_size):
    assert run_ranks(world_size, skipped_in_the_last_micro_batch) == [world_size - 1] * world_size


def bytes_without_sync() -> list[dict[Category, int]]:
    alive = []
    with recording() as record:
        model = shard_net(make_net(**NET))
        for sync in (False, False, True):
            model.set_requires_gradient_sync(sync)
            loss_of(model, batch(0, 0)).backward()
            alive.append({c: n for c, n in record.alive.items() if c is not Category.SHARDED_PARAMS})
        model.set_requires_gradient_sync(False)
        loss_of(model, batch(0, 0)).backward()
        del model
        gc.collect()
        alive.append(dict(record.alive))
    return alive


def test_gradients_without_sync_stay_full_and_are_counted_once():
    first, second, last, dropped = run_ranks(2, bytes_without_sync)[0]
    assert dropped == {}  # with the model
    # 2 blocks: norm (2 x 5), first linear (16 x 5 + 16), second linear (5 x 16 + 5)
    full = numel(ROOT_SHAPES) + 2 * (2 * 5 + 16 * 6 + 5 * 17)
    assert first == second == {Category.UNSHARDED_GRADS: full * FP32}
    assert set(last) == {Category.SHARDED_GRADS}


def most_without_sync() -> int:
    """Return the peak bytes of full parameters plus full gradients in a backward without sync."""
    together = (Category.UNSHARDED_PARAMS, Category.UNSHARDED_GRADS)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with recording() as record:
        model = fully_shard(nn.Linear(8, 16), mp_policy=policy)
        model.set_requires_gradient_sync(False)
        loss = model(torch.ones(2, 8)).sum()
        most = now = sum(record.live[category] for category in together)
        record.clear()
        loss.backward()
    for category, _, delta in record.deltas:
        now += delta if category in together else 0
        most = max(most, now)
    return most


@pytest.mark.parametrize("world_size", [1, 2])
def test_full_parameters_go_before_gradients_are_kept_in_a_wider_dtype(world_size):
    numel = 8 * 16 + 16
    in_backward, cast = (2 + 2) * numel, 4 * numel  # parameters and gradients in bfloat16; gradients in float32
    assert run_ranks(world_size, most_without_sync) == [max(in_backward, cast)] * world_size


def policy_changes(recurse: bool) -> list[dict[str, int]]:
    model = shard_net(make_net(**NET))
    counts = []
    with recording() as record:
        for policy in (None, True, False, True):
            if policy is not None:
                model.set_reshard_after_forward(policy, recurse=recurse)
            record.clear()
            loss_of(model, batch(0, 0)).backward()
            counts.append(dict(record.count(Kind.ALL_GATHER)))
    return counts


def test_set_reshard_after_forward_takes_effect_at_the_next_forward():
    once, twice = dict.fromkeys(UNITS, 1), dict.fromkeys(UNITS, 2)
    assert run_ranks(2, policy_changes, True)[0] == [twice | {ROOT: 1}, twice, once, twice]
    assert run_ranks(2, policy_changes, False)[0] == [twice | {ROOT: 1}, twice, twice | {ROOT: 1}, twice]


def announced_policies() -> list[tuple[str, bool]]:
    model = shard_net(make_net(**NET))
    model(batch(0, 0))
    announced = []
    with recording() as record:
        record.unit = lambda info: announced.append((info.name, info.reshard_after_forward))
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        model.set_reshard_after_forward(False)
        model.blocks[0].set_reshard_after_forward(True)
    return announced


def test_only_changes_of_announced_units_are_announced():
    (announced,) = run_ranks(1, announced_policies)
    assert announced == [("", False), ("blocks.0", False), ("blocks.1", False), ("blocks.0", True)]


def set_before_the_first_forward() -> dict[str, int]:
    model = shard_net(make_net(**NET))
    model.set_reshard_after_forward(True)  # the root too, so that it has no choice of its own to make
    with recording() as record:
        loss_of(model, batch(0, 0)).backward()
    return dict(record.count(Kind.ALL_GATHER))


def test_a_policy_set_before_the_first_forward_holds_for_the_root():
    assert run_ranks(2, set_before_the_first_forward)[0] == dict.fromkeys(UNITS, 2)


def by_hand(async_op: bool) -> list[str]:
    model = shard_net(make_net(**NET))
    full = {name: p.full_tensor() for name, p in model.blocks[0].named_parameters()}
    with recording() as record:
        for unit in (model, *model.blocks):
            unit._get_fsdp_state()._fsdp_param_group.announce()
        handle = model.blocks[0].unshard(async_op=async_op)
        if async_op:
            assert isinstance(handle, UnshardHandle)
            assert isinstance(model.blocks[0].norm.weight, DTensor)  # still sharded until the wait
            assert model.blocks[0].unshard(async_op=True) is not None  # a second call is allowed
            handle.wait()
        else:
            assert handle is None
        for name, param in model.blocks[0].named_parameters():
            assert not isinstance(param, DTensor)
            assert torch.equal(param, full[name])
        if async_op:
            handle.wait()  # no-op
        assert isinstance(model.embed.weight, DTensor)  # only its own unit
        model.blocks[0].reshard()
        model.blocks[0].reshard()  # a second call is allowed
        assert isinstance(model.blocks[0].norm.weight, DTensor)
    return [event for event in record.events if event.startswith(("UNSHARD", "RESHARD"))]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("async_op", [False, True])
def test_unshard_and_reshard_by_hand(world_size, async_op):
    events = run_ranks(world_size, by_hand, async_op)[0]
    assert events == [f"{event} blocks.0" for event in ("UNSHARD BEGIN", "UNSHARD END", "RESHARD INSTANT")]


def resharded_before_it_was_waited_for() -> dict[Category, int]:
    with recording() as record:
        model = shard_net(make_net(**NET))
        handle = model.unshard(async_op=True)
        model.reshard()
        handle.wait()  # no-op: the reshard cancelled it
        assert isinstance(model.embed.weight, DTensor)
        alive = record.alive
        loss_of(model, batch(0, 0)).backward()
        model.zero_grad()
        assert record.alive == alive
    return alive


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_handle_of_an_unshard_that_was_given_up(world_size):
    assert set(run_ranks(world_size, resharded_before_it_was_waited_for)[0]) == {Category.SHARDED_PARAMS}


def unsharded_ahead(run_before: bool) -> dict[str, int]:
    model = shard_net(make_net(**NET))
    if run_before:
        loss_of(model, batch(0, 0)).backward()
    with recording() as record:
        for unit in (model, *model.blocks):
            unit._get_fsdp_state()._fsdp_param_group.announce()
            unit.unshard(async_op=True)  # start all at once, ahead of the forward
        model.unshard()
        loss_of(model, batch(0, 0)).backward()
    return dict(record.count(Kind.ALL_GATHER))


@pytest.mark.parametrize("run_before", [False, True])
def test_a_forward_uses_what_was_unsharded_by_hand(run_before):
    assert run_ranks(2, unsharded_ahead, run_before)[0] == dict.fromkeys(UNITS, 2) | {ROOT: 1}
