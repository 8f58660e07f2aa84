"""Which comm pair a unit uses: chosen when its root is first run, by all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from workbench.engine.backends import backend_of
from workbench.engine.backends.shared_comm import SharedMemoryAllGather, SharedMemoryReduceScatter
from workbench.engine.backends.shared_memory import SharedMemory
from workbench.engine.comm import SET_BY_USER, CommPair, comm_choice
from workbench.engine.flat_shard import FlatShard
from workbench.engine.groups import CommGroup
from workbench.engine.mesh import FSDPMeshInfo

SHARED = "shared memory"


class CommUser(Protocol):
    """What is known here of a unit."""

    mesh_info: FSDPMeshInfo
    device: torch.device
    shards: FlatShard
    comm: CommPair | None

    @property
    def orig_dtype(self) -> torch.dtype:
        """Dtype of the shards."""

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of the all-gather."""

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the reduction."""

    @property
    def is_trained(self) -> bool:
        """True if there will be gradients to reduce."""

    def use_comm(self, pair: CommPair) -> None:
        """Communicate with ``pair`` from now on."""


class CommSelection:
    """The pairs of one communication context, and which reads of shared memory are not ordered before writes yet.

    Other ranks read a shard where it lies. They have done so once they take part in a collective issued later: mostly
    the reduction of gradients. Where none follows, :meth:`wait_for_readers` must come before the shard is written.
    """

    def __init__(self) -> None:
        self._memories: dict[CommGroup, SharedMemory | None] = {}
        self._reducers: dict[tuple[CommGroup, torch.dtype], SharedMemoryReduceScatter] = {}
        self._read: set[CommGroup] = set()

    def choose(self, units: Sequence[CommUser], max_scatters: int) -> None:
        """Give each unit the fastest pair that works between its ranks; what the user has set stays.

        Collective: whether ranks share a host is found out by all of them.

        Args:
            units: all units of a root.
            max_scatters: reduce-scatters that may be in flight at once.

        Raises:
            StepAborted, CollectiveFailed: the ranks could not come to an answer.
        """
        self._reducers.clear()
        for unit in units:
            if unit.comm is None or unit.comm.name not in SET_BY_USER:
                unit.use_comm(self._shared_pair(unit, max_scatters) or backend_of(unit.device).pair())
        for (group, dtype), reducer in self._reducers.items():
            users = [u for u in units if u.mesh_info.shard_group is group and u.reduce_dtype == dtype]
            reducer.reserve((group.size - 1) * max((u.shards.numel for u in users if u.is_trained), default=0))

    def _shared_pair(self, unit: CommUser, max_scatters: int) -> CommPair | None:
        group = unit.mesh_info.shard_group
        memory = self._memory(group, unit.device) if group is not None else None
        if group is None or memory is None:
            return None
        gather = SharedMemoryAllGather(memory)
        try:
            shard = gather.shard_memory(unit.shards.numel, unit.param_dtype)
        except OSError:  # too little memory, on all ranks alike: gloo needs less
            return None
        if unit.param_dtype == unit.orig_dtype:
            unit.shards.move_to(shard)
        key = (group, unit.reduce_dtype)
        if key not in self._reducers:
            self._reducers[key] = SharedMemoryReduceScatter(memory, unit.reduce_dtype, max_scatters, 2 * max_scatters)
        return CommPair(gather, self._reducers[key], SHARED)

    def _memory(self, group: CommGroup, device: torch.device) -> SharedMemory | None:
        if not backend_of(device).shares_memory or comm_choice():
            return None
        if group not in self._memories:
            is_real = dist.get_backend(group.process_group) == "gloo"
            self._memories[group] = SharedMemory.connect(group) if is_real else None
        return self._memories[group]

    def release(self) -> None:
        """Free the staging of reductions."""
        for reducer in self._reducers.values():
            reducer.release()

    # ---- reads before writes

    @property
    def has_readers(self) -> bool:
        """True if there may be reads that no collective follows yet."""
        return bool(self._read)

    def has_read(self, unit: CommUser) -> None:
        """Note that this rank has read the shards of other ranks, and they its own, or will soon."""
        group = unit.mesh_info.shard_group
        if group is not None and unit.comm is not None and unit.comm.name == SHARED:
            self._read.add(group)

    def reduces(self, group: CommGroup | None) -> None:
        """Note that a reduction is issued: before it is finished, all ranks have read."""
        if group is not None:
            self._read.discard(group)

    def wait_for_readers(self) -> None:
        """Wait until the other ranks have read what this one has, so that shards may be written.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: see :meth:`Readers.wait`.
        """
        for group in tuple(self._read):
            memory = self._memories.get(group)
            if memory is not None:
                memory.readers.wait()
            self._read.discard(group)
