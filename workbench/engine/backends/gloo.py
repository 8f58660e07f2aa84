"""Collectives that are faster on gloo than its own, which this engine's ranks on the CPU use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from workbench.engine.backends.addresses import is_same_memory
from workbench.engine.comm import Allocator, Peers
from workbench.engine.waits import Work


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
        if not is_same_memory(input_tensor, rows[own]):
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
    def staging_nbytes(num_bytes: int, group: Peers) -> int:
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
