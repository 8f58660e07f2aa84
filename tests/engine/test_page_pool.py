"""Memory that is emptied under tensors that still point to it, and filled with the pages of others."""

import os
import re
import resource
from pathlib import Path

import pytest
import torch

from tests.helpers.forked_ranks import on_one_rank
from tests.helpers.recording_probe import recording
from workbench.engine.backends import page_pool
from workbench.engine.backends.page_pool import Buffers, PageRange, SparePages

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
SIZES = (0, 1, 1000, page_pool._ALIGNMENT // 4 + 5, page_pool._TILE // 2 + 3)
MOVES = pytest.param(True, marks=pytest.mark.skipif(not page_pool._can_move(), reason="this system cannot move pages"))


@pytest.fixture
def spare():
    return SparePages()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=[MOVES, False], ids=["moved", "fresh"])
def moves(request, monkeypatch):
    monkeypatch.setattr(page_pool, "_can_move", lambda: request.param)
    return request.param


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", SIZES)
def test_views_of_freed_memory_read_nan_and_views_of_live_memory_their_values(numel, dtype, moves, spare):
    memory = PageRange(numel, dtype)
    alias = memory.tensor.detach()[1:]
    for value in (2.0, 3.0):
        assert alias.isnan().all()
        memory.fill(spare)
        memory.tensor.fill_(value)
        assert alias.eq(value).all()
        memory.empty(spare)
        assert alias.isnan().all()
        assert memory.tensor.isnan().all()


@pytest.mark.parametrize("at", ["_move", "unused", "_map_nan"])
def test_pages_of_a_range_that_could_not_be_emptied_are_returned_once(at, spare, monkeypatch):
    first, second = PageRange(1000, torch.float32), PageRange(1000, torch.float32)
    owner = {"_move": page_pool, "unused": page_pool.KeptPages, "_map_nan": PageRange}[at]
    first.fill(spare)
    with monkeypatch.context() as out_of_stack:
        out_of_stack.setattr(owner, at, lambda *_: [].index(0))
        with pytest.raises(ValueError, match="not in list"):
            first.empty(spare)
    first.empty(spare)
    for value, memory in enumerate((first, second)):
        memory.fill(spare)
        memory.tensor.fill_(value)
    assert [memory.tensor.eq(value).all().item() for value, memory in enumerate((first, second))] == [True, True]


@pytest.mark.parametrize("numel", SIZES)
def test_memory_in_use_is_never_shared(numel, moves, spare):
    """Fill and empty in every order; sizes differ, so that a range also gets part of another one's pages."""
    memories = [PageRange(max(0, numel - i % 3), torch.float32) for i in range(4)]
    for turn in range(3):
        order = memories[turn:] + memories[:turn]
        for value, memory in enumerate(order[:3]):
            memory.fill(spare)
            memory.tensor.fill_(value)
        for value, memory in enumerate(order[:3]):
            assert memory.tensor.eq(value).all()
        assert order[3].tensor.isnan().all()
        for memory in order[:3]:
            memory.empty(spare)
        assert all(memory.tensor.isnan().all() for memory in memories)


def test_writes_to_freed_memory_do_no_harm(moves, spare):
    first, second = PageRange(10, torch.float32), PageRange(10, torch.float32)
    first.tensor.zero_()
    assert second.tensor.isnan().all()
    first.fill(spare)
    first.empty(spare)
    assert first.tensor.isnan().all()


@pytest.mark.skipif(not page_pool._can_move(), reason="this system cannot move pages")
@on_one_rank
def test_freed_pages_are_reused():
    spare, numel = SparePages(), page_pool._ALIGNMENT // 8  # too small for huge pages, which would cause few faults
    memories = [PageRange(numel, torch.float32) for _ in range(3)]
    num_pages = memories[0].tensor.nbytes // os.sysconf("SC_PAGE_SIZE")

    def use(memory: PageRange) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        memory.fill(spare)
        memory.tensor.fill_(1)
        memory.empty(spare)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert use(memories[0]) >= num_pages
    assert all(use(memory) < num_pages // 10 for memory in (*memories, *memories))


def advice(address: int) -> list[str]:
    """Return the flags of the mapping at an address, see proc(5)."""
    found = re.search(rf"^{address:x}-.*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S)
    assert found is not None
    return found[1].split()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages")
def test_huge_pages_are_requested_for_new_and_reused_memory(moves, spare):
    first, second = (PageRange(page_pool._TILE, torch.uint8) for _ in range(2))
    first.fill(spare)
    assert "hg" in advice(first.tensor.data_ptr())
    first.empty(spare)
    assert "hg" not in advice(first.tensor.data_ptr())  # the file of NaN
    second.fill(spare)
    assert "hg" in advice(second.tensor.data_ptr())
    assert "hg" in advice(Buffers().take((page_pool._TILE,), torch.uint8).data_ptr())


@on_one_rank
def test_empty_memory_takes_no_pages_once_the_spare_ones_are_released():
    spare, num_bytes = SparePages(), 20 * page_pool._TILE
    memory = PageRange(num_bytes, torch.uint8)
    before = resident_bytes()
    memory.fill(spare)
    memory.tensor.fill_(1)
    assert resident_bytes() > before + num_bytes // 2
    memory.empty(spare)
    spare.release()
    assert resident_bytes() < before + num_bytes // 2


@pytest.mark.skipif(not page_pool._can_move(), reason="this system cannot move pages")
def test_spare_pages_cover_the_peak_use_and_are_counted_while_unused(spare):
    small, large, larger = (PageRange(numel, torch.float32) for numel in (2, 8, 16))
    with recording() as record:
        for memory in (large, small):
            memory.fill(spare)
        assert record.reserved == 0
        for memory in (large, small):
            memory.empty(spare)
        assert record.reserved == 40
        small.fill(spare)  # takes the smallest spare pages that suffice
        assert record.reserved == 32
        larger.fill(spare)  # none suffice: the largest spare pages make room
        assert record.reserved == 0
        larger.empty(spare)
        small.empty(spare)
        assert record.reserved == 72
        large.fill(spare)
        assert record.reserved == 72 - 32
        spare.release()
        assert record.reserved == 64 - 32  # of the ranges in use
        large.empty(spare)
        assert record.reserved == 64
        del spare._free[:]
        assert record.reserved == 0


def test_memory_that_cannot_be_mapped_is_an_error_that_says_how_much(monkeypatch, spare):
    monkeypatch.setattr(page_pool, "_can_move", lambda: False)
    memory = PageRange(10, torch.float32)
    memory._num_bytes = 2**62
    with pytest.raises(OSError, match=f"cannot map {2**62} bytes for parameters"):
        memory.fill(spare)


# ---- buffers in flight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(0,), (3, 0), (1,), (3, 5), (page_pool._ALIGNMENT // 4 + 5,)])
def test_a_buffer_is_exclusive_until_it_is_released(size, dtype):
    buffers = Buffers()
    for _ in range(2):
        first, second = (buffers.take(size, dtype).fill_(value) for value in (1, 2))
        for buffer, value in ((first, 1), (second, 2)):
            assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == (torch.Size(size), dtype, True)
            assert buffer.eq(value).all()
        for buffer in (first, second):
            buffers.give_back(buffer)


@on_one_rank
def test_a_buffer_of_the_size_of_the_one_before_needs_no_fresh_page():
    buffers, numel = Buffers(), page_pool._ALIGNMENT - 5  # too small for huge pages, which would cause few faults
    num_pages = numel // os.sysconf("SC_PAGE_SIZE")

    def use(wanted: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        buffers.give_back(buffers.take((wanted,), torch.uint8).fill_(1))
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert use(numel) >= num_pages
    assert all(use(smaller) < num_pages // 10 for smaller in (numel, numel - 1, 5, numel))
    buffers.release()
    assert use(numel) >= num_pages


def test_buffers_are_counted_while_unused_and_not_once_dropped():
    buffers = Buffers()
    with recording() as record:
        given, dropped = (buffers.take((10,), torch.float32) for _ in range(2))
        assert record.reserved == 0
        buffers.give_back(given)
        assert record.reserved == 40
        smaller = buffers.take((4,), torch.float32)
        assert record.reserved == 24  # from the same pages
        del dropped
        assert record.reserved == 24
        buffers.give_back(smaller)
        assert record.reserved == 40
        buffers.release()
        assert record.reserved == 0
