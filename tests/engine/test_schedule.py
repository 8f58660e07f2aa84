"""When parameters are unsharded, and how: smaller meshes, handles, custom collectives, pooled buffers."""

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.both_engines import (
    double_net,
    in_order,
    one_batch,
    shard_net_with,
    train_all,
    units_below,
)
from tests.helpers.expected_sizes import BLOCK_SHAPES, FP32, NET, ROOT_SHAPES, UNITS, slots
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, average_grads
from tests.helpers.recording_probe import ROOT, Recording, recording
from tests.helpers.small_models import Net, batch, loss_of, make_net
from tests.helpers.unsharded_copy import DIM
from workbench import engine
from workbench.events import Category, Edge, Kind

# ---- a smaller mesh after forward


def on_pairs(api: ModuleType, model: nn.Module) -> nn.Module:
    """After forward each pair of ranks holds one copy of the parameters, including the root's."""
    return shard_net_with(api, model, reshard_after_forward=2)


def trained_on_pairs() -> tuple[dict[str, int], set[tuple[int, ...]], set[tuple[int, ...]]]:
    """Return the last step's all-gathers, and their ranks in forward and in backward."""
    record = train_all(double_net, on_pairs)
    gathers = [row for row in record.rows if row[:2] == (Kind.ALL_GATHER, Edge.BEGIN)]
    seen: dict[bool, set[tuple[int, ...]]] = {False: set(), True: set()}
    met: set[int] = set()
    for _, _, unit, _, comm, _ in gathers:
        seen[unit in met].add(record.groups[comm.group])
        met.add(unit)
    return dict(record.count(Kind.ALL_GATHER)), seen[False], seen[True]


def test_backward_gathers_within_the_smaller_mesh():
    for rank, (gathers, forward, backward) in enumerate(run_ranks(4, trained_on_pairs)):
        pair = rank // 2 * 2
        assert gathers == dict.fromkeys(UNITS, 2)
        assert forward == {(0, 1, 2, 3)}
        assert backward == {(pair, pair + 1)}


def registered_after_forward() -> set[tuple[int, ...]]:
    model = on_pairs(engine, make_net(dim=8, num_blocks=1, vocab=8))
    full = {name: p.full_tensor() for name, p in model.named_parameters()}
    loss = loss_of(model, batch(dist.get_rank(), 0))
    shapes = set()
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor), name
        assert p.shape == full[name].shape
        shapes.add(p.device_mesh.shape)
        if p.shape[0] % 4 == 0:
            assert p.to_local().shape[0] == p.shape[0] // 2
            assert torch.equal(p.full_tensor(), full[name])
    loss.backward()
    assert all(p.device_mesh.shape == (4,) for p in model.parameters())
    assert all(p.grad.device_mesh.shape == (4,) for p in model.parameters())
    return {shape[-1:] for shape in shapes}


def test_after_forward_the_registered_parameters_are_on_the_smaller_mesh():
    assert run_ranks(4, registered_after_forward) == [{(2,)}] * 4


def state_between_forward_and_backward() -> set[tuple[int, ...]]:
    model = on_pairs(engine, make_net(**NET))
    full = [p.full_tensor() for p in model.parameters()]
    loss = loss_of(model, batch(dist.get_rank(), 0))
    state = model.state_dict()
    assert all(torch.equal(v.full_tensor(), p) for v, p in zip(state.values(), full, strict=True))
    loss.backward()
    return {v.device_mesh.shape for v in state.values()}


def test_a_state_dict_between_forward_and_backward_is_of_the_whole_mesh():
    assert run_ranks(4, state_between_forward_and_backward) == [{(4,)}] * 4


def refused_sizes(size: object) -> str:
    model = nn.Linear(4, 4)
    with pytest.raises((TypeError, ValueError), match="reshard_after_forward") as caught:
        engine.fully_shard(model, reshard_after_forward=size)
    assert type(model) is nn.Linear
    return str(caught.value)


@pytest.mark.parametrize("size", [3, 0, -2, 5, 2.0, "2"])
def test_sizes_that_do_not_divide_the_ranks_are_refused(size):
    messages = run_ranks(4, refused_sizes, size)
    assert all(str(size) in message for message in messages)


def gathers_with_size(size: int) -> dict[str, int]:
    record = train_all(double_net, lambda api, model: shard_net_with(api, model, reshard_after_forward=size), steps=2)
    return dict(record.count(Kind.ALL_GATHER))


@pytest.mark.parametrize(("size", "gathers"), [(1, 1), (2, 2)])
def test_sizes_of_one_and_of_all_ranks_mean_false_and_true(size, gathers):
    assert run_ranks(2, gathers_with_size, size) == [dict.fromkeys(UNITS, gathers)] * 2


def one_step_on_pairs() -> Recording:
    with recording() as record:
        one_batch(on_pairs(engine, make_net(**NET)), 0)
    return record


def test_the_events_of_a_step_on_a_smaller_mesh_are_in_order():
    record = run_ranks(4, one_step_on_pairs)[0]
    for unit in UNITS:
        assert in_order(record.events, f"FORWARD END {unit}", f"RESHARD INSTANT {unit}", f"BACKWARD BEGIN {unit}")


# ---- parameters that backward does not need


def shard_embedding_apart(api: ModuleType, model: Net) -> None:
    """Make the embedding a separate unit, whose backward needs no weight."""
    api.fully_shard(model.embed).set_unshard_in_backward(False)
    shard_net_with(api, model)


def not_unsharded_in_backward() -> dict[str, int]:
    record = train_all(double_net, shard_embedding_apart)
    return dict(record.count(Kind.ALL_GATHER))


def test_a_unit_can_stay_sharded_in_backward():
    gathers = {"embed": 1, ROOT: 1} | dict.fromkeys(UNITS[1:], 2)
    assert run_ranks(2, not_unsharded_in_backward) == [gathers] * 2


# ---- handles


def started_ahead(model: nn.Module, step: int) -> None:
    """Start all units' all-gathers before the forward; wait for half of the handles."""
    handles = [unit.unshard(async_op=True) for unit in units_below(model)]
    for handle in handles[::2]:
        handle.wait()
        handle.wait()
    one_batch(model, step)


def with_handles() -> tuple[dict[str, int], bool]:
    record = train_all(double_net, shard_net_with, started_ahead)
    begun = [event for event in record.events if event.startswith(("ALL_GATHER BEGIN", "FORWARD BEGIN"))]
    return dict(record.count(Kind.ALL_GATHER)), begun.index("FORWARD BEGIN root") == len(UNITS)


def test_all_gathers_started_by_hand_are_used_by_the_forward():
    assert run_ranks(2, with_handles) == [(dict.fromkeys(UNITS, 2) | {ROOT: 1}, True)] * 2


# ---- custom collectives, written for torch's interface


class Allocates:
    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.called: list[tuple[int, int]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append(torch.Size(size).numel())
        return torch.empty(size, dtype=dtype, device=device)


class OwnAllGather(Allocates):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.called.append((output_tensor.numel(), input_tensor.numel()))
        return dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group=group, async_op=async_op)


class OwnReduceScatter(Allocates):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.called.append((output_tensor.numel(), input_tensor.numel()))
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class SyncAllGather(OwnAllGather):
    """Completes before it returns."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        super().__call__(output_tensor, input_tensor, group)


class SyncReduceScatter(OwnReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        super().__call__(output_tensor, input_tensor, group, op)


def with_own_collectives(pair: tuple[type[Allocates], type[Allocates]]) -> tuple[list, list, list, list, set[str]]:
    used: dict[ModuleType, tuple[Allocates, Allocates]] = {}

    def shard(api: ModuleType, model: nn.Module) -> None:
        used[api] = gather, reduce = tuple(cls() for cls in pair)
        for unit in units_below(shard_net_with(api, model)):
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(reduce)

    record = train_all(double_net, shard, steps=2)
    gather, reduce = used[engine]
    comms = {u.comm for u in record.units.values() if u.comm != ""}
    return gather.allocated, gather.called, reduce.allocated, reduce.called, comms


@pytest.mark.parametrize("pair", [(SyncAllGather, SyncReduceScatter), (OwnAllGather, OwnReduceScatter)])
def test_collectives_of_ones_own(pair):
    root, block = slots(2, ROOT_SHAPES), slots(2, BLOCK_SHAPES)
    for allocated, gathered, inputs, reduced, comms in run_ranks(2, with_own_collectives, pair):
        assert sorted(gathered) == sorted([(2 * root, root), *[(2 * block, block)] * 4] * 2)
        assert sorted(reduced) == sorted([(root, 2 * root), *[(block, 2 * block)] * 2] * 2)
        assert set(allocated) == {2 * root, 2 * block}
        assert {2 * root, 2 * block} <= set(inputs)
        assert comms == {"custom"}


def allocate_from_the_group(api: ModuleType, model: nn.Module) -> None:
    for number, unit in enumerate(units_below(shard_net_with(api, model))):
        unit.set_allocate_memory_from_process_group_for_comm(True)
        unit.set_allocate_memory_from_process_group_for_comm(number != 1)


def with_memory_of_the_group() -> set[str]:
    record = train_all(double_net, allocate_from_the_group, steps=2)
    return {unit.comm for unit in record.units.values()} - {""}


def test_a_backend_without_an_allocator_works_as_before():
    assert run_ranks(2, with_memory_of_the_group) == [{"gloo"}] * 2


# ---- pooled buffers


def released() -> tuple[list[int], int]:
    """Return the pools' bytes after each of four forwards, and after their release in the second step."""
    with recording() as record:
        plain, model = make_net(**NET), shard_net_with(engine, make_net(**NET))
        reserved, after_release = [], 0
        for step in range(4):
            plain.zero_grad()
            model.zero_grad()
            one_batch(plain, step)
            loss = loss_of(model, batch(dist.get_rank(), step))
            reserved.append(record.live[Category.RESERVED])
            if step == 1:
                model.release_buffers()
                after_release = record.live[Category.RESERVED]
            loss.backward()
            average_grads(plain)
            assert_same_shards(model, plain)
    return reserved, after_release


def test_released_buffers_are_not_reserved_and_are_allocated_again_on_demand():
    for reserved, after_release in run_ranks(2, released):
        assert min(reserved) > 0
        assert after_release == 0
        assert reserved[3] == reserved[1]


def released_while_in_use(steps_before: int) -> None:
    plain, model = make_net(**NET), shard_net_with(engine, make_net(**NET))
    with recording() as record:
        for step in range(steps_before):
            one_batch(model, step)
            model.zero_grad()
        loss = loss_of(model, batch(dist.get_rank(), 9))
        model.release_buffers()  # the root's parameters are in use, and a graph refers to the blocks'
        assert record.live[Category.UNSHARDED_PARAMS] == 2 * slots(2, ROOT_SHAPES) * FP32
        loss.backward()
    one_batch(plain, 9)
    average_grads(plain)
    assert_same_shards(model, plain)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_buffers_in_use_are_kept(steps_before):
    run_ranks(2, released_while_in_use, steps_before)


def stale() -> bool:
    model = shard_net_with(engine, make_net(num_blocks=4))
    for step in range(2):
        one_batch(model, step)  # from the second step on blocks share memory
    first, *others = model.blocks
    first.unshard()
    kept = first.mlp[0].weight
    assert torch.isfinite(kept @ torch.ones(DIM)).all()
    first.reshard()
    for block in others:
        block.unshard()
    with pytest.raises(RuntimeError):
        kept @ torch.ones(DIM)
    return bool(kept.isnan())


def test_a_full_parameter_kept_beyond_its_time_holds_nan_rather_than_anothers_values():
    assert run_ranks(2, stale) == [True, True]


def backward_after_a_reshard_by_hand() -> str:
    """A backward through resharded parameters must fail if their unit has no hook in the graph."""
    model = shard_net_with(engine, make_net(num_blocks=4))
    for step in range(2):
        one_batch(model, step)
    first, *others = model.blocks
    first.unshard()
    out = torch.nn.functional.linear(torch.ones(1, DIM, requires_grad=True), first.mlp[0].weight)
    first.reshard()
    for block in others:
        block.unshard()
    with pytest.raises(RuntimeError) as caught:
        out.sum().backward()
    return str(caught.value)


def test_a_backward_through_freed_parameters_is_an_error():
    assert all("version" in message for message in run_ranks(2, backward_after_a_reshard_by_hand))
