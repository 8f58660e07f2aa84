"""The events of a wrapped model's step equal those of ``fully_shard``; bytes follow the formula of flat parameters."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.expected_sizes import BLOCK_SHAPES, BLOCKS, FP32, NET, ROOT_SHAPES, UNITS, numel
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.recording_probe import Recording, recording
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import OURS, wrap_net
from workbench.events import Category, Edge, Kind

RESHARDS = {"FULL_SHARD": None, "SHARD_GRAD_OP": False}
"""The equivalent ``reshard_after_forward``."""


def of_a_step(make) -> Recording:
    """Record the second step, which has no one-time events; bytes are counted from the start."""
    with recording() as record:
        model = make(make_net(**NET))
        for step in range(2):
            record.clear()
            loss_of(model, batch(0, step)).backward()
            model.zero_grad()
    return record


def wrapped(strategy: str, *, is_hybrid: bool = False, **options) -> Recording:
    if "backward_prefetch" in options and options["backward_prefetch"] is not None:
        options["backward_prefetch"] = OURS.BackwardPrefetch[options["backward_prefetch"]]
    if is_hybrid:
        options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return of_a_step(lambda net: wrap_net(OURS, net, strategy, **options))


def both(strategy: str, use_orig_params: bool) -> tuple[Recording, Recording]:
    ours = wrapped(strategy, use_orig_params=use_orig_params, forward_prefetch=True)
    return ours, of_a_step(lambda net: shard_net(net, reshard_after_forward=RESHARDS[strategy]))


def slot(world_size: int, shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return the elements of a flat parameter on one rank: the total over the number of ranks, rounded up."""
    return -(-numel(shapes) // world_size)


def model_slots(world_size: int) -> int:
    return slot(world_size, ROOT_SHAPES) + BLOCKS * slot(world_size, BLOCK_SHAPES)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", RESHARDS)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_sequence_of_events_is_that_of_fully_shard(world_size, strategy, use_orig_params):
    for ours, theirs in run_ranks(world_size, both, strategy, use_orig_params):
        assert ours.events == theirs.events


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", RESHARDS)
def test_collectives_and_bytes_equal_the_closed_form(world_size, strategy):
    keeps = strategy == "SHARD_GRAD_OP"
    root, block, model = slot(world_size, ROOT_SHAPES), slot(world_size, BLOCK_SHAPES), model_slots(world_size)
    gathered = model if keeps else 2 * model - root  # the root's parameter stays full from forward to backward
    for record in run_ranks(world_size, wrapped, strategy):
        assert record.payload(Kind.ALL_GATHER) == world_size * gathered * FP32
        assert record.count(Kind.ALL_GATHER) == {name: 1 if keeps or name == "root" else 2 for name in UNITS}
        assert record.payload(Kind.REDUCE_SCATTER) == world_size * model * FP32
        assert record.count(Kind.REDUCE_SCATTER) == dict.fromkeys(UNITS, 1)
        assert record.alive == {Category.SHARDED_PARAMS: model * FP32}
        at_once = BLOCKS if keeps else 2  # backward gathers the next block during the current one
        assert record.peak[Category.SHARDED_PARAMS] == model * FP32
        assert record.peak[Category.SHARDED_GRADS] == model * FP32
        assert record.peak[Category.UNSHARDED_PARAMS] <= world_size * (root + at_once * block) * FP32
        assert record.peak[Category.UNSHARDED_GRADS] == max(numel(ROOT_SHAPES), numel(BLOCK_SHAPES)) * FP32


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_without_shards_gradients_are_all_reduced_and_no_parameter_is_there_twice(world_size):
    model = numel(ROOT_SHAPES) + BLOCKS * numel(BLOCK_SHAPES)
    for record in run_ranks(world_size, wrapped, "NO_SHARD"):
        assert record.count(Kind.ALL_GATHER) == record.count(Kind.REDUCE_SCATTER) == {}
        assert record.count(Kind.ALL_REDUCE) == (dict.fromkeys(UNITS, 1) if world_size > 1 else {})
        assert record.payload(Kind.ALL_REDUCE) == (model * FP32 if world_size > 1 else 0)
        assert record.alive == {Category.SHARDED_PARAMS: model * FP32}
        assert record.peak[Category.UNSHARDED_PARAMS] == 0


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_copies_are_sharded_within_and_reduced_across(strategy):
    model, root = model_slots(2), slot(2, ROOT_SHAPES)
    gathered = model if strategy == "_HYBRID_SHARD_ZERO2" else 2 * model - root
    for record in run_ranks(4, hybrid, strategy):
        assert record.payload(Kind.ALL_GATHER) == 2 * gathered * FP32
        assert record.count(Kind.REDUCE_SCATTER) == record.count(Kind.ALL_REDUCE) == dict.fromkeys(UNITS, 1)
        assert record.payload(Kind.ALL_REDUCE) == model * FP32
        assert record.alive == {Category.SHARDED_PARAMS: model * FP32}


def hybrid(strategy: str) -> Recording:
    return wrapped(strategy, is_hybrid=True)


@pytest.mark.parametrize(
    ("prefetch", "first", "then"),
    [
        ("BACKWARD_PRE", "ALL_GATHER BEGIN blocks.0", "BACKWARD BEGIN blocks.1"),
        ("BACKWARD_POST", "BACKWARD END blocks.1", "ALL_GATHER BEGIN blocks.0"),
        (None, "REDUCE_SCATTER BEGIN blocks.1", "ALL_GATHER BEGIN blocks.0"),
    ],
)
def test_backward_prefetches_if_configured(prefetch, first, then):
    for record in run_ranks(2, prefetching, prefetch):
        backward = record.events[record.events.index("BACKWARD BEGIN root") :]
        assert backward.index(first) < backward.index(then)
        assert backward.index("ALL_GATHER BEGIN blocks.0") < backward.index("BACKWARD BEGIN blocks.0")


def prefetching(prefetch: str | None) -> Recording:
    return wrapped("FULL_SHARD", backward_prefetch=prefetch)


def test_forward_prefetches_only_if_configured():
    for ahead, alone in run_ranks(2, forwards):
        begins = "ALL_GATHER BEGIN blocks.1", "FORWARD END blocks.0"
        assert ahead.index(begins[0]) < ahead.index(begins[1])
        assert alone.index(begins[0]) > alone.index(begins[1])


def forwards() -> tuple[list[str], list[str]]:
    return wrapped("FULL_SHARD", forward_prefetch=True).events, wrapped("FULL_SHARD").events


def test_a_unit_is_described_with_its_parts():
    for record in run_ranks(2, wrapped, "FULL_SHARD"):
        (unit,) = (unit for unit in record.units.values() if unit.name == "blocks.0")
        (flat,) = unit.params
        assert flat.fqn == "blocks.0._flat_param"
        assert flat.shape == (numel(BLOCK_SHAPES),)
        assert [part.shape for part in flat.parts] == list(BLOCK_SHAPES)
        assert [part.first for part in flat.parts] == [numel(BLOCK_SHAPES[:i]) for i in range(len(BLOCK_SHAPES))]
        assert flat.parts[0].fqn == "blocks.0.norm.weight"
        assert (Kind.ALL_GATHER, Edge.END) in {(kind, edge) for kind, edge, *_ in record.rows}
