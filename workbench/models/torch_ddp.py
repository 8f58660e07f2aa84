"""Models in torch's ``DistributedDataParallel``: their parameters, steps and all-reduces, as events."""

# ruff: noqa: ANN401 - arguments and results of torch's functions are passed on

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workbench.engine import probe
from workbench.engine.module_names import clean
from workbench.engine.probe import BufferHandle
from workbench.events import C10D, TORCH_DDP, Category, Edge, Kind, Param, ParamTensors, Phase, Unit
from workbench.models import _torch_private as _torch
from workbench.models.c10d import count, holds
from workbench.models.patches import Patches
from workbench.models.source import Original, TorchUnits, UnitLayout, UnitPlace, WatchedUnit, drop


class DataParallelUnits(TorchUnits[DistributedDataParallel]):
    """Source of the events of every model in ``DistributedDataParallel``, which is one unit.

    Its backward begins when the first gradient reaches an output, and ends when all gradients are averaged.
    """

    name = TORCH_DDP
    what = "models in torch's DistributedDataParallel are"

    def install(self, changes: Patches) -> None:
        """Watch until ``changes`` are undone."""
        self._patches = changes
        changes.wrap(DistributedDataParallel, "forward", self._forward, if_probed=True)
        if hasattr(DistributedDataParallel, "finalize_backward"):  # torch 2.15; called by the program
            changes.wrap(DistributedDataParallel, "finalize_backward", self._finalize, if_probed=True)

    # ---- descriptions

    def _groups_below(self, model: nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
        for path, module in model.named_modules():
            if isinstance(module, DistributedDataParallel):
                yield clean(path), module

    def _describe(self, group: DistributedDataParallel, place: UnitPlace) -> Unit:
        copies = dist.get_world_size(group.process_group)
        params = tuple(_described(place.path, name, param) for name, param in group.module.named_parameters())
        dtype = next((param.dtype for param in group.module.parameters()), torch.get_default_dtype())
        text = str(dtype).removeprefix("torch.")
        return Unit(
            index=place.index,
            name=place.path,
            root=place.root,
            params=params,
            reshard_after_forward=False,
            shard_size=1,
            replicate_size=copies,
            compute_dtype=text,
            reduce_dtype=text,
            compute_itemsize=dtype.itemsize,
            reduce_itemsize=dtype.itemsize,
            comm=C10D if copies > 1 and _torch.HAS_HOOKS else "",
            engine=self.name,
            num_reductions=_torch.num_buckets(group),
        )

    def _nbytes(self, group: DistributedDataParallel, unit: Unit) -> tuple[int, int]:
        whole = sum(param.nbytes for param in group.module.parameters())
        return whole, whole

    def _announce(self, group: DistributedDataParallel, unit: Unit) -> None:
        is_new = group not in self._known
        super()._announce(group, unit)
        if is_new and not getattr(group, "lazy_bucket_allocation", False):  # torch 2.15
            # the buckets, which exist as long as the model; gradients may be views of them
            category = Category.SHARDED_GRADS if group.gradient_as_bucket_view else Category.REDUCE_SCATTER_BUFFERS
            nbytes = sum(param.nbytes for param in group.module.parameters() if param.requires_grad)
            weakref.finalize(group, drop, BufferHandle(category, unit.index, nbytes)).atexit = False

    def _policy(self, group: DistributedDataParallel) -> bool | int:
        return False

    def _renew(self, group: DistributedDataParallel, new_of: Mapping[int, dist.ProcessGroup]) -> None:
        _torch.renew_replicas(group, new_of)

    def _layout_of(self, group: DistributedDataParallel) -> UnitLayout:
        replicas = tuple(dist.get_process_group_ranks(group.process_group))
        return UnitLayout(modules=(group.module,), shard_ranks=(dist.get_rank(),), replicas=replicas)

    def _tensors_of(self, group: DistributedDataParallel, unit: Unit) -> Mapping[str, ParamTensors]:
        rows = zip(unit.params, group.module.named_parameters(), strict=True)
        return {
            known.fqn: ParamTensors(shard=param, shard_rank=0, full=param, full_grads=(), sharded_grad=param.grad)
            for known, (_, param) in rows
        }

    # ---- forward and backward

    def unreduced(self) -> Iterator[int]:
        """Yield the indices of models whose newest forward that trains was within ``no_sync``."""
        yield from (known.index for known in tuple(self._known.values()) if not known.is_synced)

    def backwards(self) -> Mapping[int, int]:
        """Return the number of backwards of each model that has gradients; empty once they are not watched."""
        return (
            {}
            if self._patches.is_off
            else {
                known.index: known.num_backwards
                for model, known in tuple(self._known.items())
                if any(param.grad is not None for param in model.parameters())
            }
        )

    def num_backwards(self, unit: int) -> int | None:
        """Return the number of backwards of a model; None: it is another source's, or they are not watched any more."""
        known = self._known_of(unit)
        return None if known is None or self._patches.is_off else known.num_backwards

    def _forward(self, original: Original, model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        known = self._of(model)
        if torch.is_grad_enabled():
            known.is_synced = model.require_backward_grad_sync
        probe.phase(Phase.FORWARD)
        probe.event(Kind.FORWARD, Edge.BEGIN, known.index)
        with self._collectives.within(known.index):  # buffers are broadcast
            result = original(model, *args, **kwargs)
        probe.event(Kind.FORWARD, Edge.END, known.index)
        begun = _Backward(self, model, known, self._patches)
        for output in _torch.tensors_in(result):
            if output.requires_grad:
                output.register_hook(self._patches.hook(begun, "gradients of DistributedDataParallel's outputs"))
        return result

    def _of(self, model: DistributedDataParallel) -> WatchedUnit:
        known = self._known.get(model)
        if known is None or known.unit.num_reductions != _torch.num_buckets(model):
            if known is not None:
                place = UnitPlace(known.unit.name, {}, known.index, known.unit.root)
                self._announce(model, self._describe(model, place))
            else:
                self.note([model])
        return self._known[model]

    def begin_backward(self, known: WatchedUnit) -> None:
        """Announce that the backward of a model begins; its all-reduces belong to its unit."""
        probe.phase(Phase.BACKWARD)
        known.in_backward = True
        probe.event(Kind.BACKWARD, Edge.BEGIN, known.index)
        self._collectives.unit = known.index

    def end_backward(self, model: DistributedDataParallel, known: WatchedUnit) -> None:
        """Announce that the backward of a model has ended, and count the gradients that it left."""
        self._collectives.unit = probe.NO_UNIT
        self._collectives.settle()
        known.in_backward = False
        known.num_backwards += 1
        probe.event(Kind.BACKWARD, Edge.END, known.index)
        probe.phase(Phase.IDLE)
        self._count_grads(model, known)

    def _finalize(self, original: Original, model: DistributedDataParallel) -> Any:
        result = original(model)
        self._collectives.settle()
        self._count_grads(model, self._of(model))
        return result

    @staticmethod
    def _count_grads(model: DistributedDataParallel, known: WatchedUnit) -> None:
        for param in () if model.gradient_as_bucket_view else model.module.parameters():
            grad = param.grad
            if grad is None:
                continue
            counted = holds(grad)
            if counted is None or not counted.is_told:
                count(grad, BufferHandle(Category.SHARDED_GRADS, known.index, grad.nbytes))


class _Backward:
    """Hook on the outputs of a forward: the first gradient begins the backward."""

    def __init__(
        self, units: DataParallelUnits, model: DistributedDataParallel, known: WatchedUnit, patches: Patches
    ) -> None:
        self._units, self._known, self._model = units, known, weakref.ref(model)
        self._finish = patches.hook(self._end, "the end of DistributedDataParallel's backward")
        self._has_begun = False

    def __call__(self, _: torch.Tensor) -> None:
        if self._has_begun or self._known.in_backward or probe.active is None:
            return
        self._has_begun = True
        self._units.begin_backward(self._known)
        # the reducer queues its own end of the backward after this one, and what is queued there comes after it
        _torch.at_end_of_backward(lambda: _torch.at_end_of_backward(self._finish))

    def _end(self) -> None:
        model = self._model()
        if model is not None and self._known.in_backward and probe.active is not None:
            self._units.end_backward(model, self._known)


def _described(path: str, name: str, param: torch.Tensor) -> Param:
    shape = tuple(param.shape) or (1,)
    fqn = ".".join(filter(None, (path, name)))
    return Param(
        fqn=fqn,
        shape=shape,
        global_shape=shape,
        dtype=str(param.dtype).removeprefix("torch."),
        itemsize=param.dtype.itemsize,
        shard_dim=0,
        rows_per_rank=(shape[0],),
        padded_rows=shape[0],
        trainable=param.requires_grad,
    )
