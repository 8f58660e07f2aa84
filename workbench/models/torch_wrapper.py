"""The units of models in torch's classic wrapper, ``FullyShardedDataParallel``: its flat parameters, as events."""

# ruff: noqa: ANN401 - arguments and results of torch's functions are passed on

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workbench.engine import probe
from workbench.engine.probe import BufferHandle
from workbench.engine.shard_layout import ShardLayout
from workbench.events import C10D, TORCH_CLASSIC, Category, Edge, FlatPart, Kind, Param, ParamTensors, Phase, Unit
from workbench.models import _torch_private as _torch
from workbench.models._torch_private import Handle, Tensors
from workbench.models.c10d import count, holds
from workbench.models.patches import Patches
from workbench.models.source import Original, TorchUnits, UnitLayout, UnitPlace, WatchedUnit, join

FLAT = "_flat_param"
"""Last part of the name of a flat parameter."""


class FlatParamUnits(TorchUnits[Handle]):
    """Source of the events of every model in torch's ``FullyShardedDataParallel``; a unit is a flat parameter."""

    name = TORCH_CLASSIC
    what = "units of torch's FullyShardedDataParallel are"

    def install(self, changes: Patches) -> None:
        """Watch until ``changes`` are undone."""
        changes.wrap(_torch.wrapper_functions, "_pre_forward", self._pre_forward, if_probed=True)
        changes.wrap(_torch.wrapper_functions, "_post_forward", self._post_forward, if_probed=True)
        changes.wrap(Handle, "unshard", self._unshard, if_probed=True)
        changes.wrap(Handle, "reshard", self._reshard, if_probed=True)
        changes.wrap(_torch.handle_functions, "_pre_backward_hook", self._pre_backward, if_probed=True)
        changes.wrap(_torch.handle_functions, "_post_backward_hook", self._post_backward, if_probed=True)
        changes.wrap(_torch.handle_functions, "_reduce_grad", self._reduce, if_probed=True)
        changes.wrap(_torch.handle_functions, "_post_backward_final_callback", self._end_of_backward, if_probed=True)

    # ---- descriptions

    def _groups_below(self, model: nn.Module) -> Iterator[tuple[str, Handle]]:
        return _torch.handles_below(model)

    def _describe(self, group: Handle, place: UnitPlace) -> Unit:
        facts = _torch.facts_of(group)
        layout = ShardLayout(torch.Size((facts.numel,)), 0, facts.shard_size)
        parts = tuple(
            FlatPart(fqn=join(place.path, name), shape=shape, global_shape=shape, first=first)
            for name, shape, first in zip(facts.names, facts.shapes, facts.firsts, strict=True)
        )
        flat = Param(
            fqn=join(place.path, FLAT),
            shape=(facts.numel,),
            global_shape=(facts.numel,),
            dtype=str(facts.dtype).removeprefix("torch."),
            itemsize=facts.dtype.itemsize,
            shard_dim=0,
            rows_per_rank=layout.rows_per_rank,
            padded_rows=layout.padded_rows,
            trainable=facts.trainable,
            parts=parts,
            use_orig_params=group._use_orig_params,
        )
        return Unit(
            index=place.index,
            name=place.path,
            root=place.root,
            params=(flat,),
            reshard_after_forward=facts.reshards and place.index != place.root,
            shard_size=facts.shard_size,
            replicate_size=facts.copies,
            compute_dtype=str(facts.compute_dtype).removeprefix("torch."),
            reduce_dtype=str(facts.reduce_dtype).removeprefix("torch."),
            compute_itemsize=facts.compute_dtype.itemsize,
            reduce_itemsize=facts.reduce_dtype.itemsize,
            offload=group._offload_params,
            comm=C10D if facts.shard_size * facts.copies > 1 else "",
            engine=self.name,
        )

    def _policy(self, group: Handle) -> bool | int:
        return self._known[group].unit.reshard_after_forward

    def _nbytes(self, group: Handle, unit: Unit) -> tuple[int, int]:
        (flat,) = unit.params
        return flat.padded_rows * flat.itemsize, flat.padded_rows * unit.shard_size * unit.compute_itemsize

    def _layout_of(self, group: Handle) -> UnitLayout:
        shard_ranks, replicas = _torch.ranks_of_handle(group)
        return UnitLayout(modules=(_torch.module_of_handle(group),), shard_ranks=shard_ranks, replicas=replicas)

    def _tensors_of(self, group: Handle, unit: Unit) -> Mapping[str, ParamTensors]:
        (flat,) = unit.params
        rank, shard = _torch.shard_rank_of(group), _torch.flat_shard_of(group)
        full, grad, sharded_grad = (of(group) for of in _WHOLES)
        freed = _torch.flat_freed_of(group)
        begin = rank * flat.padded_rows
        found = {
            flat.fqn: ParamTensors(
                shard=shard[: flat.rows_per_rank[rank]],
                shard_rank=rank,
                full=full,
                freed=freed,
                full_grads=() if grad is None else (grad,),
                sharded_grad=sharded_grad,
            )
        }
        for part, place in zip(flat.parts, _torch.flat_places_of(group), strict=True):
            first, last = part.within(begin, begin + flat.rows_per_rank[rank])
            whole = slice(part.first, part.first + part.numel)
            found[part.fqn] = ParamTensors(
                shard=shard[first - begin : last - begin],
                shard_rank=rank,
                full=None if full is None else full[whole].view(part.shape),
                freed=freed,
                full_grads=() if grad is None else (grad[whole].view(part.shape),),
                sharded_grad=None if sharded_grad is None else sharded_grad[first - begin : last - begin],
                places=(place,),
            )
        return found

    def _renew(self, group: Handle, new_of: Mapping[int, dist.ProcessGroup]) -> None:
        _torch.renew_handle(group, new_of)

    # ---- forward

    def _pre_forward(self, original: Original, wrapper: Any, handle: Handle | None, *args: Any) -> Any:
        if handle is None or _torch.is_recomputing(handle):
            return original(wrapper, handle, *args)
        if handle not in self._known:  # the root is the first to run
            self.note([wrapper])
        known = self._known[handle]
        probe.phase(Phase.FORWARD)
        result = original(wrapper, handle, *args)
        probe.event(Kind.FORWARD, Edge.BEGIN, known.index)
        return result

    def _post_forward(self, original: Original, wrapper: Any, handle: Handle | None, *args: Any) -> Any:
        if handle is not None and not _torch.is_recomputing(handle) and handle in self._known:
            probe.event(Kind.FORWARD, Edge.END, self._known[handle].index)
        return original(wrapper, handle, *args)

    # ---- full parameters

    def _unshard(self, original: Original, handle: Handle) -> Any:
        known = self._known.get(handle)
        if known is None or not _torch.will_gather(handle):
            return original(handle)
        probe.event(Kind.UNSHARD, Edge.BEGIN, known.index)
        known.hold_full()
        with self._collectives.within(known.index):
            result = original(handle)
        probe.event(Kind.UNSHARD, Edge.END, known.index)
        return result

    def _reshard(self, original: Original, handle: Handle, free_unsharded_flat_param: bool) -> Any:
        known = self._known.get(handle)
        if known is None or not (free_unsharded_flat_param and known.holds_full):
            return original(handle, free_unsharded_flat_param)
        probe.event(Kind.RESHARD, Edge.INSTANT, known.index)
        result = original(handle, free_unsharded_flat_param)
        known.free_full()
        return result

    # ---- backward

    def _pre_backward(self, original: Original, state: Any, module: Any, handle: Handle | None, *args: Any) -> Any:
        known = None if handle is None else self._known.get(handle)
        if handle is None or known is None or _torch.has_begun_backward(handle):
            return original(state, module, handle, *args)
        return self._begin_backward(known, lambda: original(state, module, handle, *args))

    def _post_backward(self, original: Original, state: Any, handle: Handle, *args: Any) -> Any:
        known = self._known.get(handle)
        if known is None:
            return original(state, handle, *args)
        return self._finish_backward(known, lambda: _grad_nbytes(handle), lambda: original(state, handle, *args))

    def _reduce(self, original: Original, state: Any, handle: Handle) -> Any:
        known = self._known.get(handle)
        if known is None:
            return original(state, handle)
        grad = _torch.flat_grad_of(handle)

        def issued(kind: Kind, tensors: Tensors) -> None:
            self._collectives.before_issue = None
            self._count_buffers(known, grad, tensors)

        self._collectives.before_issue = issued
        result = original(state, handle)
        known.set_grads(0)
        saved = _torch.flat_sharded_grad_of(handle)
        if saved is not None:
            counted = holds(saved)
            if counted is None or counted.num_bytes != saved.nbytes:  # it was cast, or reduced in another way
                count(saved, BufferHandle(Category.SHARDED_GRADS, known.index, saved.nbytes))
        return result

    @staticmethod
    def _count_buffers(known: WatchedUnit, grad: torch.Tensor | None, tensors: Tensors) -> None:
        """Count what a reduction allocates: a padded copy of the gradient, unless it is the gradient itself."""
        for tensor in tensors.inputs:
            if grad is None or tensor.data_ptr() != grad.data_ptr():
                count(tensor, BufferHandle(Category.REDUCE_SCATTER_BUFFERS, known.index, tensor.nbytes))
        for tensor in tensors.outputs:
            count(tensor, BufferHandle(Category.SHARDED_GRADS, known.index, tensor.nbytes))


_WHOLES = (_torch.flat_full_of, _torch.flat_grad_of, _torch.flat_sharded_grad_of)


def _grad_nbytes(handle: Handle) -> int:
    grad = _torch.flat_grad_of(handle)
    return 0 if grad is None else grad.nbytes
