"""Bytes: of mappings, of classes, of a process whose buffers are freed in other threads."""

import mmap
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

from bench.memory import Classes, added, count_in_all_threads, noted_pages, noted_stages, shared_bytes, totals
from bench.processes import on_ranks
from tests.engine.test_shared_memory import connected
from workbench.engine.backends import page_pool
from workbench.engine.backends.page_pool import PageRange, SparePages
from workbench.engine.backends.shared_comm import SharedMemoryReduceScatter
from workbench.events import Category

MAPPINGS = """\
5567-5568 r-xp 00000000 08:01 11  /usr/bin/python3.11
Size:                  4 kB
Pss:                  40 kB
7f00-7f10 rw-s 00000000 00:01 12                    /memfd:workbench-0123 (deleted)
Size:                 64 kB
Rss:                  64 kB
Pss:                  32 kB
Pss_Dirty:             8 kB
VmFlags: rd wr sh
7f10-7f20 rw-p 00000000 00:00 0
Pss:                 100 kB
7f20-7f30 r--s 00000000 00:01 13                    /dev/shm/other
Pss:                   3 kB
"""


def test_shared_mappings_count_in_proportion():
    assert shared_bytes(MAPPINGS) == (32 + 3) * 1024
    assert shared_bytes("") == 0


def test_quantities_are_added_at_every_moment():
    assert list(added([(3, 10), (1, 4)], [(0, 100), (2, 200), (5, 0)])) == [104, 204, 210, 10]
    assert list(added([(3, 10)], [])) == []


def bytes_of_pages() -> list[int]:
    noted, spare = noted_pages(), SparePages()
    used, unused = (PageRange(numel, torch.float32) for numel in (7, 5))
    for memory in (used, unused):
        memory.fill(spare)
    unused.empty(spare)
    unused.fill(spare)
    unused.empty(spare)
    spare.release()
    assert [t for t, _ in noted] == sorted(t for t, _ in noted)
    return [num_bytes for _, num_bytes in noted]


@pytest.mark.skipif(not page_pool._can_move(), reason="this system cannot move pages")
def test_pages_of_full_parameters_count_used_or_not():
    assert on_ranks(1, bytes_of_pages) == [[0, 7 * 4, (7 + 5) * 4, 7 * 4]]


def bytes_of_stages() -> list[int]:
    noted, shared = noted_stages(), connected()
    reduces = [SharedMemoryReduceScatter(shared, dtype) for dtype in (torch.float32, torch.float64)]
    for reduce in reduces:
        chunks = reduce.allocate([1], dtype=reduce._dtype, device=torch.device("cpu"))
        reduce(torch.ones(1, dtype=reduce._dtype), chunks, dist.group.WORLD)
    for reduce in reduces:
        reduce.empty()
    return [num_bytes for _, num_bytes in noted[-4:]]


def test_stages_count_as_long_as_they_have_memory():
    stages = 3 * mmap.PAGESIZE
    assert on_ranks(2, bytes_of_stages) == [[stages, 2 * stages, stages, 0]] * 2


def test_classes_know_their_peaks_and_that_of_all_together():
    classes = Classes()
    for category, delta in ((Category.SHARDED_PARAMS, 10), (Category.UNSHARDED_PARAMS, 5)):
        classes.memory(category, 0, delta)
    classes.memory(Category.UNSHARDED_PARAMS, 0, -5)
    classes.clear()
    classes.memory(Category.UNSHARDED_GRADS, 1, 3)
    classes.memory(Category.UNSHARDED_GRADS, 1, -3)
    classes.memory(Category.UNSHARDED_PARAMS, 1, 2)
    assert +classes.peak == {"SHARDED_PARAMS": 10, "UNSHARDED_GRADS": 3, "UNSHARDED_PARAMS": 2}
    assert classes.total_peak == 13
    assert +classes.live == {"SHARDED_PARAMS": 10, "UNSHARDED_PARAMS": 2}


def test_classes_remember_how_units_communicate():
    classes = Classes()
    for info in (SimpleNamespace(comm="gloo"), SimpleNamespace(comm=""), SimpleNamespace()):
        classes.unit(info)
    assert classes.comm == {"gloo", ""}


def totals_while_a_buffer_dies_elsewhere() -> list[int]:
    count_in_all_threads()
    buffers = [torch.empty(1000, dtype=torch.uint8)]
    thread = threading.Thread(target=buffers.clear)
    with profile(profile_memory=True) as profiler:
        kept = torch.empty(500, dtype=torch.uint8)
        thread.start()
        thread.join()
        kept = torch.empty(70, dtype=torch.uint8)
    del kept
    return [total for _, total in sorted(totals(profiler.profiler.kineto_results.experimental_event_tree()))]


def test_a_buffer_that_dies_in_another_thread_is_counted_as_dead():
    assert on_ranks(1, totals_while_a_buffer_dies_elsewhere) == [[1500, 570, 70]]
