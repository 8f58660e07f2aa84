"""Collectives in which the ranks of one host read each other's memory instead of sending bytes.

Shards, their casts, and the gradients to reduce are stored in mappings (see ``shared_memory.py``). Both collectives
are barriers: they end as soon as every rank has *issued* them, and each rank reads the bytes afterwards. So they cost
no copy, but a slow rank reads later than it would with gloo's collectives.

When a rank may write
    A rank may write its own row once it has waited for a collective of the group that every rank issues *after* its
    last read of that row. In particular:

    - a shard, before its all-gather is called: at any time, provided its earlier reads are complete, see below;
    - a shard, after its reads in forward and backward: as soon as this rank has finished the reduce-scatter of the same
      unit, or any collective issued later. So an optimizer is safe, even one that runs in backward, unit by unit;
    - a shard, after the engine has returned from a forward, a backward or a manual unshard: it returns only when the
      others have read what this rank has read (:class:`Readers`). So loading and other in-place writes are safe too;
    - a stage: whenever ``allocate`` returns it, see :class:`SharedMemoryReduceScatter` and
      :class:`SharedMemoryCastAllGather`.

A reader sees what was written before the barrier, even on processors that reorder memory accesses: between the write
and the read are a mutex shared with a gloo thread, a send and a receive on a socket, and again such a mutex; each of
them orders memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from workbench.engine import probe
from workbench.engine.backends.async_work import PendingWork
from workbench.engine.backends.memory_aliasing import is_same_memory
from workbench.engine.backends.page_pool import Region
from workbench.engine.backends.rank_sum import add_others
from workbench.engine.backends.shared.shared_memory import (
    PARAMETERS,
    Readers,
    SharedMemory,
    barrier,
    give_back_pages,
    take_pages,
    whole_pages,
)
from workbench.engine.cancellable_waits import AsyncWork
from workbench.engine.comm import CommTraits
from workbench.events import Category


def _refuse_unless_cpu(device: torch.device) -> None:
    if torch.device(device).type != "cpu":
        raise ValueError(f"memory on {device} was requested; ranks share CPU memory only")


def _is_same(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two contiguous tensors have the same memory, size and dtype."""
    is_alike = (tensor.numel(), tensor.dtype) == (expected.numel(), expected.dtype)
    return is_alike and is_same_memory(tensor, expected)


def _waited(work: AsyncWork, async_op: bool) -> AsyncWork | None:
    if async_op:
        return work
    work.wait()
    return None


class SharedMemoryAllGather:
    """All-gather of one unit, whose shard is in shared memory: the output *is* every rank's shard, uncopied.

    See :class:`workbench.engine.comm.AllGather`, and the head of this file for when a shard may be written.
    """

    traits = CommTraits(is_shared=True, reuses_buffers=True)

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._whole = torch.empty(0)  # [F, S]
        self._own = torch.empty(0)  # [S]
        self._number: int | None = None  # of the all-gather whose output is still in use

    def share(self, region: Region | None, numel: int, dtype: torch.dtype) -> None:
        """Share this rank's shard ``[numel]`` in ``region``, whose address stays, with the other ranks; collective.

        A region shared before keeps its memory, but no longer takes part.

        Raises:
            LiesElsewhereError: on all ranks, if one of them has no region.
            OSError: on all ranks, see :meth:`SharedMemory.rows`.
        """
        self._whole = self._shared.lay_beneath(region, numel, dtype)
        self._own = torch.empty(0) if region is None else region.tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's shard; the all-gather's output needs no more."""
        return self._own.nbytes

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a live view of every rank's shard, ``[F, S]``; nothing is allocated.

        Raises:
            ValueError: ``share`` was not called for this size and dtype.
        """
        _refuse_unless_cpu(device)
        numel = math.prod(size)
        if (numel, dtype) != (self._whole.numel(), self._whole.dtype):
            raise ValueError(
                f"an output of {numel} elements of {dtype} was requested, but this unit's shared memory has "
                f"{self._whole.numel()} of {self._whole.dtype}; call share() with the shard's size and dtype first"
            )
        return self._whole

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> AsyncWork | None:
        """Start the barrier after which every rank's shard ``[S]`` is ready in ``output_tensor`` ``[F, S]``.

        Raises:
            ValueError: the input is not the shared region's tensor, or the output is not the one from ``allocate``.
        """
        if not (_is_same(input_tensor, self._own) and _is_same(output_tensor, self._whole)):
            raise ValueError(
                "an all-gather through shared memory works in place: the input must be the tensor of the region "
                "last passed to share(), and the output the tensor that allocate() returned"
            )
        self.free(output_tensor)  # in case the last all-gather was aborted
        self._number = self._shared.readers.issue()
        return _waited(barrier(group), async_op)

    def free(self, _output: torch.Tensor) -> None:
        """Record that this rank will not read the output any more."""
        if self._number is not None:
            self._shared.readers.done(self._number)
            self._number = None


@dataclass(frozen=True, eq=False)
class _Gathered:
    """The last all-gather in a stage: ``output`` ``[F * S]`` is ready once ``barrier`` has ended."""

    output: torch.Tensor
    barrier: AsyncWork
    number: int


class SharedMemoryCastAllGather:
    """All-gather of the units of a group that cast or copy their shards to one dtype.

    Each rank casts into its row of a *stage*, where the others read it. Two stages alternate: while one is read, the
    next unit is gathered in the other. Before a rank writes to a stage, it waits until the others have read the old
    contents; usually they have, because the rank has waited for a later barrier. If the rank has not read them itself
    (more than two units are gathered at once), it first copies them to private memory, so that ranks cannot deadlock.
    """

    traits = CommTraits(is_shared=True, reads_own_row=True, reuses_buffers=True)

    def __init__(self, shared: SharedMemory, dtype: torch.dtype) -> None:
        self._shared = shared
        self._rank, self._size = shared.group.rank, shared.group.size  # of the gather; a subclass's is larger
        self._dtype = dtype
        self._readers = Readers(shared.group, shared.rows(3, torch.int64), PARAMETERS)
        self._stages: torch.Tensor | None = None  # [2, F * capacity]
        self._handle: probe.BufferHandle | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._generation = self._shared.group.index
        self._num_issued = 0
        self._gathered: list[_Gathered | None] = [None, None]  # per stage

    def reserve(self, numel: int) -> None:
        """Make the stages large enough for shards of ``numel`` elements; collective.

        Reserve for the largest unit once, so that no step has to reallocate the stages.

        Raises:
            OSError: on all ranks, see :meth:`SharedMemory.rows`; there are no stages then.
        """
        size, num_mapped = self._size, self._shared.group.size
        if self._stages is not None and size * numel <= self._stages.shape[1]:
            return
        self.release()
        self._stages = self._shared.rows(2 * numel * size // num_mapped, self._dtype).view(2, size * numel)
        self._handle = probe.BufferHandle(Category.RESERVED, probe.NO_UNIT, self._stages.nbytes // num_mapped)

    def release(self) -> None:
        """Free the stages, on all ranks; the next ``allocate`` makes new ones."""
        self._stages = self._handle = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return ``[F * S]`` of the next stage, for this rank to fill its row; all ranks use the same sizes in order.

        Raises:
            ValueError: wrong dtype or device for this object.
            OSError: on all ranks, see :meth:`reserve`; on this rank alone, if it has no memory left.
            StepAborted, CollectiveFailed: the wait for ranks that have yet to read the stage failed.
        """
        _refuse_unless_cpu(device)
        if dtype != self._dtype:
            raise ValueError(f"an output of {dtype} was requested; the stages of this all-gather hold {self._dtype}")
        if self._generation != self._shared.group.index:
            self._begin_anew()  # counts may differ between ranks; rebuilding the group has synchronised them
        numel = math.prod(size)
        self.reserve(numel // self._size)
        self._vacate(self._num_issued % 2)
        return self._next_stage()[:numel].view(*size)

    def _next_stage(self) -> torch.Tensor:
        if self._stages is None:
            return torch.empty(0, dtype=self._dtype)
        return self._stages[self._num_issued % 2]

    def _vacate(self, stage: int) -> None:
        before = self._gathered[stage]
        if before is None:
            return
        if self._readers.is_unread(before.number):
            self._readers.wait_until_issued(before.number)  # recorded, unlike the wait for the barrier, now short
            wait_for_all_to_issue(before.barrier, "all-gather through shared memory")
            before.output.data = before.output.clone()
            self._readers.done(before.number)
        self._readers.wait_for(before.number)
        self._gathered[stage] = None

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> AsyncWork | None:
        """Start the collective after which every rank's shard ``[S]`` is ready in ``output_tensor`` ``[F * S]``.

        Raises:
            ValueError: the output is not the last one from ``allocate``, or the input is not this rank's row of it.
        """
        expected, row = self._next_stage()[: output_tensor.numel()], self._rank * input_tensor.numel()
        is_own_row = _is_same(input_tensor, expected[row : row + input_tensor.numel()])
        if not (_is_same(output_tensor, expected) and is_own_row):
            raise ValueError(
                "an all-gather through shared memory works in place: the output must be the tensor that allocate() "
                "returned last, and the input this rank's row of it"
            )
        number, stage = self._readers.issue(), self._num_issued % 2
        work = self._start(output_tensor, group)
        self._gathered[stage] = _Gathered(output_tensor, work, number)
        self._num_issued += 1
        return _waited(work, async_op)

    def _start(self, _output: torch.Tensor, group: dist.ProcessGroup) -> AsyncWork:
        """Start the work that ends when all rows are filled; this rank's row is filled already."""
        return barrier(group)

    def free(self, output: torch.Tensor) -> None:
        """Record that this rank will not read the output any more."""
        for gathered in self._gathered:
            if gathered is not None and gathered.output is output:
                self._readers.done(gathered.number)


def wait_for_all_to_issue(work: AsyncWork, what: str) -> None:
    """Wait for a barrier, interruptibly.

    Raises:
        StepAborted, CollectiveFailed: see :class:`PendingWork`.
    """
    pending = PendingWork(work, what)
    pending.wait()
    pending.finish()


class IssuedReduction(Protocol):
    """An issued reduction that reads stages."""

    def get_future(self) -> Any:  # noqa: ANN401 - see Work
        """Return the reduction's future."""

    def wait(self) -> None:
        """Wait, and put the sum into the output."""

    def wait_for_all_to_issue(self) -> None:
        """Wait, interruptibly, until all ranks that share the stages have issued it."""

    def give_up_reading(self) -> None:
        """Abandon the reduction: never read the stages again."""


class _Reduction:
    """A barrier whose ``wait`` also adds this rank's chunk of every other rank's stage to its own.

    Args:
        barrier: the barrier of all ranks.
        rank: this rank.
        chunks: ``F - 1`` times ``[S]``, of the other ranks in order.
        output: ``[S]``, this rank's own chunk.
        done: called once the chunks will not be read any more.

    Attributes:
        all_have_issued: this rank has waited for the barrier.
    """

    def __init__(
        self,
        barrier: AsyncWork,
        rank: int,
        chunks: Sequence[torch.Tensor],
        output: torch.Tensor,
        done: Callable[[], None],
    ) -> None:
        self._barrier = barrier
        self._rank = rank
        self._unread = chunks  # empty once summed
        self._output: torch.Tensor | None = output  # None once summed
        self._done: Callable[[], None] | None = done
        self._is_too_late = False
        self.all_have_issued = False

    def get_future(self) -> Any:  # noqa: ANN401 - see Work
        """Return the future of the barrier."""
        return self._barrier.get_future()

    def wait(self) -> None:
        """Wait for the barrier and sum into the output; later calls do nothing.

        Raises:
            RuntimeError: the barrier failed, or the stages may hold later gradients.
        """
        self._barrier.wait()
        self.all_have_issued = True
        if self._is_too_late:
            raise RuntimeError(
                "wait() came too late for this reduction: the maximum number of outstanding reductions was issued "
                "after it, or the group was rebuilt, so its stages may hold other gradients"
            )
        if self._unread and self._output is not None:
            add_others(self._unread, self._rank, self._output)
        self._let_go()

    def wait_for_all_to_issue(self) -> None:
        """Wait for the barrier alone, interruptibly.

        Raises:
            StepAborted, CollectiveFailed: see :class:`PendingWork`.
        """
        if not self.all_have_issued:
            wait_for_all_to_issue(self._barrier, "reduce-scatter through shared memory")
            self.all_have_issued = True

    def give_up_reading(self) -> None:
        """Abandon the reduction: never read the stages again."""
        self._is_too_late |= bool(self._unread)
        self._let_go()

    def _let_go(self) -> None:
        done, self._done = self._done, None
        self._unread, self._output = (), None
        if done is not None:
            done()


class SharedMemoryReduceScatter:
    """Reduce-scatter of all units of a group with the same reduce dtype.

    Each rank lays its gradients out in its own *stage*, except its own chunk, which goes into the output; the sum reads
    every other rank's stage, in rank order. See :class:`workbench.engine.comm.ReduceScatter`. An input must be
    allocated, filled and passed to the call before the next one is allocated.

    Number of stages: let ``A(j)`` be the writing of stage j, ``B(j)`` the issuing of its barrier and ``R(j)`` the
    reading, each on every rank, and n the number of reductions that a rank may have issued and not read. A rank issues
    ``B(m)`` only after its ``R(m - n)`` (it abandons that reduction if it has not read it), so a rank that has waited
    for barrier m knows that all ranks have finished ``R(m - n)``. With N stages, ``A(j)`` overwrites what ``R(j - N)``
    reads; it needs barrier ``m = j - N + n``. A rank that writes before it reads its outstanding reductions has waited
    for barrier ``j - 1 - n``: ``N = 2n + 1`` is enough. A rank that first reads the oldest has waited for ``j - n``:
    ``N = 2n`` is enough. With fewer (at least ``n + 1``), ``allocate`` waits for the barrier itself, which is correct
    but waits for slow ranks earlier than necessary.

    Between backwards the stages have addresses, but no memory; see :meth:`empty`.

    Args:
        shared: the shared memory of the group.
        dtype: dtype of the gradients.
        max_outstanding: see :meth:`allow`.
        num_stages: see :meth:`allow`.

    Attributes:
        traits: see :class:`workbench.engine.comm.CommTraits`.
        handle: handle of the stages' memory; None while they have none.
    """

    traits = CommTraits(own_in_output=True, keeps_stages=True)

    def __init__(
        self, shared: SharedMemory, dtype: torch.dtype, max_outstanding: int = 1, num_stages: int | None = None
    ) -> None:
        self._shared = shared
        self._size = shared.group.size  # ranks in the sum; see :meth:`allocate`
        self._dtype = dtype
        self._num_issued = 0
        self._generation = shared.group.index
        self.allow(max_outstanding, num_stages)

    def allow(self, max_outstanding: int, num_stages: int | None = None) -> None:
        """Set how many reductions may be outstanding, and drop the stages; collective.

        Args:
            max_outstanding: n, the maximum number of reductions issued and not yet waited for.
            num_stages: N; None means ``2 n + 1``.

        Raises:
            ValueError: fewer stages than n + 1, or n < 1.
        """
        num_stages = 2 * max_outstanding + 1 if num_stages is None else num_stages
        if not num_stages > max_outstanding >= 1:
            raise ValueError(
                f"got {max_outstanding} outstanding reductions and {num_stages} stages; need at least 1 reduction, "
                "and more stages than reductions"
            )
        self._max_outstanding = max_outstanding
        self._num_stages = num_stages
        self._stages: torch.Tensor | None = None  # [F, N, capacity]; outstanding reductions keep the old ones alive
        self._readers: Readers | None = None  # of the stages
        self._last = -1  # the readers' number of the last reduction; -1: none
        self.handle: probe.BufferHandle | None = None
        self._recent: deque[IssuedReduction] = deque(maxlen=max(max_outstanding, num_stages - max_outstanding))

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's stages, used or not."""
        return 0 if self._stages is None else self._stages[0].nbytes

    def reserve(self, numel: int) -> None:
        """Make the stages large enough for inputs of ``numel`` elements; collective.

        Reserve for the largest unit once, so that no step has to reallocate the stages.

        Raises:
            OSError: on all ranks, see :meth:`SharedMemory.rows`; there are no stages then.
        """
        if self._stages is not None and numel <= self._stages.shape[2]:
            return
        self.release()
        capacity = whole_pages(numel, self._dtype)  # so that each rank can return its own pages
        rows = self._shared.rows(self._num_stages * capacity, self._dtype)
        self._readers = Readers(self._shared.group, self._shared.rows(3, torch.int64), "its input gradients")
        self._last = -1
        self._stages = rows.view(self._shared.group.size, self._num_stages, capacity)
        self._give_back()

    def release(self) -> None:
        """Free the stages, on all ranks; the next ``allocate`` makes new ones."""
        self._stages = self._readers = self.handle = None

    def empty(self) -> None:
        """Return the stages' memory to the system until the next ``allocate``, once the other ranks have read them.

        Call it when no reduction is waited for any more, such as after backward; outstanding reductions are abandoned.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: the wait for ranks that have yet to read failed.
        """
        if self._readers is None or self.handle is None or self._generation != self._shared.group.index:
            return
        for reduction in self._recent:
            reduction.give_up_reading()
        self._readers.wait_for(self._last)
        self._give_back()

    def _give_back(self) -> None:
        if self._stages is not None and give_back_pages(self._stages[self._shared.group.rank]):
            self.handle = None
        else:
            self._allocate_stages()

    def _allocate_stages(self) -> None:
        """Allocate the stages' memory and count it."""
        if self.handle is None and self._stages is not None:
            take_pages(self._stages[self._shared.group.rank])
            self.handle = probe.BufferHandle(Category.RESERVED, probe.NO_UNIT, self.num_bytes)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return this rank's next stage, for the caller to fill; all ranks use the same sizes in order.

        Args:
            size: ``[(F - 1) * S]``, the chunks of the other ranks in order.
            dtype: dtype of the reduction.
            device: the CPU.

        Raises:
            ValueError: wrong dtype or device for this object.
            OSError: on all ranks, see :meth:`reserve`; on this rank alone, if it has no memory left.
            StepAborted, CollectiveFailed: the wait for ranks that have yet to read the stage failed.
        """
        _refuse_unless_cpu(device)
        if dtype != self._dtype:
            raise ValueError(f"an input of {dtype} was requested; the stages of this reduce-scatter hold {self._dtype}")
        self._begin_anew_if_rebuilt()
        numel = math.prod(size)
        self.reserve(numel)
        last_user = self._issued_ago(self._num_stages - self._max_outstanding)
        if last_user is not None:
            last_user.wait_for_all_to_issue()
        self._allocate_stages()
        return self._next_stages()[self._shared.group.rank, :numel].view(*size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> AsyncWork | None:
        """Start the sum over ranks; waiting for the work adds the other ranks' chunks to ``output_tensor`` ``[S]``.

        Raises:
            ValueError: the input ``[(F - 1) * S]`` is not the last one from ``allocate``, or ``op`` is not SUM.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"a reduce-scatter through shared memory supports SUM only, got {op}")
        readers = self._check(output_tensor, input_tensor)
        oldest = self._issued_ago(self._max_outstanding)
        if oldest is not None:
            oldest.give_up_reading()
        self._last = readers.issue()
        reduction = self._start(output_tensor, group, partial(self._done, readers, self._last, self._generation))
        self._recent.append(reduction)
        self._num_issued += 1
        return _waited(reduction, async_op)

    def _done(self, readers: Readers, number: int, generation: int) -> None:
        if generation == self._shared.group.index:  # otherwise the number may refer to another reduction
            readers.done(number)

    def _check(self, output: torch.Tensor, chunks: torch.Tensor) -> Readers:
        size, numel, readers = self._size, output.numel(), self._readers
        stage = self._next_stages()[self._shared.group.rank]
        if readers is None or output.dtype != self._dtype or not _is_same(chunks, stage[: (size - 1) * numel]):
            raise ValueError(
                "a reduce-scatter through shared memory works in place: the input must be the tensor that "
                f"allocate() last returned, with {size - 1} times as many elements as the output, and both of "
                f"{self._dtype}"
            )
        return readers

    def _start(self, output: torch.Tensor, group: dist.ProcessGroup, done: Callable[[], None]) -> IssuedReduction:
        """Start adding this rank's chunk ``[S]`` of every other rank's stage to the output; then call ``done``."""
        rank, size, numel = self._shared.group.rank, self._shared.group.size, output.numel()
        stages = self._next_stages()  # [F, capacity]
        places = [(other, rank - (rank > other)) for other in range(size) if other != rank]
        chunks = [stages[other, place * numel : (place + 1) * numel] for other, place in places]
        return _Reduction(barrier(group), rank, chunks, output, done)

    def _next_stages(self) -> torch.Tensor:
        """Return the stage of every rank for the next reduction, ``[F, capacity]``.

        The index counts issued reductions, so an input that an interrupt left unused does not shift this rank alone.
        """
        if self._stages is None:
            return torch.empty(self._shared.group.size, 0, dtype=self._dtype)
        return self._stages[:, self._num_issued % self._num_stages]

    def _issued_ago(self, number: int) -> IssuedReduction | None:
        """Return the reduction issued ``number`` places before the next one; None if there is none."""
        return self._recent[-number] if len(self._recent) >= number else None

    def _begin_anew_if_rebuilt(self) -> None:
        """Restart the counts on a new process group: old counts may differ, and the rebuild has synced the ranks."""
        if self._generation != self._shared.group.index:
            for reduction in self._recent:
                reduction.give_up_reading()
            self._recent.clear()
            self._num_issued, self._last = 0, -1
            self._generation = self._shared.group.index
