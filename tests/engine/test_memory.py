"""Bytes by category, exactly, and the memory that is freed."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.expected_sizes import BLOCK_SHAPES, BLOCKS, FP32, NET, ROOT_SHAPES, numel, slots
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.waiting import eventually
from workbench.engine import fully_shard, probe, unshard_module
from workbench.events import Category

SHARDS = Category.SHARDED_PARAMS
POLICIES = (None, True, False)


def model_slots(world_size: int) -> int:
    return slots(world_size, ROOT_SHAPES) + BLOCKS * slots(world_size, BLOCK_SHAPES)


def alive_at_each_moment() -> dict[str, dict[Category, int]]:
    alive = {}
    with recording() as record:
        model = shard_net(make_net(**NET))
        alive["sharded"] = record.alive
        model.unshard()
        alive["root unsharded by hand"] = record.alive
        model.reshard()
        alive["resharded"] = record.alive
        loss = loss_of(model, batch(0, 0))
        alive["after forward"] = record.alive
        loss.backward()
        alive["after backward"] = record.alive
        loss_of(model, batch(0, 1)).backward()
        alive["after a second backward"] = record.alive
        model.zero_grad()
        alive["after zero_grad"] = record.alive
    return alive


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_alive_at_each_moment(world_size):
    shards = {SHARDS: model_slots(world_size) * FP32}
    full_root = {Category.UNSHARDED_PARAMS: world_size * slots(world_size, ROOT_SHAPES) * FP32}
    grads = {Category.SHARDED_GRADS: model_slots(world_size) * FP32}
    for alive in run_ranks(world_size, alive_at_each_moment):
        assert alive == {
            "sharded": shards,
            "root unsharded by hand": shards | full_root,
            "resharded": shards,
            "after forward": shards | full_root,
            "after backward": shards | grads,
            "after a second backward": shards | grads,
            "after zero_grad": shards,
        }


def peaks_of_a_step(reshard: bool | None) -> tuple[dict[Category, int], dict[Category, int]]:
    with recording() as record:
        model = shard_net(make_net(**NET), reshard_after_forward=reshard)
        loss = loss_of(model, batch(0, 0))
        forward = used(record.peak)
        loss.backward()
    return forward, used(record.peak)


def used(peak: dict[Category, int]) -> dict[Category, int]:
    """Return the peaks without the pools' spare memory, which has its own tests."""
    return {category: num_bytes for category, num_bytes in peak.items() if category is not Category.RESERVED}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("reshard", POLICIES)
def test_peak_of_each_category(world_size, reshard):
    root, block = slots(world_size, ROOT_SHAPES), slots(world_size, BLOCK_SHAPES)
    at_once = BLOCKS if reshard is False else 1  # full blocks at the same time
    full, others = world_size * FP32, (world_size - 1) * FP32  # per element of a slot: bytes on all ranks
    expected_forward = {
        SHARDS: model_slots(world_size) * FP32,
        Category.UNSHARDED_PARAMS: (root + at_once * block) * full,
        # the received data; with more than two ranks, plus a copy of the shard for each other rank
        Category.ALL_GATHER_BUFFERS: max(root, block) * others * (1 if world_size == 2 else 2),
    }
    reduction = {
        Category.UNSHARDED_GRADS: max(numel(ROOT_SHAPES), numel(BLOCK_SHAPES)) * FP32,
        Category.REDUCE_SCATTER_BUFFERS: 2 * max(root, block) * others,  # sent and received
        Category.SHARDED_GRADS: model_slots(world_size) * FP32,
    }
    for forward, step in run_ranks(world_size, peaks_of_a_step, reshard):
        assert forward == expected_forward
        assert step == expected_forward | reduction


def peaks_alone() -> dict[Category, int]:
    with recording() as record:
        model = shard_net(make_net(**NET))
        loss_of(model, batch(0, 0)).backward()
    return used(record.peak)


def test_a_single_rank_needs_no_communication_buffers():
    (peak,) = run_ranks(1, peaks_alone)
    root, block = numel(ROOT_SHAPES), numel(BLOCK_SHAPES)
    assert peak == {
        SHARDS: (root + BLOCKS * block) * FP32,
        Category.UNSHARDED_PARAMS: (root + block) * FP32,
        Category.UNSHARDED_GRADS: max(root, block) * FP32,
        Category.SHARDED_GRADS: (root + BLOCKS * block) * FP32,
    }


def gradients_in_flight() -> list[tuple[str, dict[Category, int]]]:
    """Return the live bytes at each event of a backward with a single unit."""
    seen = []
    with recording() as record:
        unit = fully_shard(nn.Linear(3, 5, bias=False))
        loss = unit(torch.ones(1, 3)).sum()

        def event(kind, edge, *_):
            seen.append((f"{kind.name} {edge.name}", record.alive))

        record.event = event
        loss.backward()
    return seen


def test_the_output_of_a_reduction_counts_from_its_start():
    slot = 3 * 3  # 3 padded rows of 3 on 2 ranks
    for seen in run_ranks(2, gradients_in_flight):
        issued = dict(seen)["REDUCE_SCATTER BEGIN"]
        assert issued == {
            SHARDS: slot * FP32,
            Category.REDUCE_SCATTER_BUFFERS: 2 * slot * FP32,
            Category.SHARDED_GRADS: slot * FP32,
        }


def reset_in_the_middle(where: str) -> dict[Category, int]:
    with recording() as record:
        model = shard_net(make_net(**NET))

        def fail(*_):
            raise RuntimeError("by the user")

        if where == "forward":
            handle = model.blocks[1].mlp.register_forward_hook(fail)
        else:
            # the root's backward has begun; the all-gather of blocks.1 is in flight
            handle = model.head.register_full_backward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="by the user"):
            loss_of(model, batch(0, 0)).backward()
        dist.barrier()
        model.reset_iter_state()
        handle.remove()
        alive = record.alive
        loss_of(model, batch(0, 0)).backward()  # the next iteration is clean
        model.zero_grad()
        assert record.alive == alive
    return alive


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_reset_iter_state_leaves_only_shards(world_size, where):
    for alive in run_ranks(world_size, reset_in_the_middle, where):
        assert alive == {SHARDS: model_slots(world_size) * FP32}


def undone() -> dict[Category, int]:
    gc.disable()
    with recording() as record:
        model = shard_net(make_net(**NET))
        loss_of(model, batch(0, 0)).backward()
        model.zero_grad()
        unshard_module(model)
        eventually(lambda: not record.alive)  # a gloo thread frees the last input
    return record.alive


@pytest.mark.parametrize("world_size", [1, 2])
def test_unshard_module_frees_the_shards_at_once(world_size):
    assert run_ranks(world_size, undone) == [{}] * world_size


def held_after_unsharding(convert: bool) -> list[int]:
    gc.disable()
    with recording() as record:
        model = fully_shard(nn.Linear(6, 4))
        if convert:
            model.double()
        held = model.bias
        bytes_alive = [record.live[SHARDS]]
        unshard_module(model)
        bytes_alive.append(record.live[SHARDS])
        del held
        eventually(lambda: not record.alive)
        bytes_alive.append(record.live[SHARDS])
    return bytes_alive


@pytest.mark.parametrize("convert", [False, True])
def test_shards_count_as_alive_as_long_as_one_of_the_parameters_is_held(convert):
    num_bytes = slots(2, ((4, 6), (4,))) * (8 if convert else 4)
    assert run_ranks(2, held_after_unsharding, convert) == [[num_bytes, num_bytes, 0]] * 2


def originals_alive() -> list[str]:
    gc.disable()
    model = make_net(**NET)
    originals = {name: (weakref.ref(p), weakref.ref(p.untyped_storage())) for name, p in model.named_parameters()}
    shard_net(model)
    return [name for name, (param, storage) in originals.items() if param() is not None or storage() is not None]


@pytest.mark.parametrize("world_size", [1, 2])
def test_full_originals_die_without_the_garbage_collector(world_size):
    assert run_ranks(world_size, originals_alive) == [[]] * world_size


def bytes_by_profiler() -> tuple[int, int, int]:
    """Return the allocator's total before and after sharding, by its own events, and the bytes mapped for shards."""
    gc.disable()
    totals = []
    for shard in (False, True):
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
            model = nn.Linear(64, 129)
            if shard:
                fully_shard(model)
        events = profiler.profiler.kineto_results.events()
        totals.append(sum(e.nbytes() for e in events if e.name() == "[memory]"))
        if shard:
            (unit,) = model._get_fsdp_state()._fsdp_param_groups
            totals.append(unit.shards.flat.untyped_storage().nbytes())
        del model
    return tuple(totals)


def test_process_memory_after_sharding_is_the_shards():
    plain = (64 * 129 + 129) * FP32
    sharded = slots(2, ((129, 64), (129,))) * FP32
    for before, after, shards in run_ranks(2, bytes_by_profiler):
        assert (before, shards) == (plain, sharded)
        assert 0 <= after <= 1024  # a few small tensors of torch's; shards are not from the allocator


def meta_then_real() -> list[dict[Category, int]]:
    alive = []
    with recording() as record:
        with torch.device("meta"):
            model = nn.Linear(3, 4)
        fully_shard(model)
        alive.append(record.alive)
        model.to_empty(device="cpu")
        alive.append(record.alive)
        model.double()
        alive.append(record.alive)
    return alive


def test_meta_shards_hold_no_bytes_and_conversions_are_followed():
    numel_shard = slots(2, ((4, 3), (4,)))
    assert run_ranks(2, meta_then_real)[0] == [{}, {SHARDS: numel_shard * 4}, {SHARDS: numel_shard * 8}]


def test_a_probe_gets_frees_only_for_allocations_it_got():
    before = probe.BufferHandle(SHARDS, 0, 100)
    with recording() as first:
        during = probe.BufferHandle(SHARDS, 0, 30)
        del before
        assert first.alive == {SHARDS: 30}
    with recording() as second:
        del during
        assert second.deltas == []
    assert first.alive == {SHARDS: 30}
