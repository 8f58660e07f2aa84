"""The engine's process groups, behind objects that can be given new ones.

A group with an unfinished collective is never used again (its next collective could return stale data). So after an
abort or a failure every :class:`CommGroup` gets a fresh process group, and the units that refer to it do not notice.
They are kept apart from the groups of the DTensor mesh, which the user's own collectives use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from workbench.engine import probe
from workbench.engine.waits import PendingWork, Work

_indices = itertools.count()

around_creation: Callable[[], AbstractContextManager[None]] = nullcontext
"""Entered around the making of every process group; whoever must find its sockets sets this."""


class CommGroup:
    """Ranks that communicate as one.

    Attributes:
        ranks: global ranks, in group order.
        rank: this process's position among them.
        size: number of ranks.
        process_group: the live c10d group.
        index: number of this generation of the group, as the probe knows it.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(dist.get_rank())
        self._in_flight: set[PendingWork] = set()
        self.rebuild()

    def rebuild(self) -> None:
        """Take a new process group; all ranks of the group must call this together."""
        self.index = next(_indices)
        self._seq = 0
        self._in_flight.clear()
        with around_creation():
            self.process_group = dist.new_group(list(self.ranks))
        if probe.active is not None:
            probe.active.comm_group(self.index, self.ranks)

    def next_comm(self) -> probe.Comm:
        """Number the next collective of this group."""
        comm = probe.Comm(group=self.index, seq=self._seq)
        self._seq += 1
        return comm

    def start(self, issue: Callable[[dist.ProcessGroup], Work], what: str) -> PendingWork:
        """Issue a collective; it counts as unfinished until :meth:`finished`."""
        pending = PendingWork(issue(self.process_group), what)
        self._in_flight.add(pending)
        return pending

    def finished(self, pending: PendingWork) -> None:
        """Forget a collective that has ended."""
        self._in_flight.discard(pending)

    @property
    def num_unfinished(self) -> int:
        """Collectives issued and not yet waited for."""
        return len(self._in_flight)


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
    _groups.clear()


def num_unfinished() -> int:
    """Collectives of the engine that were issued on this rank and not yet waited for."""
    return sum(group.num_unfinished for group in _groups.values())
