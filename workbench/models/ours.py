"""Models that the workbench's engine runs, with either API."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from workbench.engine import FSDPModule, classic
from workbench.engine._torch import has_grad_hooks
from workbench.engine.classic import FullyShardedDataParallel
from workbench.engine.classic import unwrapping as classic_undo
from workbench.engine.classic.wrapper_state import WrapperState, wrapper_states_below
from workbench.engine.event_source import SOURCE
from workbench.engine.fsdp_state import FSDPState, roots_below, state_of, states_below, units_of
from workbench.engine.mesh import HSDPMeshInfo
from workbench.engine.module_names import clean, full_name, named_params, names_below
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.unsharding import full_tensor, plain_copy
from workbench.errors import UsageError
from workbench.events import ENGINES, OWN_ENGINE, ParamTensors, Unit
from workbench.models.plain_model import warnings_in_plain_words
from workbench.models.sharded_model import (
    Casts,
    Largest,
    Optimizers,
    ShardedModel,
    UnitLayout,
    gathered_before,
    join,
    prefetch_in_order,
    take_calls_of_a_wrapper,
    take_setters,
)
from workbench.protocol.policy import CLASSIC, FULLY_SHARD, STRATEGIES, Api, Strategy


class WorkbenchModel(ShardedModel):
    """A model that the workbench's engine runs."""

    engine = ENGINES[OWN_ENGINE]
    module_class = FSDPModule
    wrapper_class = FullyShardedDataParallel

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._states = states_below(model)
        self._groups = {unit.index: unit for unit in units_of(self._states)}

    @functools.cached_property
    def units(self) -> Sequence[Unit]:
        """Its units, in the order of its modules."""
        return [unit.describe_in_model() for unit in self._groups.values()]

    @functools.cached_property
    def _is_classic(self) -> bool:
        return api_of(self.model) == CLASSIC

    @functools.cached_property
    def _modules(self) -> Mapping[int, tuple[nn.Module, ...]]:
        return {unit.index: state.modules for state in self._states for unit in units_of([state])}

    @classmethod
    def runs(cls, model: nn.Module) -> bool:
        """Return whether the engine runs a part of a model."""
        return bool(states_below(model))

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return this rank's tensors of a unit's parameters, by name."""
        return SOURCE.tensors(unit)

    def layout_of(self, unit: int) -> UnitLayout:
        """Return where a unit is."""
        mesh, alone = self._groups[unit].mesh_info, (dist.get_rank(),)
        shard, copies = mesh.shard_group, mesh.replicate_group
        return UnitLayout(
            modules=self._modules[unit],
            shard_ranks=alone if shard is None else tuple(shard.ranks),
            replicas=alone if copies is None else tuple(copies.ranks),
        )

    def owned(self, unit: int) -> set[int]:
        """Return the ids of the parameters of a unit that an optimizer may hold."""
        return {id(own) for param in self._groups[unit].fsdp_params for own in param.owned}

    def whole_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names, without wrappers, and the whole values of all parameters; collective."""
        if not self._is_classic:
            yield from ((name, full_tensor(param)) for name, param in named_params(self.model))
            return
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            yield from ((name, full_tensor(param)) for name, param in named_params(self.model))

    def groups(self) -> Mapping[str, Sequence[dist.ProcessGroup]]:
        """Return the process groups over which the gradient of each parameter is averaged in turn, by name."""
        names = names_below((self.model,))
        return {
            full_name(names, module, name): unit.mesh_info.mesh.get_all_groups()
            for unit in self._groups.values()
            for param in unit.fsdp_params
            for info in param.infos
            for module, name in info.places
            if module in names
        }

    def unreduced(self) -> tuple[int, ...]:
        """Return the units with gradients that were not reduced."""
        return tuple(index for index, group in self._groups.items() if _has_unreduced_grads(group))

    def drop_full_grads(self, units: Iterable[int]) -> None:
        """Drop the gradients of full parameters of units."""
        for index in units:
            self._groups[index].drop_full_grads()

    def reshard(self) -> None:
        """Free all full parameters."""
        for unit in self._groups.values():
            unit.reshard()

    def gathered_early(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which this rank gathers a unit before the root."""
        return gathered_before(self.model, module, prepend=True)

    # ---- what the engine does not manage

    def in_no_unit(self) -> Sequence[str]:
        """Return the names of the trained parameters that are in no unit."""
        return [names[0] for param, names in params_in_no_unit(self.model).items() if param.requires_grad]

    def uncalled_hooks(self) -> Sequence[str]:
        """Return the names of the sharded parameters with a ``register_hook`` hook, which autograd never calls.

        The parameters are those that the units own: the modules of an unsharded unit, such as a root after an
        evaluation, hold full parameters instead, which have the engine's hooks.
        """
        hooked = {
            param: info.places[0]
            for unit in self._groups.values()
            for each in unit.fsdp_params
            for param, info in zip(each.owned, each.infos, strict=False)  # a flat one has many, is registered itself
            if has_grad_hooks(param)
        }
        if not hooked:
            return ()
        names = {param: name for name, param in self.model.named_parameters() if param in hooked}
        paths = {module: path for path, module in self.model.named_modules()}
        return [clean(names.get(param) or join(paths[module], name)) for param, (module, name) in hooked.items()]

    # ---- a plain copy

    def check_can_copy(self, name: str, largest: Largest) -> None:
        """Raise UsageError if different APIs shard the model ``name``, or torch's wrapper would train it otherwise."""
        check_one_api(name, self.model)
        is_in_place_of_torchs = vars(fsdp)["FullyShardedDataParallel"] is FullyShardedDataParallel
        if is_in_place_of_torchs and any(map(self._is_left_unaveraged_by_torch, self._states)):
            raise UsageError(
                f"torch's FullyShardedDataParallel does not average the gradients of {name!r} between its copies: it "
                "makes NO_SHARD of a hybrid strategy with one rank in each shard group. The workbench's engine, which "
                "takes its place in verify, averages them, so a comparison says nothing of your run. Shard over groups "
                "of two ranks or more, or replicate with DistributedDataParallel"
            )

    @staticmethod
    def _is_left_unaveraged_by_torch(state: FSDPState) -> bool:
        meshes = (unit.mesh_info for unit in units_of([state]))
        return isinstance(state, WrapperState) and any(
            isinstance(mesh, HSDPMeshInfo) and mesh.shard_mesh_size == 1 < mesh.replicate_mesh_size for mesh in meshes
        )

    def copy(
        self, memo: dict[int, Any], optimizers: Optimizers, largest: Largest
    ) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return plain copies of the model and its optimizers; collective."""
        if self._is_classic:
            reference, optims = classic_undo.plain_copy(self.model, memo, optimizers)
            for _, root in roots_below(self.model):
                take_calls_of_a_wrapper(memo[id(root.modules[0])])
            return reference, optims
        reference = plain_copy(self.model, memo, optimizers)
        take_setters(self.model, memo, FSDPModule)
        return reference, [copy.deepcopy(optimizer, memo) for optimizer in optimizers]

    def casts(self) -> Iterator[Casts]:
        """Yield what each call of ``fully_shard`` or each wrapper casts."""
        for state in self._states:
            yield Casts(
                modules=state.modules,
                input_dtype=state.input_dtype,
                output_dtype=state.mp_policy.output_dtype,
                param_dtype=state.mp_policy.param_dtype,
                params=tuple(
                    (param.orig_dtype, *place)
                    for unit in units_of([state])
                    for param in unit.fsdp_params
                    for info in param.infos
                    for place in info.places
                ),
            )

    def flat_parts(self) -> Iterator[list[str]]:
        """Yield the names of the parameters in each flat parameter: all get a gradient if one of them is used."""
        for unit in self._groups.values():
            for param in unit.fsdp_params:
                places = (place for info in param.infos for place in info.places)
                yield [join(self.paths[module], name) for module, name in places]


def api_of(model: nn.Module) -> Api:
    """Return the API that a model, or its first sharded part, is sharded with."""
    return _api(roots_below(model)[0][1])


def check_one_api(name: str, model: nn.Module) -> None:
    """Raise UsageError if parts of the model ``name`` are sharded by different APIs."""
    by_api = {_api(state): path for path, state in roots_below(model)}
    if len(by_api) > 1:
        raise UsageError(
            f"{name!r} is sharded with fully_shard in {by_api[FULLY_SHARD]!r} and with the classic wrapper in "
            f"{by_api[CLASSIC]!r}; this needs one API for the whole model: %fsdp reshard {name}.{by_api[CLASSIC]} "
            "--api fully_shard"
        )


def _api(root: FSDPState) -> Api:
    return CLASSIC if isinstance(root, WrapperState) else FULLY_SHARD


def strategy_of(model: nn.Module) -> Strategy | Literal[""]:
    """Return the strategy of a wrapped model; empty: its units differ."""
    names = {state.strategy.name for state in wrapper_states_below(model) if state.unit is not None}
    words = [word for word, name in STRATEGIES.items() if names == {name}]
    return cast("Strategy", words[0]) if words else ""


def has_originals(model: nn.Module) -> bool:
    """Return whether optimizers hold pieces of the original parameters of a wrapped model."""
    flats = (state.flat for state in wrapper_states_below(model))
    return any(flat.use_orig_params for flat in flats if flat is not None)


def wrap(
    model: nn.Module,
    inner: Collection[nn.Module],
    mesh: DeviceMesh,
    optimizers: Sequence[torch.optim.Optimizer],
    options: dict[str, Any],
) -> FullyShardedDataParallel:
    """Return ``model`` in a wrapper, each of ``inner`` in its own; optimizers switch to the new parameters. Collective.

    Args:
        model: the model to wrap; changed in place.
        inner: modules in it that become units of their own.
        mesh: mesh over which it is sharded.
        optimizers: optimizers of its parameters.
        options: keyword arguments of the wrapper.

    Raises:
        TypeError, ValueError: the wrapper refuses, or an optimizer cannot switch; nothing is changed then.
    """
    chosen = frozenset(inner)
    policy = classic.CustomPolicy(lambda module: module in chosen)
    top: nn.Module = model
    try:
        with warnings_in_plain_words():
            top = wrapper = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_mesh=mesh, **options)
        classic_undo.rewrap_optimizers(wrapper, optimizers)
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        if wrapper_states_below(top):
            classic_undo.unwrap(top)
        raise
    return wrapper


def set_prefetch(model: nn.Module, ahead: int) -> None:
    """Let each unit prefetch the ``ahead`` next ones; 0 restores the engine's own order."""
    prefetch_in_order(model, ahead, unit_of)


def unit_of(module: nn.Module) -> FSDPState | None:
    """Return the state of the ``fully_shard`` call on a module; None without one, or if it has no parameters."""
    state = state_of(module)
    has_unit = state is not None and state._fsdp_param_group is not None
    return state if has_unit and isinstance(module, FSDPModule) else None


def params_in_no_unit(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the parameters that belong to no unit of the engine, each with its names at every place.

    They are matched by place as well: while a unit is unsharded, as a root is after an evaluation, its modules hold
    full parameters, which are not the objects that the unit owns.
    """
    units = units_of(states_below(model))
    owned = {param for unit in units for each in unit.fsdp_params for param in each.owned}
    managed = {place for unit in units for param in unit.fsdp_params for info in param.infos for place in info.places}
    found: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param not in owned and (module, name) not in managed:
                found.setdefault(param, []).append(clean(join(path, name)))
    return found


def _has_unreduced_grads(unit: FSDPParamGroup) -> bool:
    return unit.has_partial_sum or any(full.has_grad for param in unit.fsdp_params for full in param.fulls)
