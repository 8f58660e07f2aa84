"""A unit's collectives in flight, and the all-gather from shards to full parameters.

The reduction of full gradients to shards is in ``reduction.py``. Layouts (S = sum of the slots of the parameters
taking part, F = shard ranks)::

    all-gather output       [F, S]   row r = the flat shard of rank r, in the param dtype
    padded full of param p  [F, s_p] s_p = its slot; row r = the padded rows of rank r
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from workbench.engine import probe
from workbench.engine.backends import backend_of
from workbench.engine.backends.async_work import PendingWork
from workbench.engine.backends.device_clock import Event
from workbench.engine.collective_order import Collective
from workbench.engine.comm import AllGather, give_back, traits_of
from workbench.engine.process_groups import CommGroup
from workbench.events import Category, Edge, Kind


@dataclass(frozen=True)
class UnitId:
    """The unit of a collective: its index for the probe, its name for messages."""

    index: int
    name: str


@dataclass(frozen=True)
class ScatteredShard:
    """A flat shard ``[S]`` that is not contiguous: its slots are wherever the user put the parameters.

    Attributes:
        slot_numels: elements of each slot, S in all.
        pairs: given memory for each slot, in order, yields (view for this rank's rows, the rows).
    """

    slot_numels: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    pairs: Callable[[Sequence[torch.Tensor]], Iterable[tuple[torch.Tensor, torch.Tensor]]]
    is_meta: ClassVar[bool] = False

    def numel(self) -> int:
        """Return S."""
        return sum(self.slot_numels)

    def copy_to(self, target: torch.Tensor) -> None:
        """Fill ``target`` ``[S]`` except padding; cast and move if needed."""
        pairs = list(self.pairs(target.split(list(self.slot_numels))))
        torch._foreach_copy_([slot for slot, _ in pairs], [rows for _, rows in pairs], non_blocking=True)


@dataclass(frozen=True, eq=False)
class AllGatherState:
    """An all-gather in flight.

    Attributes:
        output: ``[F * S]``, or less, see :attr:`CommTraits.leaves_own_out`.
        own: ``[S]``, this rank's input.
        gather: the all-gather that allocated the output.
        num_bytes: bytes allocated for it alone.
    """

    output: torch.Tensor
    own: torch.Tensor
    gather: AllGather
    unit: UnitId
    group: CommGroup
    pending: PendingWork
    num_bytes: int

    def wait(self) -> list[torch.Tensor]:
        """Wait and return the flat shards as tensors ``[n, S]`` of n consecutive ranks each, F in all.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: see :class:`PendingWork`.
        """
        self.pending.wait()
        self.pending.finish()
        rank, size, numel = self.group.rank, self.group.size, self.own.numel()
        if not traits_of(self.gather).leaves_own_out:
            return [self.output.view(size, numel)]
        rows = self.output.view(size - 1, numel)
        return [part for part in (rows[:rank], self.own.view(1, numel), rows[rank:]) if len(part)]

    def abandon(self) -> None:
        """Drop the output without reusing it: data may still arrive in it."""
        self.pending.abandon()
        probe.memory(Category.ALL_GATHER_BUFFERS, self.unit.index, -self.num_bytes)

    def drop(self) -> None:
        """Return the output to its allocator; nothing may write to it any more."""
        probe.memory(Category.ALL_GATHER_BUFFERS, self.unit.index, -self.num_bytes)
        give_back(self.gather, self.output)


@dataclass(frozen=True, eq=False)
class DeviceCopyState:
    """A copy of a single rank's flat shard to the compute device, in place of an all-gather.

    Attributes:
        output: ``[S]``, on the device.
        ready: event after the copy; None if the host has waited for it.
    """

    output: torch.Tensor
    unit: UnitId
    ready: Event

    def wait(self) -> list[torch.Tensor]:
        """Make the current stream wait for the copy; return the one flat shard, ``[1, S]``."""
        if self.ready is not None:
            backend_of(self.output.device).wait_event(self.ready)
        return [self.output.view(1, -1)]

    def drop(self) -> None:
        """Drop the output."""
        probe.memory(Category.ALL_GATHER_BUFFERS, self.unit.index, -self.output.nbytes)

    abandon = drop


@contextmanager
def alive_unless_raised(announce: Callable[[int], None], amount: int) -> Iterator[None]:
    """Announce an amount, such as bytes; revoke it if the body raises."""
    announce(amount)
    try:
        yield
    except BaseException:  # an interrupt while the probe holds, an abort, a lost peer: nothing was issued
        announce(-amount)
        raise


def foreach_all_gather(
    shard: torch.Tensor | ScatteredShard,
    dtype: torch.dtype,
    device: torch.device,
    group: CommGroup,
    gather: AllGather,
    unit: UnitId,
) -> AllGatherState:
    """Start gathering the flat shard ``[S]`` in ``dtype`` on ``device``.

    The shard itself is the input, unless it must be cast, moved or assembled, or must be in this rank's row of the
    output. Then it is copied: into that row, or into a buffer if there is no such row.
    """
    numel, traits = shard.numel(), traits_of(gather)
    num_gathered = group.size - traits.leaves_own_out
    output = gather.allocate((numel * num_gathered,), dtype=dtype, device=device)
    own, own_nbytes = None, 0
    if isinstance(shard, torch.Tensor) and (shard.dtype, shard.device) == (dtype, output.device):
        own = None if traits.reads_own_row else shard
    is_copied = own is None
    if own is None and traits.leaves_own_out:
        own = torch.empty(numel, dtype=dtype, device=device)
        own_nbytes = own.nbytes
    elif own is None:
        own = output.view(group.size, numel)[group.rank]
    payload = numel * group.size * dtype.itemsize
    num_bytes = traits.nbytes_in_flight(output, group.size) + own_nbytes
    with alive_unless_raised(partial(probe.memory, Category.ALL_GATHER_BUFFERS, unit.index), num_bytes):
        if is_copied:
            _copy_shard(own, shard, unit)
        collective = Collective(Kind.ALL_GATHER.words, unit.name, payload)
        pending = group.issue(gather, output, own, collective=collective, kind=Kind.ALL_GATHER, unit=unit.index)
    return AllGatherState(output, own, gather, unit, group, pending, num_bytes)


def copy_to_device(
    shard: torch.Tensor | ScatteredShard, dtype: torch.dtype, device: torch.device, unit: UnitId
) -> DeviceCopyState:
    """Start copying the flat shard to a contiguous ``[S]`` on ``device``, in ``dtype``."""
    output = torch.empty(shard.numel(), dtype=dtype, device=device)
    with alive_unless_raised(partial(probe.memory, Category.ALL_GATHER_BUFFERS, unit.index), output.nbytes):
        _copy_shard(output, shard, unit)
    return DeviceCopyState(output, unit, backend_of(device).record_event())


def _copy_shard(target: torch.Tensor, shard: torch.Tensor | ScatteredShard, unit: UnitId) -> None:
    """Copy a flat shard to ``target``: cast, move or assemble it."""
    kind = Kind.COPY_IN if target.device == shard.device else Kind.OFFLOAD
    probe.event(kind, Edge.BEGIN, unit.index, target.nbytes)
    if isinstance(shard, ScatteredShard):
        shard.copy_to(target)
    else:
        target.copy_(shard, non_blocking=True)
    probe.event(kind, Edge.END, unit.index, target.nbytes)


def foreach_all_gather_copy_out(
    gathered: Sequence[torch.Tensor], targets: Sequence[Sequence[torch.Tensor]], unit: UnitId
) -> None:
    """Copy ``gathered`` into the parameters' padded fulls; cast if needed.

    Args:
        gathered: ``[n, S]`` each, of n consecutive ranks, F in all.
        targets: for each of these, its ranks' rows of each parameter, ``[n, ...]``; see
            :func:`workbench.engine.shard_layout.rows_of`.
        unit: for the probe.
    """
    num_bytes = sum(part.nbytes for part in gathered)
    probe.event(Kind.COPY_OUT, Edge.BEGIN, unit.index, num_bytes)
    backend = backend_of(gathered[0].device)
    for part, rows in zip(gathered, targets, strict=True):
        backend.copy_out(part, rows)
    probe.event(Kind.COPY_OUT, Edge.END, unit.index, num_bytes)
