"""How bytes travel: all-gather and reduce-scatter as exchangeable objects.

The default pair uses c10d's single-tensor collectives. On gloo those are slow (``reduce_scatter_single`` runs as an
all-reduce), so there the engine picks :class:`GlooAllGather` and :class:`GlooReduceScatter`;
``WORKBENCH_COMM=default`` in the environment forces the default pair.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from workbench.engine.waits import Work


class AllGather(Protocol):
    """Gathers equal shards into one buffer."""

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an output buffer of ``numel`` elements."""

    def __call__(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """Start gathering ``shard`` ``[S]`` of every rank into ``output`` ``[F * S]``."""


class ReduceScatter(Protocol):
    """Sums chunks across ranks; each rank gets its own."""

    def staging_numel(self, numel: int) -> int:
        """Elements of staging needed beside an input of ``numel`` elements."""

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an input buffer of ``numel`` elements."""

    def __call__(self, output: torch.Tensor, chunks: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """Start summing: ``output`` ``[S]`` becomes the sum over ranks of their ``chunks`` ``[F * S]``, own chunk."""


class _Allocator:
    """Plain allocation, shared by all four."""

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised buffer ``[numel]``."""
        return torch.empty(numel, dtype=dtype, device=device)


class DefaultAllGather(_Allocator):
    """c10d's single-tensor all-gather."""

    def __call__(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`AllGather`."""
        return cast("Work", dist.all_gather_single(output, shard, group=group, async_op=True))


class _WaitedInAThread:
    """Gives a future to work that has none, by waiting for it in a thread."""

    def __init__(self, work: Work) -> None:
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    def get_future(self) -> torch.futures.Future[Any]:
        """Future completed when the work is done."""
        return self._future

    def wait(self) -> None:
        """Block until it is; raise if it failed."""
        self._future.wait()


class DefaultReduceScatter(_Allocator):
    """c10d's single-tensor reduce-scatter."""

    def staging_numel(self, numel: int) -> int:
        """None."""
        return 0

    def __call__(self, output: torch.Tensor, chunks: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`ReduceScatter`."""
        work = cast("Work", dist.reduce_scatter_single(output, chunks, group=group, async_op=True))
        return _WaitedInAThread(work) if output.device.type == "cpu" else work  # gloo's has no future


class GlooAllGather(_Allocator):
    """All-gather into a list of views of the output: 2 to 4 times faster on gloo than the single-tensor call."""

    def __call__(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`AllGather`."""
        views = list(output.view(group.size(), shard.numel()).unbind(0))
        return cast("Work", dist.all_gather(views, shard, group=group, async_op=True))


class _SumAfterExchange:
    """An all-to-all whose ``wait`` also sums the received chunks, in rank order: independent of arrival order."""

    def __init__(self, work: Work, received: torch.Tensor, output: torch.Tensor) -> None:
        self._work, self._received, self._output = work, received, output  # received: [F, S], output: [S]

    def get_future(self) -> Any:  # noqa: ANN401 - see Work
        """Future of the exchange."""
        return self._work.get_future()

    def wait(self) -> None:
        """Finish the exchange and sum into the output."""
        self._work.wait()
        torch.sum(self._received, dim=0, out=self._output)


class GlooReduceScatter(_Allocator):
    """All-to-all, then a local sum: 5 to 8 times faster on gloo than its reduce-scatter, and deterministic."""

    def staging_numel(self, numel: int) -> int:
        """As much again, for what is received."""
        return numel

    def __call__(self, output: torch.Tensor, chunks: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`ReduceScatter`."""
        received = self.allocate(chunks.numel(), dtype=chunks.dtype, device=chunks.device)
        work = dist.all_to_all_single(received, chunks, group=group, async_op=True)
        return _SumAfterExchange(cast("Work", work), received.view(group.size(), output.numel()), output)


def default_pair(device: torch.device) -> tuple[AllGather, ReduceScatter]:
    """Choose the pair for tensors on ``device``.

    Raises:
        ValueError: WORKBENCH_COMM holds something else than ``default`` or nothing.
    """
    choice = os.environ.get("WORKBENCH_COMM", "")
    if choice not in {"", "default"}:
        raise ValueError(f"WORKBENCH_COMM={choice!r} is not known; use 'default', or unset it for the fastest pair")
    if device.type == "cpu" and not choice:
        return GlooAllGather(), GlooReduceScatter()
    return DefaultAllGather(), DefaultReduceScatter()
