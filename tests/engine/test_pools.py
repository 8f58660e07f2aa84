"""Memory that is used again: which units share a slot, what is reserved, and what happens on another order."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.engine.comparison import DIM, Outer, data, shard_each
from tests.engine.models import batch, loss_of, make_net
from tests.engine.parity import shard_net
from tests.engine.ranks import on_one_rank, run_ranks
from tests.engine.recording import Recording, recording
from tests.engine.sizes import BLOCK_SHAPES, FP32, ROOT_SHAPES, numel, slots
from tests.waiting import eventually
from workbench.engine import MixedPrecisionPolicy, fully_shard, unshard_module
from workbench.engine.call import states_below, units_of
from workbench.engine.comm_context import FSDPCommContext
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.pool import BufferPool, OverlapRecord
from workbench.events import Category, Edge, Kind

CPU = torch.device("cpu")
NUM_BLOCKS = 4
NET = {"num_blocks": NUM_BLOCKS}
TAKEN = (Category.UNSHARDED_PARAMS, Category.ALL_GATHER_BUFFERS, Category.REDUCE_SCATTER_BUFFERS, Category.RESERVED)


def units(model: nn.Module) -> list[FSDPParamGroup]:
    return units_of(states_below(model))


def named(model: nn.Module) -> dict[str, FSDPParamGroup]:
    return {unit.name: unit for unit in units(model)}


def sharing(model: nn.Module) -> list[list[str]]:
    """Names of the units by the memory their full parameters lie in, in the order of the units."""
    groups: dict[int, list[str]] = {}
    for unit in units(model):
        slot = unit._usual.memory.slot
        groups.setdefault(id(unit if slot is None else slot), []).append(unit.name)
    return list(groups.values())


def step(model: nn.Module, number: int) -> float:
    loss = loss_of(model, batch(dist.get_rank(), number))
    loss.backward()
    model.zero_grad()
    return loss.item()


# ---- who shares


def after_each_step(reshard: bool | None) -> list[list[list[str]]]:
    model = shard_net(make_net(**NET), reshard_after_forward=reshard)
    found = []
    for number in range(3):
        step(model, number)
        found.append(sharing(model))
    return found


BLOCK_NAMES = [f"blocks.{i}" for i in range(NUM_BLOCKS)]
ALONE = [[""], *([name] for name in BLOCK_NAMES)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_share_one_slot_from_the_second_iteration_on(world_size):
    """One block is freed before the next is made full, in both directions: what is gathered ahead lies in staging."""
    together = [[""], BLOCK_NAMES]
    assert run_ranks(world_size, after_each_step, None) == [[ALONE, together, together]] * world_size


def test_units_that_stay_full_until_backward_share_nothing():
    assert run_ranks(2, after_each_step, False) == [[ALONE] * 3] * 2


def neighbours_at_once() -> list[list[list[str]]]:
    """Each block makes the next one full before it runs itself."""
    model = shard_net(make_net(**NET))
    for block, following in zip(model.blocks, model.blocks[1:], strict=False):
        block.register_forward_pre_hook(lambda *_, ahead=following: ahead.unshard())
    found = []
    for number in range(3):
        step(model, number)
        found.append(sharing(model))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_that_overlap_with_their_neighbours_share_with_the_next_but_one(world_size):
    alternating = [[""], ["blocks.0", "blocks.2"], ["blocks.1", "blocks.3"]]
    assert run_ranks(world_size, neighbours_at_once) == [[ALONE, alternating, alternating]] * world_size


def nested() -> list[list[str]]:
    model = Outer()
    for middle in model.middle:
        fully_shard(middle.inner)
        fully_shard(middle)
    fully_shard(model)
    for number in range(3):
        model(data(number)).square().mean().backward()
    return sharing(model)


def test_a_unit_inside_of_another_does_not_share_with_it():
    expected = [[""], ["middle.0", "middle.1"], ["middle.0.inner", "middle.1.inner"]]
    assert run_ranks(2, nested) == [expected] * 2


def test_units_that_were_never_seen_have_no_slot():
    record = OverlapRecord()
    for unit in (0, 1):
        record.taken(unit)
    for unit in (1, 0):
        record.given_back(unit)
    for unit in (2, 3, 2):
        record.taken(unit)
        record.given_back(unit)
    assert record.colour([0, 1, 2, 3, 4]) == [[0, 2, 3], [1]]
    assert record.colour([3, 2]) == [[2, 3]]  # in the order of the first unshard
    assert record.colour([]) == []


# ---- numbers


def with_and_without() -> None:
    runs = []
    for shares in (True, False):
        if not shares:
            FSDPCommContext.settle = lambda *_: None  # in this process, which ends with the test
        model = shard_net(make_net(**NET))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for number in range(5):
            loss = loss_of(model, batch(dist.get_rank(), number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert (sharing(model) == ALONE) != shares
        runs.append((losses, [p.to_local().clone() for p in model.parameters()]))
    (losses, values), (others, other_values) = runs
    assert losses == others
    assert all(torch.equal(a, b) for a, b in zip(values, other_values, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sharing_changes_no_bit(world_size):
    run_ranks(world_size, with_and_without)


# ---- what is reserved


def allocated(model: nn.Module) -> int:
    """Bytes of the storages that full parameters and staging lie in, whether used or not."""
    memories = [u._usual.memory for u in units(model)]
    in_use = [m.full.untyped_storage() for m in memories if m.slot is not None or m.is_held]  # else no page of it is
    storages = {storage.data_ptr(): storage for storage in in_use}
    ctx = model._get_fsdp_state()._comm_ctx
    blocks = [*ctx.pool._free, *ctx.pool._taken.values()]
    to_cast = [r.scatter.output for r in ctx.reductions._scattering if r.scatter.output.dtype is torch.bfloat16]
    return sum(memory.nbytes() for memory in storages.values()) + sum(
        tensor.untyped_storage().nbytes() for tensor in (*(block.memory for block in blocks), *to_cast)
    )


def sums(policy: MixedPrecisionPolicy) -> list[tuple[str, int, int]]:
    """Return moments at which the classes did not add up to what is allocated."""
    wrong, counted = [], 0
    with recording() as record:
        model = shard_net(make_net(**NET), mp_policy=policy)
        step(model, 0)

        def event(kind, edge, unit, *_):
            nonlocal counted
            if (kind, edge) in {(Kind.FORWARD, Edge.BEGIN), (Kind.FORWARD, Edge.END), (Kind.BACKWARD, Edge.BEGIN)}:
                counted += 1
                told = sum(record.live[category] for category in TAKEN)
                if told != allocated(model):
                    wrong.append((f"{kind.name} {edge.name} {record.name(unit)}", told, allocated(model)))

        record.event = event
        for number in range(1, 4):
            step(model, number)
            assert record.reserved == allocated(model)  # between steps nothing is used
        model.release_buffers()
        assert record.reserved == 0
        assert allocated(model) == 0
        step(model, 4)
    assert counted == 4 * 3 * (1 + NUM_BLOCKS)
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)], ids=["fp32", "bf16"]
)
def test_the_classes_add_up_to_what_is_allocated_at_every_moment(world_size, policy):
    assert run_ranks(world_size, sums, policy) == [[]] * world_size


def reserved_after_steps(dim: int, num_blocks: int) -> int:
    with recording() as record:
        model = shard_net(make_net(dim=dim, num_blocks=num_blocks))
        for number in range(4):
            step(model, number)
    return record.reserved


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("dim", "num_blocks"), [(5, 1), (5, 4), (16, 3)])
def test_never_more_is_reserved_than_torch_needs_at_its_peak(world_size, dim, num_blocks):
    """torch, in backward: root, the current block and the gathered next one, full gradients, reduce-scatter input.

    All of them padded, as on shapes this small the rows of padding count.
    """
    wide = 3 * dim + 1
    block = ((dim,), (dim,), (wide, dim), (wide,), (dim, wide), (dim,))
    root = ((7, dim), (1,), (7, dim))
    whole = {shapes: world_size * slots(world_size, shapes) * FP32 for shapes in (root, block)}
    largest = max(whole.values())
    next_one = whole[block] if num_blocks > 1 else 0
    staging = 2 * largest + next_one if world_size > 1 else 0  # alone torch needs no collective either
    peak = whole[root] + whole[block] + staging
    for reserved in run_ranks(world_size, reserved_after_steps, dim, num_blocks):
        assert whole[root] + whole[block] <= reserved <= peak


def test_alone_a_rank_reserves_the_slots_and_nothing_else():
    assert run_ranks(1, reserved_after_steps, 5, 4) == [(numel(ROOT_SHAPES) + numel(BLOCK_SHAPES)) * FP32]


def test_a_pool_counts_what_it_keeps_and_nobody_uses():
    with recording() as record:
        pool = BufferPool()
        first, second = pool.take(8, torch.float32, CPU), pool.take(2, torch.float32, CPU)
        assert record.reserved == 0
        pool.give_back(first)
        pool.give_back(second)
        assert record.reserved == 40
        small = pool.take(1, torch.float64, CPU)  # the smallest that fits
        assert record.reserved == 32
        large = pool.take(16, torch.float32, CPU)  # nothing fits: the largest makes room for it
        assert record.reserved == 0
        pool.give_back(large)
        pool.give_back(small)
        assert record.reserved == 72
        part = pool.take(3, torch.float32, CPU)
        assert record.reserved == 72 - 12
        pool.forget_taken()
        del part
        assert record.reserved == 8
        pool.release()
        assert record.reserved == 0


def test_a_pool_tells_a_probe_only_of_what_it_saw():
    pool = BufferPool()
    kept = pool.take(4, torch.float32, CPU)
    pool.give_back(kept)
    with recording() as record:
        again = pool.take(4, torch.float32, CPU)
        pool.give_back(again)
        assert record.reserved == 16
    del pool
    assert record.reserved == 16  # it has stopped listening


# ---- another order than the one that was learnt


def forward_deviates() -> list[object]:
    model = shard_net(make_net(**NET))
    losses = [step(model, 0) for _ in range(3)]
    assert sharing(model) == [[""], BLOCK_NAMES]
    for _ in range(2):
        model(batch(0, 0))  # a graph that is dropped: nobody refers to the memory any more
    handle = model.blocks[0].register_forward_pre_hook(lambda *_: model.blocks[2].unshard())
    losses.append(step(model, 0))
    at_once = sharing(model)
    handle.remove()
    losses += [step(model, 0) for _ in range(2)]
    assert len(set(losses)) == 1
    return [at_once, sharing(model)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_that_is_needed_beside_another_in_forward_gets_memory_of_its_own(world_size):
    at_once = [[""], ["blocks.0", "blocks.1", "blocks.3"], ["blocks.2"]]
    later = [[""], ["blocks.0"], ["blocks.1"], ["blocks.2", "blocks.3"]]
    for seen in run_ranks(world_size, forward_deviates):
        assert seen[0] == at_once
        together = {name: group for group in seen[1] for name in group}
        assert "blocks.2" not in together["blocks.0"]  # what overlapped once never shares again
        assert "blocks.2" not in together["blocks.1"]
        assert len(seen[1]) <= len(later)


def backward_deviates(ahead: int, needed: int) -> None:
    """In the backward of one block another is unsharded by hand, which no iteration did before."""
    model, twin = shard_net(make_net(**NET)), shard_net(make_net(**NET))
    for number in range(3):
        same_step(model, twin, number)
    assert sharing(model) == [[""], BLOCK_NAMES]
    with recording() as record:
        handle = model.blocks[needed].register_full_backward_pre_hook(lambda *_: model.blocks[ahead].unshard())
        for number in range(3, 6):
            same_step(model, twin, number)
        handle.remove()
        same_step(model, twin, 6)
        assert set(record.alive) <= {Category.SHARDED_PARAMS}
    groups = {name: group for group in sharing(model) for name in group}
    assert f"blocks.{needed}" not in groups[f"blocks.{ahead}"]


def same_step(model: nn.Module, twin: nn.Module, number: int) -> None:
    """Do a step of both: the same loss and gradients, bit by bit."""
    grads = []
    for m in (model, twin):
        loss = loss_of(m, batch(dist.get_rank(), number))
        loss.backward()
        grads.append([loss, *(p.grad.to_local() for p in m.parameters())])
        m.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("ahead", "needed"), [(0, 2), (1, 2), (3, 1)])
def test_a_unit_that_is_needed_beside_another_in_backward_finds_its_values_where_its_graph_points(
    world_size, ahead, needed
):
    run_ranks(world_size, backward_deviates, ahead, needed)


def all_by_hand(where: str) -> None:
    """All blocks are full at once, before forward, between, or within a backward: where one slot was enough before."""
    model, twin = shard_net(make_net(**NET)), shard_net(make_net(**NET))
    for number in range(3):
        same_step(model, twin, number)
    expected = loss_of(twin, batch(dist.get_rank(), 3))
    expected.backward()
    if where == "forward":
        unshard_all(model)
    loss = loss_of(model, batch(dist.get_rank(), 3))
    if where == "between":
        unshard_all(model)
    handle = model.head.register_full_backward_hook(lambda *_: unshard_all(model) if where == "backward" else None)
    loss.backward()
    handle.remove()
    assert torch.equal(loss, expected)
    assert_same_grads(model, twin)
    assert all(unit.is_sharded for unit in units(model))


def unshard_all(model: nn.Module) -> None:
    for block in model.blocks:
        full = [p.full_tensor() for p in block.parameters() if isinstance(p, DTensor)]
        block.unshard()
        assert all(torch.equal(p, v) for p, v in zip(block.parameters(), full, strict=bool(full)))


def assert_same_grads(model: nn.Module, twin: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    for m in (model, twin):
        m.zero_grad()


@pytest.mark.parametrize("where", ["forward", "between", "backward"])
def test_all_units_may_be_full_at_once_at_any_time(where):
    run_ranks(2, all_by_hand, where)


def retained() -> None:
    """A graph is kept while later iterations give its units other memory: its backward finds the values in the old."""
    model = shard_net(make_net(**NET))
    loss = loss_of(model, batch(0, 0))
    loss.backward(retain_graph=True)  # complete: the next forward shares
    grads = [p.grad.to_local().clone() for p in model.parameters()]
    model.zero_grad()
    for number in range(2):
        step(model, number)
    assert sharing(model) == [[""], BLOCK_NAMES]
    loss.backward()
    assert all(torch.equal(p.grad.to_local(), grad) for p, grad in zip(model.parameters(), grads, strict=True))
    model.zero_grad()
    step(model, 0)
    assert sharing(model) == [[""], BLOCK_NAMES]


def test_a_retained_graph_computes_where_it_was_recorded():
    run_ranks(2, retained)


def retained_and_settled() -> None:
    """Once memory is settled it stays: the same graph can run backward again, with the right numbers."""
    model = shard_net(make_net(**NET))
    for number in range(3):
        step(model, number)
    loss = loss_of(model, batch(0, 0))
    grads = []
    for _ in range(2):
        loss.backward(retain_graph=True)
        grads.append([p.grad.to_local().clone() for p in model.parameters()])
        model.zero_grad()
        step(model, 4)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_retained_graph_of_settled_memory_runs_backward_again():
    run_ranks(2, retained_and_settled)


def waiting_graph() -> None:
    """Two forwards before their backwards: memory is given to others only when both are done."""
    model, twin = shard_net(make_net(**NET)), shard_net(make_net(**NET))
    FSDPCommContext.settle, settle = lambda *_: None, FSDPCommContext.settle
    expected = [step(twin, number) for number in (0, 1, 2, 3)]
    FSDPCommContext.settle = settle
    assert step(model, 0) == expected[0]
    losses = [loss_of(model, batch(dist.get_rank(), number)) for number in (1, 2)]
    for loss, wanted in zip(reversed(losses), (expected[2], expected[1]), strict=True):
        model.set_is_last_backward(loss is losses[0])
        loss.backward()
        assert loss.item() == wanted
    model.zero_grad()
    assert step(model, 3) == expected[3]


def test_memory_stays_while_a_recorded_forward_refers_to_it():
    run_ranks(2, waiting_graph)


# ---- references, several models, the end


def kept_reference() -> None:
    model = shard_net(make_net(**NET))
    kept: list[torch.Tensor] = []
    for number in range(3):
        handle = model.blocks[0].mlp[0].register_forward_hook(lambda m, *_: kept.append(m.weight))
        step(model, number)
        handle.remove()
        assert kept[-1].shape == ()
        assert kept[-1].isnan()  # and not what lies in the memory now
    assert kept[0] is kept[2]
    model.blocks[0].unshard()
    assert kept[0].shape == (16, 5)
    assert torch.equal(kept[0], model.blocks[0].mlp[0].weight)
    model.blocks[0].reshard()
    assert kept[0].isnan()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_kept_full_parameter_reads_as_nan_after_reshard(world_size):
    run_ranks(world_size, kept_reference)


def two_models() -> None:
    with recording() as record:
        alone = shard_net(make_net(**NET))
        expected = [step(alone, number) for number in range(4)]
        of_one = record.reserved
        models = [shard_net(make_net(**NET)) for _ in range(2)]
        for number in range(4):
            for model in models:
                assert step(model, number) == expected[number]
        assert record.reserved == 3 * of_one
        storages = [{u._usual.memory.full.untyped_storage().data_ptr() for u in units(m)} for m in models]
        assert not storages[0] & storages[1]
        models[0].release_buffers()
        assert record.reserved == 2 * of_one


def test_two_models_have_memory_of_their_own():
    run_ranks(2, two_models)


def deleted(how: str) -> tuple[dict[Category, int], int]:
    """Return bytes that are left of a model, at once or after the garbage collector."""
    gc.disable()
    with recording() as record:
        model = shard_net(make_net(**NET))
        for number in range(3):
            step(model, number)
        if how == "undone":
            unshard_module(model)
        else:
            del model
            gc.collect()
        eventually(lambda: not record.alive)
        return record.alive, record.reserved


@pytest.mark.parametrize("how", ["undone", "deleted"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_is_left_of_a_model(world_size, how):
    """An undone one goes at once; a deleted one with the collector: hooks and modules refer to each other."""
    assert run_ranks(world_size, deleted, how) == [({}, 0)] * world_size


def interrupted() -> None:
    """What an iteration that raised had taken from the pools is not counted for ever."""
    with recording() as record:
        model = shard_net(make_net(**NET))
        for number in range(3):
            step(model, number)
        usual = record.reserved
        for _ in range(3):
            fail_in_the_middle(model)
            assert record.alive == {Category.SHARDED_PARAMS: record.live[Category.SHARDED_PARAMS]}
        assert record.reserved == allocated(model)
        for number in range(3):
            step(model, number)
        assert record.reserved == usual == allocated(model)


def fail_in_the_middle(model: nn.Module) -> None:
    def fail(*_):
        raise LookupError("by the user")

    handle = model.blocks[1].register_full_backward_pre_hook(fail)
    with pytest.raises(LookupError):
        step(model, 0)
    handle.remove()
    dist.barrier()
    model.reset_iter_state()
    model.zero_grad()


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_iteration_that_raised_leaves_no_reserved_bytes_behind(world_size):
    run_ranks(world_size, interrupted)


@on_one_rank
def test_a_model_in_parts_of_one_size_needs_one_slot():
    model = shard_each(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3))))
    with recording() as record:
        for number in range(3):
            model(data(number)).sum().backward()
        assert record.reserved == (DIM * DIM + DIM) * FP32
    assert isinstance(record, Recording)
