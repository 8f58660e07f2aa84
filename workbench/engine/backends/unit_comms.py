"""The collectives that the units of a model use, and the times at which a rank may write its shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from workbench.engine.backends.page_pool import Region
from workbench.engine.comm import SET_BY_USER, CommPair, Peers


class CommDevice(Protocol):
    """The view of a :class:`~workbench.engine.backends.base.Backend` that the choice of collectives needs."""

    def pair(self) -> CommPair:
        """Return a pair of collectives that works between any ranks."""

    def release_buffers(self) -> None:
        """Return unused buffers of the collectives to the system."""


class CommUser(Protocol):
    """The view of a unit that the choice of its collectives needs."""

    @property
    def comm(self) -> CommPair | None:
        """The pair of collectives that the unit uses; None until one is chosen."""

    @property
    def shard_group(self) -> Peers | None:
        """The ranks that share one copy of the unit; None if there is only one."""

    @property
    def shard_numel(self) -> int:
        """Number of elements of the unit's flat shard."""

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
        """True if the unit has gradients to reduce."""

    @property
    def shard_region(self) -> Region | None:
        """Memory of the flat shard, if its pages can be exchanged; otherwise None."""

    def use_comm(self, pair: CommPair) -> None:
        """Use ``pair`` for communication from now on."""


class Comms:
    """The collectives of the units of one communication context.

    In this class no rank reads another rank's shard in place, so a rank never waits before it writes a shard.
    """

    def __init__(self, backend: CommDevice) -> None:
        self._backend = backend

    def choose(self, units: Sequence[CommUser], max_scatters: int) -> None:
        """Give each unit its pair of collectives, except units whose pair the user has set. Collective.

        Args:
            units: all units of a root.
            max_scatters: maximum number of reduce-scatters in flight.

        Raises:
            StepAborted, CollectiveFailed: the ranks could not agree on the pairs.
        """
        for unit in units:
            if unit.comm is None or unit.comm.name not in SET_BY_USER:
                unit.use_comm(self.pair_for(unit, max_scatters))

    def pair_for(self, _unit: CommUser, _max_scatters: int) -> CommPair:
        """Return the pair of collectives for a unit."""
        return self._backend.pair()

    def release(self) -> None:
        """Free the buffers that are cached for the next step."""
        self.release_buffers()

    def release_buffers(self) -> None:
        """Return the buffers of finished collectives to the system."""
        self._backend.release_buffers()

    def empty(self) -> None:
        """Return memory to the system that is not needed until gradients are reduced again.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: a wait for other ranks was aborted.
        """
        self.release_buffers()

    def has_read(self, unit: CommUser) -> None:
        """Note that this rank and the others have read each other's shards of ``unit``, or soon will."""

    def reduces(self, unit: CommUser) -> None:
        """Note that a reduction of ``unit`` is issued: once it finishes, all ranks have read the shards."""

    def wait_for_readers(self) -> None:
        """Wait until the other ranks have read the shards that this rank has read, so that shards may be written.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: the wait was aborted.
        """
