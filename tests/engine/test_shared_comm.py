"""The collectives over shared memory: bit for bit equal to gloo's, without a copy; and their refusals."""

import mmap
import multiprocessing
import weakref
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_shared_memory import DTYPES, connected, mapped
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.small_models import batch, loss_of, make_net
from workbench.engine import MixedPrecisionPolicy
from workbench.engine.backends.page_pool import Region
from workbench.engine.backends.shared import shared_memory
from workbench.engine.backends.shared.shared_comm import (
    SharedMemoryAllGather,
    SharedMemoryCastAllGather,
    SharedMemoryReduceScatter,
)
from workbench.engine.fsdp_state import states_below, units_of

FORK = multiprocessing.get_context("fork")
CPU = torch.device("cpu")
SUM = dist.ReduceOp.SUM


# ---- the same bits as gloo


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    numel: int
    magnitude: int
    seed: int

    def numbers(self, count: int) -> torch.Tensor:
        """Return random numbers that depend on the rank; their sizes vary so much that the order of a sum shows."""
        generator = torch.Generator().manual_seed(self.seed * 8 + dist.get_rank())
        if not self.dtype.is_floating_point:
            return torch.randint(-128, 128, (count,), generator=generator).to(self.dtype)
        exponents = torch.randint(0, self.magnitude, (count,), generator=generator)
        return (torch.randn(count, generator=generator) * 2.0**exponents).to(self.dtype)


CASES = st.builds(
    Case,
    dtype=st.sampled_from(DTYPES),
    numel=st.sampled_from([0, 1, 2, 7, 63, 64, 65, 1000, 4097]),
    magnitude=st.integers(1, 20),  # in float16 some sums overflow to NaN
    seed=st.integers(0, 2**20),
)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.flatten().contiguous().view(torch.uint8).tolist()


def gloo_gather(shard: torch.Tensor) -> torch.Tensor:
    rows = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, shard)
    return torch.cat(rows)


def begin(
    reduce: SharedMemoryReduceScatter, numbers: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[Any, torch.Tensor]:
    """Issue the reduction of this rank's ``numbers`` ``[F * S]``; return it and the tensor for the sum."""
    rank, rows = dist.get_rank(), numbers.view(dist.get_world_size(), -1)
    others = torch.cat([rows[:rank], rows[rank + 1 :]]).flatten()
    chunks = reduce.allocate([len(others)], dtype=numbers.dtype, device=CPU)
    assert chunks.shape == others.shape
    chunks.copy_(others)
    total = rows[rank].clone()
    return reduce(total, chunks, group or dist.group.WORLD, SUM, async_op=True), total


def gloo_reduce(chunks: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks)
    total, *rest = received.view(dist.get_world_size(), -1).unbind(0)
    for chunk in rest:
        total = total + chunk
    return total


def share(gather: SharedMemoryAllGather, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Share a new shard with the other ranks and return it."""
    region = Region(numel, dtype)
    gather.share(region, numel, dtype)
    return region.tensor


def compare(cases: list[Case]) -> None:
    shared, size, group = connected(), dist.get_world_size(), dist.group.WORLD
    reduces = {dtype: SharedMemoryReduceScatter(shared, dtype) for dtype in DTYPES}
    for case in cases:
        gather, reduce = SharedMemoryAllGather(shared), reduces[case.dtype]
        shard = share(gather, case.numel, case.dtype)
        shard.copy_(case.numbers(case.numel))
        output = gather.allocate([case.numel * size], dtype=case.dtype, device=CPU)
        gather(output, shard, group, async_op=True).wait()
        assert bits(output) == bits(gloo_gather(case.numbers(case.numel)))
        work, total = begin(reduce, case.numbers(case.numel * size))
        work.wait()
        assert bits(total) == bits(gloo_reduce(case.numbers(case.numel * size)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@settings(max_examples=4)
@given(cases=st.lists(CASES, min_size=4, max_size=12))
def test_both_collectives_give_the_same_bits_as_gloo(world_size, cases):
    run_ranks(world_size, compare, cases)


def synchronous() -> tuple[list[float], list[float]]:
    shared, group = connected(), dist.group.WORLD
    gather, reduce = SharedMemoryAllGather(shared), SharedMemoryReduceScatter(shared, torch.float32)
    shard = share(gather, 1).fill_(dist.get_rank())
    output = gather.allocate([2, 1], dtype=torch.float32, device=CPU)
    assert gather(output, shard, group) is None
    chunks = reduce.allocate([1, 1], dtype=torch.float32, device=CPU)
    numbers = [1.0, 10.0]
    total = torch.tensor([numbers.pop(dist.get_rank())])
    chunks.fill_(numbers[0])
    assert reduce(total, chunks, group, SUM) is None
    return output.flatten().tolist(), total.tolist()


def test_called_without_async_op_they_return_when_it_is_done():
    assert run_ranks(2, synchronous) == [([0.0, 1.0], [2.0]), ([0.0, 1.0], [20.0])]


# ---- memory


def shards() -> None:
    shared = connected()
    gather = SharedMemoryAllGather(shared)
    kept = []
    for dtype in (torch.float32, torch.bfloat16):  # a unit gets new memory when its policy changes
        shard = share(gather, 1000, dtype)
        assert shard.nbytes == gather.num_bytes == 1000 * dtype.itemsize
        output = gather.allocate([2000], dtype=dtype, device=CPU)
        assert (output.shape, output.data_ptr() % mmap.PAGESIZE) == ((2, 1000), 0)
        kept.append(shard.fill_(1))
        assert output[dist.get_rank()].eq(1).all()
        assert output.data_ptr() != shard.data_ptr()  # the same pages, at two addresses
        assert len(set(mapped())) == len(kept)
    del gather, output, kept
    assert len(mapped()) == 1
    assert shard.eq(1).all()  # a shard keeps its memory alive alone
    del shard
    assert mapped() == []


def test_a_shard_is_its_own_storage_and_keeps_it_alive():
    run_ranks(2, shards)


def stages_grow() -> list[int]:
    reduce, sizes = SharedMemoryReduceScatter(connected(), torch.float32, max_outstanding=2), []

    def begin_with(numel: int) -> tuple[Any, torch.Tensor]:
        begun = begin(reduce, torch.full((2 * numel,), float(numel)))
        sizes.append(reduce.num_bytes)
        return begun

    sizes.append(reduce.num_bytes)
    reduce.reserve(30)
    small, large = begin_with(10), begin_with(5000)
    assert len(mapped()) == 4  # the outstanding one keeps its stages and its reader counters
    for (work, total), numel in ((small, 10), (large, 5000)):
        work.wait()
        work.wait()  # a second wait is a no-op
        assert total.tolist() == [2 * numel] * numel
    assert len(mapped()) == 2
    del small, large, work, total
    reduce.release()
    assert mapped() == []
    again, total = begin_with(20)
    again.wait()
    assert total.tolist() == [40] * 20
    return sizes


def test_stages_grow_are_released_and_are_allocated_again():
    assert run_ranks(2, stages_grow) == [[0, 5 * 4096, 5 * 5 * 4096, 5 * 4096]] * 2


def what_a_reduction_keeps() -> list[bool]:
    reduce = SharedMemoryReduceScatter(connected(), torch.float32)
    kept = []
    for _ in range(2):
        work, total = begin(reduce, torch.ones(2))
        work.wait()
        output = weakref.ref(total)
        del work, total
        kept.append(output() is not None)
    return kept


def test_a_reduction_that_has_ended_keeps_no_gradients():
    assert run_ranks(2, what_a_reduction_keeps) == [[False, False]] * 2


def mapped_with_casts(num_blocks: int) -> int:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    model = shard_net(make_net(num_blocks=num_blocks), mp_policy=policy)
    loss_of(model, batch(0, 0)).backward()
    assert [unit.comm.name for unit in units_of(states_below(model))] == ["shared memory"] * (num_blocks + 1)
    return len(mapped())


def test_units_that_are_cast_share_their_memory(environ):
    environ.pop("WORKBENCH_COMM", None)
    assert run_ranks(2, mapped_with_casts, 5) == run_ranks(2, mapped_with_casts, 2)


# ---- slow ranks: shards


def overwritten_after(ordered: bool, has_read, has_written) -> list[float]:
    """After a forward without backward, rank 1 writes its shard while rank 0 reads late."""
    shared = connected()
    gather = SharedMemoryAllGather(shared)
    shard = share(gather, 1).fill_(1 + dist.get_rank())
    output = gather.allocate([2], dtype=torch.float32, device=CPU)
    gather(output, shard, dist.group.WORLD)
    if dist.get_rank() == 1:
        gather.free(output)
        if ordered:
            shared.readers.wait()
            assert has_read.is_set()
        shard.fill_(9)
        has_written.set()
        return []
    if not ordered:
        assert has_written.wait(60)
    seen = output.flatten().tolist()
    has_read.set()
    gather.free(output)
    return seen


@pytest.mark.parametrize(("ordered", "seen"), [(True, [1.0, 2.0]), (False, [1.0, 9.0])])
def test_a_writer_can_wait_for_slow_readers(ordered, seen):
    assert run_ranks(2, overwritten_after, ordered, FORK.Event(), FORK.Event())[0] == seen


# ---- shards that are cast


def casts_in_turn(numels: list[int], at_once: int) -> list[bool]:
    """Gather units of the given sizes, some before the first is read; return which came out right."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    gather = SharedMemoryCastAllGather(connected(), torch.bfloat16)
    gather.reserve(max(numels))
    unread: deque[tuple[int, torch.Tensor]] = deque()
    right = []

    def read() -> None:
        value, output = unread.popleft()
        wanted = torch.arange(size).repeat_interleave(output.numel() // size) + value
        right.append(torch.equal(output, wanted.bfloat16()))
        gather.free(output)

    for value, numel in enumerate(numels):
        output = gather.allocate([size * numel], dtype=torch.bfloat16, device=CPU)
        row = output.view(size, numel)[rank].fill_(rank + value)
        work = gather(output, row, group, async_op=True)
        assert work is not None
        unread.append((value, output))
        work.wait()
        if len(unread) == at_once:
            read()
    while unread:
        read()
    return right


@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_casts_are_gathered_in_two_stages(world_size, at_once):
    numels = [7, 3, 64, 0, 64, 1, 7, 7]
    assert run_ranks(world_size, casts_in_turn, numels, at_once) == [[True] * len(numels)] * world_size


def cast_read_late(has_read, waits_for_readers) -> list[float]:
    """Rank 0 reads its first all-gather only when rank 1 waits for that read, two all-gathers later."""
    rank, group = dist.get_rank(), dist.group.WORLD
    gather = SharedMemoryCastAllGather(connected(), torch.bfloat16)
    gather.reserve(1)
    outputs = []
    with pytest.MonkeyPatch.context() as patch:
        for value in range(3):
            if value == 2 and rank == 0:
                assert waits_for_readers.wait(60)
                seen = outputs[0].tolist()
                has_read.set()
                gather.free(outputs[0])
            if value == 2 and rank == 1:
                patch.setattr(shared_memory, "cancellation", SimpleNamespace(sleep=lambda _: waits_for_readers.set()))
                gather.free(outputs[0])
            output = gather.allocate([2], dtype=torch.bfloat16, device=CPU)
            if value == 2 and rank == 1:
                assert has_read.is_set()
            gather(output, output[rank : rank + 1].fill_(10 * value + rank), group)
            outputs.append(output)
    return seen if rank == 0 else []


def test_a_stage_is_not_written_while_another_rank_reads_it():
    assert run_ranks(2, cast_read_late, FORK.Event(), FORK.Event()) == [[0.0, 1.0], []]


# ---- aborted, and refused


def after_a_rebuild() -> list[float]:
    """Rank 0 issues one reduction more than rank 1; new process groups reset the counters."""
    shared = connected()
    group = shared.group
    reduce = SharedMemoryReduceScatter(shared, torch.float32)

    def begin_with(number: float) -> tuple[Any, torch.Tensor]:
        return begin(reduce, torch.full((2,), number), group.process_group)

    begin_with(1.0)[0].wait()
    if group.rank == 0:
        abandoned, _ = begin_with(2.0)
    group.rebuild()
    seen = []
    for number in (3.0, 4.0, 5.0):
        work, total = begin_with(number)
        work.wait()
        seen += total.tolist()
    if group.rank == 0:
        assert abandoned._unread == ()
    return seen


def test_after_an_abandoned_reduction_new_groups_count_again():
    assert run_ranks(2, after_a_rebuild) == [[6.0, 8.0, 10.0]] * 2


def drop_some(reduce: SharedMemoryReduceScatter) -> list[float]:
    """Issue reductions and drop most of them, as if all ranks were interrupted at the same place."""
    size, totals = dist.get_world_size(), []
    for number in range(7):
        reduce.allocate([size - 1], dtype=torch.float32, device=CPU).fill_(-1)  # never issued
        work, total = begin(reduce, torch.full((size,), float(number)))
        if number % 3 == 0:
            work.wait()
            totals += total.tolist()
    return totals


def dropped() -> list[float]:
    return drop_some(SharedMemoryReduceScatter(connected(), torch.float32))


def test_reductions_without_a_wait_do_no_harm():
    assert run_ranks(2, dropped) == [[0.0, 6.0, 12.0]] * 2


def more_allowed() -> list[float]:
    reduce = SharedMemoryReduceScatter(connected(), torch.float32)
    begun = []
    for number in range(4):
        if number == 1:
            reduce.allow(3)  # one is outstanding
        begun.append(begin(reduce, torch.full((2,), float(number))))
    for work, _ in begun:
        work.wait()
    return [float(total) for _, total in begun]


def test_more_reductions_can_be_allowed_at_any_time():
    assert run_ranks(2, more_allowed) == [[0.0, 2.0, 4.0, 6.0]] * 2


def too_many() -> tuple[str, list[list[float]]]:
    reduce = SharedMemoryReduceScatter(connected(), torch.float32, max_outstanding=2)
    begun = [begin(reduce, torch.full((2,), float(number))) for number in (5, 1, 2)]
    with pytest.raises(RuntimeError) as refused:
        begun[0][0].wait()
    for work, _ in begun[1:]:
        work.wait()
    return str(refused.value), [total.tolist() for _, total in begun]


def test_a_reduction_that_was_waited_for_too_late_is_an_error_not_a_wrong_sum():
    message = (
        "wait() came too late for this reduction: the maximum number of outstanding reductions was issued after it, "
        "or the group was rebuilt, so its stages may hold other gradients"
    )
    assert run_ranks(2, too_many) == [(message, [[5.0], [2.0], [4.0]])] * 2


def refusals() -> list[str]:
    shared, group, other = connected(), dist.group.WORLD, torch.zeros(4)
    gather, reduce = SharedMemoryAllGather(shared), SharedMemoryReduceScatter(shared, torch.float32)
    shard = share(gather, 2)
    output = gather.allocate([4], dtype=torch.float32, device=CPU)
    chunks = reduce.allocate([2], dtype=torch.float32, device=CPU)
    casts = SharedMemoryCastAllGather(shared, torch.bfloat16)
    cast = casts.allocate([4], dtype=torch.bfloat16, device=CPU)
    meta = torch.device("meta")
    refused = [
        lambda: SharedMemoryAllGather(shared).allocate([4], dtype=torch.float32, device=CPU),
        lambda: gather.allocate([4], dtype=torch.bfloat16, device=CPU),
        lambda: gather.allocate([4], dtype=torch.float32, device=meta),
        lambda: gather(other, shard, group),
        lambda: gather(output, other[:2], group),
        lambda: reduce.allocate([4], dtype=torch.bfloat16, device=CPU),
        lambda: reduce.allocate([4], dtype=torch.float32, device=meta),
        lambda: reduce(other[:2], other, group, SUM),
        lambda: reduce(other[:1], chunks, group, SUM),
        lambda: reduce(other[:2].double(), chunks, group, SUM),
        lambda: reduce(other[:2], chunks, group, dist.ReduceOp.AVG),
        lambda: SharedMemoryReduceScatter(shared, torch.float32).__call__(other[:2], other, group, SUM),
        lambda: SharedMemoryReduceScatter(shared, torch.float32, max_outstanding=0),
        lambda: SharedMemoryReduceScatter(shared, torch.float32, max_outstanding=2, num_stages=2),
        lambda: casts.allocate([4], dtype=torch.float32, device=CPU),
        lambda: casts(cast, cast[:2] if dist.get_rank() else cast[2:], group),
        lambda: casts(other.bfloat16(), cast[:2], group),
    ]
    messages = []
    for call in refused:
        with pytest.raises(ValueError, match=r"shar|stage") as error:
            call()
        messages.append(str(error.value))
    return messages


def test_tensors_that_would_need_a_copy_are_refused():
    messages, _ = run_ranks(2, refusals)
    assert messages[1] == (
        "an output of 4 elements of torch.bfloat16 was requested, but this unit's shared memory has 4 of "
        "torch.float32; call share() with the shard's size and dtype first"
    )
    assert messages[2] == messages[6] == "memory on meta was requested; ranks share CPU memory only"
    assert messages[5] == (
        "an input of torch.bfloat16 was requested; the stages of this reduce-scatter hold torch.float32"
    )
    assert messages[10] == "a reduce-scatter through shared memory supports SUM only, got RedOpType.AVG"
    assert "the input must be the tensor of the region last passed to share()" in messages[3] == messages[4]
    assert "the input must be the tensor that allocate() last returned" in messages[7] == messages[8] == messages[9]
    assert messages[12] == (
        "got 0 outstanding reductions and 1 stages; need at least 1 reduction, and more stages than reductions"
    )
    assert messages[14] == (
        "an output of torch.float32 was requested; the stages of this all-gather hold torch.bfloat16"
    )
    assert "the input this rank's row of it" in messages[15] == messages[16]
