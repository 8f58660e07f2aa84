"""What the units of one model share while they communicate."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from workbench.engine import probe
from workbench.engine.backends import backend_of
from workbench.engine.backends.base import CommUser
from workbench.engine.backends.page_pool import SparePages
from workbench.engine.reduction import ReductionQueue
from workbench.engine.tensor_trees import unrecorded
from workbench.engine.unshard_memory import BufferSet
from workbench.events import Edge, Kind

CPU = torch.device("cpu")


class RecordedForward:
    """A forward that autograd has recorded; its graph keeps it alive.

    Attributes:
        homes: where the full parameters of the call's units lay.
        before: the call whose forward ended just before, and whose backward comes next; None: there is none.
    """

    def __init__(self, homes: Sequence[BufferSet]) -> None:
        self.homes = homes
        self.before: Any = None  # FSDPState


class FSDPCommContext:
    """Buffers, streams and order of one model's communication, or of several models that share it.

    Attributes:
        comms: comm pairs of the units.
        pages: those of full parameters that no unit uses now.
        reductions: reductions in flight.
        streams: where work goes, and what waits for what.
        post_forward_order: calls (FSDPState) of this iteration whose backward comes, in the order their forwards ended.
        recorded: forwards whose backward can still come, after the iteration's end too (pipeline order).
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

    @unrecorded
    def choose_comms(self, units: Sequence[CommUser]) -> None:
        """Give each unit its comm pair; collective, see :meth:`Comms.choose`."""
        self.comms.choose(units, self.reductions.max_scatters)

    def join(self, *, all_streams: bool = False) -> None:
        """Let compute wait for reduce-scatters that others waited for, or for all that reductions do.

        Nothing on the CPU. On a device this, and not the wait in a stream of its own, is where compute may stand still.
        """
        ended, self.reductions.ended = self.reductions.ended, None
        join = self.streams.join_all if all_streams else self.streams.join
        if ended is None or not self.streams.are_there:
            join()
            return
        unit, comm = ended
        probe.event(Kind.WAIT, Edge.BEGIN, unit, comm=comm)
        join()
        probe.event(Kind.WAIT, Edge.END, unit, comm=comm)

    def release_buffers(self) -> None:
        """Free what is kept for the next step; what is in use is kept."""
        self.pages.release()
        self.comms.release()

    def abandon(self) -> None:
        """Drop what an iteration that raised has left, without waiting for anything."""
        self.post_forward_order.clear()
        self.recorded.clear()
        self.reductions.abandon()
