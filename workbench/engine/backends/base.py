"""The interface between the engine and a device, with defaults for a device that runs synchronously with the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine._torch import destroy_all_groups
from workbench.engine.backends import copies
from workbench.engine.backends.async_work import Transport
from workbench.engine.backends.copies import Grads, LaidOutParam
from workbench.engine.backends.device_clock import DeviceClock, Event
from workbench.engine.backends.full_memory import FullMemory, ResizedMemory
from workbench.engine.backends.page_pool import Region
from workbench.engine.backends.stream_order import Streams
from workbench.engine.backends.unit_comms import Comms
from workbench.engine.comm import CommPair, DefaultAllGather, DefaultReduceScatter
from workbench.events import C10D


class Backend:
    """One device. The defaults work on any device; subclasses override what their kind does better.

    Attributes:
        is_host: the device is host memory, where data loaders put inputs and offloaded shards are stored.
        averages: its collectives can divide.
        fuses_copies: it has kernels that copy many strided pieces at once; one copy per piece is expensive there.
        c10d: the backend name for ``init_process_group``.
        kind: the device type for a ``DeviceMesh``.
    """

    is_host = False
    averages = False
    fuses_copies = False
    c10d = "gloo"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = device.type

    @classmethod
    def of_rank(cls, _local_rank: int) -> torch.device:
        """Return the device of a rank, given its index on its host."""
        return torch.device("cpu")

    @classmethod
    def num_here(cls) -> int | None:
        """Return the number of devices on this host, one per rank; None if ranks can share a device."""
        return None

    def make_current(self) -> None:
        """Make this the current device of the process."""

    # ---- memory

    def full_memory(self, numel: int, dtype: torch.dtype) -> FullMemory:
        """Return memory for a unit's full parameters; it starts empty."""
        return ResizedMemory(numel, dtype, self.device)

    def shard_region(self, _numel: int, _dtype: torch.dtype) -> Region | None:
        """Return memory for shards whose pages can be exchanged; None if the device has no such memory."""
        return None

    # ---- gather and reduce

    def pair(self) -> CommPair:
        """Return a pair of collectives that works between any ranks."""
        return CommPair(DefaultAllGather(), DefaultReduceScatter(), C10D)

    def release_buffers(self) -> None:
        """Return the memory cached for future collectives to the system."""

    def comms(self) -> Comms:
        """Return a new object that chooses and tracks the collectives of a communication context's units."""
        return Comms(self)

    def copy_out(self, gathered: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """Copy the flat shards of n ranks, ``[n, S]``, into the targets, ``[n, ...]`` each; cast if dtypes differ."""
        copies.copy_out(gathered, targets, fuses=self.fuses_copies)

    def copy_in(
        self, params: Sequence[LaidOutParam], grads: Sequence[Grads], chunks: torch.Tensor, first_rank: int = 0
    ) -> None:
        """Cast and copy full gradients into ``chunks`` ``[n, S]``, for the n ranks from ``first_rank`` on."""
        copies.copy_in(params, grads, chunks, first_rank, fuses=self.fuses_copies)

    # ---- ordering

    def streams(self) -> Streams:
        """Return streams for a communication context."""
        return Streams()

    def transport(self, _process_group: dist.ProcessGroup) -> Transport:
        """Return the object that waits for a process group's collectives and aborts those that cannot end."""
        return Transport()

    def record_event(self) -> Event:
        """Return an event after the work issued so far; None if the host runs the work itself."""
        return None

    def wait_event(self, event: Event) -> None:
        """Make work issued from now on wait for ``event``."""

    def wait_on_host(self, event: Event) -> None:
        """Block the host until ``event``."""

    def within(
        self,
        stream: Any,  # noqa: ANN401 - its type depends on the device
        *_tensors: torch.Tensor,
    ) -> AbstractContextManager[object]:
        """Return a context for work with these tensors on a user's stream, after earlier and before later work."""
        return nullcontext()

    def synchronize(self) -> None:
        """Block until the device has finished all work."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type == self.kind:
            torch.accelerator.synchronize(self.device)

    # ---- abort and clock

    def destroy_process_groups(self) -> None:
        """Destroy all process groups, even with collectives unfinished."""
        destroy_all_groups()

    def now_ns(self) -> int:
        """Return the host's time in nanoseconds, which only grows."""
        return time.monotonic_ns()

    def clock(self) -> DeviceClock | None:
        """Return a clock for the work on the device; None if the host runs the work itself."""
        return None
