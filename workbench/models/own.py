"""The units of an FSDP of your own, announced by its own code: what it gathers, frees and reduces, as events.

The author of an FSDP describes its units to an :class:`OwnUnits` and marks in the code where they are unsharded, run,
resharded and reduced. Collectives inside these marks belong to the unit. Where nothing records, every mark is a no-op
after one comparison, and checks nothing.

Bytes are counted by storage. A storage counts in one class at a time: an output of an all-gather counts among the
buffers, and among the unsharded parameters once the full parameters are views of it. The source announces that full
parameters are freed (:meth:`OwnUnit.reshard`). If their storage still has bytes at the next mark, at the optimizer or
at the end of the step, it counts again until it is empty or dead. All other storages count as long as they exist.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from workbench.engine import probe
from workbench.engine.probe import BufferHandle
from workbench.engine.shard_layout import ShardLayout
from workbench.events import (
    C10D,
    UNIT_INDICES,
    Category,
    Edge,
    FlatPart,
    Kind,
    Param,
    ParamTensors,
    Phase,
    Probe,
    Unit,
    unit_words,
)
from workbench.models import c10d
from workbench.models._torch_private import Tensors, local_of
from workbench.models.c10d import Within, count, holds

Named = Mapping[str, torch.Tensor] | torch.Tensor
"""Tensors of a unit's parameters by name; the tensor itself where the unit has one parameter."""

_NOTHING: AbstractContextManager[None] = nullcontext()


def log_metric(name: str, value: float) -> None:
    """Record a number of the step, such as its loss; ``%fsdp training`` draws it. No-op where nothing records.

    After the end of a step it belongs to that step.
    """
    if probe.active is not None:
        probe.active.metric(name, float(value))


@dataclass(frozen=True)
class OwnParam:
    """A parameter of a unit, and this rank's part of it.

    Attributes:
        fqn: name relative to the model.
        shape: shape of the whole parameter, in elements.
        shard: this rank's rows, as the optimizer has them; with or without padding to ``ceil(rows / F)`` rows.
        dim: tensor dimension that is split over the F ranks.
        rows_per_rank: rows of each rank, without padding; empty: ``ceil(rows / F)`` each, the last ones fewer.
        parts: for a flat parameter of shape ``(elements,)``, the names and shapes of the parameters in it, in order.
    """

    fqn: str
    shape: Sequence[int]
    shard: torch.Tensor
    dim: int = 0
    rows_per_rank: Sequence[int] = ()
    parts: Mapping[str, Sequence[int]] = field(default_factory=dict)


class OwnUnits:
    """Source of the events of one model of your own FSDP.

    Args:
        name: name of the source, as traces show it.

    Raises:
        ValueError: the name is empty or has a comma.
    """

    def __init__(self, name: str) -> None:
        if not name or "," in name:
            raise ValueError(f"a source of events needs a name without commas, not {name!r}")
        self.name = name
        self._units: weakref.WeakValueDictionary[int, OwnUnit] = weakref.WeakValueDictionary()
        self._probe: Probe | None = None
        self._was_left = False  # an error left a mark
        _EVERY.add(self)

    def add(
        self,
        name: str,
        params: Sequence[OwnParam],
        *,
        group: dist.ProcessGroup | None = None,
        replicate_group: dist.ProcessGroup | None = None,
        reshard_after_forward: bool = True,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> OwnUnit:
        """Return a new unit, which exists as long as the caller keeps it.

        Args:
            name: module path relative to the model; "" for the root, whose forward contains all others.
            params: its parameters.
            group: the ranks that share one copy, F; default: all ranks.
            replicate_group: the ranks with the same shard, R, whose gradients are averaged by an all-reduce.
            reshard_after_forward: whether the unit is sharded between forward and backward.
            compute_dtype: dtype of its all-gathers; default: that of the first shard.
            reduce_dtype: dtype of its reductions; default: ``compute_dtype``.

        Raises:
            ValueError: a unit of this name exists, or a parameter does not fit its shard.
        """
        if any(unit.info.name == name for unit in self._units.values()):
            raise ValueError(f"{self.name} has a unit {unit_words(name)} already: give each unit its own name")
        if not params:
            raise ValueError(f"unit {unit_words(name)} has no parameters: add only units that shard some")
        size, rank = (dist.get_world_size(group), dist.get_rank(group)) if dist.is_initialized() else (1, 0)
        described = tuple(_described(param, name, size, rank) for param in params)
        names = [each.fqn for each in described]
        if len(set(names)) < len(names):
            raise ValueError(f"unit {unit_words(name)} has two parameters of one name: {', '.join(names)}")
        compute = compute_dtype or params[0].shard.dtype
        reduce = reduce_dtype or compute
        index = next(UNIT_INDICES)
        roots = [unit.info.index for unit in self._units.values() if not unit.info.name]
        info = Unit(
            index=index,
            name=name,
            root=roots[0] if roots else index,
            params=described,
            reshard_after_forward=reshard_after_forward,
            shard_size=size,
            replicate_size=1 if replicate_group is None else dist.get_world_size(replicate_group),
            compute_dtype=str(compute).removeprefix("torch."),
            reduce_dtype=str(reduce).removeprefix("torch."),
            compute_itemsize=compute.itemsize,
            reduce_itemsize=reduce.itemsize,
            comm=C10D if size > 1 else "",
            engine=self.name,
        )
        is_announced = self._begins()
        unit = self._units[index] = OwnUnit(self, info, {param.fqn: param.shard for param in params}, rank)
        if is_announced:
            unit._introduce(is_new=True)
        if not name:
            self._adopt(index)
        return unit

    def _adopt(self, root: int) -> None:
        """Announce that all units belong to the model of a root that was added after them."""
        for unit in list(self._units.values()):
            if unit.info.root != root:
                unit.info = replace(unit.info, root=root)
                if probe.active is not None:
                    probe.active.unit(unit.info)

    def reset(self) -> None:
        """All units are sharded and nothing is in flight: the iteration was given up.

        Called by the workbench after an aborted step, and after an error that left a mark. No-op if nothing records.
        """
        self._was_left = False
        if probe.active is not None and self._probe is probe.active:
            for unit in list(self._units.values()):
                unit._reset()

    # ---- Source

    def has(self, unit: int) -> bool:
        """Return whether a unit exists."""
        return unit in self._units

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return this rank's tensors of a unit's parameters, by name."""
        found = self._units.get(unit)
        return {} if found is None else found.tensors()

    # ---- used by its units

    def _begins(self) -> bool:
        """Return whether a probe is active; first announce the units that it has not seen."""
        if probe.active is None:
            return False
        if probe.active is not self._probe:
            self._probe, self._was_left = probe.active, False
            self._probe.source(self)
            for unit in list(self._units.values()):
                unit._introduce(is_new=False)
        if self._was_left:
            self.reset()
        self._count_unfreed()
        return True

    def _count_unfreed(self) -> None:
        """Count the full parameters that units announced as freed and still hold."""
        if self._probe is probe.active:
            for unit in list(self._units.values()):
                unit._count_unfreed()

    def _ends(self) -> bool:
        """Return whether the end of something may be announced: not while an error unwinds what had begun."""
        return not self._was_left and self._begins()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Record that the body raised: its open events get no END."""
        try:
            yield
        except BaseException:
            self._was_left = True
            raise

    @property
    def _is_in_backward(self) -> bool:
        """Whether the backward of a unit runs."""
        return any(unit._runs(Kind.BACKWARD) for unit in self._units.values())


_EVERY: weakref.WeakSet[OwnUnits] = weakref.WeakSet()


def reset_all() -> None:
    """Reset every :class:`OwnUnits` of the process."""
    for units in list(_EVERY):
        units.reset()


def count_unfreed() -> None:
    """Count the full parameters that any :class:`OwnUnits` announced as freed and still holds."""
    if probe.active is not None:
        for units in list(_EVERY):
            units._count_unfreed()


class OwnUnit:
    """A unit of your own FSDP, made by :meth:`OwnUnits.add`.

    A step of a unit, each line once where it happens::

        with unit.forward():
            with unit.unshard():
                dist.all_gather_into_tensor(full, shard)
            unit.end_unshard(full)
            ...
        unit.reshard()
        unit.begin_backward()      # then unshard() and end_unshard() as above
        unit.end_backward(full.grad)
        unit.reshard()
        with unit.reduce():
            dist.reduce_scatter_tensor(shard.grad, full.grad)

    Forward and backward count from the moment at which the parameters are full.

    Attributes:
        info: its description, as last announced.
    """

    def __init__(self, units: OwnUnits, info: Unit, shards: Mapping[str, torch.Tensor], shard_rank: int) -> None:
        self.info = info
        self._units, self._shards, self._shard_rank = units, shards, shard_rank
        self._full: dict[str, torch.Tensor] = {}
        self._freed: list[weakref.ref[torch.UntypedStorage]] = []  # storages announced as freed
        self._grads: dict[str, weakref.ref[torch.Tensor]] = {}
        self._is_known = True  # False: nothing recorded its past, so it may be unsharded
        self._is_unsharding = False
        self._is_reducing = False
        self._awaiting: Kind | None = None  # work that begins when the parameters are full
        self._running: set[Kind] = set()
        self._shard_bytes: BufferHandle | None = None

    # ---- full parameters

    def unshard(self) -> AbstractContextManager[None]:
        """Mark an all-gather of the unit, which belongs to it; :meth:`end_unshard` says when its result is usable.

        To prefetch, issue the all-gather in one such block and wait for it in another.

        Raises:
            ValueError: the unit is unsharded already.
        """
        return _NOTHING if probe.active is None else self._unshard()

    @contextmanager
    def _unshard(self) -> Iterator[None]:
        self._units._begins()
        if self._full:
            raise ValueError(f"{self._words} is unsharded already: call reshard() before the next unshard()")
        if not self._is_unsharding:
            self._is_unsharding = True
            probe.event(Kind.UNSHARD, Edge.BEGIN, self.info.index)
        with self._issuing(lambda kind: (Category.ALL_GATHER_BUFFERS, Category.ALL_GATHER_BUFFERS)):
            yield

    def end_unshard(self, full: Named) -> None:
        """Announce that the full parameters are usable.

        Args:
            full: the parameters, each in its whole shape. They are kept until :meth:`reshard`.

        Raises:
            ValueError: no unshard has begun, or the tensors are not those of the parameters.
        """
        if probe.active is None or not self._units._ends():
            return
        if not self._is_unsharding:
            raise ValueError(f"{self._words} has no unshard to end: put its all-gather into `with unit.unshard():`")
        named = self._named(full)
        for param in self.info.params:
            shape = tuple(named[param.fqn].shape)
            if shape != param.shape:
                raise ValueError(f"full parameter {param.fqn} of {self._words} has shape {shape}, not {param.shape}")
        self._is_unsharding, self._is_known, self._full = False, True, named
        for tensor in named.values():
            self._count(tensor, Category.UNSHARDED_PARAMS, is_final=True)
        probe.event(Kind.UNSHARD, Edge.END, self.info.index)
        if self._awaiting is not None:
            self._start(self._awaiting)

    def reshard(self) -> None:
        """Announce that the full parameters are about to be freed; empty their storage, or drop it, right after.

        Raises:
            ValueError: the unit is not unsharded.
        """
        if probe.active is None or not self._units._ends():
            return
        if not self._full and self._is_known:
            raise ValueError(
                f"{self._words} is not unsharded, so it cannot be resharded: call end_unshard(full) before"
            )
        is_known, self._is_known = self._is_known, True
        if is_known:
            probe.event(Kind.RESHARD, Edge.INSTANT, self.info.index)
            self._drop_full()

    def _drop_full(self) -> None:
        for tensor in self._full.values():
            if not self._is_shard(tensor):
                count(_storage(tensor), None)
                self._freed.append(weakref.ref(_storage(tensor)))
        self._full = {}

    def _count_unfreed(self) -> None:
        """Count the full parameters that :meth:`reshard` announced as freed and that still have bytes."""
        if not self._freed:
            return
        left = []
        for weak in self._freed:
            storage = weak()
            if storage is None or self._counts_as_full(storage):
                continue
            if storage.nbytes():
                left.append(weak)
                if _counts_as(storage) is None:
                    handle = BufferHandle(Category.UNSHARDED_PARAMS, self.info.index, storage.nbytes())
                    count(storage, handle)
            elif _counts_as(storage) is not None:
                count(storage, None)
        self._freed = left

    def _counts_as_full(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage holds the full parameters again."""
        return any(_storage(tensor) is storage for tensor in self._full.values())

    # ---- forward and backward

    def forward(self) -> AbstractContextManager[None]:
        """Mark the unit's forward: :meth:`begin_forward` and :meth:`end_forward`."""
        return _NOTHING if probe.active is None else self._work(self.begin_forward, self.end_forward)

    def backward(self) -> AbstractContextManager[None]:
        """Mark the unit's backward: :meth:`begin_backward` and :meth:`end_backward`."""
        return _NOTHING if probe.active is None else self._work(self.begin_backward, self.end_backward)

    @contextmanager
    def _work(self, begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
        with self._units._guarded():
            begin()
            yield
            end()

    def begin_forward(self) -> None:
        """Announce the unit's forward; call it before the unshard that precedes it.

        Raises:
            ValueError: the forward has begun already, or the backward waits for the parameters.
        """
        if probe.active is not None:
            self._begin(Kind.FORWARD)

    def end_forward(self) -> None:
        """Announce the end of the unit's forward.

        Raises:
            ValueError: it has not begun, or the parameters were never unsharded.
        """
        if probe.active is not None:
            self._end(Kind.FORWARD)

    def begin_backward(self) -> None:
        """Announce the unit's backward; call it before the unshard that precedes it.

        Raises:
            ValueError: the backward has begun already, or the forward waits for the parameters.
        """
        if probe.active is not None:
            self._begin(Kind.BACKWARD)

    def end_backward(self, grads: Named | None = None) -> None:
        """Announce the end of the unit's backward: its gradients are complete.

        Args:
            grads: gradients of the full parameters, as in :meth:`reduce`.

        Raises:
            ValueError: it has not begun, or the parameters were never unsharded, or the gradients are not those of the
                unit's parameters.
        """
        if probe.active is not None and self._units._ends():
            self._note_grads(grads)
            self._end(Kind.BACKWARD)
            probe.phase(Phase.POST_BACKWARD)

    def _runs(self, kind: Kind) -> bool:
        """Return whether the unit's forward or backward runs."""
        return kind in self._running

    def _begin(self, kind: Kind) -> None:
        self._units._begins()
        if kind in self._running or self._awaiting is not None:
            begun = kind if kind in self._running else self._awaiting
            raise ValueError(
                f"{begun.words if begun else ''} of {self._words} has begun and not ended, and its {kind.words} begins:"
                f" call end_{begun.key if begun else ''}() before; after an error, reset() of its OwnUnits"
            )
        if kind is Kind.BACKWARD:
            probe.phase(Phase.PRE_BACKWARD)
        elif not self._units._is_in_backward:  # else activations are recomputed
            probe.phase(Phase.FORWARD)
        if self._full or not self._is_known:
            self._start(kind)
        else:
            self._awaiting = kind

    def _start(self, kind: Kind) -> None:
        self._awaiting = None
        self._running.add(kind)
        if kind is Kind.BACKWARD:
            probe.phase(Phase.BACKWARD)
        probe.event(kind, Edge.BEGIN, self.info.index)

    def _end(self, kind: Kind) -> None:
        if not self._units._ends():
            return
        if kind in self._running:
            self._running.remove(kind)
            probe.event(kind, Edge.END, self.info.index)
        elif self._awaiting is kind:
            raise ValueError(
                f"{kind.words} of {self._words} ends, but nothing unsharded it: call end_unshard(full) before"
            )
        elif self._is_known:
            raise ValueError(f"{kind.words} of {self._words} ends, but has not begun: call begin_{kind.key}() before")

    # ---- gradients

    def reduce(self, grads: Named | None = None) -> AbstractContextManager[None]:
        """Mark the reduction of the unit's gradients, whose collectives belong to it.

        Args:
            grads: gradients of the full parameters, if :meth:`end_backward` did not get them. They are not kept.

        Raises:
            ValueError: a reduction of the unit runs already, or the gradients are not those of its parameters.
        """
        return _NOTHING if probe.active is None else self._reduce(grads)

    @contextmanager
    def _reduce(self, grads: Named | None) -> Iterator[None]:
        self._units._begins()
        if self._is_reducing:
            raise ValueError(f"{self._words} is in a reduction already: leave its `with unit.reduce():` before")
        self._is_reducing = True
        self._note_grads(grads)
        del grads  # the caller frees them within the body
        with self._issuing(
            lambda kind: (
                Category.REDUCE_SCATTER_BUFFERS,
                Category.SHARDED_GRADS if kind is Kind.REDUCE_SCATTER else Category.REDUCE_SCATTER_BUFFERS,
            )
        ):
            yield
        self._is_reducing, self._grads = False, {}
        for shard in self._shards.values():
            if shard.is_leaf and shard.grad is not None:
                self._count(shard.grad, Category.SHARDED_GRADS)

    def _note_grads(self, grads: Named | None) -> None:
        for name, grad in {} if grads is None else self._named(grads).items():
            self._grads[name] = weakref.ref(grad)
            self._count(grad, Category.UNSHARDED_GRADS)

    # ---- copies

    def copy_in(self, num_bytes: int | None = None) -> AbstractContextManager[None]:
        """Mark a copy into the input of the unit's all-gather or reduction, within :meth:`unshard` or :meth:`reduce`.

        Args:
            num_bytes: bytes copied; default: the padded input.

        Raises:
            ValueError: the unit has neither begun an unshard nor a reduction.
        """
        return _NOTHING if probe.active is None else self._copy(Kind.COPY_IN, num_bytes)

    def copy_out(self, num_bytes: int | None = None) -> AbstractContextManager[None]:
        """Mark a copy out of the output of the unit's all-gather or reduction; as :meth:`copy_in`."""
        return _NOTHING if probe.active is None else self._copy(Kind.COPY_OUT, num_bytes)

    @contextmanager
    def _copy(self, kind: Kind, num_bytes: int | None) -> Iterator[None]:
        self._units._begins()
        if not (self._is_unsharding or self._is_reducing):
            raise ValueError(
                f"{kind.words} of {self._words} belongs into `with unit.unshard():` or `with unit.reduce():`"
            )
        info = self.info
        params = [param for param in info.params if param.trainable or not self._is_reducing]
        full = sum(_padded_numel(param) for param in params)
        full *= info.reduce_itemsize if self._is_reducing else info.compute_itemsize
        is_shard = (kind is Kind.COPY_OUT) == self._is_reducing
        default = full // info.shard_size if is_shard else full
        nbytes = default if num_bytes is None else num_bytes
        with self._units._guarded():
            probe.event(kind, Edge.BEGIN, info.index, nbytes)
            yield
            probe.event(kind, Edge.END, info.index, nbytes)

    # ---- used by OwnUnits

    def _introduce(self, *, is_new: bool) -> None:
        """Announce the unit to a probe, which knows its past only if the unit ``is_new``."""
        self._forget(is_known=is_new)
        if probe.active is not None:
            probe.active.unit(self.info)
        own = sum(local_of(shard).nbytes for shard in self._shards.values())
        self._shard_bytes = BufferHandle(Category.SHARDED_PARAMS, self.info.index, own)

    def _reset(self) -> None:
        """Announce that the unit is sharded and has nothing in flight; its FSDP may still think otherwise."""
        probe.event(Kind.RESET, Edge.INSTANT, self.info.index)
        self._forget(is_known=False)

    def _forget(self, *, is_known: bool) -> None:
        self._drop_full()
        self._freed = []
        self._is_known, self._is_unsharding, self._is_reducing = is_known, False, False
        self._awaiting, self._grads = None, {}
        self._running.clear()

    def tensors(self) -> Mapping[str, ParamTensors]:
        """Return this rank's tensors of the parameters, by name."""
        return {name: tensors for param in self.info.params for name, tensors in self._tensors_of(param)}

    def _tensors_of(self, param: Param) -> Iterator[tuple[str, ParamTensors]]:
        shard, full = self._shards[param.fqn], self._full.get(param.fqn)
        grad = None if param.fqn not in self._grads else self._grads[param.fqn]()
        if grad is None and full is not None and full.is_leaf:
            grad = full.grad
        whole = ParamTensors(
            shard=shard,
            shard_rank=self._shard_rank,
            full=full,
            full_grads=() if grad is None else (grad,),
            sharded_grad=shard.grad if shard.is_leaf else None,
        )
        yield param.fqn, whole
        begin = self._shard_rank * param.padded_rows
        for part in param.parts:
            first, last = part.within(begin, begin + param.padded_rows)
            mine = slice(first - begin, max(first, last) - begin)
            yield (
                part.fqn,
                replace(
                    whole,
                    shard=shard.detach()[mine],
                    full=None if full is None else _part_of(full, part),
                    full_grads=tuple(_part_of(each, part) for each in (grad,) if each is not None),
                    sharded_grad=None if whole.sharded_grad is None else shard.grad[mine],  # type: ignore[index]
                ),
            )

    # ---- bytes and names

    @contextmanager
    def _issuing(self, categories: Callable[[Kind], tuple[Category, Category]]) -> Iterator[None]:
        """Attribute collectives of the body to the unit; ``categories`` are the classes of their inputs and outputs."""

        def count_buffers(kind: Kind, inputs: Tensors, outputs: Tensors) -> None:
            for category, some in zip(categories(kind), (inputs, outputs), strict=True):
                for tensor in some:
                    self._count(tensor, category)

        with self._units._guarded():
            if c10d.active is None:
                yield
            else:
                with Within(c10d.active, self.info.index, count_buffers):
                    yield

    def _count(self, tensor: torch.Tensor, category: Category, *, is_final: bool = False) -> None:
        """Count a storage until it is freed, unless it counts already; ``is_final``: it changes its class then."""
        storage = _storage(tensor)
        if self._is_shard(tensor) or _counts_as(storage) in (category, *(() if is_final else Category)):
            return
        count(storage, None)  # first, so that no byte counts twice
        count(storage, BufferHandle(category, self.info.index, storage.nbytes()))

    def _is_shard(self, tensor: torch.Tensor) -> bool:
        return any(_storage(tensor) is _storage(shard) for shard in self._shards.values())

    def _named(self, given: Named) -> dict[str, torch.Tensor]:
        names = [param.fqn for param in self.info.params]
        found = {names[0]: given} if isinstance(given, torch.Tensor) and len(names) == 1 else given
        if isinstance(found, torch.Tensor) or set(found) != set(names):
            got = "one tensor" if isinstance(found, torch.Tensor) else ", ".join(found) or "none"
            raise ValueError(
                f"{self._words} has the parameters {', '.join(names)}; expected a tensor for each, got {got}"
            )
        return dict(found)

    @property
    def _words(self) -> str:
        return f"unit {unit_words(self.info.name)}"


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of this rank's part of a tensor; the same object as long as the storage exists."""
    return local_of(tensor).untyped_storage()


def _counts_as(storage: torch.UntypedStorage) -> Category | None:
    known = holds(storage)
    return known.category if known is not None and known.is_announced else None


def _part_of(flat: torch.Tensor, part: FlatPart) -> torch.Tensor:
    return flat.detach().flatten()[part.first : part.first + part.numel].view(part.shape)


def _padded_numel(param: Param) -> int:
    others = math.prod(size for dim, size in enumerate(param.shape) if dim != param.shard_dim)
    return param.padded_rows * len(param.rows_per_rank) * others


def _described(given: OwnParam, unit: str, num_shards: int, rank: int) -> Param:
    """Return the description of a parameter.

    Raises:
        ValueError: it contradicts itself or its shard.
    """
    where, shape = f"parameter {given.fqn} of unit {unit_words(unit)}", tuple(given.shape)
    if not 0 <= given.dim < len(shape):
        raise ValueError(f"{where} has shape {shape}, and no dimension {given.dim} to split")
    total = shape[given.dim]
    rows = tuple(given.rows_per_rank) or ShardLayout(torch.Size(shape), given.dim, num_shards).rows_per_rank
    if len(rows) != num_shards or sum(rows) != total:
        raise ValueError(f"{where} has {total} rows for {num_shards} ranks; rows_per_rank says {rows}")
    local = local_of(given.shard)
    allowed = {(*shape[: given.dim], num, *shape[given.dim + 1 :]) for num in (rows[rank], max(rows))}
    if tuple(local.shape) not in allowed:
        expected = " or ".join(map(str, sorted(allowed)))
        raise ValueError(f"{where} has a shard of shape {tuple(local.shape)} on rank {rank}; expected {expected}")
    parts, first = [], 0
    for fqn, part in given.parts.items():
        parts.append(FlatPart(fqn=fqn, shape=tuple(part), global_shape=tuple(part), first=first))
        first += math.prod(part)
    if parts and (shape != (total,) or first > total or given.rows_per_rank):
        raise ValueError(f"{where} has {first} elements in its parts, and shape {shape}; a flat parameter is even")
    return Param(
        fqn=given.fqn,
        shape=shape,
        global_shape=shape,
        dtype=str(local.dtype).removeprefix("torch."),
        itemsize=local.dtype.itemsize,
        shard_dim=given.dim,
        rows_per_rank=rows,
        padded_rows=max(rows),
        trainable=given.shard.requires_grad,
        parts=tuple(parts),
    )
