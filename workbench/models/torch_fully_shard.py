"""The units of models that torch's ``fully_shard`` shards: what they gather, free and reduce, as events."""

# ruff: noqa: ANN401 - arguments and results of torch's functions are passed on

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from workbench.engine import probe
from workbench.engine.agreement import holdings
from workbench.engine.backends import backend_of
from workbench.engine.dtensor_param import DTensorParam
from workbench.engine.module_names import named_params
from workbench.engine.probe import BufferHandle
from workbench.engine.shard_layout import ShardLayout
from workbench.engine.unsharding import copied, full_tensor, remap_optimizer, state_like
from workbench.errors import UsageError
from workbench.events import C10D, ENGINES, TORCH_FULLY_SHARD, Category, Edge, Kind, Param, ParamTensors, Phase, Unit
from workbench.models import _torch_private as _torch
from workbench.models._torch_private import ParamGroup, State, Tensors
from workbench.models.c10d import Within, count, holds
from workbench.models.patches import Patches, Watching
from workbench.models.plain_model import PlainModel, dtype_of, fully_shard_options
from workbench.models.sharded_model import (
    Casts,
    Largest,
    Optimizers,
    UnitLayout,
    check_same_holdings,
    gathered_before,
    join,
    prefetch_in_order,
    take_setters,
)
from workbench.models.source import TorchUnits, UnitPlace, WatchedModel, WatchedUnit
from workbench.protocol.commands import Shard
from workbench.protocol.policy import PrecisionNames


class FullyShardUnits(TorchUnits[ParamGroup]):
    """Source of the events of every model that torch's ``fully_shard`` shards.

    Its calls are wrapped on their class while this watches, so models sharded before and after are seen alike.
    """

    name = TORCH_FULLY_SHARD
    what = "units of torch's fully_shard are"

    def install(self, changes: Patches) -> None:
        """Watch until ``changes`` are undone."""
        for method in ("pre_forward", "post_forward", "unshard", "wait_for_unshard", "pre_backward", "post_backward"):
            changes.wrap(ParamGroup, method, getattr(self, f"_{method}"), if_probed=True)
        changes.wrap(ParamGroup, "_to_sharded", self._reshard, if_probed=True)
        changes.wrap(ParamGroup, "_to_sharded_post_forward", self._reshard, if_probed=True)
        changes.wrap(_torch.foreach, "foreach_all_gather_copy_out", self._copy_out, if_probed=True)
        changes.wrap(_torch.foreach, "foreach_reduce", self._reduce, if_probed=True)
        changes.wrap(State, "_root_post_backward_final_callback", self._end_of_backward, if_probed=True)
        if hasattr(State, "finalize_backward"):  # torch 2.15; called by the program, after the above
            changes.wrap(State, "finalize_backward", self._end_of_backward, if_probed=True)

    def unreduced(self) -> Iterator[int]:
        """Yield the units with gradients that were not reduced, or not between the copies of HSDP."""
        waits = {watched.index for group, watched in tuple(self._watched.items()) if _torch.has_partial_sum(group)}
        yield from sorted(waits.union(super().unreduced()))

    # ---- descriptions

    def layout_of(self, group: ParamGroup) -> UnitLayout:
        """Return where a unit is."""
        shard_ranks, replicas = _torch.ranks_of_group(group)
        return UnitLayout(modules=tuple(group.modules), shard_ranks=shard_ranks, replicas=replicas)

    def _tensors_of(self, group: ParamGroup, unit: Unit) -> Mapping[str, ParamTensors]:
        rank = getattr(group.mesh_info, "shard_mesh_rank", 0)
        return {
            info.fqn: ParamTensors(
                shard=param.sharded_param,
                shard_rank=rank,
                full=_torch.full_of(param),
                freed=_torch.freed_of(param),
                full_grads=_torch.full_grads_of(param),
                sharded_grad=param.sharded_param.grad,
                places=_torch.places_of(param),
            )
            for info, param in zip(unit.params, group.fsdp_params, strict=True)
        }

    @staticmethod
    def groups_below(model: nn.Module) -> Iterator[tuple[str, ParamGroup]]:
        """Yield the groups of a model, in the order of its modules, with the paths of their modules."""
        return _torch.groups_below(model)

    def _describe(self, group: ParamGroup, place: UnitPlace) -> Unit:
        mesh = group.mesh_info
        shard_size = getattr(mesh, "shard_mesh_size", 1)
        compute, reduce = _dtypes_of(group)
        return Unit(
            index=place.index,
            name=place.path,
            root=place.root,
            params=tuple(_described(param, place.paths, shard_size, compute) for param in group.fsdp_params),
            reshard_after_forward=self._policy(group),
            shard_size=shard_size,
            replicate_size=getattr(mesh, "replicate_mesh_size", 1),
            compute_dtype=str(compute).removeprefix("torch."),
            reduce_dtype=str(reduce).removeprefix("torch."),
            compute_itemsize=compute.itemsize,
            reduce_itemsize=reduce.itemsize,
            offload=any(param.offload_to_cpu for param in group.fsdp_params),
            comm=C10D if shard_size > 1 else "",
            engine=self.name,
        )

    def _nbytes(self, group: ParamGroup, unit: Unit) -> tuple[int, int]:
        shard = full = 0
        for param in group.fsdp_params:
            numel = math.prod(param.padded_sharded_param_size)
            shard += numel * param.sharded_param.dtype.itemsize
            full += numel * _torch.dtypes_of(param)[0].itemsize
        return shard, full * unit.shard_size

    def _policy(self, group: ParamGroup) -> bool | int:
        after = group.post_forward_mesh_info
        if after is None:
            return False
        size: int = after.shard_mesh_size
        return after == group.mesh_info or size

    def _renew(self, group: ParamGroup, _: Mapping[int, dist.ProcessGroup]) -> None:
        _torch.renew(group)

    def _watched_unit(self, group: ParamGroup) -> WatchedUnit:
        watched = self._watched.get(group)
        if watched is None:
            self.note([_torch.root_of(group)])
            watched = self._watched[group]
        return watched

    # ---- forward

    def _pre_forward(self, group: ParamGroup, *_: Any, **__: Any) -> Watching:
        if _torch.is_in_forward(group):  # another module of the same unit
            return
        watched = self._refreshed(group, self._watched_unit(group))  # torch decides on the policy at the first forward
        probe.phase(Phase.FORWARD)
        yield
        probe.event(Kind.FORWARD, Edge.BEGIN, watched.index)

    def _post_forward(self, group: ParamGroup, *_: Any, **__: Any) -> Watching:
        probe.event(Kind.FORWARD, Edge.END, self._watched_unit(group).index)
        yield

    # ---- full parameters

    def _unshard(self, group: ParamGroup, *_: Any, **__: Any) -> Watching:
        if not _torch.will_unshard(group):
            return
        watched = self._watched_unit(group)
        unit, shards = watched.index, watched.unit.shard_size
        nbytes = watched.full_nbytes // shards
        probe.event(Kind.UNSHARD, Edge.BEGIN, unit)

        def copied_in(kind: Kind, inputs: Tensors, outputs: Tensors) -> None:
            self._collectives.before_issue = None
            for output in outputs:
                count(output, BufferHandle(Category.ALL_GATHER_BUFFERS, unit, output.nbytes))
            probe.event(Kind.COPY_IN, Edge.END, unit, nbytes)

        if shards > 1:  # one rank gathers nothing
            probe.event(Kind.COPY_IN, Edge.BEGIN, unit, nbytes)
        with Within(self._collectives, unit, copied_in if shards > 1 else None):
            yield

    def _wait_for_unshard(self, group: ParamGroup) -> Watching:
        if not _torch.is_gathering(group):
            return
        watched = self._watched_unit(group)
        with Within(self._collectives, watched.index):
            yield
        watched.hold_full()  # one rank has no copy-out
        probe.event(Kind.UNSHARD, Edge.END, watched.index)

    def _copy_out(self, gathered: Any, *_: Any, **__: Any) -> Watching:
        unit = self._collectives.unit
        watched = self._by_index.get(unit)
        nbytes = 0 if watched is None else watched.full_nbytes

        def begin() -> None:
            if watched is not None:
                watched.hold_full()
            probe.event(Kind.COPY_OUT, Edge.BEGIN, unit, nbytes)

        if isinstance(gathered.all_gather_work, _torch.Work):
            self._collectives.after_wait = begin
        else:
            begin()
        yield
        probe.event(Kind.COPY_OUT, Edge.END, unit, nbytes)

    def _reshard(self, group: ParamGroup) -> Watching:
        watched = self._watched.get(group)
        if watched is None or not watched.holds_full:
            return
        probe.event(Kind.RESHARD, Edge.INSTANT, watched.index)
        yield
        if not _torch.keeps_full(group):
            watched.free_full()

    # ---- backward

    def _pre_backward(self, group: ParamGroup, *_: Any, **__: Any) -> Watching:
        if not _torch.is_in_backward(group):
            yield from self._begin_backward(self._watched_unit(group))

    def _post_backward(self, group: ParamGroup, *_: Any, **__: Any) -> Watching:
        return self._finish_backward(self._watched_unit(group), lambda: _torch.full_grads_nbytes(group))

    def _reduce(self, params: Any, *_: Any, **__: Any) -> Watching:
        unit = self._collectives.unit
        watched = self._by_index.get(unit)
        if watched is None:
            return
        padded = sum(math.prod(param.padded_sharded_param_size) for param in params) * watched.unit.shard_size
        nbytes = padded * watched.unit.reduce_itemsize
        probe.event(Kind.COPY_IN, Edge.BEGIN, unit, nbytes)
        reduced: list[torch.Tensor] = []

        def copied_in(kind: Kind, inputs: Tensors, outputs: Tensors) -> None:
            self._collectives.before_issue = None
            for tensor in (*inputs, *outputs):
                count(tensor, BufferHandle(Category.REDUCE_SCATTER_BUFFERS, unit, tensor.nbytes))
            reduced.extend(outputs)
            watched.set_grads(0)
            probe.event(Kind.COPY_IN, Edge.END, unit, nbytes)

        self._collectives.before_issue = copied_in
        yield
        if self._collectives.before_issue is copied_in:  # one rank, or one of several copies: no reduce-scatter
            self._collectives.before_issue = None
            watched.set_grads(0)
            probe.event(Kind.COPY_IN, Edge.END, unit, nbytes)
        for output in reduced:
            count(output, None)
        self._count_sharded_grads(params, unit)

    @staticmethod
    def _count_sharded_grads(params: Any, unit: int) -> None:
        """Count the storages of new gradients, which several parameters share, until the last of them is dropped."""
        for param in params:
            grad = param.sharded_param.grad
            if grad is not None:
                storage = _torch.local_of(grad).untyped_storage()
                handle = holds(storage)
                if handle is None or not handle.is_announced:
                    count(storage, BufferHandle(Category.SHARDED_GRADS, unit, storage.nbytes()))


def _dtypes_of(group: ParamGroup) -> tuple[torch.dtype, torch.dtype]:
    """Return the widest dtype of forward and backward of a group's parameters, and that of their reduction."""
    pairs = [(_torch.dtypes_of(param), param.sharded_param.requires_grad) for param in group.fsdp_params]
    computes = [compute for (compute, _), _ in pairs]
    reduces = [reduce for (_, reduce), is_trainable in pairs if is_trainable] or [reduce for (_, reduce), _ in pairs]
    return max(computes, key=_width), max(reduces, key=_width)


def _width(dtype: torch.dtype) -> tuple[bool, int]:
    return dtype.is_floating_point, dtype.itemsize


def _described(param: Any, paths: Mapping[nn.Module, str], num_shards: int, widest: torch.dtype) -> Param:
    shape, dim = _torch.shape_of(param), param.fsdp_placement.dim
    layout = ShardLayout(torch.Size(shape), dim, num_shards)
    dtype = param.sharded_param.dtype
    module, name = _torch.module_of(param)
    own = _torch.dtypes_of(param)[0].itemsize
    return Param(
        fqn=join(paths.get(module, ""), name),
        shape=shape,
        global_shape=tuple(param.sharded_param.shape),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        shard_dim=dim,
        rows_per_rank=layout.rows_per_rank,
        padded_rows=layout.padded_rows,
        trainable=param.sharded_param.requires_grad,
        compute_itemsize=0 if own == widest.itemsize else own,
    )


class FullyShardModel(WatchedModel[ParamGroup]):
    """A model that torch's ``fully_shard`` shards."""

    engine = ENGINES[TORCH_FULLY_SHARD]
    module_class = FSDPModule
    source_class = FullyShardUnits

    def reshard(self) -> None:
        """Free all full parameters."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def _managed(self) -> Iterator[tuple[str, nn.Parameter, Any]]:
        """The parameters of units with their names, and what ``fully_shard`` knows of each."""
        params = {id(each.sharded_param): each for group in self._groups.values() for each in group.fsdp_params}
        named = named_params(self.model)
        yield from ((name, param, params[id(param)]) for name, param in named if id(param) in params)

    @torch.no_grad()
    def copy(
        self, memo: dict[int, Any], optimizers: Optimizers, largest: Largest
    ) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return plain copies of the model and its optimizers; collective. What tensor parallelism splits stays split.

        Raises:
            HoldingsDiffer: only some ranks hold a gradient or optimizer state.
        """
        managed = [(name, param, _torch.form_of(own)) for name, param, own in self._managed]
        check_same_holdings(repr(holdings(((name, param) for name, param, _ in managed), optimizers)), largest)
        for _, shard, form in managed:
            memo[id(shard)] = plain = nn.Parameter(state_like(form, shard), requires_grad=shard.requires_grad)
            if shard.grad is not None:
                plain.grad = state_like(form, shard.grad)
        for optimizer in optimizers:
            for _, shard, form in managed:
                for value in optimizer.state.get(shard, {}).values():
                    if isinstance(value, DTensor):
                        memo[id(value)] = state_like(form, value)
        with _torch.plain_modules(self.model):
            reference = copied(self.model, memo, lambda: copy.deepcopy(self.model, memo))
        take_setters(self.model, memo, FSDPModule)
        return reference, [copy.deepcopy(optimizer, memo) for optimizer in optimizers]

    def casts(self) -> Iterator[Casts]:
        """Yield what each call of ``fully_shard`` casts."""
        for modules, policy, groups in _torch.policies_below(self.model):
            yield Casts(
                modules=modules,
                input_dtype=policy.param_dtype if policy.cast_forward_inputs else None,
                output_dtype=policy.output_dtype,
                param_dtype=policy.param_dtype,
                params=tuple(
                    (param.sharded_param.dtype, *_torch.module_of(param))
                    for group in groups
                    for param in group.fsdp_params
                ),
            )

    def groups(self) -> Mapping[str, Sequence[dist.ProcessGroup]]:
        """Return the process groups over which the gradient of each parameter is averaged in turn, by name."""
        return {name: _torch.mesh_of(own).get_all_groups() for name, _, own in self._managed}

    def whole_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and the whole values of all parameters; collective."""
        self.reshard()  # a root stays gathered after its forward, and its modules then hold full parameters
        yield from ((name, full_tensor(param)) for name, param in named_params(self.model))

    def owned(self, unit: int) -> set[int]:
        """Return the ids of the parameters of a unit that an optimizer may hold."""
        return {id(tensors.shard) for tensors in self.tensors(unit).values()}

    def unreduced(self) -> tuple[int, ...]:
        """Return the units with gradients that were not reduced."""
        return tuple(
            index
            for index, group in self._groups.items()
            if _torch.has_partial_sum(group) or any(map(_torch.full_grads_of, group.fsdp_params))
        )

    def drop_full_grads(self, units: Iterable[int]) -> None:
        """Drop the gradients of full parameters of units."""
        for index in units:
            _torch.drop_full_grads(self._groups[index])

    def in_no_unit(self) -> Sequence[str]:
        """Return the names of the trained parameters that are in no unit."""
        shards = {name: tensors.shard for unit in self.units for name, tensors in self.tensors(unit.index).items()}
        managed = {id(shard) for shard in shards.values()}  # the modules of an unsharded unit hold full parameters
        return [
            name
            for name, held in named_params(self.model)
            if held.requires_grad and name not in shards and id(held) not in managed
        ]

    def gathered_early(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which this rank gathers a unit before the root.

        torch checks no order, and transfers of different lengths would end the process: the root comes first, and
        prefetches the unit before any later hook.
        """
        if isinstance(self.model, FSDPModule):
            return _torch.prefetched_first(self.model, module)
        return gathered_before(self.model, module, prepend=False)

    def check_can_copy(self, name: str, largest: Largest) -> None:
        """Raise UsageError if ``fully_shard`` got one mesh for the model and for tensor parallelism."""
        if any(_torch.is_on_one_mesh(param) for group in self._groups.values() for param in group.fsdp_params):
            raise UsageError(
                f"fully_shard shards {name!r} over a mesh that has the dimensions of tensor parallelism too, which "
                "verify does not know: pass fully_shard the data-parallel part of the mesh, such as mesh['dp']"
            )

    @classmethod
    def shard(
        cls, command: Shard, plain: PlainModel, plan: Sequence[Unit], device: torch.device, optimizers: Optimizers
    ) -> nn.Module:
        """Apply ``fully_shard`` to the units of a plain model, innermost first, and return the same module.

        Raises:
            UsageError: this torch has no dtypes of single parameters.
            TypeError, ValueError, ...: torch refuses.
        """
        if plain.kept is not None and not DTensorParam.reduces_in_grad_dtype:
            raise UsageError(
                f"--mp {command.mp}: fully_shard of torch {torch.__version__} has no dtypes of single parameters, that "
                "of 2.15 has: leave out keep=, or --engine torch"
            )
        model = plain.model
        before = dict(model.named_parameters())
        dtypes = PrecisionNames.parse(command.mp)
        param, reduce, output = map(dtype_of, (dtypes.param, dtypes.reduce, dtypes.output))
        kept: Any = {} if plain.kept is None else {"param_dtype_override_fn": plain.kept}
        # pages are pinned for an accelerator
        options = fully_shard_options(command, fsdp, not backend_of(device).is_host)
        for module in (*plain.inner, model):
            fully_shard(
                module,
                mesh=plain.mesh,
                mp_policy=MixedPrecisionPolicy(param, reduce, output if module is model else None, **kept),
                ignored_params=set(plain.ignored),
                **options,
            )
        mapping = {before[name]: param for name, param in model.named_parameters()}
        for optimizer in optimizers:
            remap_optimizer(optimizer, mapping)
        if command.prefetch:
            prefetch_in_order(model, command.prefetch, _unit_of)
        return model


def _unit_of(module: nn.Module) -> nn.Module | None:
    return module if isinstance(module, FSDPModule) else None
