"""The communication context shared by the units of one model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from workbench.engine import probe
from workbench.engine.backends import backend_of
from workbench.engine.backends.page_pool import SparePages
from workbench.engine.backends.unit_comms import CommUser
from workbench.engine.reduction import ReductionQueue
from workbench.engine.tensor_trees import unrecorded
from workbench.engine.unshard_memory import BufferSet
from workbench.events import Edge, Kind

CPU = torch.device("cpu")


class RecordedForward:
    """A forward that autograd has recorded; its graph keeps it alive.

    Attributes:
        buffer_sets: buffers of the full parameters, for each unit of the call.
        before: the state whose forward ended just before and whose backward comes next; None without one.
    """

    def __init__(self, buffer_sets: Sequence[BufferSet]) -> None:
        self.buffer_sets = buffer_sets
        self.before: Any = None  # FSDPState


class FSDPCommContext:
    """Buffers, streams and order of communication, for one model or several that share it.

    Attributes:
        comms: comm pairs of the units.
        pages: spare pages for full parameters.
        reductions: reductions in flight.
        streams: streams for the work, and the waits between them.
        post_forward_order: states of this iteration whose backward is pending, in the order their forwards ended.
        recorded: forwards whose backward may still run, even after the iteration's end (pipeline order).
        finalization: handle of a root's ``finalize_backward`` until its reductions were waited for; else None.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        backend = backend_of(device)
        self.comms = backend.comms()
        self.pages = SparePages()
        self.streams = backend.streams()
        self.reductions = ReductionQueue(self.streams)
        self.post_forward_order: list[Any] = []
        self.recorded: weakref.WeakSet[RecordedForward] = weakref.WeakSet()
        self.finalization: object = None

    def check_no_finalization(self, what: str) -> None:
        """Raise RuntimeError if the reductions of a ``finalize_backward`` have yet to be waited for."""
        if self.finalization is not None:
            raise RuntimeError(
                f"{what}: first call wait() of the handle that finalize_backward(async_op=True) returned"
            )

    @unrecorded
    def choose_comms(self, units: Sequence[CommUser]) -> None:
        """Give each unit its comm pair; collective, see :meth:`Comms.choose`."""
        self.comms.choose(units, self.reductions.max_scatters)

    def join(self, *, all_streams: bool = False) -> None:
        """Make compute wait for the reduction streams: up to the reduce-scatters, or for all their work.

        No-op on the CPU. On a device, compute may stall here and not at the wait in the reduction stream.
        """
        ended, self.reductions.ended = self.reductions.ended, None
        join = self.streams.join_all if all_streams else self.streams.join
        if ended is None or not self.streams.are_there:
            join()
            return
        probe.event(Kind.WAIT, Edge.BEGIN, ended.unit, comm=ended.comm)
        join()
        probe.event(Kind.WAIT, Edge.END, ended.unit, comm=ended.comm)

    def release_buffers(self) -> None:
        """Free buffers kept for the next step, except those in use."""
        self.pages.release()
        self.comms.release()

    def abandon(self) -> None:
        """Drop the remains of an iteration that raised, without waiting for anything."""
        self.post_forward_order.clear()
        self.recorded.clear()
        self.reductions.abandon()
        self.finalization = None
