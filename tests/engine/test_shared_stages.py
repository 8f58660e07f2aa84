"""Slow ranks: the number of stages that keeps a rank from summing later numbers; and the bytes of the stages."""

import ctypes
import errno
import multiprocessing
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_shared_memory import connected
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from workbench.engine.backends.async_work import PendingWork
from workbench.engine.backends.shared import shared_comm, shared_memory
from workbench.engine.backends.shared.shared_comm import SharedMemoryReduceScatter
from workbench.engine.backends.shared.shared_memory import SharedMemory
from workbench.events import Category

FORK = multiprocessing.get_context("fork")
CPU = torch.device("cpu")
SUM = dist.ReduceOp.SUM
PAGE = 4096


@dataclass(frozen=True)
class Plan:
    """Reductions in a row.

    Attributes:
        reads_first: wait for the oldest reduction before, not after, writing the next.
        empties: after every third reduction, wait for all and empty the stages.
    """

    num_outstanding: int
    num_stages: int
    reads_first: bool = False
    number: int = 12
    empties: bool = False


def value(rank: int, number: int) -> torch.Tensor:
    return torch.arange(8.0) + 100 * rank + 1000 * number  # [F * S]


def reductions(shared: SharedMemory, plan: Plan, written: Callable[[int], Any], reading: Callable[[int], Any]) -> bool:
    """Run ``plan`` as the engine would; return whether all sums are right."""
    n, rank = plan.num_outstanding, dist.get_rank()
    reduce = SharedMemoryReduceScatter(shared, torch.float32, n, plan.num_stages)
    outstanding, totals = [], [value(rank, number).view(2, 4)[rank].clone() for number in range(plan.number)]

    def read_oldest() -> None:
        oldest, pending = outstanding.pop(0)
        reading(oldest)
        pending.wait()
        pending.finish()

    for number, total in enumerate(totals):
        if plan.reads_first and len(outstanding) == n:
            read_oldest()
        chunks = reduce.allocate([4], dtype=torch.float32, device=CPU)
        chunks.copy_(value(rank, number).view(2, 4)[1 - rank])
        written(number)
        if len(outstanding) == n:
            read_oldest()
        work = reduce(total, chunks, dist.group.WORLD, SUM, async_op=True)
        outstanding.append((number, PendingWork(work, f"reduction {number}")))
        if plan.empties and number % 3 == 2:
            while outstanding:
                read_oldest()
            reduce.empty()
            assert not chunks.any()
    while outstanding:
        read_oldest()
    wanted = [(value(0, i) + value(1, i))[4 * rank : 4 * rank + 4] for i in range(plan.number)]
    return all(map(torch.equal, totals, wanted))


def nothing(_number: int) -> None:
    """Do nothing."""


def slow_reader(plan: Plan, slow: int, may_read, in_wait: str) -> bool:
    """Make the slow rank read its first sum only when the other rank can get no further ahead.

    The other rank has then overwritten the stage 2 n later (``in_wait`` is ""), or waits in ``allocate`` for permission
    to do so. That wait continues ("wait") or is skipped ("skip").
    """
    shared = connected()
    if dist.get_rank() == slow:
        return reductions(shared, plan, nothing, lambda number: number or may_read.wait(60))
    original = shared_comm._Reduction.wait_for_all_to_issue

    def wait_for_all_to_issue(reduction: Any) -> None:
        if not reduction.all_have_issued:
            assert in_wait, "allocate() had to wait"
            if in_wait == "wait":
                may_read.set()
                original(reduction)

    shared_comm._Reduction.wait_for_all_to_issue = wait_for_all_to_issue
    furthest = plan.num_stages if in_wait == "skip" else 2 * plan.num_outstanding
    return reductions(shared, plan, lambda number: number == furthest and may_read.set(), nothing)


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("num_outstanding", [1, 2, 3])
def test_with_2n_plus_1_stages_no_rank_waits_for_a_slow_one(num_outstanding, slow):
    plan = Plan(num_outstanding, 2 * num_outstanding + 1)
    assert run_ranks(2, slow_reader, plan, slow, FORK.Event(), "") == [True, True]


@pytest.mark.parametrize(("num_outstanding", "num_stages"), [(1, 2), (2, 3), (2, 4), (3, 6)])
def test_with_fewer_stages_allocate_waits_for_the_slow_rank(num_outstanding, num_stages):
    plan = Plan(num_outstanding, num_stages)
    assert run_ranks(2, slow_reader, plan, 0, FORK.Event(), "wait") == [True, True]


@pytest.mark.parametrize(("num_outstanding", "num_stages"), [(1, 2), (2, 4), (3, 6)])
def test_without_that_wait_the_slow_rank_would_sum_later_numbers(num_outstanding, num_stages):
    """This proves that 2 n + 1 is exact: n + 2 stages are too few for n = 2."""
    plan = Plan(num_outstanding, num_stages)
    assert run_ranks(2, slow_reader, plan, 0, FORK.Event(), "skip") == [False, True]


def no_wait_in_allocate(plan: Plan) -> bool:
    def refuse(_reduction: Any) -> None:
        raise AssertionError("allocate() had to wait")

    original = shared_comm._Reduction.wait_for_all_to_issue
    shared_comm._Reduction.wait_for_all_to_issue = lambda r: None if r.all_have_issued else refuse(r)
    try:
        return reductions(connected(), plan, nothing, nothing)
    finally:
        shared_comm._Reduction.wait_for_all_to_issue = original


@pytest.mark.parametrize("num_outstanding", [1, 2, 3])
def test_reading_before_writing_needs_2n_stages(num_outstanding):
    plan = Plan(num_outstanding, 2 * num_outstanding, reads_first=True)
    assert run_ranks(2, no_wait_in_allocate, plan) == [True, True]


@settings(max_examples=4)
@given(
    plans=st.lists(
        st.integers(1, 3).flatmap(
            lambda n: st.builds(
                Plan, st.just(n), st.integers(n + 1, 2 * n + 2), st.booleans(), st.integers(1, 40), st.booleans()
            )
        ),
        min_size=2,
        max_size=6,
    )
)
def test_any_allowed_number_of_stages_gives_right_sums(plans):
    assert run_ranks(2, all_plans, plans) == [[True] * len(plans)] * 2


def all_plans(plans: list[Plan]) -> list[bool]:
    shared = connected()
    return [reductions(shared, plan, nothing, nothing) for plan in plans]


# ---- bytes


def resident(mapping: torch.Tensor) -> int:
    """Return the resident bytes of a mapping in this process."""
    address = f"{mapping.data_ptr():x}-"
    _, _, rest = Path("/proc/self/smaps").read_text().partition(f"\n{address}")
    found = re.search(r"\nRss: +(\d+) kB", rest)
    assert found is not None
    return int(found[1]) * 1024


def bytes_of_a_step(num_blocks: int) -> tuple[int, int, int, int, int]:
    """Return the bytes of the stages (all, used in backward, recorded and resident after it) and the largest numel."""
    plain = {"dim": 64, "num_blocks": num_blocks, "vocab": 100}
    with recording() as record:
        model = shard_net(make_net(**plain))
        unit = model.blocks[0]._get_fsdp_state()._fsdp_param_group
        for number in range(2):
            record.clear()
            loss_of(model, batch(dist.get_rank(), number, plain["vocab"])).backward()
        reduce = unit.comm_choice.pair.reduce
        largest = max(u.shard_numel for u in (model._get_fsdp_state()._fsdp_param_group, unit))
        reported = 0 if reduce.handle is None else reduce.num_bytes
        dist.barrier()  # the other ranks have returned their part too
        return (
            reduce.num_bytes,
            record.peak[Category.REDUCE_SCATTER_BUFFERS],
            reported,
            resident(reduce._stages),
            largest,
        )


@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_are_for_the_largest_unit_and_have_no_memory_between_steps(world_size, environ):
    environ.pop("WORKBENCH_COMM", None)
    for num_bytes, used, reported, in_memory, largest in run_ranks(world_size, bytes_of_a_step, 3):
        needed = (world_size - 1) * largest * 4
        assert num_bytes == 2 * -(-needed // PAGE) * PAGE
        assert used == needed
        assert reported == in_memory == 0


def kept(can_give_back: bool) -> tuple[int, int]:
    if not can_give_back:
        shared_comm.give_back_pages = lambda _: False
    reduce = SharedMemoryReduceScatter(connected(), torch.float32, 1, 2)
    with recording() as record:
        reduce.reserve(5 * PAGE)
        chunks = reduce.allocate([5 * PAGE], dtype=torch.float32, device=CPU)
        reduce(torch.zeros(5 * PAGE), chunks.fill_(1), dist.group.WORLD, SUM)
        reduce.empty()
        reduce.empty()
        dist.barrier()
        return record.live[Category.RESERVED], resident(reduce._stages)


def test_memory_that_cannot_be_returned_is_still_counted():
    assert run_ranks(2, kept, True) == [(0, 0)] * 2
    for reported, in_memory in run_ranks(2, kept, False):
        assert reported == 2 * 5 * PAGE * 4
        assert in_memory >= reported // 2


@pytest.mark.parametrize(("problem", "is_told"), [(errno.ENOMEM, True), (errno.EFAULT, True), (errno.EINVAL, False)])
def test_lack_of_memory_is_an_error_and_an_old_system_takes_page_by_page(monkeypatch, problem, is_told):
    monkeypatch.setattr(shared_memory, "madvise", lambda: lambda *_: ctypes.set_errno(problem) or -1)
    with pytest.raises(OSError, match="not enough memory for 16 bytes") if is_told else nullcontext():
        shared_memory.take_pages(torch.zeros(4))


def one_is_slow(has_looked: Any) -> list[bool]:
    """Rank 0 sums only after rank 1 has checked in vain whether it may return the pages."""
    rank, group = dist.get_rank(), dist.group.WORLD
    reduce = SharedMemoryReduceScatter(connected(), torch.float32, 1, 2)
    chunks = reduce.allocate([4], dtype=torch.float32, device=CPU).fill_(1.0 + rank)
    total = torch.zeros(4)
    work = reduce(total, chunks, group, SUM, async_op=True)
    if rank == 0:
        assert has_looked.wait(60)
    else:
        look = shared_memory.cancellation.sleep

        def sleep(seconds: float) -> None:
            has_looked.set()
            look(seconds)

        shared_memory.cancellation.sleep = sleep
    work.wait()
    reduce.empty()
    return [bool((total == 2.0 - rank).all())]


def test_stages_that_another_rank_still_reads_are_not_released():
    assert run_ranks(2, one_is_slow, FORK.Event()) == [[True]] * 2
