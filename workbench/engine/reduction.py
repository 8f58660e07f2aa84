"""Gradient reduction: from full gradients to sharded gradients.

A reduction has these steps, each only where it applies::

    copy-in -> reduce-scatter over F -> [+ partial sums] -> all-reduce over R -> hook -> divide -> cast -> .grad

A unit's post-backward starts it. It is finished when another one needs its room or backward ends. What is in flight
is a frozen state; finishing it returns the next one::

    ReduceScatterState -> ShardSum -> AllReduceState -> gradients set

Layouts (S = sum of the slots of the parameters taking part, F = shard ranks)::

    reduce-scatter input    [F, S]   row r = rank r's part of every gradient, in the reduce dtype
    reduce-scatter output   [S]      this rank's part, summed
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from functools import reduce as reduce_
from typing import cast

import torch
import torch.distributed as dist

from workbench.engine import probe
from workbench.engine._torch import call_post_accumulate_hooks, has_post_accumulate_hooks, premultiplied_sum
from workbench.engine.backends import backend_of
from workbench.engine.backends.async_work import CollectiveSpan, PendingWork
from workbench.engine.backends.base import Backend
from workbench.engine.backends.copies import Grads
from workbench.engine.backends.device_clock import Event
from workbench.engine.backends.stream_order import Streams
from workbench.engine.collective_order import Collective
from workbench.engine.comm import ReduceScatter, StageKeeper, all_reduce_in_place, give_back, traits_of
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.param import FSDPParam
from workbench.engine.process_groups import SEPARATE, CommGroup, group_of
from workbench.engine.unit_collectives import UnitId, alive_unless_raised
from workbench.events import Category, Edge, Kind

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scaling:
    """Divisors and operations of a gradient reduction.

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
        """Divide the input of the reduction in place."""
        if self.pre is not None and self.pre != 1:
            chunks.div_(self.pre)

    def after(self, output: torch.Tensor) -> None:
        """Divide the output of the reduction in place."""
        if self.post is not None and self.post != 1:
            output.div_(self.post)


def _get_gradient_divide_factors(
    num_ranks: int, dtype: torch.dtype, *, has_average: bool, factor: float | None
) -> Scaling:
    """Return the scaling that averages over ``num_ranks``, or divides the sum by ``factor``.

    Args:
        num_ranks: ranks that see different data.
        dtype: of the reduction. float16 is divided by about the square root of the divisor before and by the rest
            after, so that the sum does not overflow and its parts do not underflow.
        has_average: the backend can average (NCCL), and the user did not ask for plain sums.
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
    pre = factor_before(divisor)
    return Scaling(pre, divisor / pre, total, total)


def factor_before(divisor: float) -> float:
    """Return the divisor to apply before a sum: a power of two near the square root of ``divisor``."""
    factor = 1.0
    while divisor % factor == 0 and divisor / factor > factor:
        factor *= 2
    return factor


@dataclass
class GradientSync:
    """User settings for the reduction of a unit's gradients.

    Attributes:
        reduce_grads: reduce at the end of backward (False: accumulate full gradients).
        all_reduce_grads: with replicas, also all-reduce then (False: accumulate reduced shards).
        divide_factor: divisor of the sum; None: the number of ranks that see different data.
        force_sum: use only sums in the backend.
        reduce_unused: reduce a zero gradient for a parameter that got none.
        all_reduce_hook: called with the reduced shard ``[S]``, before it is divided.
        hook_stream: CUDA stream the hook runs in; None: the engine's.
        separate_group: reduce-scatter in a process group of its own, so that it does not wait for an all-gather.
        comm_hook: averages gradients ``[S]`` in place, instead of the all-reduce; the engine then divides nothing.
            With shards, the unit's reduce-scatter is a custom one that averages too.
    """

    reduce_grads: bool = True
    all_reduce_grads: bool = True
    divide_factor: float | None = None
    force_sum: bool = False
    reduce_unused: bool = False
    all_reduce_hook: Callable[[torch.Tensor], object] | None = None
    hook_stream: torch.cuda.Stream | None = None
    separate_group: bool = False
    comm_hook: Callable[[torch.Tensor], object] | None = None


@dataclass
class PartialSum:
    """Gradients summed over the shard ranks, but not yet over the replicas.

    Attributes:
        params: the parameters with a gradient, in the order of their unit.
        output: ``[S]``, their slots one after another.
        handle: handle for the output's bytes.
    """

    params: list[FSDPParam]
    output: torch.Tensor
    handle: probe.BufferHandle

    def slots(self) -> Iterator[tuple[FSDPParam, torch.Tensor]]:
        """Yield each parameter with its slot."""
        return zip(self.params, self.output.split([p.slot_numel for p in self.params]), strict=True)

    def in_grad_dtypes(self) -> list[tuple[list[FSDPParam], torch.Tensor]]:
        """Return parameters whose sharded gradients share a dtype, with their slots in it, one after another."""
        by_dtype: dict[torch.dtype, list[tuple[FSDPParam, torch.Tensor]]] = {}
        for param, slot in self.slots():
            by_dtype.setdefault(param.shard_grad_dtype or slot.dtype, []).append((param, slot))
        if len(by_dtype) == 1:
            return [(self.params, self.output.to(next(iter(by_dtype))))]
        return [([p for p, _ in own], torch.cat([s for _, s in own]).to(dtype)) for dtype, own in by_dtype.items()]


@dataclass
class Reducer:
    """Reduces the gradients of one unit.

    Attributes:
        mesh_info: ranks to reduce over.
        offloads: sharded gradients live on the CPU.
        pins: sharded gradients are in pinned memory.
        kept: partial sum of earlier micro-batches, for the next all-reduce.
    """

    unit: UnitId
    mesh_info: FSDPMeshInfo
    offloads: bool
    pins: bool
    sync: GradientSync = field(default_factory=GradientSync)
    kept: PartialSum | None = None
    _to_host: Event = None  # end of the last copy to the host, until the host waits for it

    @property
    def _backend(self) -> Backend:
        return backend_of(torch.device(self.mesh_info.mesh.device_type))

    @property
    def scatter_group(self) -> CommGroup | None:
        """The group of the reduce-scatter; None for one rank. Its ranks create a separate one at its first use."""
        group = self.mesh_info.shard_group
        if group is None or not self.sync.separate_group:
            return group
        return group_of(group.ranks, group.device_type, SEPARATE)

    def dtype_with(self, dtypes: Iterable[torch.dtype]) -> torch.dtype:
        """Return the dtype of a reduction of gradients of ``dtypes``, at least one, and of those from :meth:`keep`."""
        total = reduce_(torch.promote_types, dtypes)
        return total if self.kept is None else torch.promote_types(total, self.kept.output.dtype)

    def scaling(self, dtype: torch.dtype) -> Scaling:
        """Return divisors and operations for a reduction in ``dtype``."""
        if self.sync.comm_hook is not None:
            return Scaling(None, None, dist.ReduceOp.SUM, dist.ReduceOp.SUM)
        # NCCL applies the user's factor in the reduce-scatter; a single shard rank has none
        can_divide = self.sync.divide_factor is None or self.mesh_info.shard_group is not None
        return _get_gradient_divide_factors(
            self.mesh_info.data_parallel_size,
            dtype,
            has_average=self._backend.averages and not self.sync.force_sum and can_divide,
            factor=self.sync.divide_factor,
        )

    def category(self, params: Sequence[FSDPParam], dtype: torch.dtype, device: torch.device) -> Category:
        """Return the memory category of the output, in ``dtype`` on ``device``, of a reduction for ``params``."""
        moves = self.offloads and device != CPU
        lives_on = not moves and all(p.shard_grad_dtype in (None, dtype) for p in params)
        return Category.SHARDED_GRADS if lives_on else Category.REDUCE_SCATTER_BUFFERS

    @property
    def owes_all_reduce(self) -> bool:
        """True if partial sums wait for an all-reduce that is now enabled."""
        return self.kept is not None and self.sync.all_reduce_grads

    def keep(self, part: PartialSum) -> None:
        """Add a partial sum to the one that waits for an all-reduce."""
        self.kept = part if self.kept is None else self.added(self.kept, part)

    def take_kept(self) -> PartialSum | None:
        """Return the sum from :meth:`keep` and clear it."""
        kept, self.kept = self.kept, None
        return kept

    def plan(self, unused: Sequence[str]) -> AllReducePlan:
        """Return what follows a reduce-scatter that begins now; an all-reduce takes the sum from :meth:`keep`."""
        keeps = not self.sync.all_reduce_grads
        return AllReducePlan(self, tuple(unused), keeps, None if keeps else self.take_kept())

    def all_reduce_kept(self, unused: Sequence[str]) -> ShardSum:
        """Return the sum from :meth:`keep` as a started reduction; call it while :attr:`owes_all_reduce`."""
        kept = cast("PartialSum", self.take_kept())
        return ShardSum(self.plan(unused), kept)

    def added(self, part: PartialSum, other: PartialSum) -> PartialSum:
        """Return the sum, over the union of their parameters; may change ``part`` in place."""
        dtype = torch.promote_types(part.output.dtype, other.output.dtype)
        if part.params == other.params and part.output.dtype == dtype:
            part.output += other.output
            return part
        params = sorted({*part.params, *other.params}, key=lambda p: p.position)
        output = part.output.new_zeros(sum(p.slot_numel for p in params), dtype=dtype)
        category = self.category(params, dtype, output.device)
        total = PartialSum(params, output, probe.BufferHandle(category, self.unit.index, output.nbytes))
        slots = dict(total.slots())
        for param, slot in (*part.slots(), *other.slots()):
            slots[param] += slot
        return total

    def finish(self, total: PartialSum) -> None:
        """Scale ``total``, fully reduced, and set it as the gradient of the shards."""
        self._run_hook(total.output)
        self.scaling(total.output.dtype).after(total.output)
        for params, grad in total.in_grad_dtypes():
            self._set(params, grad, total)
        for param in itertools.chain.from_iterable(p.owned for p in total.params):
            call_post_accumulate_hooks(param)

    def _set(self, params: Sequence[FSDPParam], grad: torch.Tensor, total: PartialSum) -> None:
        if self.offloads and grad.device != CPU:
            grad = self._copy_to_host(grad)
            if any(p.has_sharded_grad or any(map(has_post_accumulate_hooks, p.owned)) for p in params):
                self.wait_for_host()  # accumulation or hooks read it below
        handle = total.handle
        if grad is not total.output:
            handle = probe.BufferHandle(Category.SHARDED_GRADS, self.unit.index, grad.nbytes)
        set_sharded_grads(params, grad, handle)

    def _copy_to_host(self, grad: torch.Tensor) -> torch.Tensor:
        """Start copying ``grad`` ``[S]`` to the host; read the copy only after :meth:`wait_for_host`."""
        probe.event(Kind.OFFLOAD, Edge.BEGIN, self.unit.index, grad.nbytes)
        host = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=self.pins)
        host.copy_(grad, non_blocking=True)
        self._to_host = backend_of(grad.device).record_event()
        probe.event(Kind.OFFLOAD, Edge.END, self.unit.index, grad.nbytes)
        return host

    def wait_for_host(self) -> None:
        """Wait for gradients being copied to the host; no-op on the CPU."""
        if self._to_host is not None:
            self._backend.wait_on_host(self._to_host)
            self._to_host = None

    def _run_hook(self, output: torch.Tensor) -> None:
        hook, stream = self.sync.all_reduce_hook, self.sync.hook_stream
        if hook is None:
            return
        if stream is None:
            hook(output)
            return
        with backend_of(output.device).within(stream, output):
            hook(output)


# ---- the states of a reduction: ReduceScatterState -> ShardSum -> AllReduceState -> gradients set


@dataclass(frozen=True, eq=False)
class ReduceScatterState:
    """A reduce-scatter in flight.

    Attributes:
        then: what follows it.
        params: the parameters whose gradients it reduces, in order.
        reduce: the reduce-scatter that allocated its input.
        chunks: its input ``[F * S]``, or less, see :attr:`CommTraits.own_in_output`; must stay alive until it ends.
        staged_nbytes: bytes that it holds in flight.
        output: ``[S]``.
        handle: handle for the output's bytes.
    """

    then: AllReducePlan
    params: list[FSDPParam]
    reduce: ReduceScatter
    chunks: torch.Tensor
    staged_nbytes: int
    output: torch.Tensor
    handle: probe.BufferHandle
    pending: PendingWork

    def finish(self) -> ShardSum:
        """Wait for the sum over the shard ranks.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: see :class:`PendingWork`.
        """
        self.pending.wait()
        unit = self.then.reducer.unit
        probe.event(Kind.COPY_OUT, Edge.BEGIN, unit.index, self.output.nbytes)
        self.pending.finish()
        probe.event(Kind.COPY_OUT, Edge.END, unit.index, self.output.nbytes)
        _count_staging(self.reduce, unit, self.chunks, self.staged_nbytes, -1)
        give_back(self.reduce, self.chunks)
        return ShardSum(self.then, PartialSum(self.params, self.output, self.handle))

    def drain(self) -> None:
        """Wait and drop the sum; raises as :meth:`finish`."""
        self.finish()

    def abandon(self) -> None:
        """Drop the input without reusing it: peers may still read it, or gloo send it."""
        self.pending.abandon()
        _count_staging(self.reduce, self.then.reducer.unit, self.chunks, self.staged_nbytes, -1)


@dataclass(frozen=True, eq=False)
class ShardSum:
    """Gradients summed over the shard ranks, and what follows."""

    then: AllReducePlan
    part: PartialSum

    def go_on(self, streams: Streams) -> AllReduceState | None:
        """Keep the sum or set the gradients, and return None; or start an all-reduce over the replicas."""
        with streams.trailing(self.part.output):
            return self.then.start(self.part)


@dataclass(frozen=True, eq=False)
class AllReducePlan:
    """The steps after a reduce-scatter, decided when the reduction began.

    Attributes:
        unused: names of the trainable parameters that have no gradient.
        keeps: with replicas, the output of the reduce-scatter waits for a later all-reduce.
        kept: partial sum of earlier micro-batches, to be added before the all-reduce.
    """

    reducer: Reducer
    unused: tuple[str, ...]
    keeps: bool
    kept: PartialSum | None

    def start(self, part: PartialSum) -> AllReduceState | None:
        """Go on with ``part``, the sum over the shard ranks; see :meth:`ShardSum.go_on`."""
        reducer, group = self.reducer, self.reducer.mesh_info.replicate_group
        if group is None:
            if reducer.sync.comm_hook is not None and reducer.mesh_info.shard_group is None:
                reducer.sync.comm_hook(part.output)
            reducer.finish(part)
        elif self.keeps:
            reducer.keep(part)
        else:
            total = part if self.kept is None else reducer.added(part, self.kept)
            return all_reduce(reducer, total, group, self.unused)
        return None


@dataclass(frozen=True, eq=False)
class AllReduceState:
    """An all-reduce of ``total``, this rank's reduced shard, in flight, in place."""

    reducer: Reducer
    total: PartialSum
    pending: PendingWork

    def finish(self) -> None:
        """Wait and set the gradients.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: see :class:`PendingWork`.
        """
        self.drain()
        self.reducer.finish(self.total)

    def drain(self) -> None:
        """Wait and drop the sum; raises as :meth:`finish`."""
        self.pending.wait()
        self.pending.finish()

    def abandon(self) -> None:
        """Drop it without waiting for it."""
        self.pending.abandon()


def all_reduce(reducer: Reducer, total: PartialSum, group: CommGroup, unused: Sequence[str]) -> AllReduceState:
    """Start summing ``total`` over the ranks that hold the same shard.

    ``unused`` names trainable parameters without a gradient from the last micro-batch.
    """
    has_grad = {p.fqn for p in total.params}
    left_out = [fqn for fqn in unused if fqn not in has_grad]
    hook, output = reducer.sync.comm_hook, total.output
    comm = all_reduce_in_place if hook is None else partial(_call_hook, hook)
    kind = Kind.ALL_REDUCE
    collective = Collective(kind.words + _without(left_out), reducer.unit.name, output.nbytes)
    op, unit = reducer.scaling(output.dtype).reduce_op, reducer.unit.index
    return AllReduceState(reducer, total, group.issue(comm, output, collective=collective, op=op, kind=kind, unit=unit))


def _call_hook(hook: Callable[[torch.Tensor], object], output: torch.Tensor, *_: object, **__: object) -> None:
    """Average with the user's hook, which waits, in place of an all-reduce."""
    hook(output)


# ---- the start


def foreach_reduce(
    reducer: Reducer,
    params: list[FSDPParam],
    grads: list[Grads],
    reduce: ReduceScatter,
    unused: Sequence[str],
    dtype: torch.dtype,
) -> ReduceScatterState | ShardSum:
    """Start summing the full gradients ``grads``; empties the list, so that they can be freed.

    A single shard rank needs no reduce-scatter: its gradients are the sum.

    Args:
        reducer: of the unit.
        params: the parameters of ``grads``, at least one.
        grads: full gradients of each parameter.
        reduce: the unit's reduce-scatter.
        unused: names of the trainable parameters without a gradient.
        dtype: of the reduction.
    """
    unit, device, scaling = reducer.unit, reducer.mesh_info.device, reducer.scaling(dtype)
    then, group, slot_numel = reducer.plan(unused), reducer.scatter_group, sum(p.slot_numel for p in params)
    if group is None:
        return ShardSum(then, _laid_out(reducer, params, grads, dtype))
    traits = traits_of(reduce)
    own = torch.empty(slot_numel, dtype=dtype, device=device) if traits.own_in_output else None
    num_staged = group.size if own is None else group.size - 1
    chunks = reduce.allocate((slot_numel * num_staged,), dtype=dtype, device=device)
    staged_nbytes = traits.nbytes_in_flight(chunks, group.size)
    with alive_unless_raised(partial(_count_staging, reduce, unit, chunks, staged_nbytes), 1):
        rows = chunks.view(num_staged, slot_numel)
        parts = [rows] if own is None else [rows[: group.rank], own.view(1, -1), rows[group.rank :]]
        lay_out(params, grads, [part for part in parts if len(part)], unit)
        drop_full_grads(grads, unit)
        for part in (chunks,) if own is None else (chunks, own):
            scaling.before(part)
        output = torch.empty(slot_numel, dtype=dtype, device=device) if own is None else own
        handle = probe.BufferHandle(reducer.category(params, dtype, device), unit.index, output.nbytes)
        kind, num_bytes = Kind.REDUCE_SCATTER, slot_numel * group.size * dtype.itemsize
        collective = Collective(kind.words + _without(unused), unit.name, num_bytes)
        pending = group.issue(
            reduce, output, chunks, collective=collective, op=scaling.scatter_op, kind=kind, unit=unit.index
        )
    return ReduceScatterState(then, params, reduce, chunks, staged_nbytes, output, handle, pending)


def _laid_out(reducer: Reducer, params: list[FSDPParam], grads: list[Grads], dtype: torch.dtype) -> PartialSum:
    """Return a single shard rank's full gradients as a partial sum."""
    device = reducer.mesh_info.device
    output = torch.empty(sum(p.slot_numel for p in params), dtype=dtype, device=device)
    lay_out(params, grads, [output.view(1, -1)], reducer.unit)
    drop_full_grads(grads, reducer.unit)
    reducer.scaling(dtype).before(output)
    category = reducer.category(params, dtype, device)
    return PartialSum(params, output, probe.BufferHandle(category, reducer.unit.index, output.nbytes))


def _count_staging(reduce: ReduceScatter, unit: UnitId, chunks: torch.Tensor, num_bytes: int, sign: int) -> None:
    """Announce the input and its staging as in use (1) or released (-1).

    ``chunks`` may be in a buffer that ``reduce`` keeps and that counts as reserved while unused.
    """
    probe.memory(Category.REDUCE_SCATTER_BUFFERS, unit.index, sign * num_bytes)
    handle = cast("StageKeeper", reduce).handle if traits_of(reduce).keeps_stages else None
    if handle is not None and handle.is_announced:
        probe.memory(Category.RESERVED, probe.NO_UNIT, -sign * chunks.nbytes)


def lay_out(params: Sequence[FSDPParam], grads: Sequence[Grads], chunks: Sequence[torch.Tensor], unit: UnitId) -> None:
    """Copy and cast full gradients into ``chunks``: ``[n, S]`` each, for n consecutive ranks, F in all."""
    num_bytes = sum(part.nbytes for part in chunks)
    probe.event(Kind.COPY_IN, Edge.BEGIN, unit.index, num_bytes)
    first_rank = 0
    for part in chunks:
        backend_of(part.device).copy_in(params, grads, part, first_rank)
        first_rank += len(part)
    probe.event(Kind.COPY_IN, Edge.END, unit.index, num_bytes)


def drop_full_grads(grads: list[Grads], unit: UnitId) -> None:
    """Drop full gradients and announce the freed bytes; empties the list."""
    num_bytes = sum(grad.nbytes for of_param in grads for grad in of_param if grad is not None)
    grads.clear()
    probe.memory(Category.UNSHARDED_GRADS, unit.index, -num_bytes)


def _without(unused: Sequence[str]) -> str:
    """Return text on ``unused`` for the order check: equal sizes do not imply equal parameters."""
    if not unused:
        return ""
    return f" without {', '.join(unused)} (no gradient; set_reduce_scatter_unused_params(True) treats it as zero)"


# ---- the queue


class ReductionQueue:
    """Reductions in flight, oldest first.

    Attributes:
        max_scatters: maximum number of reduce-scatters in flight: each holds an input buffer.
        ended: last collective that the reduction stream waited on since compute last joined it; None without one.
    """

    def __init__(self, streams: Streams) -> None:
        self.max_scatters = 1
        self.ended: CollectiveSpan | None = None
        self._streams = streams
        self._scattering: deque[ReduceScatterState] = deque()
        self._all_reducing: AllReduceState | None = None

    def __len__(self) -> int:
        """Return the number of unfinished reductions."""
        return len(self._in_flight)

    @property
    def _in_flight(self) -> list[ReduceScatterState | AllReduceState]:
        return [*self._scattering, *([] if self._all_reducing is None else [self._all_reducing])]

    def make_room(self) -> None:
        """Finish the oldest reduce-scatters until another may start."""
        while len(self._scattering) >= self.max_scatters:
            self._end_oldest()

    def add(self, started: ReduceScatterState | ShardSum) -> None:
        """Add a started reduction."""
        if isinstance(started, ShardSum):
            self._go_on(started)
        else:
            self._scattering.append(started)

    def finish(self) -> None:
        """Finish all reductions."""
        while self._scattering:
            self._end_oldest()
        self._follow(None)

    def drain(self) -> None:
        """Wait for all reductions and drop their sums."""
        for state in self._in_flight:
            state.drain()
        self._clear()

    def abandon(self) -> None:
        """Drop all reductions without waiting."""
        with self._streams.reducing(after_compute=False):  # their memory was allocated in that stream
            for state in self._in_flight:
                state.abandon()
        self._clear()

    def _clear(self) -> None:
        self._scattering.clear()
        self._all_reducing = None

    def _end_oldest(self) -> None:
        self.ended = self._scattering[0].pending.span
        self._go_on(self._summed_oldest())

    def _summed_oldest(self) -> ShardSum:
        """Finish and drop the oldest reduce-scatter; its input is freed here, before what follows."""
        summed = self._scattering[0].finish()
        self._scattering.popleft()  # only now: a cancelled wait keeps it, to be abandoned
        return summed

    def _go_on(self, summed: ShardSum) -> None:
        all_reducing = summed.go_on(self._streams)
        del summed  # and the partial sum it had taken up
        if all_reducing is not None:
            self._follow(all_reducing)

    def _follow(self, state: AllReduceState | None) -> None:
        """Make ``state`` the all-reduce in flight and finish the one before it."""
        before, self._all_reducing = self._all_reducing, state
        if before is not None:
            if state is None:  # with a new all-reduce in flight, compute does not join the trailing stream yet
                self.ended = before.pending.span
            with self._streams.trailing():
                before.finish()


# ---- the end


def set_sharded_grads(params: Sequence[FSDPParam], flat_grad: torch.Tensor, handle: probe.BufferHandle) -> None:
    """Add to each parameter's gradient its part of ``flat_grad`` ``[S]``; ``handle`` ends with the last part."""
    for param, slot in zip(params, flat_grad.split_with_sizes([p.slot_numel for p in params]), strict=True):
        param.add_sharded_grad(param.local_view(slot), handle)
