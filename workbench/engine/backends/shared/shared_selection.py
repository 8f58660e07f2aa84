"""Selection of shared-memory collectives for units whose ranks share hosts, and tracking of their pending reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from workbench.engine.backends.base import Backend
from workbench.engine.backends.shared.hierarchical_comm import Hosts, HostsAllGather, HostsReduceScatter
from workbench.engine.backends.shared.shared_comm import (
    SharedMemoryAllGather,
    SharedMemoryCastAllGather,
    SharedMemoryReduceScatter,
)
from workbench.engine.backends.shared.shared_memory import LiesElsewhereError, SharedMemory
from workbench.engine.backends.unit_comms import Comms, CommUser
from workbench.engine.comm import AllGather, CommPair, Peers, comm_choice
from workbench.events import PER_HOST

SHARED = "shared memory"


class SharedComms(Comms):
    """Shared-memory pairs, and their reads that are not yet ordered before writes.

    Other ranks read a shard in place. They have finished once they take part in a later collective, usually the
    reduction of gradients. If none follows, :meth:`wait_for_readers` must be called before the shard is written.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._shared: dict[Peers, SharedMemory | Hosts | None] = {}
        self._casts: dict[tuple[Peers, torch.dtype], SharedMemoryCastAllGather] = {}
        self._reducers: dict[tuple[Peers, torch.dtype], SharedMemoryReduceScatter] = {}
        self._read: set[Peers] = set()

    def choose(self, units: Sequence[CommUser], max_scatters: int) -> None:
        """Give each unit a shared-memory pair, if its ranks, or those on each host, can map the memory.

        Pairs that the user has set stay. Arguments and errors are those of :meth:`Comms.choose`.
        """
        self._casts.clear()
        self._reducers.clear()
        super().choose(units, max_scatters)
        for (group, dtype), reducer in self._reducers.items():
            users = [u for u in units if u.shard_group is group and u.reduce_dtype == dtype]
            reducer.reserve((group.size - 1) * max((u.shard_numel for u in users if u.is_trained), default=0))

    def pair_for(self, unit: CommUser, max_scatters: int) -> CommPair:
        """Return the fastest pair of collectives that works between a unit's ranks."""
        group = unit.shard_group
        shared = None if group is None or comm_choice() else self._shared_by(group)
        if group is None or shared is None:
            return super().pair_for(unit, max_scatters)
        try:
            gather = self._gather(unit, group, shared)
        except OSError:  # too little memory; raised on all ranks. gloo needs less
            return super().pair_for(unit, max_scatters)
        name = SHARED if isinstance(shared, SharedMemory) else PER_HOST
        return CommPair(gather, self._reducer(unit, group, shared, max_scatters), name)

    def _gather(self, unit: CommUser, group: Peers, shared: SharedMemory | Hosts) -> AllGather:
        if isinstance(shared, SharedMemory) and unit.param_dtype == unit.orig_dtype:
            gather = SharedMemoryAllGather(shared)
            try:
                gather.share(unit.shard_region, unit.shard_numel, unit.param_dtype)
            except LiesElsewhereError:  # raised on all ranks: copy the shards, as for a cast
                pass
            else:
                return gather
        key = (group, unit.param_dtype)
        if key not in self._casts:
            self._casts[key] = (
                SharedMemoryCastAllGather(shared, key[1])
                if isinstance(shared, SharedMemory)
                else HostsAllGather(shared, key[1])
            )
        self._casts[key].reserve(unit.shard_numel)
        return self._casts[key]

    def _reducer(
        self, unit: CommUser, group: Peers, shared: SharedMemory | Hosts, max_scatters: int
    ) -> SharedMemoryReduceScatter:
        key = (group, unit.reduce_dtype)
        if key not in self._reducers:
            self._reducers[key] = (
                SharedMemoryReduceScatter(shared, key[1], max_scatters, 2 * max_scatters)
                if isinstance(shared, SharedMemory)
                else HostsReduceScatter(shared, key[1], max_scatters)
            )
        return self._reducers[key]

    def _shared_by(self, group: Peers) -> SharedMemory | Hosts | None:
        """Return what the ranks of a group share: one memory, one per host, or None. Collective at first use."""
        if group not in self._shared:
            is_real = dist.get_backend(group.process_group) == "gloo"
            self._shared[group] = (SharedMemory.connect(group) or Hosts.connect(group)) if is_real else None
        return self._shared[group]

    def release(self) -> None:
        """Free the stages of casts and reductions."""
        super().release()
        for casts in self._casts.values():
            casts.release()
        for reducer in self._reducers.values():
            reducer.release()

    def empty(self) -> None:
        """Return the memory of the reductions' stages to the system until the next reduction; their addresses stay.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: the wait for ranks still reading the stages was aborted.
        """
        super().empty()
        for reducer in self._reducers.values():
            reducer.empty()

    # ---- reads before writes

    def has_read(self, unit: CommUser) -> None:
        """Note that this rank and the others have read each other's shards of ``unit``, or soon will."""
        if unit.shard_group is not None and unit.comm is not None and unit.comm.name == SHARED:
            self._read.add(unit.shard_group)

    def reduces(self, unit: CommUser) -> None:
        """Note that a reduction of ``unit`` is issued: once it finishes, all ranks have read the shards."""
        if unit.shard_group is not None:
            self._read.discard(unit.shard_group)

    def wait_for_readers(self) -> None:
        """Wait until the other ranks have read the shards that this rank has read, so that shards may be written.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: see :meth:`Readers.wait`.
        """
        for group in tuple(self._read):
            memory = self._shared.get(group)
            if isinstance(memory, SharedMemory):
                memory.readers.wait()
            self._read.discard(group)
