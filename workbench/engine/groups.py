"""The engine's process groups, behind objects that can be given new ones.

A group with an unfinished collective is never used again (its next collective could return stale data). So after an
abort or a failure every :class:`CommGroup` gets a fresh process group, and the units that refer to it do not notice.
They are kept apart from the groups of the DTensor mesh, which the user's own collectives use.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from workbench.engine import probe
from workbench.engine.waits import PendingWork, Work, cancellation

_indices = itertools.count()

around_creation: Callable[[], AbstractContextManager[None]] = nullcontext
"""Entered around the making of every process group; whoever must find its sockets sets this."""


class CommGroup:
    """Ranks that communicate as one.

    Attributes:
        ranks: global ranks, in group order.
        rank: this process's position among them.
        size: number of ranks.
        process_group: the live c10d group; None between two of them.
        index: number of this generation of the group, as the probe knows it.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(dist.get_rank())
        self._in_flight: set[PendingWork] = set()
        self.process_group: dist.ProcessGroup | None = None
        self.rebuild()

    def rebuild(self) -> None:
        """Take a new process group; all ranks of the group must call this together."""
        self.let_go()
        self.index = next(_indices)
        self._seq = 0
        # the rows of a mesh make their groups side by side: then only the ranks of a row wait for each other
        is_part = self.size < dist.get_world_size()
        with around_creation():
            self.process_group = dist.new_group(list(self.ranks), use_local_synchronization=is_part)
        if probe.active is not None:
            probe.active.comm_group(self.index, self.ranks)

    def let_go(self) -> None:
        """Drop the process group, which must not be used again.

        With a collective unfinished it is kept alive for good: ending it joins gloo's threads, and one of them can
        wait for ever to send to a peer that has left.
        """
        if self.num_unfinished:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.process_group))
        self._in_flight.clear()
        self.process_group = None

    def next_comm(self) -> probe.Comm:
        """Number the next collective of this group."""
        comm = probe.Comm(group=self.index, seq=self._seq)
        self._seq += 1
        return comm

    def start(self, issue: Callable[[dist.ProcessGroup], Work], what: str) -> PendingWork:
        """Issue a collective.

        Raises:
            StepAborted: this rank was told to give up; the group may be half closed already.
            RuntimeError: the group was destroyed and not built anew.
        """
        cancellation.check()
        if self.process_group is None:
            raise RuntimeError(f"{what}: its process group was destroyed; recover or start the ranks again")
        pending = PendingWork(issue(self.process_group), what)
        self._in_flight = {p for p in self._in_flight if not p.has_ended} | {pending}  # a reset drops some unwaited
        return pending

    def finished(self, pending: PendingWork) -> None:
        """Forget a collective that was waited for."""
        self._in_flight.discard(pending)

    @property
    def num_unfinished(self) -> int:
        """Collectives issued that have not ended; asked from any thread."""
        return sum(not pending.has_ended for pending in tuple(self._in_flight))


_groups: dict[tuple[int, ...], CommGroup] = {}


def group_for(mesh: DeviceMesh) -> CommGroup:
    """Return the engine's group over all ranks of a 1-D ``mesh``; made at first use, by all its ranks together."""
    ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
    if ranks not in _groups:
        _groups[ranks] = CommGroup(ranks)
    return _groups[ranks]


def rebuild_all() -> None:
    """Give every group a new process group, in the order of their making; all ranks must call this together."""
    for group in _groups.values():
        group.rebuild()


def forget_all() -> None:
    """Drop all groups: the process groups they hold were destroyed for good."""
    for group in _groups.values():
        group.let_go()
    _groups.clear()


def num_unfinished() -> int:
    """Collectives of the engine that were issued on this rank and have not ended; asked from any thread."""
    return sum(group.num_unfinished for group in tuple(_groups.values()))
