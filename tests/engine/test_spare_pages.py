"""Pages of full parameters that one unit passes to the next: the number kept, and deviations from the learnt order."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.expected_sizes import BLOCK_SHAPES, FP32, slots
from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.recording_probe import Recording, recording
from tests.helpers.small_models import adamw, batch, loss_of, make_net
from tests.helpers.unsharded_copy import DIM, Outer, UsesInner, data, shard_each
from tests.helpers.waiting import eventually
from workbench.engine import MixedPrecisionPolicy, fully_shard, unshard_module
from workbench.engine.backends import backend_of, page_pool
from workbench.engine.fsdp_state import states_below, units_of
from workbench.engine.param_group import FSDPParamGroup
from workbench.events import Category, Edge, Kind

NUM_BLOCKS = 4
NET = {"num_blocks": NUM_BLOCKS}
TAKEN = (Category.UNSHARDED_PARAMS, Category.ALL_GATHER_BUFFERS, Category.REDUCE_SCATTER_BUFFERS, Category.RESERVED)


def units(model: nn.Module) -> list[FSDPParamGroup]:
    return units_of(states_below(model))


def named(model: nn.Module) -> dict[str, FSDPParamGroup]:
    return {unit.name: unit for unit in units(model)}


def step(model: nn.Module, number: int) -> float:
    loss = loss_of(model, batch(dist.get_rank(), number))
    loss.backward()
    model.zero_grad()
    return loss.item()


# ---- how many


def kept_in_steps(build: str) -> set[tuple[int, int]]:
    """Return the bytes of spare pages between forward and backward, and between steps."""
    found = set()
    with recording() as record:
        model = BUILDERS[build]()
        for number in range(3):
            inputs = data(number) if build == "nested" else batch(dist.get_rank(), number)
            loss = model(inputs).square().mean()
            in_forward = record.reserved
            loss.backward()
            found.add((in_forward, record.reserved))
    return found


def neighbours_at_once() -> nn.Module:
    """Each block unshards the next one before it runs."""
    model = shard_net(make_net(**NET))
    for block, following in zip(model.blocks, model.blocks[1:], strict=False):
        block.register_forward_pre_hook(lambda *_, ahead=following: ahead.unshard())
    return model


def nested() -> nn.Module:
    model = Outer()
    for middle in model.middle:
        fully_shard(middle.inner)
        fully_shard(middle)
    fully_shard(model)
    return model


BUILDERS = {
    "usual": lambda: shard_net(make_net(**NET)),
    "kept": lambda: shard_net(make_net(**NET), reshard_after_forward=False),
    "neighbours": neighbours_at_once,
    "nested": nested,
}


@pytest.mark.parametrize(
    ("build", "world_size", "num_blocks"),
    [("usual", 1, 1), ("usual", 2, 1), ("usual", 4, 1), ("neighbours", 2, 2), ("kept", 2, 0)],
)
def test_pages_are_kept_for_the_peak_number_of_unsharded_blocks(build, world_size, num_blocks):
    kept = world_size * num_blocks * slots(world_size, BLOCK_SHAPES) * FP32
    assert run_ranks(world_size, kept_in_steps, build) == [{(kept, 0)}] * world_size


def test_a_nested_unit_needs_its_own_pages():
    kept = 2 * slots_of(UsesInner()) * FP32  # only one of the two middle units at a time
    assert run_ranks(2, kept_in_steps, "nested") == [{(kept, 0)}] * 2


def slots_of(module: nn.Module) -> int:
    return slots(2, tuple(tuple(p.shape) for p in module.parameters()))


# ---- numbers


def with_and_without() -> None:
    runs = []
    for moves in (True, False):
        if not moves:
            page_pool._can_move = lambda: False  # only in this process, which ends with the test
        model = shard_net(make_net(**NET))
        optimizer = adamw(model.parameters())
        losses = []
        for number in range(5):
            loss = loss_of(model, batch(dist.get_rank(), number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, [p.to_local().clone() for p in model.parameters()]))
    (losses, values), (others, other_values) = runs
    assert losses == others
    assert all(torch.equal(a, b) for a, b in zip(values, other_values, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_where_pages_cannot_be_moved_fresh_ones_give_the_same_bits(world_size):
    run_ranks(world_size, with_and_without)


# ---- what is reserved


def allocated(model: nn.Module) -> int:
    """Return the bytes of full parameters' pages, used or spare, and of communication buffers."""
    ctx = model._get_fsdp_state()._comm_ctx
    full = [m._memory._kept for m in (unit.buffers.current.memory for unit in units(model)) if m.is_held]
    free = (*ctx.pages._free, *backend_of(torch.device("cpu"))._buffers._spare._free)
    flying = [unit._all_gather for unit in units(model) if unit._all_gather is not None]
    casts = [g.own for g in flying if g.own.dtype is torch.bfloat16]
    scatters = ctx.reductions._scattering
    received = [s.pending._work._received for s in scatters]
    to_cast = [s.output for s in scatters if s.output.dtype is torch.bfloat16]
    buffers = (*(g.output for g in flying), *casts, *(s.chunks for s in scatters), *received, *to_cast)
    return sum(kept.num_bytes for kept in (*free, *full)) + sum(tensor.untyped_storage().nbytes() for tensor in buffers)


def sums(policy: MixedPrecisionPolicy) -> list[tuple[str, int, int]]:
    """Return the events at which the categories do not add up to the allocated bytes."""
    wrong, counted = [], 0
    with recording() as record:
        model = shard_net(make_net(**NET), mp_policy=policy)
        step(model, 0)

        def event(kind, edge, unit, *_):
            nonlocal counted
            if (kind, edge) in {(Kind.FORWARD, Edge.BEGIN), (Kind.FORWARD, Edge.END), (Kind.BACKWARD, Edge.BEGIN)}:
                counted += 1
                reported = sum(record.live[category] for category in TAKEN)
                if reported != allocated(model):
                    wrong.append((f"{kind.name} {edge.name} {record.name(unit)}", reported, allocated(model)))

        record.event = event
        for number in range(1, 4):
            step(model, number)
            assert record.reserved == allocated(model) == 0  # between steps
        loss = loss_of(model, batch(dist.get_rank(), 4))
        model.release_buffers()
        assert record.reserved == 0
        loss.backward()
    assert counted == 4 * 3 * (1 + NUM_BLOCKS)
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)], ids=["fp32", "bf16"]
)
def test_the_classes_add_up_to_what_is_allocated_at_every_moment(world_size, policy):
    assert run_ranks(world_size, sums, policy) == [[]] * world_size


# ---- deviations from the learnt order


def forward_deviates() -> None:
    """One block's forward unshards another block, for the first time."""
    model, twin = shard_net(make_net(**NET)), shard_net(make_net(**NET))
    for number in range(3):
        same_step(model, twin, number)
    for _ in range(2):
        model(batch(0, 0))  # its graph is dropped
    handle = model.blocks[0].register_forward_pre_hook(lambda *_: model.blocks[2].unshard())
    same_step(model, twin, 3)
    handle.remove()
    for number in range(2):
        same_step(model, twin, number)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_overlapping_unit_in_forward_changes_no_bit(world_size):
    run_ranks(world_size, forward_deviates)


def backward_deviates(ahead: int, needed: int) -> None:
    """One block's backward unshards another block, for the first time."""
    model, twin = shard_net(make_net(**NET)), shard_net(make_net(**NET))
    for number in range(3):
        same_step(model, twin, number)
    with recording() as record:
        handle = model.blocks[needed].register_full_backward_pre_hook(lambda *_: model.blocks[ahead].unshard())
        for number in range(3, 6):
            same_step(model, twin, number)
        handle.remove()
        same_step(model, twin, 6)
        assert set(record.alive) <= {Category.SHARDED_PARAMS}


def same_step(model: nn.Module, twin: nn.Module, number: int) -> None:
    """Run a step of both models and compare loss and gradients bit by bit."""
    grads = []
    for m in (model, twin):
        loss = loss_of(m, batch(dist.get_rank(), number))
        loss.backward()
        grads.append([loss, *(p.grad.to_local() for p in m.parameters())])
        m.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("ahead", "needed"), [(0, 2), (1, 2), (3, 1)])
def test_an_overlapping_unit_in_backward_finds_its_values(world_size, ahead, needed):
    run_ranks(world_size, backward_deviates, ahead, needed)


def all_by_hand(where: str) -> None:
    """Unshard all blocks before forward, between the passes, or in backward, when spare pages suffice for one."""
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
    """Keep a graph over later iterations and run it repeatedly: its backward must find its values in place."""
    model = shard_net(make_net(**NET))
    loss = loss_of(model, batch(0, 0))
    grads = []
    for number in range(3):
        loss.backward(retain_graph=True)
        grads.append([p.grad.to_local().clone() for p in model.parameters()])
        model.zero_grad()
        step(model, number)
    assert all(torch.equal(a, b) for later in grads[1:] for a, b in zip(grads[0], later, strict=True))


def test_a_retained_graph_runs_backward_again():
    run_ranks(2, retained)


def waiting_graph() -> None:
    """Run two forwards, then their backwards in reverse order."""
    model, twin = shard_net(make_net(**NET)), shard_net(make_net(**NET))
    expected = [step(twin, number) for number in (0, 1, 2, 3)]
    assert step(model, 0) == expected[0]
    losses = [loss_of(model, batch(dist.get_rank(), number)) for number in (1, 2)]
    for loss, wanted in zip(reversed(losses), (expected[2], expected[1]), strict=True):
        model.set_is_last_backward(loss is losses[0])
        loss.backward()
        assert loss.item() == wanted
    model.zero_grad()
    assert step(model, 3) == expected[3]


def test_two_forwards_may_wait_for_their_backwards():
    run_ranks(2, waiting_graph)


# ---- references, several models, deletion


def kept_reference() -> None:
    model = shard_net(make_net(**NET))
    kept: list[torch.Tensor] = []
    for number in range(3):
        handle = model.blocks[0].mlp[0].register_forward_hook(lambda m, *_: kept.append(m.weight))
        step(model, number)
        handle.remove()
        assert kept[-1].shape == ()
        assert kept[-1].isnan()  # not the memory's current content
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
        models = [shard_net(make_net(**NET)) for _ in range(2)]
        for number in range(4):
            for model in models:
                assert step(model, number) == expected[number]
        losses = [loss_of(model, batch(dist.get_rank(), 4)) for model in (alone, *models)]
        of_all = record.reserved
        losses[0].backward()
        assert record.reserved == of_all * 2 // 3 > 0
        models[0].release_buffers()
        assert record.reserved == of_all // 3


def test_two_models_keep_their_own_pages():
    run_ranks(2, two_models)


def deleted(how: str) -> tuple[dict[Category, int], int]:
    """Return the bytes that remain of a model, recorded at once or after a collection."""
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
    """Undoing frees at once; deletion needs the collector, because hooks and modules refer to each other."""
    assert run_ranks(world_size, deleted, how) == [({}, 0)] * world_size


def interrupted() -> None:
    """Pool memory of an iteration that raised does not stay counted."""
    with recording() as record:
        model = shard_net(make_net(**NET))
        for number in range(3):
            step(model, number)
        for _ in range(3):
            fail_in_the_middle(model)
            assert record.alive == {Category.SHARDED_PARAMS: record.live[Category.SHARDED_PARAMS]}
        for number in range(3):
            step(model, number)
        assert record.reserved == allocated(model) == 0


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
def test_a_model_in_parts_of_one_size_keeps_the_pages_of_one():
    model = shard_each(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3))))
    with recording() as record:
        for number in range(3):
            loss = model(data(number)).sum()
            assert record.reserved == (DIM * DIM + DIM) * FP32
            loss.backward()
    assert isinstance(record, Recording)
