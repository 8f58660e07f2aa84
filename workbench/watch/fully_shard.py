"""The units of models that torch's ``fully_shard`` shards: what they gather, free and reduce, as events."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from workbench.engine import probe
from workbench.engine.probe import BufferHandle
from workbench.events import C10D, UNIT_INDICES, Category, Edge, Kind, Param, ParamTensors, Phase, Unit
from workbench.watch import _torch_private as _torch
from workbench.watch._torch_private import ParamGroup, Replacements, State, Tensors
from workbench.watch.c10d_calls import CollectiveWatch, count, holds

Original = Callable[..., Any]


@dataclass(eq=False)
class _Watched:
    """What is known of a parameter group.

    Attributes:
        unit: its description, as last announced.
        after_forward: the mesh for which the unit is resharded after forward, as torch has it.
        full_nbytes: bytes of the full parameters, padded, in the compute dtype.
        grads_nbytes: announced bytes of full gradients.
        in_backward: whether its backward was announced.
        holds_full: whether the full parameters are counted.
    """

    unit: Unit
    after_forward: object
    full_nbytes: int
    grads_nbytes: int = 0
    in_backward: bool = False
    holds_full: bool = False

    @property
    def index(self) -> int:
        """Its unit's index."""
        return self.unit.index


class FullyShardUnits:
    """Source of the events of every model that torch's ``fully_shard`` shards.

    Its calls are wrapped on their class while this watches, so models sharded before and after are seen alike.
    """

    name = "torch.fully_shard"

    def __init__(self, collectives: CollectiveWatch) -> None:
        self._collectives = collectives
        self._known: weakref.WeakKeyDictionary[ParamGroup, _Watched] = weakref.WeakKeyDictionary()
        self._groups: weakref.WeakValueDictionary[int, ParamGroup] = weakref.WeakValueDictionary()

    def install(self, changes: Replacements) -> None:
        """Watch until ``changes`` are undone."""
        for method in ("pre_forward", "post_forward", "unshard", "wait_for_unshard", "pre_backward", "post_backward"):
            changes.wrap(ParamGroup, method, self._if_probed(getattr(self, f"_{method}")))
        changes.wrap(ParamGroup, "_to_sharded", self._if_probed(self._reshard))
        changes.wrap(ParamGroup, "_to_sharded_post_forward", self._if_probed(self._reshard))
        changes.wrap(_torch.foreach, "foreach_all_gather", self._if_probed(self._all_gather))
        changes.wrap(_torch.foreach, "foreach_all_gather_copy_out", self._if_probed(self._copy_out))
        changes.wrap(_torch.foreach, "foreach_reduce", self._if_probed(self._reduce))
        changes.wrap(State, "_root_post_backward_final_callback", self._if_probed(self._end_of_backward))

    @staticmethod
    def _if_probed(wrapper: Original) -> Original:
        def wrapped(original: Original, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
            return original(*args, **kwargs) if probe.active is None else wrapper(original, *args, **kwargs)

        return wrapped

    # ---- Source

    def has(self, unit: int) -> bool:
        """Return whether a unit exists."""
        return unit in self._groups

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return this rank's tensors of a unit's parameters, by name."""
        group = self._groups.get(unit)
        if group is None:
            return {}
        rank = getattr(group.mesh_info, "shard_mesh_rank", 0)
        return {
            known.fqn: ParamTensors(
                shard=param.sharded_param,
                shard_rank=rank,
                full=_torch.full_of(param),
                full_grads=_torch.full_grads_of(param),
                sharded_grad=param.sharded_param.grad,
                places=(_torch.module_of(param),),
            )
            for known, param in zip(self._known[group].unit.params, group.fsdp_params, strict=True)
        }

    # ---- descriptions

    def _of(self, group: ParamGroup) -> _Watched:
        known = self._known.get(group)
        if known is None:
            self.note([_torch.root_of(group)])
        known = self._known[group]
        if known.after_forward is not group.post_forward_mesh_info:  # torch decides at the first forward
            self._announce(group, replace(known.unit, reshard_after_forward=_policy(group)))
        return known

    def note(self, models: Iterable[nn.Module]) -> None:
        """Announce the units of models that are new, or whose place was unknown, in the order of their modules.

        Args:
            models: none is part of another.
        """
        for model in models:
            paths = {module: path for path, module in model.named_modules()}
            roots: list[tuple[str, int]] = []
            for path, group in _torch.groups_below(model):
                known = self._known.get(group)
                index = next(UNIT_INDICES) if known is None else known.index
                above = next((root for top, root in roots if not top or path.startswith(f"{top}.")), None)
                if above is None:
                    roots.append((path, index))
                root = index if above is None else above
                if known is None or (known.unit.name, known.unit.root) != (path, root):
                    self._announce(group, describe(group, path, paths, index, root))

    def _announce(self, group: ParamGroup, unit: Unit) -> None:
        known = self._known.get(group)
        if probe.active is not None:
            probe.active.unit(unit)
        if known is not None:
            known.unit, known.after_forward = unit, group.post_forward_mesh_info
            return
        shard = sum(math.prod(param.padded_sharded_param_size) * _itemsize(param) for param in group.fsdp_params)
        full = unit.shard_size * sum(math.prod(param.padded_sharded_param_size) for param in group.fsdp_params)
        self._groups[unit.index] = group
        self._known[group] = _Watched(unit, group.post_forward_mesh_info, full * unit.compute_itemsize)
        probe.memory(Category.SHARDED_PARAMS, unit.index, shard)
        weakref.finalize(group, probe.memory, Category.SHARDED_PARAMS, unit.index, -shard).atexit = False

    def renew(self) -> None:
        """Let all models use the process groups that replaced theirs; what was under way is over."""
        for group, known in tuple(self._known.items()):
            probe.event(Kind.RESET, Edge.INSTANT, known.index)
            _torch.renew(group)
            if known.holds_full:
                probe.memory(Category.UNSHARDED_PARAMS, known.index, -known.full_nbytes)
            self._free_grads(known)
            known.holds_full = known.in_backward = False

    @contextmanager
    def _within(self, known: _Watched) -> Iterator[None]:
        """CollectiveWatch that begin in the body belong to a unit."""
        before, self._collectives.unit = self._collectives.unit, known.index
        try:
            yield
        finally:
            self._collectives.unit = before
            self._collectives.before_issue = self._collectives.after_wait = None

    # ---- forward

    def _pre_forward(self, original: Original, group: ParamGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if _torch.is_in_forward(group):  # another module of the same unit
            return original(group, *args, **kwargs)
        known = self._of(group)
        probe.phase(Phase.FORWARD)
        result = original(group, *args, **kwargs)
        probe.event(Kind.FORWARD, Edge.BEGIN, known.index)
        return result

    def _post_forward(self, original: Original, group: ParamGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        probe.event(Kind.FORWARD, Edge.END, self._of(group).index)
        return original(group, *args, **kwargs)

    # ---- full parameters

    def _unshard(self, original: Original, group: ParamGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not _torch.will_unshard(group):
            return original(group, *args, **kwargs)
        known = self._of(group)
        probe.event(Kind.UNSHARD, Edge.BEGIN, known.index)
        with self._within(known):
            return original(group, *args, **kwargs)

    def _all_gather(self, original: Original, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        unit = self._collectives.unit
        nbytes = self._nbytes_of(unit, lambda known: known.full_nbytes // known.unit.shard_size)
        probe.event(Kind.COPY_IN, Edge.BEGIN, unit, nbytes)

        def copied_in(kind: Kind, tensors: Tensors) -> None:
            self._collectives.before_issue = None
            for output in tensors.outputs:
                count(output, BufferHandle(Category.ALL_GATHER_BUFFERS, unit, output.nbytes))
            probe.event(Kind.COPY_IN, Edge.END, unit, nbytes)

        self._collectives.before_issue = copied_in
        return original(*args, **kwargs)

    def _wait_for_unshard(self, original: Original, group: ParamGroup) -> Any:  # noqa: ANN401
        if not _torch.is_gathering(group):
            return original(group)
        known = self._of(group)
        with self._within(known):
            result = original(group)
        self._hold_full(known)  # one rank gathers nothing
        probe.event(Kind.UNSHARD, Edge.END, known.index)
        return result

    def _hold_full(self, known: _Watched) -> None:
        if not known.holds_full:
            known.holds_full = True
            probe.memory(Category.UNSHARDED_PARAMS, known.index, known.full_nbytes)

    def _copy_out(self, original: Original, gathered: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        unit = self._collectives.unit
        nbytes = self._nbytes_of(unit, lambda known: known.full_nbytes)

        def begin() -> None:
            group = self._groups.get(unit)
            if group is not None:
                self._hold_full(self._known[group])
            probe.event(Kind.COPY_OUT, Edge.BEGIN, unit, nbytes)

        if isinstance(gathered.all_gather_work, _torch.Work):
            self._collectives.after_wait = begin
        else:
            begin()
        result = original(gathered, *args, **kwargs)
        probe.event(Kind.COPY_OUT, Edge.END, unit, nbytes)
        return result

    def _nbytes_of(self, unit: int, of: Callable[[_Watched], int]) -> int:
        group = self._groups.get(unit)
        return 0 if group is None else of(self._known[group])

    def _reshard(self, original: Original, group: ParamGroup) -> Any:  # noqa: ANN401
        known = self._known.get(group)
        if known is None or not known.holds_full:
            return original(group)
        probe.event(Kind.RESHARD, Edge.INSTANT, known.index)
        result = original(group)
        known.holds_full = False
        probe.memory(Category.UNSHARDED_PARAMS, known.index, -known.full_nbytes)
        return result

    # ---- backward

    def _pre_backward(self, original: Original, group: ParamGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if _torch.is_in_backward(group):
            return original(group, *args, **kwargs)
        known = self._of(group)
        probe.phase(Phase.PRE_BACKWARD)
        result = original(group, *args, **kwargs)
        probe.phase(Phase.BACKWARD)
        known.in_backward = True
        probe.event(Kind.BACKWARD, Edge.BEGIN, known.index)
        return result

    def _post_backward(self, original: Original, group: ParamGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        known = self._of(group)
        if known.in_backward:
            known.in_backward = False
            probe.event(Kind.BACKWARD, Edge.END, known.index)
        probe.phase(Phase.POST_BACKWARD)
        self._count_grads(group, known)
        with self._within(known):
            result = original(group, *args, **kwargs)
        self._count_grads(group, known)
        return result

    @staticmethod
    def _count_grads(group: ParamGroup, known: _Watched) -> None:
        """Announce the change of the bytes of full gradients."""
        nbytes = sum(grad.nbytes for param in group.fsdp_params for grad in _torch.full_grads_of(param))
        if nbytes != known.grads_nbytes:
            probe.memory(Category.UNSHARDED_GRADS, known.index, nbytes - known.grads_nbytes)
            known.grads_nbytes = nbytes

    def _reduce(self, original: Original, params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        unit = self._collectives.unit
        group = self._groups.get(unit)
        known = None if group is None else self._known[group]
        if known is None:
            return original(params, grads, *args, **kwargs)
        padded = sum(math.prod(param.padded_sharded_param_size) for param in params) * known.unit.shard_size
        nbytes = padded * known.unit.reduce_itemsize
        probe.event(Kind.COPY_IN, Edge.BEGIN, unit, nbytes)
        outputs: list[torch.Tensor] = []

        def copied_in(kind: Kind, tensors: Tensors) -> None:
            self._collectives.before_issue = None
            for tensor in (*tensors.inputs, *tensors.outputs):
                count(tensor, BufferHandle(Category.REDUCE_SCATTER_BUFFERS, unit, tensor.nbytes))
            outputs.extend(tensors.outputs)
            self._free_grads(known)
            probe.event(Kind.COPY_IN, Edge.END, unit, nbytes)

        self._collectives.before_issue = copied_in
        result = original(params, grads, *args, **kwargs)
        if self._collectives.before_issue is copied_in:  # one rank, or one of several copies: no reduce-scatter
            self._collectives.before_issue = None
            self._free_grads(known)
            probe.event(Kind.COPY_IN, Edge.END, unit, nbytes)
        for output in outputs:
            count(output, None)
        self._count_sharded_grads(params, unit)
        return result

    @staticmethod
    def _free_grads(known: _Watched) -> None:
        probe.memory(Category.UNSHARDED_GRADS, known.index, -known.grads_nbytes)
        known.grads_nbytes = 0

    @staticmethod
    def _count_sharded_grads(params: Any, unit: int) -> None:  # noqa: ANN401 - FSDPParams
        """Count the storages of new gradients, which several parameters share, until the last of them is dropped."""
        handles: dict[int, BufferHandle] = {}
        for param in params:
            if param.sharded_param.grad is None:
                continue
            local = _torch.local_of(param.sharded_param.grad)
            known = holds(local)
            if known is not None and known.is_told:
                continue
            storage = local.untyped_storage()
            if storage.data_ptr() not in handles:
                handles[storage.data_ptr()] = BufferHandle(Category.SHARDED_GRADS, unit, storage.nbytes())
            count(local, handles[storage.data_ptr()])

    def _end_of_backward(self, original: Original, state: State) -> Any:  # noqa: ANN401
        result = original(state)
        probe.phase(Phase.IDLE)
        return result


def _itemsize(param: Any) -> int:  # noqa: ANN401 - an FSDPParam
    size: int = param.sharded_param.dtype.itemsize
    return size


def _policy(group: ParamGroup) -> bool | int:
    """Return ``reshard_after_forward`` of a group: a number of ranks, if it is not all."""
    after = group.post_forward_mesh_info
    if after is None:
        return False
    size: int = after.shard_mesh_size
    return after == group.mesh_info or size


def describe(group: ParamGroup, path: str, paths: Mapping[nn.Module, str], index: int, root: int) -> Unit:
    """Return the description of a parameter group.

    Args:
        group: the group.
        path: of its module.
        paths: of all modules of the model.
        index: of the unit.
        root: index of the model's root unit.
    """
    mesh = group.mesh_info
    shard_size = getattr(mesh, "shard_mesh_size", 1)
    params = tuple(_described(param, paths, shard_size) for param in group.fsdp_params)
    own = group.fsdp_params[0].sharded_param.dtype if group.fsdp_params else torch.get_default_dtype()
    compute = group.mp_policy.param_dtype or own
    reduce = group.mp_policy.reduce_dtype or compute
    return Unit(
        index=index,
        name=path,
        root=root,
        params=params,
        reshard_after_forward=_policy(group),
        shard_size=shard_size,
        replicate_size=getattr(mesh, "replicate_mesh_size", 1),
        compute_dtype=str(compute).removeprefix("torch."),
        reduce_dtype=str(reduce).removeprefix("torch."),
        compute_itemsize=compute.itemsize,
        reduce_itemsize=reduce.itemsize,
        offload=any(param.offload_to_cpu for param in group.fsdp_params),
        comm=C10D if shard_size > 1 else "",
    )


def _described(param: Any, paths: Mapping[nn.Module, str], num_shards: int) -> Param:  # noqa: ANN401 - an FSDPParam
    shape, dim = _torch.shape_of(param), param.fsdp_placement.dim
    padded = -(-shape[dim] // num_shards)
    rows = tuple(min(max(shape[dim] - rank * padded, 0), padded) for rank in range(num_shards))
    dtype = param.sharded_param.dtype
    module, name = _torch.module_of(param)
    return Param(
        fqn=".".join(filter(None, (paths.get(module, ""), name))),
        shape=shape,
        global_shape=tuple(param.sharded_param.shape),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        shard_dim=dim,
        rows_per_rank=rows,
        padded_rows=padded,
        trainable=param.sharded_param.requires_grad,
    )
