"""A unit's collectives, from its shards to full parameters and from full gradients to shards.

Layouts (S = sum of the slots of the parameters taking part, F = shard ranks)::

    all-gather output       [F, S]   row r = the flat shard of rank r, in the param dtype
    padded full of param p  [F, s_p] s_p = its slot; row r = what rank r holds (its padded rows)
    reduce-scatter input    [F, S]   row r = what rank r will own of every gradient, in the reduce dtype
    reduce-scatter output   [S]      this rank's part, summed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from workbench.engine import probe
from workbench.engine._torch import premultiplied_sum
from workbench.engine.backends import backend_of
from workbench.engine.backends.clock import Event
from workbench.engine.backends.pending import PendingWork
from workbench.engine.comm import AllGather, ReduceScatter, give_back, input_nbytes, output_nbytes, takes_own_in_output
from workbench.engine.groups import CommGroup
from workbench.engine.order import Call
from workbench.engine.param import FSDPParam
from workbench.events import Category, Comm, Edge, Kind


@dataclass(frozen=True)
class UnitId:
    """Which unit a collective belongs to: its number for the probe, its name for people."""

    index: int
    name: str


@dataclass
class InFlight:
    """A collective that was issued, on one group.

    Attributes:
        kind: what it is.
        payload: its bytes, as the probe is told.
    """

    unit: UnitId
    kind: Kind
    group: CommGroup
    pending: PendingWork
    comm: Comm
    payload: int

    def __post_init__(self) -> None:
        if probe.active is not None:
            wait = self.pending.lets_stream_wait
            if wait is not None:
                probe.active.issued(self.comm, wait)

    def wait(self) -> None:
        """Wait interruptibly; the collective counts as unfinished if the wait is given up.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: see :class:`PendingWork`.
        """
        unit = self.unit.index
        probe.event(Kind.WAIT, Edge.BEGIN, unit, comm=self.comm)
        self.pending.block()
        self.group.finished(self.pending)
        probe.event(Kind.WAIT, Edge.END, unit, comm=self.comm)
        probe.event(self.kind, Edge.END, unit, self.payload, self.comm, self.pending.end_ns or None)


@dataclass
class AllGatherState:
    """An all-gather in flight: its output ``[F * S]`` and the one who allocated it."""

    output: torch.Tensor
    gather: AllGather
    flight: InFlight

    @property
    def num_bytes(self) -> int:
        """Bytes of the output."""
        return output_nbytes(self.gather, self.output)

    def wait(self) -> torch.Tensor:
        """Wait for the bytes; returns the output.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: see :class:`PendingWork`.
        """
        self.flight.wait()
        self.flight.pending.finish()
        return self.output

    def abandon(self) -> None:
        """Forget the output; whatever still arrives in it is nobody's."""
        self.flight.pending.abandon()
        probe.memory(Category.ALL_GATHER_BUFFERS, self.flight.unit.index, -self.num_bytes)

    def drop(self) -> None:
        """Give the output back; nothing may write to it any more."""
        probe.memory(Category.ALL_GATHER_BUFFERS, self.flight.unit.index, -self.num_bytes)
        give_back(self.gather, self.output)


@dataclass
class DeviceCopyState:
    """The flat shard of a single rank on its way to the device that computes: what an all-gather is among several.

    Attributes:
        output: ``[S]`` there.
        ready: after the copy; None where the host has waited for it.
    """

    output: torch.Tensor
    unit: UnitId
    ready: Event

    def wait(self) -> torch.Tensor:
        """Let the current stream wait for the bytes; returns the output."""
        if self.ready is not None:
            backend_of(self.output.device).wait_event(self.ready)
        return self.output

    def drop(self) -> None:
        """Forget the output."""
        probe.memory(Category.ALL_GATHER_BUFFERS, self.unit.index, -self.output.nbytes)

    abandon = drop


@contextmanager
def _alive_unless_raised(announce: Callable[[int], None], num_bytes: int) -> Iterator[None]:
    """Announce bytes that outlive the body, unless it raises."""
    announce(num_bytes)
    try:
        yield
    except BaseException:  # an interrupt while the probe holds, an abort, a peer that is gone: nothing was issued
        announce(-num_bytes)
        raise


def _announce(unit: UnitId, kind: Kind, group: CommGroup, num_bytes: int, exception: str = "") -> tuple[Comm, Call]:
    """Number a collective and tell the probe, just before it is issued."""
    comm = group.next_comm()
    probe.event(kind, Edge.BEGIN, unit.index, num_bytes, comm)
    return comm, Call(kind.words + exception, unit.name, num_bytes)


def foreach_all_gather(
    shard: torch.Tensor, dtype: torch.dtype, device: torch.device, group: CommGroup, gather: AllGather, unit: UnitId
) -> AllGatherState:
    """Start gathering the flat shard ``[S]`` in ``dtype`` on ``device``.

    It is the collective's input as it lies, unless it must be cast or moved; then this rank's row of the output is.
    """
    output = gather.allocate((shard.numel() * group.size,), dtype=dtype, device=device)
    with _alive_unless_raised(
        partial(probe.memory, Category.ALL_GATHER_BUFFERS, unit.index), output_nbytes(gather, output)
    ):
        source = shard
        if shard.dtype != dtype or shard.device != output.device:
            source = output.view(group.size, shard.numel())[group.rank]
            _copy_shard(source, shard, unit)
        comm, call = _announce(unit, Kind.ALL_GATHER, group, output.nbytes)
        pending = group.start(lambda pg: gather(output, source, pg, async_op=True), call)
    return AllGatherState(output, gather, InFlight(unit, Kind.ALL_GATHER, group, pending, comm, output.nbytes))


def copy_to_device(shard: torch.Tensor, dtype: torch.dtype, device: torch.device, unit: UnitId) -> DeviceCopyState:
    """Start copying the flat shard ``[S]``, in one piece, to ``device``, in ``dtype``."""
    output = torch.empty(shard.numel(), dtype=dtype, device=device)
    with _alive_unless_raised(partial(probe.memory, Category.ALL_GATHER_BUFFERS, unit.index), output.nbytes):
        _copy_shard(output, shard, unit)
    return DeviceCopyState(output, unit, backend_of(device).record_event())


def _copy_shard(target: torch.Tensor, shard: torch.Tensor, unit: UnitId) -> None:
    """Cast and move a flat shard."""
    kind = Kind.COPY_IN if target.device == shard.device else Kind.OFFLOAD
    probe.event(kind, Edge.BEGIN, unit.index, target.nbytes)
    target.copy_(shard, non_blocking=True)
    probe.event(kind, Edge.END, unit.index, target.nbytes)


def foreach_all_gather_copy_out(gathered: torch.Tensor, targets: Sequence[torch.Tensor], unit: UnitId) -> None:
    """Copy ``gathered`` ``[F, S]`` into each parameter's padded full, seen rank by rank ``[F, ...]``; casts if need be.

    The views are :meth:`ShardLayout.by_rank`'s.
    """
    num_bytes = gathered.nbytes
    probe.event(Kind.COPY_OUT, Edge.BEGIN, unit.index, num_bytes)
    backend_of(gathered.device).copy_out(gathered, targets)
    probe.event(Kind.COPY_OUT, Edge.END, unit.index, num_bytes)


def _use_staging(reduce: ReduceScatter, unit: UnitId, num_bytes: int) -> None:
    """Announce staging that is used from now on, or not any more; it may lie in what ``reduce`` keeps."""
    probe.memory(Category.REDUCE_SCATTER_BUFFERS, unit.index, num_bytes)
    lease = getattr(reduce, "lease", None)
    if lease is not None and lease.is_told:
        probe.memory(Category.RESERVED, probe.NO_UNIT, -num_bytes)


@dataclass
class ReduceScatterState:
    """A reduce-scatter in flight.

    Attributes:
        chunks: its input ``[F * S]``, or less, see :func:`takes_own_in_output`; must stay alive until it has ended.
        output: ``[S]``.
        lease: of its bytes.
    """

    chunks: torch.Tensor
    output: torch.Tensor
    lease: probe.Lease
    reduce: ReduceScatter
    flight: InFlight

    @property
    def num_bytes(self) -> int:
        """Bytes of input and staging."""
        return input_nbytes(self.reduce, self.chunks, self.flight.group)

    def finish(self) -> torch.Tensor:
        """Wait, and take the sum ``[S]``.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: see :class:`PendingWork`.
        """
        self.flight.wait()
        unit = self.flight.unit.index
        probe.event(Kind.COPY_OUT, Edge.BEGIN, unit, self.output.nbytes)
        self.flight.pending.finish()
        probe.event(Kind.COPY_OUT, Edge.END, unit, self.output.nbytes)
        self.drop()
        return self.output

    def abandon(self) -> None:
        """Forget the input; others may still read it, or gloo send it."""
        self.flight.pending.abandon()
        _use_staging(self.reduce, self.flight.unit, -self.num_bytes)

    def drop(self) -> None:
        """Give the input back."""
        _use_staging(self.reduce, self.flight.unit, -self.num_bytes)
        give_back(self.reduce, self.chunks)


def lay_out(
    params: Sequence[FSDPParam], grads: Sequence[torch.Tensor], chunks: Sequence[torch.Tensor], unit: UnitId
) -> None:
    """Copy full gradients, cast, into ``chunks``: ``[n, S]`` each, of so many ranks one after another, F in all."""
    num_bytes = sum(part.nbytes for part in chunks)
    probe.event(Kind.COPY_IN, Edge.BEGIN, unit.index, num_bytes)
    layouts, first_rank = [p.layout for p in params], 0
    for part in chunks:
        backend_of(part.device).copy_in(layouts, grads, part, first_rank)
        first_rank += len(part)
    probe.event(Kind.COPY_IN, Edge.END, unit.index, num_bytes)


def drop_full_grads(grads: list[torch.Tensor], unit: UnitId) -> None:
    """Let go of full gradients; empties the list."""
    num_bytes = sum(g.nbytes for g in grads)
    grads.clear()
    probe.memory(Category.UNSHARDED_GRADS, unit.index, -num_bytes)


@dataclass(frozen=True)
class ReduceMode:
    """How gradients are reduced.

    Attributes:
        dtype: of the reduction.
        scaling: divisors and operations.
        category: what the bytes of its output count as: SHARDED_GRADS, unless they are cast or moved afterwards.
        unused: names of the trainable parameters left out: they got no gradient.
    """

    dtype: torch.dtype
    scaling: Scaling
    category: Category
    unused: tuple[str, ...]

    @property
    def exception(self) -> str:
        """Return what the order check must also agree on: as many bytes may be of other parameters."""
        return _without(self.unused)


def _without(unused: Sequence[str]) -> str:
    if not unused:
        return ""
    return f" without {', '.join(unused)} (no gradient; set_reduce_scatter_unused_params(True) counts that as zero)"


def foreach_reduce(
    params: Sequence[FSDPParam],
    grads: list[torch.Tensor],
    mode: ReduceMode,
    group: CommGroup,
    reduce: ReduceScatter,
    unit: UnitId,
) -> ReduceScatterState:
    """Start summing the full gradients ``grads``; empties the list, so that they can be freed."""
    slot_numel = sum(p.slot_numel for p in params)
    device, dtype, scaling = grads[0].device, mode.dtype, mode.scaling
    num_bytes = slot_numel * group.size * dtype.itemsize
    own = torch.empty(slot_numel, dtype=dtype, device=device) if takes_own_in_output(reduce) else None
    num_staged = group.size if own is None else group.size - 1
    chunks = reduce.allocate((slot_numel * num_staged,), dtype=dtype, device=device)
    with _alive_unless_raised(partial(_use_staging, reduce, unit), input_nbytes(reduce, chunks, group)):
        rows = chunks.view(num_staged, slot_numel)
        parts = [rows] if own is None else [rows[: group.rank], own.view(1, -1), rows[group.rank :]]
        lay_out(params, grads, parts, unit)
        drop_full_grads(grads, unit)
        for part in (chunks,) if own is None else (chunks, own):
            scaling.before(part)
        output = torch.empty(slot_numel, dtype=dtype, device=device) if own is None else own
        lease = probe.Lease(mode.category, unit.index, output.nbytes)
        comm, call = _announce(unit, Kind.REDUCE_SCATTER, group, num_bytes, mode.exception)
        pending = group.start(lambda pg: reduce(output, chunks, pg, scaling.scatter_op, async_op=True), call)
    flight = InFlight(unit, Kind.REDUCE_SCATTER, group, pending, comm, num_bytes)
    return ReduceScatterState(chunks, output, lease, reduce, flight)


@dataclass
class AllReduceState:
    """An all-reduce of a rank's reduced shard ``[S]`` in flight, in place."""

    output: torch.Tensor
    flight: InFlight

    def finish(self) -> torch.Tensor:
        """Wait, and take the sum ``[S]``.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: see :class:`PendingWork`.
        """
        self.flight.wait()
        self.flight.pending.finish()
        return self.output


def all_reduce(
    output: torch.Tensor, group: CommGroup, scaling: Scaling, unit: UnitId, unused: Sequence[str]
) -> AllReduceState:
    """Start summing ``output`` ``[S]`` over the ranks that hold the same shard.

    ``unused`` names the parameters left out, see :class:`ReduceMode`.
    """
    comm, call = _announce(unit, Kind.ALL_REDUCE, group, output.nbytes, _without(unused))
    pending = group.start(lambda pg: dist.all_reduce(output, scaling.reduce_op, group=pg, async_op=True), call)
    return AllReduceState(output, InFlight(unit, Kind.ALL_REDUCE, group, pending, comm, output.nbytes))


@dataclass(frozen=True)
class Scaling:
    """How a sum of gradients becomes what the user asked for.

    Attributes:
        pre: divisor before the reduction; None: 1.
        post: divisor after it; None: 1.
        scatter_op: operation of the reduce-scatter.
        reduce_op: operation of the all-reduce.
    """

    pre: float | None
    post: float | None
    scatter_op: object
    reduce_op: object

    def before(self, chunks: torch.Tensor) -> None:
        """Divide what goes into the reduction."""
        if self.pre is not None and self.pre != 1:
            chunks.div_(self.pre)

    def after(self, output: torch.Tensor) -> None:
        """Divide what comes out of it."""
        if self.post is not None and self.post != 1:
            output.div_(self.post)


def _get_gradient_divide_factors(
    num_ranks: int, dtype: torch.dtype, *, has_average: bool, factor: float | None
) -> Scaling:
    """Return how to average over ``num_ranks``, or to divide the sum by ``factor``.

    Args:
        num_ranks: ranks that see different data.
        dtype: of the reduction. float16 is divided by about the square root of the divisor before and by the rest
            after, so that neither the sum overflows nor its parts underflow.
        has_average: the backend can average by itself (NCCL), and the user has not asked for plain sums.
        factor: the user's divisor; None: ``num_ranks``.
    """
    total = dist.ReduceOp.SUM
    if has_average and dtype != torch.float16:
        if factor is None:
            op = dist.ReduceOp.AVG if num_ranks > 1 else total
            return Scaling(None, None, op, op)
        return Scaling(None, None, premultiplied_sum(1 / factor), total)
    divisor = float(num_ranks) if factor is None else factor
    if dtype != torch.float16:
        return Scaling(None, divisor, total, total)
    pre = 1.0
    while divisor % pre == 0 and divisor / pre > pre:
        pre *= 2
    return Scaling(pre, divisor / pre, total, total)


def set_sharded_grads(params: Sequence[FSDPParam], flat_grad: torch.Tensor, lease: probe.Lease) -> None:
    """Give each parameter its part of ``flat_grad`` ``[S]``; its ``lease`` ends when the user drops the last part."""
    for param, slot in zip(params, flat_grad.split([p.slot_numel for p in params]), strict=True):
        had_grad = param.sharded_param.grad is not None
        grad = param.add_sharded_grad(param.local_view(slot))
        if not had_grad:
            grad._workbench_lease = lease  # type: ignore[attr-defined]
