"""A unit's two collectives, from its shards to full parameters and from full gradients to shards.

Layouts (S = sum of the slots of the parameters taking part, F = shard ranks)::

    all-gather output       [F, S]   row r = the flat shard of rank r
    padded full of param p  [F, s_p] s_p = its slot; row r = what rank r holds (its padded rows)
    reduce-scatter input    [F, S]   row r = what rank r will own of every gradient
    reduce-scatter output   [S]      this rank's part, summed, then divided by F
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from workbench.engine import probe
from workbench.engine.comm import AllGather, ReduceScatter
from workbench.engine.groups import CommGroup
from workbench.engine.param import FSDPParam
from workbench.engine.probe import Category, Comm, Edge, Kind
from workbench.engine.waits import PendingWork


@dataclass
class AllGatherState:
    """An all-gather in flight: its output ``[F * S]`` and the way to wait for it."""

    output: torch.Tensor
    pending: PendingWork
    comm: Comm


@dataclass
class ReduceScatterState:
    """A reduce-scatter in flight.

    Attributes:
        params: the parameters whose gradients are in it, in order.
        chunks: its input ``[F * S]``; must stay alive until it has ended.
        output: ``[S]``.
        num_bytes: bytes of input and staging.
        payload: bytes of the input.
        lease: of the output's bytes.
    """

    params: list[FSDPParam]
    chunks: torch.Tensor
    output: torch.Tensor
    pending: PendingWork
    comm: Comm
    num_bytes: int
    payload: int
    lease: probe.Lease


@contextmanager
def _alive_unless_raised(category: Category, unit: int, num_bytes: int) -> Iterator[None]:
    """Announce bytes that outlive the body, unless it raises."""
    probe.memory(category, unit, num_bytes)
    try:
        yield
    except BaseException:  # an interrupt while the probe holds, an abort, a peer that is gone: nothing was issued
        probe.memory(category, unit, -num_bytes)
        raise


def _wait(group: CommGroup, pending: PendingWork, unit: int, comm: Comm) -> None:
    """Wait interruptibly; the collective counts as unfinished if the wait is given up."""
    probe.event(Kind.WAIT, Edge.BEGIN, unit, comm=comm)
    pending.block()
    group.finished(pending)
    probe.event(Kind.WAIT, Edge.END, unit, comm=comm)


def foreach_all_gather(flat_shard: torch.Tensor, group: CommGroup, gather: AllGather, unit: int) -> AllGatherState:
    """Start gathering ``flat_shard`` ``[S]``; it is the collective's input as it lies."""
    output = gather.allocate(flat_shard.numel() * group.size, dtype=flat_shard.dtype, device=flat_shard.device)
    with _alive_unless_raised(Category.ALL_GATHER_BUFFERS, unit, output.nbytes):
        comm = group.next_comm()
        probe.event(Kind.ALL_GATHER, Edge.BEGIN, unit, output.nbytes, comm)
        pending = group.start(lambda pg: gather(output, flat_shard, pg), f"all-gather of unit {unit}")
    return AllGatherState(output, pending, comm)


def wait_for_all_gather(state: AllGatherState, group: CommGroup, unit: int) -> None:
    """Wait for the bytes of an all-gather.

    Raises:
        StepAborted, CollectiveFailed: see :class:`PendingWork`.
    """
    _wait(group, state.pending, unit, state.comm)
    state.pending.finish()
    end_ns = state.pending.end_ns
    probe.event(Kind.ALL_GATHER, Edge.END, unit, state.output.nbytes, state.comm, end_ns)


def foreach_all_gather_copy_out(
    gathered: torch.Tensor, params: Sequence[FSDPParam], padded_fulls: Sequence[torch.Tensor], unit: int
) -> None:
    """Copy ``gathered`` ``[F, S]`` into each parameter's padded full ``[F * s_p]``."""
    num_bytes = gathered.nbytes
    probe.event(Kind.COPY_OUT, Edge.BEGIN, unit, num_bytes)
    slots = gathered.split([p.slot_numel for p in params], dim=1)
    torch._foreach_copy_([full.view(slot.shape) for full, slot in zip(padded_fulls, slots, strict=True)], list(slots))
    probe.event(Kind.COPY_OUT, Edge.END, unit, num_bytes)


def _chunk_pairs(
    param: FSDPParam, grad: torch.Tensor, slots: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (destination, source) pairs that lay ``grad`` ``[d0, *rest]`` out in ``slots`` ``[F, s_p]``."""
    if param.is_even:
        yield slots, grad.reshape(slots.shape)
        return
    for rank, slot in enumerate(slots):
        first, last = param.rows_of(rank)
        numel = (last - first) * param.rest_numel
        slot[numel:].zero_()
        if numel:
            yield slot[:numel], grad[first:last].reshape(-1)


def _copy_in(params: Sequence[FSDPParam], grads: Sequence[torch.Tensor], chunks: torch.Tensor, unit: int) -> None:
    """Lay all gradients out as the reduce-scatter's input ``chunks`` ``[F, S]``."""
    probe.event(Kind.COPY_IN, Edge.BEGIN, unit, chunks.nbytes)
    slots = chunks.split([p.slot_numel for p in params], dim=1)
    pairs = [pair for p, g, s in zip(params, grads, slots, strict=True) for pair in _chunk_pairs(p, g, s)]
    if pairs:
        torch._foreach_copy_([dst for dst, _ in pairs], [src for _, src in pairs])
    probe.event(Kind.COPY_IN, Edge.END, unit, chunks.nbytes)


def foreach_reduce(
    params: list[FSDPParam], grads: list[torch.Tensor], group: CommGroup, reduce: ReduceScatter, unit: int
) -> ReduceScatterState:
    """Start reducing the full gradients ``grads`` ``[d0, *rest]``; empties the list, so that they can be freed."""
    slot_numel = sum(p.slot_numel for p in params)
    dtype, device = grads[0].dtype, grads[0].device
    chunks = reduce.allocate(slot_numel * group.size, dtype=dtype, device=device)
    num_bytes = chunks.nbytes + reduce.staging_numel(chunks.numel()) * dtype.itemsize
    with _alive_unless_raised(Category.REDUCE_SCATTER_BUFFERS, unit, num_bytes):
        _copy_in(params, grads, chunks.view(group.size, slot_numel), unit)
        _drop_full_grads(grads, unit)
        output = torch.empty(slot_numel, dtype=dtype, device=device)
        lease = probe.Lease(Category.SHARDED_GRADS, unit, output.nbytes)
        comm = group.next_comm()
        probe.event(Kind.REDUCE_SCATTER, Edge.BEGIN, unit, chunks.nbytes, comm)
        pending = group.start(lambda pg: reduce(output, chunks, pg), f"reduce-scatter of unit {unit}")
    return ReduceScatterState(params, chunks, output, pending, comm, num_bytes, chunks.nbytes, lease)


def _drop_full_grads(grads: list[torch.Tensor], unit: int) -> None:
    num_bytes = sum(g.nbytes for g in grads)
    grads.clear()
    probe.memory(Category.UNSHARDED_GRADS, unit, -num_bytes)


def keep_whole_grads(params: Sequence[FSDPParam], grads: list[torch.Tensor], unit: int) -> None:
    """Take the full gradients of a single rank, which are their own average; empties the list."""
    flat = torch.cat([g.reshape(-1) for g in grads])
    lease = probe.Lease(Category.SHARDED_GRADS, unit, flat.nbytes)
    _drop_full_grads(grads, unit)
    set_sharded_grads(params, flat, lease)


def finish_reduce(state: ReduceScatterState, group: CommGroup, unit: int) -> None:
    """Wait for a reduction, average it and add it to the sharded gradients.

    Raises:
        StepAborted, CollectiveFailed: see :class:`PendingWork`.
    """
    _wait(group, state.pending, unit, state.comm)
    end_ns = state.pending.end_ns
    probe.event(Kind.REDUCE_SCATTER, Edge.END, unit, state.payload, state.comm, end_ns)
    probe.event(Kind.COPY_OUT, Edge.BEGIN, unit, state.output.nbytes)
    state.pending.finish()
    state.output.div_(group.size)
    set_sharded_grads(state.params, state.output, state.lease)
    probe.event(Kind.COPY_OUT, Edge.END, unit, state.output.nbytes)
    probe.memory(Category.REDUCE_SCATTER_BUFFERS, unit, -state.num_bytes)


def set_sharded_grads(params: Sequence[FSDPParam], flat_grad: torch.Tensor, lease: probe.Lease) -> None:
    """Give each parameter its part of ``flat_grad`` ``[S]``; its ``lease`` ends when the user drops the last part."""
    for param, slot in zip(params, flat_grad.split([p.slot_numel for p in params]), strict=True):
        local = param.local_view(slot)
        had_grad = param.sharded_param.grad is not None
        grad = param.add_sharded_grad(local)
        if not had_grad:
            grad._workbench_lease = lease  # type: ignore[attr-defined]
