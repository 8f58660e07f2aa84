from __future__ import annotations

from dataclasses import replace
from math import ceil, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import Setup, example_trace, setups, simulate
from workbench.events import Category, FlatPart, Param, Unit
from workbench.replay import shards as replay_shards
from workbench.replay.shards import AtRest, alike, at_rest, pieces, shards, totals, unit_shards
from workbench.trace.keyframe import advance
from workbench.trace.schema import Header


def make_param(shape, num_shards, shard_dim=0, itemsize=4, fqn="w"):
    room = ceil(shape[shard_dim] / num_shards)
    rows = tuple(max(0, min(room, shape[shard_dim] - rank * room)) for rank in range(num_shards))
    return Param(
        fqn=fqn,
        shape=shape,
        global_shape=shape,
        dtype="float32",
        itemsize=itemsize,
        shard_dim=shard_dim,
        rows_per_rank=rows,
        padded_rows=room,
    )


def make_flat(numels, num_ranks, **options):
    """Return a flat parameter of vectors ``p0``, ``p1``, ... with these numbers of elements."""
    parts = tuple(
        FlatPart(fqn=f"p{i}", shape=(n,), global_shape=(n,), first=sum(numels[:i])) for i, n in enumerate(numels)
    )
    return replace(make_param((sum(numels),), num_ranks, fqn="_flat_param", **options), parts=parts)


def make_unit(*params, index=0, name="", **fields):
    dtypes = {"compute_dtype": "float32", "reduce_dtype": "float32", "compute_itemsize": 4, "reduce_itemsize": 4}
    defaults = {"root": 0, "reshard_after_forward": True, **dtypes}
    size = len(params[0].rows_per_rank) if params else 1
    return Unit(index=index, name=name, params=params, shard_size=size, **{**defaults, **fields})


def only(param):
    (part,) = unit_shards(make_unit(param))
    return part


@st.composite
def params(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    dim = draw(st.integers(0, len(shape) - 1))
    return make_param(shape, draw(st.integers(1, 9)), dim, draw(st.sampled_from([1, 2, 4, 8])))


def test_the_example_of_the_docstring():
    part = only(make_param((5,), 4))
    assert part.begin_rows == (0, 2, 4, 5)
    assert part.padding_rows == (0, 0, 1, 2)


@given(params())
def test_rows_add_up_to_the_dimension_and_no_shard_overflows_its_room(param):
    part = only(param)
    assert sum(param.rows_per_rank) == param.shape[param.shard_dim]
    assert min(part.padding_rows) >= 0
    assert part.bytes_unsharded == prod(param.shape) * param.itemsize
    assert part.bytes_at_rest * part.num_shards == part.bytes_unsharded + part.bytes_wasted


@given(params())
def test_the_storages_without_their_padding_are_the_parameter(param):
    part, dim = only(param), param.shard_dim
    values = np.arange(prod(param.shape)).reshape(param.shape)
    storages = []
    for begin, rows, padding in zip(part.begin_rows, param.rows_per_rank, part.padding_rows, strict=True):
        own = values.take(range(begin, begin + rows), axis=dim)
        widths = [(0, padding if axis == dim else 0) for axis in range(values.ndim)]
        storages.append(np.pad(own, widths, constant_values=-1))
    assert {s.size * param.itemsize for s in storages} == {part.bytes_at_rest}
    whole = np.concatenate(storages, axis=dim)
    real = np.concatenate(
        [np.arange(param.padded_rows) < rows for rows in param.rows_per_rank],
    )
    assert np.array_equal(whole.compress(real, axis=dim), values)
    assert np.count_nonzero(whole == -1) * param.itemsize == part.bytes_wasted


@given(params())
def test_the_pieces_are_those_of_torch_chunk(param):
    import torch

    part, dim = only(param), param.shard_dim
    values = torch.arange(prod(param.shape)).reshape(param.shape)
    chunks = torch.chunk(values, part.num_shards, dim)
    for shard, (begin, rows) in enumerate(zip(part.begin_rows, param.rows_per_rank, strict=True)):
        own = values.narrow(dim, begin, rows)
        assert torch.equal(own, chunks[shard]) if shard < len(chunks) else rows == 0


@given(setups())
def test_totals_follow_the_closed_form(setup):
    header = simulate(replace(setup, steps=0)).header
    found = totals(shards(header))
    every = [param for unit in header.units for param in unit.params]
    size = setup.shard_size
    padded = sum(ceil(p.shape[0] / size) * size * prod(p.shape[1:]) for p in every)
    assert found.bytes_at_rest == 4 * padded // size
    assert found.num_elements == sum(prod(p.shape) for p in every)
    assert found.bytes_unsharded == 4 * found.num_elements
    assert found.bytes_wasted == 4 * (padded - found.num_elements)
    assert found.num_empty == sum(rows == 0 for p in every for rows in p.rows_per_rank)
    assert found.num_params == len(every)


@pytest.mark.parametrize("how", ["retired", "gone"])
def test_retired_units_hold_nothing(how):
    header = example_trace().header
    unused = replace(header, units=tuple(replace(unit, **{how: True}) for unit in header.units))
    assert shards(unused) == ()
    assert shards(Header()) == ()
    assert totals(()) == replay_shards.Totals(
        num_params=0, num_flat=0, num_elements=0, bytes_unsharded=0, bytes_at_rest=0, bytes_wasted=0, num_empty=0
    )


def test_a_parameter_without_elements_has_no_bytes():
    part = only(make_param((4, 0), 2))
    assert (part.bytes_at_rest, part.bytes_wasted) == (0, 0)


def test_repeated_blocks_are_equal_and_the_root_differs():
    header = simulate(Setup(num_units=6, steps=0)).header
    groups = alike(shards(header))
    blocks = [group for group in groups if group[0].unit.name]
    assert {tuple(part.unit.name for part in group) for group in blocks} == {tuple(f"blocks.{i}" for i in range(5))}
    assert [len(group) for group in groups if not group[0].unit.name] == [1, 1, 1]
    assert sorted(part.param.fqn for group in groups for part in group) == sorted(
        part.param.fqn for part in shards(header)
    )


def test_a_block_with_one_different_parameter_is_separate():
    same = [make_unit(make_param((4,), 2, fqn=f"b.{i}.w"), index=i, name=f"b.{i}") for i in range(2)]
    other = make_unit(make_param((4,), 2, fqn="b.2.w"), make_param((4,), 2, fqn="b.2.extra"), index=2, name="b.2")
    groups = alike(shards(Header(units=(*same, other))))
    assert [[part.param.fqn for part in group] for group in groups] == [["b.0.w", "b.1.w"], ["b.2.w"], ["b.2.extra"]]


@given(setups())
def test_memory_at_rest_is_that_after_a_step(setup):
    trace = simulate(replace(setup, steps=1))
    for rank in trace.ranks:
        live = advance(rank.start, rank.rows).bytes_by_category
        found = at_rest(trace.header, rank.rank % setup.shard_size)
        assert found.params == live[Category.SHARDED_PARAMS]
        assert found.grads == live[Category.SHARDED_GRADS]
        assert found.adam == live[Category.OPTIMIZER_STATE]
        assert found.total == sum(live)


def test_memory_at_rest_of_the_docstring_and_of_frozen_parameters():
    header = Header(units=(make_unit(make_param((5, 3), 4)),))
    assert at_rest(header, 2) == AtRest(params=24, grads=24, adam=28)
    assert at_rest(header, 3) == AtRest(params=24, grads=24, adam=4)
    frozen = Header(units=(make_unit(replace(make_param((5, 3), 4), trainable=False)),))
    assert at_rest(frozen, 0) == AtRest(params=24, grads=0, adam=0)


def test_optimizer_state_of_a_flat_parameter_covers_all_of_it_or_its_trained_pieces():
    flat = make_flat((3, 4), 2)
    assert [at_rest(Header(units=(make_unit(flat),)), rank) for rank in (0, 1)] == [
        AtRest(params=16, grads=16, adam=36)
    ] * 2
    first, second = flat.parts
    pieces = replace(flat, use_orig_params=True)
    header = Header(units=(make_unit(pieces),))
    assert at_rest(header, 0) == AtRest(params=16, grads=16, adam=2 * 4 * (3 + 1) + 4 * 2)
    assert at_rest(header, 1) == AtRest(params=16, grads=16, adam=2 * 4 * 3 + 4)
    frozen = replace(pieces, parts=(first, replace(second, trainable=False)))
    header = Header(units=(make_unit(frozen),))
    assert at_rest(header, 0) == AtRest(params=16, grads=16, adam=2 * 4 * 3 + 4)
    assert at_rest(header, 1) == AtRest(params=16, grads=0, adam=0)


def test_memory_at_rest_of_a_parameter_split_on_another_dimension():
    header = Header(units=(make_unit(make_param((3, 6), 2, shard_dim=1)),))
    assert [at_rest(header, rank) for rank in (0, 1)] == [AtRest(params=36, grads=36, adam=76)] * 2


def test_under_tensor_parallelism_the_whole_is_the_global_shape():
    part = replace(make_param((8, 4), 2), global_shape=(16, 4))
    found = totals(unit_shards(make_unit(part)))
    assert (found.num_elements, found.bytes_unsharded) == (64, 256)
    assert (found.bytes_at_rest, found.bytes_wasted) == (64, 0)


def test_units_of_another_policy_are_separate():
    one, two = (make_unit(make_param((4,), 2, fqn=f"b.{i}.w"), index=i, name=f"b.{i}") for i in range(2))
    assert len(alike(shards(Header(units=(one, two))))) == 1
    for other in ({"compute_dtype": "bfloat16"}, {"offload": True}, {"reshard_after_forward": False}):
        assert len(alike(shards(Header(units=(one, replace(two, **other)))))) == 2


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 6))
def test_pieces_are_all_elements_in_order_each_on_the_rank_that_has_it(numels, num_ranks):
    flat = make_flat(numels, num_ranks)
    found = pieces(flat)
    assert [e for piece in found for e in range(piece.begin, piece.end)] == list(range(sum(numels)))
    for piece in found:
        assert piece.begin < piece.end
        assert piece.begin // flat.padded_rows == (piece.end - 1) // flat.padded_rows == piece.shard_rank
        first, last = piece.own
        assert 0 <= first <= last < piece.part.numel
        assert (first > 0, last < piece.part.numel - 1) == (piece.is_begun_before, piece.goes_on)
    for part in flat.parts:
        assert sum(piece.end - piece.begin for piece in found if piece.part == part) == part.numel


def test_a_flat_parameter_counts_as_those_in_it_and_adam_keeps_its_padding():
    header = Header(world_size=2, units=(make_unit(make_flat((3, 6), 2)),))
    found = totals(shards(header))
    assert (found.num_params, found.num_flat, found.num_elements, found.bytes_wasted) == (2, 1, 9, 4)
    assert at_rest(header, 0) == at_rest(header, 1) == AtRest(params=20, grads=20, adam=44)
