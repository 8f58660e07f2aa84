"""The backend for the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workbench.engine.backends.base import Backend
from workbench.engine.backends.full_memory import FullMemory
from workbench.engine.backends.gloo import GlooAllGather, GlooReduceScatter
from workbench.engine.backends.page_pool import Buffers, PageRange, Region
from workbench.engine.backends.shared.shared_selection import SharedComms
from workbench.engine.comm import CommPair, comm_choice
from workbench.events import GLOO


class HostMemory(PageRange):
    """A page range; views of it can be made at any time."""

    @contextmanager
    def present(self) -> Iterator[None]:
        """Views of :attr:`tensor` can be made in the body, although it is empty."""
        yield


class Cpu(Backend):
    """The CPU: the host itself waits, interruptibly, and memory pages are reused."""

    is_host = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buffers = Buffers()

    def full_memory(self, numel: int, dtype: torch.dtype) -> FullMemory:
        """Return a page range for a unit's full parameters; it starts empty."""
        return HostMemory(numel, dtype)

    def shard_region(self, numel: int, dtype: torch.dtype) -> Region:
        """Return memory for shards, whose pages can be replaced by pages that ranks share."""
        return Region(numel, dtype)

    def comms(self) -> SharedComms:
        """Return collectives that use shared memory between ranks of one host."""
        return SharedComms(self)

    def pair(self) -> CommPair:
        """Return the fastest pair for gloo, or c10d's own pair if ``WORKBENCH_COMM=default``.

        Raises:
            ValueError: see :func:`workbench.engine.comm.comm_choice`.
        """
        if comm_choice() == "default":
            return super().pair()
        return CommPair(GlooAllGather(self._buffers), GlooReduceScatter(self._buffers), GLOO)

    def release_buffers(self) -> None:
        """Return unused buffers of collectives over gloo to the system."""
        self._buffers.release()
