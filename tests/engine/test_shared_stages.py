"""Ranks that are late: how many stages keep a slow rank from summing later numbers."""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.ranks import run_ranks
from tests.engine.test_shared_memory import connected
from workbench.engine.backends import shared_comm
from workbench.engine.backends.pending import PendingWork
from workbench.engine.backends.shared_comm import SharedMemoryReduceScatter
from workbench.engine.backends.shared_memory import SharedMemory

FORK = multiprocessing.get_context("fork")
CPU = torch.device("cpu")
SUM = dist.ReduceOp.SUM


@dataclass(frozen=True)
class Plan:
    """Reductions in a row; ``reads_first``: the oldest is waited for before the next is written, not after."""

    num_outstanding: int
    num_stages: int
    reads_first: bool = False
    number: int = 12


def value(rank: int, number: int) -> torch.Tensor:
    return torch.arange(8.0) + 100 * rank + 1000 * number  # [F * S]


def reductions(shared: SharedMemory, plan: Plan, written: Callable[[int], Any], reading: Callable[[int], Any]) -> bool:
    """Go through ``plan`` as an engine does; returns whether all sums are right."""
    n, rank = plan.num_outstanding, dist.get_rank()
    reduce = SharedMemoryReduceScatter(shared, torch.float32, n, plan.num_stages)
    outstanding, totals = [], [value(rank, number).view(2, 4)[rank].clone() for number in range(plan.number)]

    def read_oldest() -> None:
        oldest, pending = outstanding.pop(0)
        reading(oldest)
        pending.block()
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
    while outstanding:
        read_oldest()
    wanted = [(value(0, i) + value(1, i))[4 * rank : 4 * rank + 4] for i in range(plan.number)]
    return all(map(torch.equal, totals, wanted))


def nothing(_number: int) -> None:
    """Do nothing."""


def slow_reader(plan: Plan, slow: int, may_read, in_wait: str) -> bool:
    """The slow rank reads its first sum only when the other is as far ahead as it can come.

    That is: has overwritten the stage 2 n later (``in_wait`` is ""), or waits for the right to do so: then the wait of
    ``allocate`` goes on ("wait") or is skipped ("skip").
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
def test_with_2n_plus_1_stages_a_slow_rank_is_not_robbed_and_nobody_waits(num_outstanding, slow):
    plan = Plan(num_outstanding, 2 * num_outstanding + 1)
    assert run_ranks(2, slow_reader, plan, slow, FORK.Event(), "") == [True, True]


@pytest.mark.parametrize(("num_outstanding", "num_stages"), [(1, 2), (2, 3), (2, 4), (3, 6)])
def test_with_fewer_stages_allocate_waits_for_the_slow_rank(num_outstanding, num_stages):
    plan = Plan(num_outstanding, num_stages)
    assert run_ranks(2, slow_reader, plan, 0, FORK.Event(), "wait") == [True, True]


@pytest.mark.parametrize(("num_outstanding", "num_stages"), [(1, 2), (2, 4), (3, 6)])
def test_without_that_wait_the_slow_rank_would_sum_later_numbers(num_outstanding, num_stages):
    """So 2 n + 1 is exact: n + 2 stages are too few for n = 2."""
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
def test_who_reads_before_writing_needs_2n_stages(num_outstanding):
    plan = Plan(num_outstanding, 2 * num_outstanding, reads_first=True)
    assert run_ranks(2, no_wait_in_allocate, plan) == [True, True]


@settings(max_examples=4)
@given(
    plans=st.lists(
        st.integers(1, 3).flatmap(
            lambda n: st.builds(Plan, st.just(n), st.integers(n + 1, 2 * n + 2), st.booleans(), st.integers(1, 40))
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
