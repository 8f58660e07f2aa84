"""Models in torch's ``FullyShardedDataParallel`` and ``DistributedDataParallel``, as ``verify`` needs them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from workbench.engine.classic import unwrapping as classic_undo
from workbench.engine.module_names import clean, named_params, names_below
from workbench.engine.unsharding import copied
from workbench.errors import UsageError
from workbench.events import FlatPart, ParamTensors, Unit, unit_words
from workbench.models import _torch_private
from workbench.models._torch_private import Handle
from workbench.protocol.commands import UnmanagedState
from workbench.runtime.command_handlers import RankContext
from workbench.runtime.model_summary import unmanaged_in
from workbench.runtime.reference_precision import Casts
from workbench.runtime.step_observation import ParamPiece
from workbench.runtime.verified_model import (
    Averaged,
    Optimizers,
    OwnGrads,
    VerifiedModel,
    average_over,
    check_same_holdings,
    join,
    take_calls_of_a_wrapper,
)

# ---- torch's classic wrapper


@dataclass(frozen=True)
class _Flat:
    """A flat parameter of torch's wrapper.

    Attributes:
        handle: torch's object for it.
        unit: its unit.
        shard_rank: index of this rank's shard.
    """

    handle: Handle
    unit: Unit
    shard_rank: int

    @property
    def parts(self) -> tuple[FlatPart, ...]:
        """The parameters inside it."""
        return self.unit.params[0].parts

    @property
    def held(self) -> tuple[nn.Parameter, ...]:
        """What an optimizer holds: one parameter, or one for each part."""
        return _torch_private.held_of(self.handle)

    @property
    def is_one(self) -> bool:
        """Whether an optimizer holds the flat parameter, and not its parts."""
        return not self.unit.params[0].use_orig_params

    def slice_of(self, part: FlatPart) -> slice:
        """Return the elements of this rank's shard that belong to a part."""
        flat = self.unit.params[0]
        begin = self.shard_rank * flat.padded_rows
        first, last = part.within(begin, begin + flat.rows_per_rank[self.shard_rank])
        return slice(first - begin, last - begin)

    def split(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole of each part from this rank's shard, ``[padded_rows]``; collective."""
        whole = _torch_private.gathered_flat(self.handle, shard)
        return [whole[part.first : part.first + part.numel].view(part.shape).clone() for part in self.parts]

    def gather_states(self, states: Mapping[Any, Mapping[str, Any]]) -> list[dict[str, Any] | None]:
        """Return the whole state of each part; None where no rank has one; collective.

        Args:
            states: of what an optimizer holds; tensors with its shape are pieces, all else is the same on all ranks.
        """
        own = {number: states[param] for number, param in enumerate(self.held) if states.get(param)}
        described = {
            number: {key: _Piece.describe(value, self.held[number]) for key, value in state.items()}
            for number, state in own.items()
        }
        known: dict[int, dict[str, Any]] = {}
        for each in (described, *_torch_private.objects_of_shards(self.handle, described)):  # this rank's first
            for number, state in each.items():
                known.setdefault(number, {}).update({k: v for k, v in state.items() if k not in known[number]})
        dtypes = {key: v.dtype for state in known.values() for key, v in state.items() if isinstance(v, _Piece)}
        wholes = {key: self.split(self._shard_of(key, own, dtypes[key])) for key in sorted(dtypes)}
        found: list[dict[str, Any] | None] = []
        for place in range(len(self.parts)):
            known_of = known.get(0 if self.is_one else place)
            found.append(
                None
                if known_of is None
                else {k: wholes[k][place] if isinstance(v, _Piece) else copy.deepcopy(v) for k, v in known_of.items()}
            )
        return found

    def _shard_of(self, key: str, own: Mapping[int, Mapping[str, Any]], dtype: torch.dtype) -> torch.Tensor:
        """Return one value of the state of all that an optimizer holds, as one shard."""
        like = _torch_private.flat_shard_of(self.handle)
        shard = torch.zeros(self.unit.params[0].padded_rows, dtype=dtype, device=like.device)
        for number, state in own.items():
            if key in state:
                place = slice(None) if self.is_one else self.slice_of(self.parts[number])
                shard[place] = state[key].detach().reshape(-1)
        return shard


@dataclass(frozen=True)
class _Piece:
    """A tensor of an optimizer's state that is sharded like its parameter."""

    dtype: torch.dtype

    @classmethod
    def describe(cls, value: Any, param: torch.Tensor) -> Any:  # noqa: ANN401 - state holds anything
        """Return a piece without its values, or the value if it is none."""
        is_piece = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == param.shape
        return cls(value.dtype) if is_piece else value


_Plains = Mapping[int, Sequence[nn.Parameter]]
"""The plain parameters of the parts of each flat parameter, by unit."""


class TorchWrapperModel(VerifiedModel):
    """A model in torch's ``FullyShardedDataParallel``.

    Raises:
        UsageError: it holds gradients that were not reduced.
    """

    def __init__(self, name: str, model: nn.Module, rank: RankContext) -> None:
        super().__init__(model, rank.recorder.tensors)
        self._largest = rank.groups.largest
        self.units = rank.watch.units_of(model)
        handles = [handle for _, handle in _torch_private.handles_below(model)]
        self._flats = {
            unit.index: _Flat(handle, unit, _torch_private.shard_rank_of(handle))
            for unit, handle in zip(self.units, handles, strict=True)
        }
        self._wrappers = list(_torch_private.wrappers_below(model))
        self._replicas = {
            unit.index: layout.replicas or () for unit in self.units if (layout := rank.watch.layout_of(unit))
        }
        self.tensors = functools.partial(self._tensors, self.tensors)
        if self._largest(len(self.unreduced())):
            raise UsageError(
                f"{name!r} holds gradients that were accumulated in no_sync() and are not reduced yet; clear them "
                "before verify: call optimizer.zero_grad() in a %%fsdp cell"
            )

    def _tensors(self, tensors: Any, unit: int) -> Mapping[str, ParamTensors]:  # noqa: ANN401 - as of the base class
        """Return this rank's tensors of a unit; gradients are those that an optimizer gets."""
        found, flat = dict(tensors(unit)), self._flats[unit]
        if not flat.is_one:
            for part, param in zip(flat.parts, flat.held, strict=True):
                is_reduced = param.grad is not None and found[part.fqn].sharded_grad is not None
                found[part.fqn] = replace(found[part.fqn], sharded_grad=param.grad if is_reduced else None)
        return found

    @property
    def names(self) -> dict[int, str]:
        """The name of each parameter that an optimizer may hold: that of its flat parameter, if a unit has it."""
        flats = {id(each): flat.unit.params[0].fqn for flat in self._flats.values() for each in flat.held}
        return {**super().names, **flats}

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients a step changes."""
        flats = [flat.handle.flat_param for flat in self._flats.values() if not flat.is_one]
        return (*flats, *self.model.parameters())

    def reshard(self) -> None:
        """Free all full parameters."""
        for flat in self._flats.values():
            _torch_private.reshard_handle(flat.handle)

    @torch.no_grad()
    def copy(self, memo: dict[int, Any], optimizers: Optimizers) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return plain copies of the model and its optimizers; collective.

        Raises:
            UsageError: only some ranks hold a gradient or optimizer state.
        """
        check_same_holdings(self._holdings(optimizers), self._largest)
        plains = {index: self._plain_params(flat) for index, flat in self._flats.items()}
        mapping = self._map_params(plains, memo)

        def make() -> nn.Module:
            for wrapper, _, _ in reversed(self._wrappers):  # copies of outer modules contain those of inner ones
                memo[id(wrapper)] = copy.deepcopy(wrapper.module, memo)
            return copy.deepcopy(self.model, memo)

        reference = copied(self.model, memo, make)
        self._finish(plains, memo)
        states = [self._gathered(optimizer, plains) for optimizer in optimizers]
        return reference, [
            classic_undo.copied_optimizer(optimizer, mapping, state, memo)
            for optimizer, state in zip(optimizers, states, strict=True)
        ]

    def _map_params(self, plains: _Plains, memo: dict[int, Any]) -> classic_undo.Mapped:
        """Enter the plain parameters into ``memo``; return those of each parameter that an optimizer may hold."""
        mapping: classic_undo.Mapped = {}
        for index, flat in self._flats.items():
            new = plains[index]
            memo[id(flat.handle.flat_param)] = flat.handle.flat_param
            memo |= {} if flat.is_one else {id(held): plain for held, plain in zip(flat.held, new, strict=True)}
            for number, module, name in _torch_private.all_places_of(flat.handle):
                memo[id(getattr(module, name))] = new[number]
            mapping |= zip(flat.held, [tuple(new)] if flat.is_one else [(plain,) for plain in new], strict=True)
        return mapping

    def _finish(self, plains: _Plains, memo: Mapping[int, Any]) -> None:
        """Give the copies of modules their parameters, the wrapper's methods, and the dtypes of their buffers."""
        for wrapper, _, _ in self._wrappers:
            _torch_private.plain_module(memo[id(wrapper)])
        for index, flat in self._flats.items():
            for number, module, name in _torch_private.all_places_of(flat.handle):
                vars(memo[id(module)]).pop(name, None)
                memo[id(module)].register_parameter(name, plains[index][number])
        for wrapper, is_root, _ in self._wrappers:
            if is_root:
                take_calls_of_a_wrapper(memo[id(wrapper)])
        for module, dtype in self._buffer_dtypes().items():
            for buffer in memo[id(module)].buffers(recurse=False):
                buffer.data = buffer.data.to(dtype) if buffer.is_floating_point() else buffer.data

    def _buffer_dtypes(self) -> dict[nn.Module, torch.dtype]:
        """Return the dtype in which wrappers keep the buffers of modules; the innermost wrapper decides."""
        found = {m: wrapper.mixed_precision.buffer_dtype for wrapper, *_ in self._wrappers for m in wrapper.modules()}
        return {module: dtype for module, dtype in found.items() if dtype is not None}

    def _holdings(self, optimizers: Optimizers) -> str:
        """Describe which flat parameters have gradients, and what optimizers have for them; equal on all ranks."""
        return repr(
            [
                (
                    any(held.grad is not None for held in flat.held),
                    [sorted({key for held in flat.held for key in o.state.get(held, ())}) for o in optimizers],
                )
                for flat in self._flats.values()
                if any(held.numel() for held in flat.held)
            ]
        )

    def _plain_params(self, flat: _Flat) -> list[nn.Parameter]:
        grads = {held: {"grad": held.grad} for held in flat.held if held.grad is not None}
        trained = [held.requires_grad for held in flat.held]
        values = flat.split(_torch_private.flat_shard_of(flat.handle).detach())
        found = []
        for place, (value, state) in enumerate(zip(values, flat.gather_states(grads), strict=True)):
            found.append(nn.Parameter(value, requires_grad=trained[0 if flat.is_one else place]))
            found[-1].grad = None if state is None else state["grad"]
        return found

    def _gathered(self, optimizer: torch.optim.Optimizer, plains: _Plains) -> classic_undo.States:
        found: classic_undo.States = {}
        for index, flat in self._flats.items():
            states = flat.gather_states(optimizer.state)
            found |= {plain: state for plain, state in zip(plains[index], states, strict=True) if state is not None}
        return found

    def casts(self) -> Iterator[Casts]:
        """Yield what each wrapper casts."""
        for wrapper, is_root, handle in self._wrappers:
            policy = wrapper.mixed_precision
            casts_inputs = policy.cast_forward_inputs or (is_root and policy.cast_root_forward_inputs)
            flats = [] if handle is None else [handle]
            yield Casts(
                modules=(wrapper.module,),
                input_dtype=policy.param_dtype if casts_inputs else None,
                output_dtype=None,
                param_dtype=policy.param_dtype,
                params=tuple(
                    (each.flat_param.dtype, module, name)
                    for each in flats
                    for _, module, name in _torch_private.all_places_of(each)
                ),
            )

    def flat_parts(self) -> Iterator[list[str]]:
        """Yield the names of the parameters in each flat parameter: all get a gradient if one of them is used."""
        for flat in self._flats.values():
            yield [join(self.paths[module], name) for module, name in _torch_private.flat_places_of(flat.handle)]

    def groups(self) -> Mapping[str, Sequence[dist.ProcessGroup]]:
        """Return the process groups over which the gradient of each parameter is averaged in turn, by name."""
        return {
            join(self.paths[module], name): _torch_private.averaging_groups_of(flat.handle)
            for flat in self._flats.values()
            for _, module, name in _torch_private.all_places_of(flat.handle)
        }

    def whole_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names, without wrappers, and the whole values of all parameters; collective."""
        managed = set()
        for flat in self._flats.values():
            values = flat.split(_torch_private.flat_shard_of(flat.handle).detach())
            for value, (module, name) in zip(values, _torch_private.flat_places_of(flat.handle), strict=True):
                managed.add(join(self.paths[module], name))
                yield join(self.paths[module], name), value
        for name, param in self._in_no_unit():
            if name not in managed:
                yield name, param.detach().clone()

    def _in_no_unit(self) -> Iterator[tuple[str, nn.Parameter]]:
        own = {id(each) for flat in self._flats.values() for each in (flat.handle.flat_param, *flat.held)}
        names = self.names
        yield from ((names[id(param)], param) for param in self.model.parameters() if id(param) not in own)

    def owned(self, unit: int) -> set[int]:
        """Return the ids of the parameters of a unit that an optimizer may hold."""
        return set(map(id, self._flats[unit].held))

    def unreduced(self) -> tuple[int, ...]:
        """Return the units with gradients that were not reduced."""
        return tuple(i for i, flat in self._flats.items() if _torch_private.flat_grad_of(flat.handle) is not None)

    def drop_full_grads(self, units: Iterable[int]) -> None:
        """Drop all gradients of units, and forget a step that raised."""
        for index in units:
            _torch_private.forget_iteration(self._flats[index].handle)

    @property
    def unmanaged(self) -> UnmanagedState:
        """The parameters that are in no unit, and the buffers."""
        params = tuple(name for name, param in self._in_no_unit() if param.requires_grad)
        return replace(unmanaged_in(self.model), params=params, hooks=())

    def replicas(self, unit: int) -> Sequence[int]:
        """Return the ranks that hold the same shard of a unit as this one."""
        return self._replicas[unit]


# ---- DistributedDataParallel


class ReplicatedModel(VerifiedModel):
    """A model in, or with parts in, torch's ``DistributedDataParallel``.

    Raises:
        UsageError: it has the mixed precision of ``DistributedDataParallel`` itself.
    """

    def __init__(self, name: str, model: nn.Module, rank: RankContext) -> None:
        super().__init__(model, rank.recorder.tensors)
        self.units = rank.watch.units_of(model)
        self._parts = {path: part for path, part in model.named_modules() if isinstance(part, DistributedDataParallel)}
        self._by_unit = dict(zip((unit.index for unit in self.units), self._parts.values(), strict=True))
        if any(part.mixed_precision is not None for part in self._parts.values()):
            raise UsageError(
                f"{name!r} has the mixed_precision of DistributedDataParallel, which verify does not know: use "
                "torch.autocast in the step, or leave it out"
            )
        self.tensors = functools.partial(self._tensors, self.tensors)

    def _tensors(self, tensors: Any, unit: int) -> Mapping[str, ParamTensors]:  # noqa: ANN401 - as of the base class
        """Return the tensors of a unit, with the modules that have them."""
        part = self._by_unit[unit]
        places = [
            (part.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in part.module.named_parameters()
        ]
        found = zip(tensors(unit).items(), places, strict=True)
        return {name: replace(known, places=(place,)) for (name, known), place in found}

    @functools.cached_property
    def paths(self) -> dict[nn.Module, str]:
        """The path of each module, without wrappers."""
        return {module: self._without_wrapper(path) for module, path in names_below([self.model]).items()}

    def _without_wrapper(self, path: str) -> str:
        for top in self._parts:
            inner = join(top, "module")
            if path == inner or path.startswith(f"{inner}."):
                return ".".join(filter(None, (top, path[len(inner) + 1 :])))
        return path

    def reshard(self) -> None:
        """No-op: every rank holds all parameters."""

    @torch.no_grad()
    def copy(self, memo: dict[int, Any], optimizers: Optimizers) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return plain copies of the model and its optimizers; unlike others, this rank's own."""
        for param in self.model.parameters():
            memo[id(param)] = plain = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            plain.grad = None if param.grad is None else param.grad.detach().clone()

        def make() -> nn.Module:
            for part in self._parts.values():
                memo[id(part)] = copy.deepcopy(part.module, memo)
            return copy.deepcopy(self.model, memo)

        reference = copied(self.model, memo, make)
        for part in self._parts.values():
            _act_as_replicated(memo[id(part)], part)
        return reference, [copy.deepcopy(optimizer, memo) for optimizer in optimizers]

    def casts(self) -> Iterator[Casts]:
        """Yield nothing: no dtype is cast."""
        yield from ()

    def groups(self) -> Mapping[str, Sequence[dist.ProcessGroup]]:
        """Return the process group over which the gradient of each parameter is averaged, by name."""
        return {
            clean(join(path, name)): (part.process_group,)
            for path, part in self._parts.items()
            for name, _ in part.module.named_parameters()
            if name not in part.parameters_to_ignore
        }

    def average(self, reference: nn.Module, averaged: Averaged) -> OwnGrads:
        """Let a plain copy average its gradients at the end of each backward, as ranks may use other parameters."""
        plains, by_group = dict(named_params(reference)), dict[dist.ProcessGroup, dict[str, nn.Parameter]]()
        for name, (group,) in self.groups().items():
            if name in plains and plains[name].requires_grad:
                by_group.setdefault(group, {})[name] = plains[name]
        averagers = [GradAverager(params, group, averaged) for group, params in by_group.items()]
        return lambda: {name: grad for each in averagers for name, grad in each.own_grads()}

    def whole_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names, without wrappers, and the values of all parameters on the next rank; collective.

        Each rank's copy steps as the rank does, so a rank that trains otherwise differs only from the copies of others.
        """
        names, groups = self.names, self.groups()
        for param in self.model.parameters():
            name, value = names[id(param)], param.detach().clone()
            yield name, _of_next_rank(value, *groups[name]) if name in groups else value

    def owned(self, unit: int) -> set[int]:
        """Return the ids of the parameters of a unit that an optimizer may hold."""
        return set(map(id, self._by_unit[unit].parameters()))

    def part_of(self, piece: ParamPiece) -> tuple[str, set[int]]:
        """Return the module that has a parameter, as text, and the ids of its parameters: a unit is the whole model."""
        path = piece.name.rpartition(".")[0]
        return f"module {unit_words(path)}", self._ids_by_module.get(path, set())

    @functools.cached_property
    def _ids_by_module(self) -> Mapping[str, set[int]]:
        """The ids of the parameters of each module, by its path without wrappers."""
        found: dict[str, set[int]] = {}
        for id_, name in self.names.items():
            found.setdefault(name.rpartition(".")[0], set()).add(id_)
        return found

    def unreduced(self) -> tuple[int, ...]:
        """Return no unit: a gradient of this rank alone is not marked as such."""
        return ()

    def drop_full_grads(self, units: Iterable[int]) -> None:
        """No-op: a parameter has one gradient."""

    @property
    def unmanaged(self) -> UnmanagedState:
        """The parameters that no wrapper averages, and the buffers that it does not broadcast."""
        averaged, names = self.groups(), self.names
        trained = (names[id(param)] for param in self.model.parameters() if param.requires_grad)
        broadcast = {
            id(buffer)
            for part in self._parts.values()
            if part.broadcast_buffers
            for name, buffer in part.module.named_buffers()
            if name not in part.parameters_to_ignore
        }
        checksums = unmanaged_in(self.model).buffers
        others = {clean(name) for name, buffer in self.model.named_buffers() if id(buffer) not in broadcast}
        return UnmanagedState(
            params=tuple(name for name in trained if name not in averaged),
            hooks=(),
            buffers={self._without_wrapper(name): crc for name, crc in checksums.items() if name in others},
        )

    def replicas(self, unit: int) -> Sequence[int]:
        """Return the ranks that hold the same parameters."""
        return dist.get_process_group_ranks(self._by_unit[unit].process_group)


def _of_next_rank(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    found = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(found, value.contiguous(), group=group)
    return found[(group.rank() + 1) % group.size()]


class GradAverager:
    """Average of the gradients of a plain copy over ranks, at the end of each of its backwards.

    Args:
        params: its parameters, by name.
        group: the ranks.
        averaged: gets each gradient and its average.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], group: dist.ProcessGroup, averaged: Averaged = lambda *_: None
    ) -> None:
        self._params, self._group, self._averaged = params, group, averaged
        self._taken: dict[str, torch.Tensor] = {}  # what the averages have taken from this rank's own gradients
        self._is_queued = False
        for param in params.values():
            param.register_post_accumulate_grad_hook(self._accumulated)

    def own_grads(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients that this rank would have without any average, by name."""
        for name, param in self._params.items():
            if param.grad is not None:
                yield name, param.grad.detach() + self._taken.get(name, 0)

    def _accumulated(self, _: torch.Tensor) -> None:
        if not self._is_queued:
            self._is_queued = True
            _torch_private.at_end_of_backward(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        """Average the gradients of all parameters that any rank has one of; others count as 0."""
        self._is_queued = False
        params = self._params.values()
        device = next(iter(params)).device
        used = torch.tensor([param.grad is not None for param in params], dtype=torch.uint8, device=device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        own = dict(self.own_grads())
        for (name, param), is_used in zip(self._params.items(), used.tolist(), strict=True):
            if is_used:
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                before = grad.clone()
                average_over((self._group,), grad)
                param.grad = grad
                self._taken[name] = own.get(name, 0) - grad
                self._averaged(name, before, grad, (self._group,))


def _act_as_replicated(plain: nn.Module, part: DistributedDataParallel) -> None:
    """Let a plain copy broadcast buffers, and move its inputs, as the wrapper does; give it the wrapper's methods."""
    first = dist.get_process_group_ranks(part.process_group)[0]
    buffers = [buffer for name, buffer in plain.named_buffers() if name not in part.parameters_to_ignore]
    syncs = {"forward": part.require_forward_param_sync, "backward": part.require_backward_grad_sync}
    device = next(iter(part.device_ids), None) if part.device_ids else None

    def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401 - as given
        if syncs["forward"] and part.broadcast_buffers:
            for buffer in buffers:
                dist.broadcast(buffer.detach(), first, group=part.process_group)
        syncs["forward"] = torch.is_grad_enabled() and syncs["backward"]
        if device is not None:
            args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        return args, kwargs

    @contextmanager
    def no_sync() -> Iterator[None]:
        kept, syncs["backward"] = syncs["backward"], False
        try:
            yield
        finally:
            syncs["backward"] = kept

    plain.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    calls = {"module": plain, "no_sync": no_sync, "join": lambda **_: nullcontext()}
    vars(plain).update({name: call for name, call in calls.items() if not hasattr(plain, name)})
