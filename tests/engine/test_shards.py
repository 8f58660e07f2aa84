"""Which rank holds which rows: laws over shapes and world sizes, on ranks simulated in turn."""

import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.helpers.forked_ranks import run_ranks, simulated_rank, simulating
from workbench.engine import fully_shard, reduction, unit_collectives
from workbench.engine.backends.cpu import Cpu
from workbench.engine.flat_shard import in_flat_order
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.shard_layout import ShardLayout, rows_of
from workbench.engine.unit_collectives import UnitId

UNIT = UnitId(0, "unit")

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)
UNITS = st.lists(SHAPES, min_size=1, max_size=4)
WORLD_SIZES = st.integers(1, 8)


def numbered(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return tensors of these shapes that hold 1, 2, 3 ..., all different."""
    ends = torch.tensor([0, *(math.prod(shape) for shape in shapes)]).cumsum(0).tolist()
    return [torch.arange(a + 1.0, b + 1.0).view(shape) for a, b, shape in zip(ends, ends[1:], shapes, strict=False)]


@contextmanager
def kernels(fused: bool):
    """Copy with a device's kernels for many pieces at once, or with one copy each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cpu, "fuses_copies", fused)
        yield


def unit_of(tensors: list[torch.Tensor]) -> FSDPParamGroup:
    module = nn.Module()
    for i, tensor in enumerate(tensors):
        module.register_parameter(f"p{i}", nn.Parameter(tensor.clone()))
    return fully_shard(module)._get_fsdp_state()._fsdp_param_group


def units_of_all_ranks(tensors: list[torch.Tensor], world_size: int) -> list[FSDPParamGroup]:
    units = []
    for rank in range(world_size):
        with simulated_rank(rank, world_size):
            units.append(unit_of(tensors))
    return units


@simulating
@settings(max_examples=60, deadline=None)
@given(SHAPES, WORLD_SIZES)
def test_shards_are_torch_chunks_rows(shape, world_size):
    (full,) = numbered([shape])
    padded_rows = math.ceil(shape[0] / world_size)
    chunks = list(full.chunk(world_size)) + [full[:0]] * world_size
    locals_ = []
    for rank in range(world_size):
        with simulated_rank(rank, world_size):
            (param,) = unit_of([full]).fsdp_params
            sharded = param.sharded_param
            assert isinstance(sharded, DTensor)
            assert (sharded.shape, sharded.stride(), sharded.placements) == (full.shape, full.stride(), (Shard(0),))
            first, last = param.layout.rows_of(rank)
            assert torch.equal(sharded.to_local(), full[first:last])
            assert (param.layout.padded_rows, param.slot_numel) == (padded_rows, padded_rows * math.prod(shape[1:]))
            assert param.layout.is_even == (shape[0] % world_size == 0)
            locals_.append(sharded.to_local().detach())
    assert all(torch.equal(local, chunk) for local, chunk in zip(locals_, chunks, strict=False))
    assert torch.equal(torch.cat(locals_), full)


def in_flat_order_of(unit: FSDPParamGroup, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[int(param.fqn.removeprefix("p"))] for param in unit.fsdp_params]


@simulating
@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=2).map(tuple), min_size=1, max_size=6), WORLD_SIZES)
def test_every_parameter_is_aligned_as_its_own_size_is(shapes, world_size):
    for unit in units_of_all_ranks(numbered(shapes), world_size):
        slots = sum(p.slot_numel for p in unit.fsdp_params)
        assert unit.shards.flat.numel() == unit.shards.numel == slots  # no padding beyond the slots
        padded_fulls = unit.buffers.usual.padded_fulls
        for param, slot, full in zip(unit.fsdp_params, unit.shards._slots(), padded_fulls, strict=True):
            aligned = min(math.gcd(param.slot_numel, 32) * 4, 64)  # bytes; torch allocates at multiples of 64
            assert not param.slot_numel or slot.data_ptr() % aligned == 0
            assert full.storage_offset() * 4 % aligned == 0
        assert [p.fqn for p in unit.describe().params] == [f"p{i}" for i in range(len(shapes))]


def test_slots_of_odd_sizes_are_last():
    sizes = [1, 96, 6, 64, 3]
    assert in_flat_order(sizes) == [1, 3, 2, 4, 0]
    assert in_flat_order([]) == []


def with_a_scale_in_front() -> None:
    """A one-element parameter defined first does not misalign the others."""
    module = nn.Module()
    for name, shape in {"scale": (1,), "weight": (64, 32), "bias": (64,), "odd": (3, 5)}.items():
        module.register_parameter(name, nn.Parameter(torch.ones(shape)))
    module.forward = lambda x: sum((p * x).sum() for p in module.parameters())
    fully_shard(module)
    for _ in range(3):  # in its own memory, then in a slot
        module(torch.ones(1)).backward()
    module.unshard()
    full = [p.data_ptr() for p in (module.weight, module.bias, module.odd)]
    module.reshard()
    wide = (module.weight, module.bias)
    shards = [p.to_local().data_ptr() for p in wide] + [p.grad.to_local().data_ptr() for p in wide]
    assert [address % 16 for address in (*full, *shards)] == [0] * 7
    assert module.scale.grad.full_tensor().item() == 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_of_one_element_leaves_the_others_aligned(world_size):
    run_ranks(world_size, with_a_scale_in_front)


@simulating
@settings(max_examples=60, deadline=None)
@given(UNITS, WORLD_SIZES, st.booleans(), st.integers(1, 3))
def test_gathering_the_flat_shards_gives_the_parameters(shapes, world_size, fused, num_parts):
    tensors = numbered(shapes)
    units = units_of_all_ranks(tensors, world_size)
    assert [u.shards.flat.numel() for u in units] == [units[0].shards.numel] * world_size
    gathered = torch.stack([u.shards.flat for u in units])
    assert gathered.count_nonzero() == sum(map(math.prod, shapes))  # the padding is zero
    params = units[0].fsdp_params
    fulls = [torch.full((p.slot_numel * world_size,), math.nan) for p in params]
    targets = [p.layout.by_rank(full) for p, full in zip(params, fulls, strict=True)]
    sizes = [len(part) for part in torch.arange(world_size).tensor_split(num_parts) if len(part)]
    with kernels(fused):
        unit_collectives.foreach_all_gather_copy_out(gathered.split(sizes), rows_of(targets, sizes), UNIT)
    for full, tensor in zip(fulls, in_flat_order_of(units[0], tensors), strict=True):
        assert torch.equal(full[: tensor.numel()].view(tensor.shape), tensor)
        assert not full[tensor.numel() :].any()


@simulating
@settings(max_examples=60, deadline=None)
@given(UNITS, WORLD_SIZES, st.booleans())
def test_a_reductions_input_holds_for_each_rank_what_it_owns(shapes, world_size, fused):
    tensors = numbered(shapes)
    units = units_of_all_ranks(tensors, world_size)
    chunks = torch.full((world_size, units[0].shards.numel), math.nan)
    with kernels(fused):
        grads = [[tensor] for tensor in in_flat_order_of(units[0], tensors)]
        reduction.lay_out(units[0].fsdp_params, grads, [chunks], UNIT)
    assert torch.equal(chunks, torch.stack([u.shards.flat for u in units]))


@simulating
@settings(max_examples=30, deadline=None)
@given(UNITS)
def test_bytes_of_a_unit(shapes):
    world_size = 3
    unit = units_of_all_ranks(numbered(shapes), world_size)[1]
    rows = [math.ceil(shape[0] / world_size) for shape in shapes]
    assert unit.shards.flat.nbytes == 4 * sum(c * math.prod(s[1:]) for c, s in zip(rows, shapes, strict=True))
    info = unit.describe()
    assert [p.padded_rows for p in info.params] == rows
    assert [sum(p.rows_per_rank) for p in info.params] == [shape[0] for shape in shapes]
    assert all(0 <= r <= p.padded_rows for p in info.params for r in p.rows_per_rank)


@given(st.tuples(st.integers(0, 99), st.integers(0, 9)), st.integers(1, 99), st.integers(1, 99))
def test_more_ranks_never_raise_what_a_rank_owns(shape, num_ranks, more):
    layout, on_more = (ShardLayout(torch.Size(shape), 0, count) for count in (num_ranks, num_ranks + more))
    assert on_more.slot_numel <= layout.slot_numel
    padding = num_ranks * layout.slot_numel - layout.numel  # it is gathered too, and rises
    assert 0 <= padding <= (num_ranks - 1) * layout.row_numel


@pytest.mark.parametrize(
    ("rows", "first_rank", "num_pairs"), [(9, 0, 2), (9, 3, 2), (9, 4, 1), (7, 3, 1), (3, 0, 1), (3, 2, 1), (3, 5, 0)]
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_uneven_rows_are_laid_out_in_two_copies(rows, first_rank, num_pairs, is_transposed):
    full = torch.arange(rows * 4.0).view(4, rows).T if is_transposed else torch.arange(rows * 4.0).view(rows, 4)
    layout = ShardLayout(full.shape, 0, 7)
    slots = torch.full((7 - first_rank, layout.slot_numel), math.nan)
    pairs = list(layout.copy_in_pairs(full, slots, first_rank))
    assert len(pairs) == num_pairs
    for target, source in pairs:
        target.copy_(source)
    padded = torch.zeros(7 * layout.padded_rows, 4)
    padded[:rows] = full
    assert torch.equal(slots, padded.view(7, -1)[first_rank:])


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("first_rank", [0, 1])
def test_rows_of_any_dim_are_laid_out_for_some_ranks_and_come_back(dim, first_rank):
    full = torch.arange(6 * 9 * 3.0).view(6, 9, 3)
    layout = ShardLayout(full.shape, dim, 3)
    assert (layout.is_even, layout.row_numel, layout.slot_numel) == (True, full.numel() // full.shape[dim], 54)
    slots = torch.full((2, layout.slot_numel), math.nan)
    for target, source in layout.copy_in_pairs(full, slots, first_rank):
        target.copy_(source)
    gathered = torch.full((full.numel() + 1,), math.nan)
    for rank, slot in enumerate(slots, first_rank):
        shard = layout.shard_of(full, rank)
        assert torch.equal(layout.local_view(slot, rank), shard)
        assert layout.local_shape(rank) == tuple(shard.shape)
        part = layout.by_rank(gathered)[rank]
        part.copy_(slot.view(part.shape))
    for rank in range(first_rank, first_rank + 2):
        assert torch.equal(layout.shard_of(layout.full_view(gathered), rank), layout.shard_of(full, rank))


def empty_parameters(shapes: list[tuple[int, ...]]) -> list[float]:
    """Train a module that has parameters without elements."""
    module = nn.Module()
    for i, shape in enumerate(shapes):
        module.register_parameter(f"p{i}", nn.Parameter(torch.ones(shape)))
    module.forward = lambda x: x * sum(p.sum() for p in module.parameters())
    fully_shard(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(2):
        module(torch.ones(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().sum().item() for p in module.parameters()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_without_elements_train(world_size):
    assert run_ranks(world_size, empty_parameters, [(0, 5), (3, 0), (2,)])[0] == [0, 0, 0]  # 2 - 2 * 0.5 * 2
    for shape in [(0, 5), (3, 0)]:
        assert run_ranks(world_size, empty_parameters, [shape]) == [[0]] * world_size
