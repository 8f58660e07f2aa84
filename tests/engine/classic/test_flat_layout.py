"""Where the parameters of a flat parameter lie in the slots: laws over shapes and ranks, without any rank."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.engine.classic.flat_layout import FlatLayout, PartSpan

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(torch.Size), min_size=1, max_size=5)
NUM_SHARDS = st.integers(1, 6)


def layouts(shapes: list[torch.Size], num_shards: int) -> list[FlatLayout]:
    """The layout as each of the ranks sees it."""
    return [FlatLayout.of(shapes, num_shards, rank) for rank in range(num_shards)]


def numbered(shapes: list[torch.Size]) -> list[torch.Tensor]:
    """Return tensors of these shapes that hold 1, 2, 3 ..., all different."""
    every = torch.arange(1.0, sum(map(math.prod, shapes)) + 1)
    return [part.view(shape) for part, shape in zip(every.split([math.prod(s) for s in shapes]), shapes, strict=True)]


def padded(wholes: list[torch.Tensor], layout: FlatLayout) -> torch.Tensor:
    """Return the padded flat parameter, with zeros at the end."""
    flat = torch.zeros(layout.num_shards * layout.slot_numel)
    flat[: layout.numel] = torch.cat([whole.reshape(-1) for whole in wholes])
    return flat


def test_the_example_of_the_docstring():
    layout = FlatLayout.of([torch.Size([2, 3]), torch.Size([4])], 3, 1)
    assert (layout.numel, layout.slot_numel, layout.bounds) == (10, 4, (4, 8))
    assert layout.spans == (PartSpan(0, torch.Size([2, 3])), PartSpan(6, torch.Size([4])))
    slot = torch.tensor([4, 5, 100, 101])
    assert [piece.tolist() for piece in layout.pieces_of(slot)] == [[4, 5], [100, 101]]
    assert [[layout.num_held(part, rank) for rank in range(3)] for part in range(2)] == [[4, 2, 0], [0, 2, 2]]
    assert [FlatLayout.of([torch.Size([2, 3]), torch.Size([4])], 3, rank).own_numel for rank in range(3)] == [4, 4, 2]


@given(SHAPES, NUM_SHARDS)
def test_slots_are_torch_chunks_parts_of_the_flat_parameter(shapes, num_shards):
    every = layouts(shapes, num_shards)
    flat = torch.arange(every[0].numel)
    chunks = [*flat.chunk(num_shards), *[flat[:0]] * num_shards]
    for layout, chunk in zip(every, chunks, strict=False):
        begin, end = layout.bounds
        assert torch.equal(flat[begin:end], chunk)
        assert layout.own_numel == len(chunk)
        assert end - begin == layout.slot_numel


@given(SHAPES, NUM_SHARDS)
def test_the_pieces_of_all_ranks_are_the_parameters(shapes, num_shards):
    wholes, every = numbered(shapes), layouts(shapes, num_shards)
    slots = padded(wholes, every[0]).view(num_shards, -1)
    pieces = [layout.pieces_of(slot) for layout, slot in zip(every, slots, strict=True)]
    for index, whole in enumerate(wholes):
        assert torch.equal(torch.cat([of_rank[index].reshape(-1) for of_rank in pieces]), whole.reshape(-1))
        for layout, of_rank in zip(every, pieces, strict=True):
            piece = layout.piece_of_full(index, whole)
            assert torch.equal(piece, of_rank[index])
            assert piece.numel() == layout.num_held(index, layout.rank)
            assert piece.shape == (whole.shape if num_shards == 1 else (piece.numel(),))
    assert [layout.is_whole for layout in every] == [num_shards == 1] * num_shards


@given(SHAPES, NUM_SHARDS)
def test_pieces_are_views_of_the_slot(shapes, num_shards):
    for layout in layouts(shapes, num_shards):
        slot = torch.zeros(layout.numel if layout.is_whole else layout.slot_numel)
        for piece in layout.pieces_of(slot):
            piece.fill_(1)
        assert slot.sum() == layout.own_numel


@given(SHAPES, NUM_SHARDS)
def test_parts_have_their_shapes_in_the_whole(shapes, num_shards):
    wholes, layout = numbered(shapes), FlatLayout.of(shapes, num_shards, 0)
    parts = layout.parts_of(padded(wholes, layout)[: layout.numel])
    assert all(torch.equal(part, whole) for part, whole in zip(parts, wholes, strict=True))


@given(SHAPES, NUM_SHARDS, st.data())
def test_gradients_are_laid_out_for_any_run_of_ranks_and_missing_ones_are_zero(shapes, num_shards, data):
    layout = FlatLayout.of(shapes, num_shards, 0)
    has_grad = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    first = data.draw(st.integers(0, num_shards - 1))
    last = data.draw(st.integers(first + 1, num_shards))
    values = numbered(shapes)
    grads = [value if has else None for value, has in zip(values, has_grad, strict=True)]
    slots = torch.full((last - first, layout.slot_numel), math.nan)
    for target, source in layout.copy_in_pairs(grads, slots, first):
        target.copy_(source)
    zeroed = [value * has for value, has in zip(values, has_grad, strict=True)]
    assert torch.equal(slots, padded(zeroed, layout).view(num_shards, -1)[first:last])


def test_a_piece_of_a_contiguous_parameter_is_a_view_and_one_of_another_a_copy():
    layout, whole = FlatLayout.of([torch.Size([4, 3])], 2, 1), torch.zeros(4, 3)
    layout.piece_of_full(0, whole).fill_(1)
    assert whole.sum() == 6
    layout.piece_of_full(0, whole.t()).fill_(2)
    assert whole.sum() == 6


@pytest.mark.parametrize("numel", [0, 1, 5])
def test_more_ranks_than_elements_leave_the_last_slots_without_any(numel):
    every = layouts([torch.Size([numel])], 6)
    assert [layout.own_numel for layout in every] == [1] * numel + [0] * (6 - numel)
    assert {layout.slot_numel for layout in every} == {min(numel, 1)}
