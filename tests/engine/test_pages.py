"""Memory that is emptied under tensors which still point to it."""

import os
from pathlib import Path

import pytest
import torch

from tests.engine.ranks import on_one_rank
from workbench.engine import pages
from workbench.engine.pages import Pages

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", [0, 1, 1000, pages._TILE // 2 + 3])
def test_what_points_to_empty_memory_reads_as_nan_and_to_filled_memory_what_was_written(numel, dtype):
    memory = Pages(numel, dtype)
    alias = memory.tensor.detach()[1:]
    for value in (2.0, 3.0):
        memory.fill()
        memory.tensor.fill_(value)
        assert alias.eq(value).all()
        memory.empty()
        assert alias.isnan().all()
        assert memory.tensor.isnan().all()


def test_what_is_written_to_empty_memory_harms_nobody():
    first, second = Pages(10, torch.float32), Pages(10, torch.float32)
    first.empty()
    second.empty()
    first.tensor.zero_()
    assert second.tensor.isnan().all()
    first.fill()
    first.empty()
    assert first.tensor.isnan().all()


@on_one_rank
def test_empty_memory_takes_no_pages():
    num_bytes = 20 * pages._TILE
    memory = Pages(num_bytes, torch.uint8)
    before = resident_bytes()
    memory.fill()
    memory.tensor.fill_(1)
    assert resident_bytes() > before + num_bytes // 2
    memory.empty()
    assert resident_bytes() < before + num_bytes // 2


@on_one_rank
def test_memory_that_cannot_be_mapped_is_an_error_that_says_how_much():
    memory = Pages(10, torch.float32)
    memory._num_bytes = 2**62
    with pytest.raises(OSError, match=f"{2**62} bytes for full parameters cannot be mapped"):
        memory.fill()
