"""Collectives over gloo that are faster than its own and need less memory; the default for ranks on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from workbench.engine.backends.async_work import CombinedWork
from workbench.engine.backends.page_pool import Buffers
from workbench.engine.backends.rank_sum import add_others
from workbench.engine.cancellable_waits import AsyncWork
from workbench.engine.comm import CommTraits

_FEW_BYTES = 2**20
"""Up to this many bytes are copied to send one all-to-all instead of several: small messages are latency-bound."""


class _PooledBuffers:
    """Buffer allocation for the collectives of this file; freed buffers are reused.

    Args:
        buffers: a pool that several collectives share; None makes a private one.
    """

    def __init__(self, buffers: Buffers | None = None) -> None:
        self._buffers = buffers or Buffers()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised buffer of ``size`` on the host."""
        if device.type != "cpu":
            raise ValueError(f"memory on {device} was requested; gloo's collectives need CPU memory")
        return self._buffers.take(size, dtype)

    def free(self, buffer: torch.Tensor) -> None:
        """Return an unused buffer to the pool."""
        self._buffers.give_back(buffer)


class GlooAllGather(_PooledBuffers):
    """All-gather as a series of all-to-alls; in each, a rank sends its shard to one other rank without a copy.

    gloo's all-gathers, and c10d's on top of them, gather into a fresh internal buffer at every call and copy it. A
    single all-to-all needs one copy of the shard per target, so it is used only for small shards.

    It needs an additional buffer for sending only if it copies.
    """

    traits = CommTraits(
        leaves_own_out=True,
        reuses_buffers=True,
        staging_nbytes=lambda num_bytes, num_ranks: num_bytes if _sends_copies(num_bytes, num_ranks) else 0,
    )

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> AsyncWork | None:
        """Gather ``input_tensor`` ``[S]`` of every other rank into ``output_tensor`` ``[(F - 1) * S]``, in order."""
        others = _others(group)
        if _sends_copies(output_tensor.nbytes, group.size()):
            works = [exchange(output_tensor, others, input_tensor.repeat(len(others)), others, group)]
        else:
            places = dict(zip(others, output_tensor.view(len(others), input_tensor.numel()), strict=True))
            works = [
                exchange(places[source], [source], input_tensor, [target], group)
                for source, target in neighbours(group)
            ]
        work = works[0] if len(works) == 1 else CombinedWork(works)
        if async_op:
            return work
        work.wait()
        return None


def _sends_copies(num_bytes: int, size: int) -> bool:
    return size > 2 and num_bytes <= _FEW_BYTES


def _others(group: dist.ProcessGroup) -> list[int]:
    return [rank for rank in range(group.size()) if rank != group.rank()]


def neighbours(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Return (source, target) rank pairs: for each distance, the rank before and the rank after this one."""
    rank, size = group.rank(), group.size()
    return [((rank - distance) % size, (rank + distance) % size) for distance in range(1, size)]


def exchange(
    received: torch.Tensor, sources: Sequence[int], sent: torch.Tensor, targets: Sequence[int], group: dist.ProcessGroup
) -> AsyncWork:
    """Start sending equal parts to ``targets`` and receiving equal parts from ``sources``, each in rank order."""
    each, all_ranks = received.numel() // len(sources), range(group.size())
    taken, given = ([each if rank in some else 0 for rank in all_ranks] for some in (sources, targets))
    return cast("AsyncWork", dist.all_to_all_single(received, sent, taken, given, group=group, async_op=True))


class GlooReduceScatter(_PooledBuffers):
    """All-to-all, then a local sum: 5 to 8 times faster on gloo than its reduce-scatter, and deterministic.

    It receives into an additional buffer of the size of its input.
    """

    traits = CommTraits(own_in_output=True, reuses_buffers=True, staging_nbytes=lambda num_bytes, _num_ranks: num_bytes)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = dist.ReduceOp.SUM,  # noqa: ANN401 - see ReduceScatter
        async_op: bool = False,
    ) -> AsyncWork | None:
        """Add the other ranks' parts of this rank's chunk to ``output_tensor`` ``[S]``; supports SUM only.

        ``input_tensor`` ``[(F - 1) * S]`` holds the chunks for the other ranks, in order.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"GlooReduceScatter supports SUM only, got {op}")
        others = _others(group)
        received = self._buffers.take((len(others), output_tensor.numel()), input_tensor.dtype)
        sent = exchange(received.view(-1), others, input_tensor, others, group)
        work = _SumAfterExchange(sent, received, group.rank(), output_tensor, self._buffers)
        if async_op:
            return work
        work.wait()
        return None


class _SumAfterExchange:
    """An all-to-all whose ``wait`` also sums in rank order, independent of the order of arrival."""

    def __init__(
        self, work: AsyncWork, received: torch.Tensor, rank: int, output: torch.Tensor, buffers: Buffers
    ) -> None:
        self._work = work
        self._received: torch.Tensor | None = received  # [F - 1, S], of the other ranks in order; None once summed
        self._rank = rank
        self._output = output  # [S]; holds this rank's own part until summed
        self._buffers = buffers

    def get_future(self) -> Any:  # noqa: ANN401 - see Work
        """Future of the exchange."""
        return self._work.get_future()

    def wait(self) -> None:
        """Finish the exchange and sum into the output; later calls do nothing."""
        self._work.wait()
        received, self._received = self._received, None
        if received is not None:
            add_others(received.unbind(0), self._rank, self._output)
            self._buffers.give_back(received)
