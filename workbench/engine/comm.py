"""How bytes travel: all-gather and reduce-scatter as exchangeable objects, with torch's own call signatures.

``WORKBENCH_COMM`` in the environment chooses: unset, ranks of one host use shared memory (``shared_memory.py``) and
others the fastest pair for their backend; ``gloo``, never shared memory; ``default``, c10d's single-tensor collectives.
On gloo those are slow (``reduce_scatter_single`` runs as an all-reduce), so there the engine picks
:class:`GlooAllGather` and :class:`GlooReduceScatter`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from workbench.engine._torch import all_gather_single, group_allocator, reduce_scatter_single
from workbench.engine.groups import CommGroup
from workbench.engine.waits import Work

CHOICES = ("", "gloo", "default")
CUSTOM = "custom"
OF_GROUP = "c10d, memory of the group"
SET_BY_USER = frozenset({CUSTOM, OF_GROUP})


class AllGather(Protocol):
    """Gathers equal shards into one buffer."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an output buffer of ``size``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Gather ``input_tensor`` ``[S]`` of every rank into ``output_tensor`` ``[F * S]``; None if it is done."""


class ReduceScatter(Protocol):
    """Sums chunks across ranks; each rank gets its own."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an input buffer of ``size``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ANN401 - dist.ReduceOp or one of its kinds
        async_op: bool = False,
    ) -> Work | None:
        """Reduce: ``output_tensor`` ``[S]`` becomes the sum over ranks of their ``input_tensor`` ``[F * S]``, own part.

        None if it is done.
        """


class Allocator:
    """Where the engine's own pairs get their buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised buffer of ``size``."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


def give_back(comm: AllGather | ReduceScatter, buffer: torch.Tensor) -> None:
    """Return a buffer to the one who allocated it, if that one wants it."""
    free = getattr(comm, "free", None)
    if free is not None:
        free(buffer)


def output_nbytes(gather: AllGather, output: torch.Tensor) -> int:
    """Bytes an all-gather's output costs: none if it is the ranks' shared memory itself."""
    return 0 if getattr(gather, "is_shared", False) else output.nbytes


def input_nbytes(reduce: ReduceScatter, chunks: torch.Tensor, group: CommGroup) -> int:
    """Bytes a reduce-scatter costs while in flight: its input, and what it needs beside."""
    beside = getattr(reduce, "staging_nbytes", None)
    return chunks.nbytes + (beside(chunks.nbytes, group) if beside is not None else 0)


def takes_own_in_output(reduce: ReduceScatter) -> bool:
    """Whether this rank's own chunk ``[S]`` goes into the output, and only the others' into what is allocated."""
    return getattr(reduce, "own_in_output", False)


class DefaultAllGather(Allocator):
    """c10d's single-tensor all-gather."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """See :class:`AllGather`."""
        return cast("Work | None", all_gather_single(output_tensor, input_tensor, group, async_op))


class DefaultReduceScatter(Allocator):
    """c10d's single-tensor reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = dist.ReduceOp.SUM,  # noqa: ANN401 - see ReduceScatter
        async_op: bool = False,
    ) -> Work | None:
        """See :class:`ReduceScatter`."""
        return cast("Work | None", reduce_scatter_single(output_tensor, input_tensor, op, group, async_op))


class GlooAllGather(Allocator):
    """The fastest on gloo: between two ranks an exchange, among more an all-gather into a list of views of the output.

    The list is 2 to 4 times faster than the single-tensor call. But gloo gathers it in a buffer of its own, fresh at
    every call; the exchange goes from memory to memory.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """See :class:`AllGather`."""
        rows = list(output_tensor.view(group.size(), input_tensor.numel()).unbind(0))
        if len(rows) != 2:
            return cast("Work | None", dist.all_gather(rows, input_tensor, group=group, async_op=async_op))
        own, splits = group.rank(), [input_tensor.numel()] * 2
        splits[own] = 0
        if input_tensor.data_ptr() != rows[own].data_ptr():
            rows[own].copy_(input_tensor)
        work = dist.all_to_all_single(rows[1 - own], input_tensor, splits, splits, group=group, async_op=async_op)
        return cast("Work | None", work)


class GlooReduceScatter(Allocator):
    """All-to-all, then a local sum: 5 to 8 times faster on gloo than its reduce-scatter, and deterministic.

    The first and the last rank send what lies in one piece around their own part; that part is summed where it is.
    Ranks between them would have two pieces, so they let gloo copy their own part along. Of two ranks each receives
    into the output, and adds its own part to that.
    """

    @staticmethod
    def staging_nbytes(num_bytes: int, group: CommGroup) -> int:
        """Bytes it needs beside an input of ``num_bytes``, for what is received."""
        return 0 if group.size == 2 else num_bytes // group.size * _num_received(group.rank, group.size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = dist.ReduceOp.SUM,  # noqa: ANN401 - see ReduceScatter
        async_op: bool = False,
    ) -> Work | None:
        """See :class:`ReduceScatter`; sums only."""
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"GlooReduceScatter sums; it got {op}")
        numel, size, rank = output_tensor.numel(), group.size(), group.rank()
        num_received = _num_received(rank, size)
        received = output_tensor if size == 2 else input_tensor.new_empty(numel * num_received)
        sent, splits, parts = input_tensor, [numel] * size, list(received.view(num_received, numel).unbind(0))
        if num_received < size:
            sent = input_tensor[numel:] if rank == 0 else input_tensor[: numel * rank]
            splits[rank] = 0
            parts.insert(rank, input_tensor[numel * rank : numel * (rank + 1)])
        exchange = dist.all_to_all_single(received, sent, splits, splits, group=group, async_op=True)
        work = _SumAfterExchange(cast("Work", exchange), parts, output_tensor)
        if async_op:
            return work
        work.wait()
        return None


def _num_received(rank: int, size: int) -> int:
    """Return how many parts a rank receives, its own included if it does not lie at an end."""
    return size - 1 if rank in {0, size - 1} else size


class _SumAfterExchange:
    """An all-to-all whose ``wait`` also sums, in rank order: independent of the order of arrival."""

    def __init__(self, work: Work, parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        self._work, self._parts, self._output = work, parts, output  # F times [S], [S]

    def get_future(self) -> Any:  # noqa: ANN401 - see Work
        """Future of the exchange."""
        return self._work.get_future()

    def wait(self) -> None:
        """Finish the exchange and sum into the output; later calls do nothing."""
        self._work.wait()
        if self._parts:
            sum_in_order(self._parts, self._output)
            self._parts = ()


def sum_in_order(parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Sum ``parts`` (F times ``[S]``) into ``output`` ``[S]`` as ``((p0 + p1) + p2) + ...``: bit-equal anywhere."""
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)


@dataclass(frozen=True)
class CommPair:
    """What a unit communicates with.

    Attributes:
        gather: for its parameters.
        reduce: for its gradients.
        name: "gloo", "shared memory", "c10d"; "custom" once the user has set one of the two.
    """

    gather: AllGather
    reduce: ReduceScatter
    name: str


def comm_choice() -> str:
    """Return what WORKBENCH_COMM asks for.

    Raises:
        ValueError: something unknown.
    """
    choice = os.environ.get("WORKBENCH_COMM", "")
    if choice not in CHOICES:
        raise ValueError(
            f"WORKBENCH_COMM={choice!r} is not known; use 'gloo' (never shared memory), 'default' (c10d's own "
            "collectives), or unset it for the fastest pair"
        )
    return choice


def default_pair(device: torch.device) -> CommPair:
    """Choose the pair for tensors on ``device`` that works between any ranks.

    Raises:
        ValueError: see :func:`comm_choice`.
    """
    if device.type == "cpu" and comm_choice() != "default":
        return CommPair(GlooAllGather(), GlooReduceScatter(), "gloo")
    return CommPair(DefaultAllGather(), DefaultReduceScatter(), "c10d")


class FromGroup(Allocator):
    """Allocates in memory that the backend can send from without a copy (NCCL with registered buffers)."""

    def __init__(self, allocate: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._allocate = allocate

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised buffer of ``size``."""
        return self._allocate(math.prod(size), dtype=dtype, device=device).view(tuple(size))


class GroupAllGather(FromGroup, DefaultAllGather):
    """c10d's all-gather, into memory of the backend."""


class GroupReduceScatter(FromGroup, DefaultReduceScatter):
    """c10d's reduce-scatter, from memory of the backend."""


def group_pair(group: CommGroup, device: torch.device) -> CommPair | None:
    """Return the pair that communicates from memory which the backend of ``group`` allocates; None: it allocates none.

    Only NCCL does.
    """
    allocate = group_allocator(group.process_group, device)
    return None if allocate is None else CommPair(GroupAllGather(allocate), GroupReduceScatter(allocate), OF_GROUP)
