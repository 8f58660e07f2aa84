"""A sharded model as ``verify`` needs it: a plain copy that trains as it does, and its parts on this rank.

One class per engine: :class:`OwnModel` for the workbench's, :class:`TorchModel` for torch's ``fully_shard``; those of
torch's wrappers are in ``verified_wrappers.py``.
"""

from __future__ import annotations

import copy
import functools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torchs
from torch.distributed.tensor import DTensor

from workbench.engine import FSDPModule, UnshardHandle
from workbench.engine._torch import local_of
from workbench.engine.agreement import holdings
from workbench.engine.classic import FullyShardedDataParallel
from workbench.engine.classic import unwrapping as classic_undo
from workbench.engine.fsdp_state import roots_below, states_below, units_of
from workbench.engine.full_param import local_tensor
from workbench.engine.module_names import clean, named_params
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.unsharding import copied, full_tensor, plain_copy, state_like
from workbench.errors import UsageError
from workbench.events import ParamTensors, Unit, unit_words
from workbench.models import _torch_private
from workbench.protocol.commands import ReplicaSum, UnmanagedState
from workbench.protocol.policy import CLASSIC
from workbench.runtime import sharding
from workbench.runtime.command_handlers import RankContext
from workbench.runtime.model_summary import sizes_of, unmanaged_in
from workbench.runtime.reference_precision import Casts
from workbench.runtime.step_observation import ParamPiece

Optimizers = Sequence[torch.optim.Optimizer]
Largest = Callable[[int], int]
Averaged = Callable[[str, torch.Tensor, torch.Tensor, Sequence[dist.ProcessGroup]], None]
"""Gets a parameter's name, this rank's gradient, its average, and the groups over which it was averaged in turn."""
OwnGrads = Callable[[], Mapping[str, torch.Tensor]]
"""Returns the gradients of a copy's parameters that this rank would have without any average, by name."""


class VerifiedModel(ABC):
    """A sharded model.

    Args:
        model: the model.
        tensors: returns this rank's tensors of a unit's parameters, by name.

    Attributes:
        model: the model.
        units: its units.
    """

    units: Sequence[Unit]

    def __init__(self, model: nn.Module, tensors: Callable[[int], Mapping[str, ParamTensors]]) -> None:
        self.model = model
        self.tensors = tensors

    @functools.cached_property
    def paths(self) -> dict[nn.Module, str]:
        """The path of each module, without wrappers."""
        return {module: clean(path) for path, module in self.model.named_modules()}

    @abstractmethod
    def reshard(self) -> None:
        """Free all full parameters."""

    @abstractmethod
    def copy(self, memo: dict[int, Any], optimizers: Optimizers) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return plain copies of the model and its optimizers; collective. ``memo``: as of :func:`copy.deepcopy`."""

    @property
    def names(self) -> dict[int, str]:
        """The name, without wrappers, of each parameter that the modules hold now, by its id."""
        found: dict[int, str] = {}
        for module, path in self.paths.items():
            for name, param in module.named_parameters(recurse=False):
                found.setdefault(id(param), join(path, name))
        return found

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients a step changes."""
        return tuple(self.model.parameters())

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers with their names without wrappers."""
        for module, path in self.paths.items():
            yield from ((join(path, name), buffer) for name, buffer in module.named_buffers(recurse=False))

    @abstractmethod
    def casts(self) -> Iterator[Casts]:
        """Yield what each call of ``fully_shard`` casts."""

    @abstractmethod
    def groups(self) -> Mapping[str, Sequence[dist.ProcessGroup]]:
        """Return the process groups over which the gradient of each parameter is averaged in turn, by name."""

    def average(self, reference: nn.Module, averaged: Averaged) -> OwnGrads:
        """Let a plain copy average its gradients; return what returns the gradients of this rank alone, if known."""
        groups = self.groups()
        for name, plain in named_params(reference):
            if name in groups and plain.requires_grad:
                hook = functools.partial(_average, groups[name], functools.partial(averaged, name))
                plain.register_post_accumulate_grad_hook(hook)
        return dict

    def flat_parts(self) -> Iterator[list[str]]:
        """Yield the names of the parameters in each flat parameter: all get a gradient if one of them is used."""
        yield from ()

    def complete_grads(self, params: Mapping[str, nn.Parameter]) -> None:
        """Give unused parameters of a copy the gradient 0, as in a flat parameter of which another part is used."""
        for names in self.flat_parts():
            parts = [params[name] for name in names if name in params]
            for param in parts if any(part.grad is not None for part in parts) else ():
                if param.grad is None and param.requires_grad:
                    param.grad = torch.zeros_like(param)

    @abstractmethod
    def whole_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names, without wrappers, and the whole values of all parameters; collective."""

    @abstractmethod
    def owned(self, unit: int) -> set[int]:
        """Return the ids of the parameters of a unit that an optimizer may hold."""

    def part_of(self, piece: ParamPiece) -> tuple[str, set[int]]:
        """Return the part of the model that has a piece, as text, and the ids of what an optimizer may hold of it."""
        return f"unit {unit_words(piece.unit.name)}", self.owned(piece.unit.index)

    @abstractmethod
    def unreduced(self) -> tuple[int, ...]:
        """Return the units with gradients that were not reduced."""

    @abstractmethod
    def drop_full_grads(self, units: Iterable[int]) -> None:
        """Drop the gradients of full parameters of units."""

    @property
    @abstractmethod
    def unmanaged(self) -> UnmanagedState:
        """The parts of the model that the engine does not manage."""

    @abstractmethod
    def replicas(self, unit: int) -> Sequence[int]:
        """Return the ranks that hold the same shard of a unit as this one."""

    def replica_sums(self) -> tuple[ReplicaSum, ...]:
        """Return the checksums of the shards of units that several groups of ranks have a copy of."""
        found = []
        for unit in self.units:
            replicas = self.replicas(unit.index)
            if len(replicas) > 1:
                tensors = self.tensors(unit.index).values()
                own = {id(each.shard): each.shard for each in tensors if isinstance(each.shard, torch.Tensor)}.values()
                crc = 0
                for each in own:
                    local = local_tensor(each).detach().cpu().contiguous().reshape(-1)
                    crc = zlib.crc32(local.view(torch.uint8).numpy().tobytes(), crc) if local.numel() else crc
                found.append(ReplicaSum(unit=unit_words(unit.name), first_rank=min(replicas), crc32=crc))
        return tuple(found)


def join(path: str, name: str) -> str:
    """Return the name of a parameter or buffer from the path of its module; the root's path is empty."""
    return f"{path}.{name}" if path else name


def _average(groups: Sequence[dist.ProcessGroup], averaged: Callable[..., None], param: torch.Tensor) -> None:
    """Average a gradient over the ranks of groups; repeating it, as accumulation does, changes nothing."""
    if isinstance(param, DTensor) and isinstance(param.grad, DTensor):
        param.grad = param.grad.redistribute(placements=param.placements)  # reduces a pending sum
    if param.grad is not None:
        grad = local_tensor(param.grad)
        own = grad.clone()
        average_over(groups, grad)
        averaged(own, grad, groups)


def average_over(groups: Sequence[dist.ProcessGroup], tensor: torch.Tensor) -> None:
    """Average a tensor in place over the ranks of groups, one after another."""
    for group in groups:
        dist.all_reduce(tensor, group=group)
    tensor.div_(math.prod(group.size() for group in groups))


def _take_setters(model: nn.Module, memo: dict[int, Any], cls: type) -> None:
    """Give the copies of sharded modules no-op versions of the methods of ``cls`` that a step may call.

    A copy averages immediately, whatever is synchronised or gathered when.
    """
    calls: dict[str, Callable[..., object]] = {
        name: _nothing for name, call in vars(cls).items() if callable(call) and not name.startswith("_")
    }
    calls["unshard"] = _gathered
    for module in model.modules():
        if isinstance(module, cls):
            plain = memo[id(module)]
            vars(plain).update({name: call for name, call in calls.items() if not hasattr(plain, name)})


def _nothing(*_args: object, **_settings: object) -> None:
    """Do nothing: the setter of a module whose parameters are whole anyway."""


def _gathered(async_op: bool = False) -> UnshardHandle | None:
    return UnshardHandle(()) if async_op else None


# ---- the workbench's engine


class OwnModel(VerifiedModel):
    """A model that the workbench's engine runs, with either API."""

    def __init__(self, model: nn.Module, tensors: Callable[[int], Mapping[str, ParamTensors]]) -> None:
        super().__init__(model, tensors)
        self._groups = {unit.index: unit for unit in units_of(states_below(model))}
        self._is_classic = sharding.api_of(model) == CLASSIC
        self.units = [unit.describe_in_model() for unit in self._groups.values()]

    def reshard(self) -> None:
        """Free all full parameters."""
        for unit in self._groups.values():
            unit.reshard()

    def copy(self, memo: dict[int, Any], optimizers: Optimizers) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return plain copies of the model and its optimizers; collective."""
        if self._is_classic:
            reference, optims = classic_undo.plain_copy(self.model, memo, optimizers)
            for _, root in roots_below(self.model):
                take_calls_of_a_wrapper(memo[id(root.modules[0])])
            return reference, optims
        reference = plain_copy(self.model, memo, optimizers)
        _take_setters(self.model, memo, FSDPModule)
        return reference, [copy.deepcopy(optimizer, memo) for optimizer in optimizers]

    def casts(self) -> Iterator[Casts]:
        """Yield what each call of ``fully_shard`` or each wrapper casts."""
        for state in states_below(self.model):
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

    def groups(self) -> Mapping[str, Sequence[dist.ProcessGroup]]:
        """Return the process groups over which the gradient of each parameter is averaged in turn, by name."""
        meshes = {name: s.unit.mesh_info.mesh for s in sizes_of(self.model) if s.unit for name in s.names}
        return {name: mesh.get_all_groups() for name, mesh in meshes.items()}

    def whole_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names, without wrappers, and the whole values of all parameters; collective."""
        if not self._is_classic:
            yield from ((name, full_tensor(param)) for name, param in named_params(self.model))
            return
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            yield from ((name, full_tensor(param)) for name, param in named_params(self.model))

    def owned(self, unit: int) -> set[int]:
        """Return the ids of the parameters of a unit that an optimizer may hold."""
        return {id(own) for param in self._groups[unit].fsdp_params for own in param.owned}

    def unreduced(self) -> tuple[int, ...]:
        """Return the units with gradients that were not reduced."""
        return tuple(index for index, group in self._groups.items() if _has_unreduced_grads(group))

    def drop_full_grads(self, units: Iterable[int]) -> None:
        """Drop the gradients of full parameters of units."""
        for index in units:
            self._groups[index].drop_full_grads()

    @property
    def unmanaged(self) -> UnmanagedState:
        """The parts of the model that the engine does not manage."""
        return unmanaged_in(self.model)

    def replicas(self, unit: int) -> Sequence[int]:
        """Return the ranks that hold the same shard of a unit as this one."""
        group = self._groups[unit].mesh_info.replicate_group
        return () if group is None else group.ranks


def _has_unreduced_grads(unit: FSDPParamGroup) -> bool:
    return unit.has_partial_sum or any(full.has_grad for param in unit.fsdp_params for full in param.fulls)


class HoldingsDiffer(UsageError):
    """Ranks hold different gradients or optimizer state; raised on all ranks."""


def check_same_holdings(holds: str, largest: Largest) -> None:
    """Raise HoldingsDiffer if ranks hold other gradients or optimizer state; ``holds`` describes them; collective."""
    known = zlib.crc32(holds.encode())
    if largest(known) != -largest(-known):
        raise HoldingsDiffer(
            "the ranks hold gradients or optimizer state of different parameters, so no copy can be made of them: "
            "let all ranks take the same steps, and clear gradients before verify"
        )


def take_calls_of_a_wrapper(reference: nn.Module) -> None:
    """Give a plain copy the wrapper's methods that a step may call; its own attributes stay."""
    clip = functools.partial(_clip, list(reference.parameters()))
    calls = {"module": reference, "no_sync": nullcontext, "clip_grad_norm_": clip}
    vars(reference).update({name: call for name, call in calls.items() if not hasattr(reference, name)})


@torch.no_grad()
def _clip(params: Sequence[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip as :func:`torch.nn.utils.clip_grad_norm_` does, which refuses a mix of plain gradients and DTensors.

    Returns:
        the norm before clipping, a plain scalar.
    """
    grads = [param.grad for param in params if param.grad is not None]
    norms = [full_tensor(torch.linalg.vector_norm(grad, norm_type)) for grad in grads]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    for grad in grads:
        local_tensor(grad).mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


# ---- torch's fully_shard


class TorchModel(VerifiedModel):
    """A model that torch's ``fully_shard`` runs.

    Raises:
        UsageError: ``fully_shard`` got one mesh for it and for tensor parallelism.
    """

    def __init__(self, name: str, model: nn.Module, rank: RankContext) -> None:
        super().__init__(model, rank.recorder.tensors)
        rank.watch.note([model])
        self._largest = rank.groups.largest
        self._groups = {group: path for path, group in _torch_private.groups_below(model)}
        self.units = rank.watch.units_of(model)
        if any(_torch_private.is_on_one_mesh(param) for group in self._groups for param in group.fsdp_params):
            raise UsageError(
                f"fully_shard shards {name!r} over a mesh that has the dimensions of tensor parallelism too, which "
                "verify does not know: pass fully_shard the data-parallel part of the mesh, such as mesh['dp']"
            )
        self._replicas = {
            unit.index: layout.replicas or () for unit in self.units if (layout := rank.watch.layout_of(unit))
        }
        self._by_index = dict(zip((unit.index for unit in self.units), self._groups, strict=True))

    def reshard(self) -> None:
        """Free all full parameters."""
        for module in self.model.modules():
            if isinstance(module, torchs.FSDPModule):
                module.reshard()

    @property
    def _managed(self) -> Iterator[tuple[str, nn.Parameter, Any]]:
        """The parameters of units with their names, and what ``fully_shard`` knows of each."""
        params = {id(each.sharded_param): each for group in self._groups for each in group.fsdp_params}
        named = named_params(self.model)
        yield from ((name, param, params[id(param)]) for name, param in named if id(param) in params)

    @torch.no_grad()
    def copy(self, memo: dict[int, Any], optimizers: Optimizers) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return plain copies of the model and its optimizers; collective. What tensor parallelism splits stays split.

        Raises:
            UsageError: only some ranks hold a gradient or optimizer state.
        """
        managed = [(name, param, _torch_private.form_of(own)) for name, param, own in self._managed]
        check_same_holdings(repr(holdings(((name, param) for name, param, _ in managed), optimizers)), self._largest)
        for _, param, form in managed:
            memo[id(param)] = plain = nn.Parameter(state_like(form, param), requires_grad=param.requires_grad)
            if param.grad is not None:
                plain.grad = state_like(form, param.grad)
        for optimizer in optimizers:
            for _, param, form in managed:
                for value in optimizer.state.get(param, {}).values():
                    if isinstance(value, DTensor):
                        memo[id(value)] = state_like(form, value)
        with _torch_private.plain_modules(self.model):
            reference = copied(self.model, memo, lambda: copy.deepcopy(self.model, memo))
        _take_setters(self.model, memo, torchs.FSDPModule)
        return reference, [copy.deepcopy(optimizer, memo) for optimizer in optimizers]

    def casts(self) -> Iterator[Casts]:
        """Yield what each call of ``fully_shard`` casts."""
        for modules, policy, groups in _torch_private.policies_below(self.model):
            yield Casts(
                modules=modules,
                input_dtype=policy.param_dtype if policy.cast_forward_inputs else None,
                output_dtype=policy.output_dtype,
                param_dtype=policy.param_dtype,
                params=tuple(
                    (param.sharded_param.dtype, *_torch_private.module_of(param))
                    for group in groups
                    for param in group.fsdp_params
                ),
            )

    def groups(self) -> Mapping[str, Sequence[dist.ProcessGroup]]:
        """Return the process groups over which the gradient of each parameter is averaged in turn, by name."""
        return {name: _torch_private.mesh_of(own).get_all_groups() for name, _, own in self._managed}

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
            for index, group in self._by_index.items()
            if _torch_private.has_partial_sum(group) or any(map(_torch_private.full_grads_of, group.fsdp_params))
        )

    def drop_full_grads(self, units: Iterable[int]) -> None:
        """Drop the gradients of full parameters of units."""
        for index in units:
            _torch_private.drop_full_grads(self._by_index[index])

    @property
    def unmanaged(self) -> UnmanagedState:
        """The parameters that are in no unit, and the buffers."""
        managed = {name for name, _, _ in self._managed}
        whole = tuple(n for n, p in named_params(self.model) if p.requires_grad and n not in managed)
        return replace(unmanaged_in(self.model), params=whole, hooks=())

    def replicas(self, unit: int) -> Sequence[int]:
        """Return the ranks that hold the same shard of a unit as this one."""
        return self._replicas[unit]


def local_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's tensors of the parameters, and the buffers of a model."""
    tensors = [local_of(p) for p in model.parameters() if isinstance(p, DTensor)]
    return tensors + [p.data for p in model.parameters() if not isinstance(p, DTensor)] + list(model.buffers())
