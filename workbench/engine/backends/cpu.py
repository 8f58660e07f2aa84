"""The CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workbench.engine.backends.base import Backend, FullMemory
from workbench.engine.backends.gloo import GlooAllGather, GlooReduceScatter
from workbench.engine.backends.page_pool import Buffers, PageRange, Region
from workbench.engine.backends.shared_selection import SharedComms
from workbench.engine.comm import CommPair, comm_choice
from workbench.events import GLOO


class HostMemory(PageRange):
    """Pages, which views can be made of at any time."""

    @contextmanager
    def present(self) -> Iterator[None]:
        """Within the body views of :attr:`tensor` can be made, though it is empty."""
        yield


class Cpu(Backend):
    """The CPU: waits are the host's own, and can be interrupted; pages are used again."""

    is_host = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._buffers = Buffers()

    def full_memory(self, numel: int, dtype: torch.dtype) -> FullMemory:
        """Return pages for a unit's full parameters, empty."""
        return HostMemory(numel, dtype)

    def shard_region(self, numel: int, dtype: torch.dtype) -> Region:
        """Return memory for shards, beneath which pages can lie that ranks share."""
        return Region(numel, dtype)

    def comms(self) -> SharedComms:
        """Return what lets units whose ranks share this host communicate through memory."""
        return SharedComms(self)

    def pair(self) -> CommPair:
        """Return the fastest for gloo, or c10d's own if WORKBENCH_COMM asks for that.

        Raises:
            ValueError: see :func:`workbench.engine.comm.comm_choice`.
        """
        if comm_choice() == "default":
            return super().pair()
        return CommPair(GlooAllGather(self._buffers), GlooReduceScatter(self._buffers), GLOO)

    def release_buffers(self) -> None:
        """Let the system have what no collective over gloo uses now."""
        self._buffers.release()
