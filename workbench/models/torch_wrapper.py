"""The units of models in torch's classic wrapper, ``FullyShardedDataParallel``: its flat parameters, as events."""

# ruff: noqa: ANN401 - arguments and results of torch's functions are passed on

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy

from workbench.engine import probe
from workbench.engine.backends import backend_of
from workbench.engine.classic import unwrapping as classic_undo
from workbench.engine.module_names import clean, named_params
from workbench.engine.probe import BufferHandle
from workbench.engine.shard_layout import ShardLayout
from workbench.engine.unsharding import copied
from workbench.errors import UsageError
from workbench.events import (
    C10D,
    ENGINES,
    TORCH_CLASSIC,
    Category,
    Edge,
    FlatPart,
    Kind,
    Param,
    ParamTensors,
    Phase,
    Unit,
)
from workbench.models import _torch_private as _torch
from workbench.models._torch_private import Handle, Tensors
from workbench.models.c10d import Within, count, holds
from workbench.models.patches import Patches, Watching
from workbench.models.plain_model import PlainModel, warnings_in_plain_words, wrapper_options
from workbench.models.sharded_model import (
    Casts,
    Largest,
    Optimizers,
    UnitLayout,
    check_same_holdings,
    join,
    take_calls_of_a_wrapper,
)
from workbench.models.source import TorchUnits, UnitPlace, WatchedModel, WatchedUnit
from workbench.protocol.commands import Shard

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

    @staticmethod
    def groups_below(model: nn.Module) -> Iterator[tuple[str, Handle]]:
        """Yield the handles of a model, in the order of its modules, with the paths of their modules."""
        return _torch.handles_below(model)

    def _describe(self, group: Handle, place: UnitPlace) -> Unit:
        facts = _torch.facts_of(group)
        layout = ShardLayout(torch.Size((facts.numel,)), 0, facts.shard_size)
        parts = tuple(
            FlatPart(fqn=clean(join(place.path, name)), shape=shape, global_shape=shape, first=first)
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
        return self._watched[group].unit.reshard_after_forward

    def _nbytes(self, group: Handle, unit: Unit) -> tuple[int, int]:
        (flat,) = unit.params
        return flat.padded_rows * flat.itemsize, flat.padded_rows * unit.shard_size * unit.compute_itemsize

    def layout_of(self, group: Handle) -> UnitLayout:
        """Return where a unit is."""
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
        places: list[list[tuple[nn.Module, str]]] = [[] for _ in flat.parts]
        for number, module, name in _torch.all_places_of(group):
            places[number].append((module, name))
        for part, own in zip(flat.parts, places, strict=True):
            first, last = part.within(begin, begin + flat.rows_per_rank[rank])
            whole = slice(part.first, part.first + part.numel)
            found[part.fqn] = ParamTensors(
                shard=shard[first - begin : last - begin],
                shard_rank=rank,
                full=None if full is None else full[whole].view(part.shape),
                freed=freed,
                full_grads=() if grad is None else (grad[whole].view(part.shape),),
                sharded_grad=None if sharded_grad is None else sharded_grad[first - begin : last - begin],
                places=tuple(own),
            )
        return found

    def _renew(self, group: Handle, new_of: Mapping[int, dist.ProcessGroup]) -> None:
        _torch.renew_handle(group, new_of)

    # ---- forward

    def _pre_forward(self, wrapper: Any, handle: Handle | None, *_: Any) -> Watching:
        if handle is None or _torch.is_recomputing(handle):
            return
        if handle not in self._watched:  # the root is the first to run
            self.note([wrapper])
        watched = self._watched[handle]
        probe.phase(Phase.FORWARD)
        yield
        probe.event(Kind.FORWARD, Edge.BEGIN, watched.index)

    def _post_forward(self, wrapper: Any, handle: Handle | None, *_: Any) -> Watching:
        if handle is not None and not _torch.is_recomputing(handle) and handle in self._watched:
            probe.event(Kind.FORWARD, Edge.END, self._watched[handle].index)
        yield

    # ---- full parameters

    def _unshard(self, handle: Handle) -> Watching:
        watched = self._watched.get(handle)
        if watched is None or not _torch.will_gather(handle):
            return
        probe.event(Kind.UNSHARD, Edge.BEGIN, watched.index)
        watched.hold_full()
        with Within(self._collectives, watched.index):
            yield
        probe.event(Kind.UNSHARD, Edge.END, watched.index)

    def _reshard(self, handle: Handle, free_unsharded_flat_param: bool) -> Watching:
        watched = self._watched.get(handle)
        if watched is None or not (free_unsharded_flat_param and watched.holds_full):
            return
        probe.event(Kind.RESHARD, Edge.INSTANT, watched.index)
        yield
        watched.free_full()

    # ---- backward

    def _pre_backward(self, state: Any, module: Any, handle: Handle | None, *_: Any) -> Watching:
        watched = None if handle is None else self._watched.get(handle)
        if handle is not None and watched is not None and not _torch.has_begun_backward(handle):
            yield from self._begin_backward(watched)

    def _post_backward(self, state: Any, handle: Handle, *_: Any) -> Watching:
        watched = self._watched.get(handle)
        if watched is not None:
            yield from self._finish_backward(watched, lambda: _grad_nbytes(handle))

    def _reduce(self, state: Any, handle: Handle) -> Watching:
        watched = self._watched.get(handle)
        if watched is None:
            return
        grad = _torch.flat_grad_of(handle)

        def issued(kind: Kind, inputs: Tensors, outputs: Tensors) -> None:
            self._collectives.before_issue = None
            self._count_buffers(watched, grad, inputs, outputs)

        self._collectives.before_issue = issued
        yield
        watched.set_grads(0)
        saved = _torch.flat_sharded_grad_of(handle)
        if saved is not None:
            counted = holds(saved)
            if counted is None or counted.num_bytes != saved.nbytes:  # it was cast, or reduced in another way
                count(saved, BufferHandle(Category.SHARDED_GRADS, watched.index, saved.nbytes))

    @staticmethod
    def _count_buffers(watched: WatchedUnit, grad: torch.Tensor | None, inputs: Tensors, outputs: Tensors) -> None:
        """Count what a reduction allocates: a padded copy of the gradient, unless it is the gradient itself."""
        for tensor in inputs:
            if grad is None or tensor.data_ptr() != grad.data_ptr():
                count(tensor, BufferHandle(Category.REDUCE_SCATTER_BUFFERS, watched.index, tensor.nbytes))
        for tensor in outputs:
            count(tensor, BufferHandle(Category.SHARDED_GRADS, watched.index, tensor.nbytes))


_WHOLES = (_torch.flat_full_of, _torch.flat_grad_of, _torch.flat_sharded_grad_of)


def _grad_nbytes(handle: Handle) -> int:
    grad = _torch.flat_grad_of(handle)
    return 0 if grad is None else grad.nbytes


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
        """The parameters that an optimizer holds: one, or one for each part."""
        return _torch.held_of(self.handle)

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
        whole = _torch.gathered_flat(self.handle, shard)
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
        agreed: dict[int, dict[str, Any]] = {}
        for each in (described, *_torch.objects_of_shards(self.handle, described)):  # this rank's first
            for number, state in each.items():
                agreed.setdefault(number, {}).update({k: v for k, v in state.items() if k not in agreed[number]})
        dtypes = {key: v.dtype for state in agreed.values() for key, v in state.items() if isinstance(v, _Piece)}
        wholes = {key: self.split(self._shard_of(key, own, dtypes[key])) for key in sorted(dtypes)}
        found: list[dict[str, Any] | None] = []
        for place in range(len(self.parts)):
            of_part = agreed.get(0 if self.is_one else place)
            found.append(
                None
                if of_part is None
                else {k: wholes[k][place] if isinstance(v, _Piece) else copy.deepcopy(v) for k, v in of_part.items()}
            )
        return found

    def _shard_of(self, key: str, own: Mapping[int, Mapping[str, Any]], dtype: torch.dtype) -> torch.Tensor:
        """Return one value of the state of all that an optimizer holds, as one shard."""
        like = _torch.flat_shard_of(self.handle)
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
    def describe(cls, value: Any, param: torch.Tensor) -> Any:
        """Return a piece without its values, or the value if it is none."""
        is_piece = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == param.shape
        return cls(value.dtype) if is_piece else value


_Plains = Mapping[int, Sequence[nn.Parameter]]
"""The plain parameters of the parts of each flat parameter, by unit."""


class WrapperModel(WatchedModel[Handle]):
    """A model in torch's ``FullyShardedDataParallel``."""

    engine = ENGINES[TORCH_CLASSIC]
    wrapper_class = FullyShardedDataParallel
    source_class = FlatParamUnits

    def __init__(self, model: nn.Module, source: FlatParamUnits) -> None:
        super().__init__(model, source)
        self._flats = {
            unit.index: _Flat(handle, unit, _torch.shard_rank_of(handle))
            for unit in self.units
            for handle in [self._groups[unit.index]]
        }
        self._wrappers = list(_torch.wrappers_below(model))

    def is_left_unaveraged(self, unit: int) -> bool:
        """Return whether the wrapper replicates a unit over several ranks without averaging its gradients."""
        return _torch.is_left_unaveraged(self._flats[unit].handle)

    def check_can_copy(self, name: str, largest: Largest) -> None:
        """Raise UsageError if tensor parallelism splits the model, or it holds gradients not reduced; collective."""
        if any(_torch.is_split_otherwise(flat.handle) for flat in self._flats.values()):
            raise UsageError(
                f"tensor parallelism splits {name!r} in torch's FullyShardedDataParallel, which verify does not know: "
                "use fully_shard"
            )
        if largest(len(self.unreduced())):
            raise UsageError(
                f"{name!r} holds gradients that were accumulated in no_sync() and are not reduced yet; clear them "
                "before verify: call optimizer.zero_grad() in a %%fsdp cell"
            )

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return this rank's tensors of a unit, by name; gradients are those that an optimizer gets."""
        found, flat = dict(super().tensors(unit)), self._flats[unit]
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
            _torch.reshard_handle(flat.handle)

    @torch.no_grad()
    def copy(
        self, memo: dict[int, Any], optimizers: Optimizers, largest: Largest
    ) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return plain copies of the model and its optimizers; collective.

        Raises:
            HoldingsDiffer: only some ranks hold a gradient or optimizer state.
        """
        check_same_holdings(self._holdings(optimizers), largest)
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
            for number, module, name in _torch.all_places_of(flat.handle):
                memo[id(getattr(module, name))] = new[number]
            mapping |= zip(flat.held, [tuple(new)] if flat.is_one else [(plain,) for plain in new], strict=True)
        return mapping

    def _finish(self, plains: _Plains, memo: Mapping[int, Any]) -> None:
        """Give the copies of modules their parameters, the wrapper's methods, and the dtypes of their buffers."""
        for wrapper, _, _ in self._wrappers:
            _torch.plain_module(memo[id(wrapper)])
        for index, flat in self._flats.items():
            for number, module, name in _torch.all_places_of(flat.handle):
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
        values = flat.split(_torch.flat_shard_of(flat.handle).detach())
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
                    for _, module, name in _torch.all_places_of(each)
                ),
            )

    def flat_parts(self) -> Iterator[list[str]]:
        """Yield the names of the parameters in each flat parameter: all get a gradient if one of them is used."""
        for flat in self._flats.values():
            yield [join(self.paths[module], name) for module, name in _torch.flat_places_of(flat.handle)]

    def groups(self) -> Mapping[str, Sequence[dist.ProcessGroup]]:
        """Return the process groups over which the gradient of each parameter is averaged in turn, by name."""
        return {
            join(self.paths[module], name): _torch.averaging_groups_of(flat.handle)
            for flat in self._flats.values()
            for _, module, name in _torch.all_places_of(flat.handle)
        }

    def whole_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names, without wrappers, and the whole values of all parameters; collective."""
        managed = set()
        for flat in self._flats.values():
            values = flat.split(_torch.flat_shard_of(flat.handle).detach())
            for value, (module, name) in zip(values, _torch.flat_places_of(flat.handle), strict=True):
                managed.add(join(self.paths[module], name))
                yield join(self.paths[module], name), value
        for name, param in self._whole():
            if name not in managed:
                yield name, param.detach().clone()

    def _whole(self) -> Iterator[tuple[str, nn.Parameter]]:
        own = {id(each) for flat in self._flats.values() for each in (flat.handle.flat_param, *flat.held)}
        names = self.names
        yield from ((names[id(param)], param) for param in self.model.parameters() if id(param) not in own)

    def owned(self, unit: int) -> set[int]:
        """Return the ids of the parameters of a unit that an optimizer may hold."""
        return set(map(id, self._flats[unit].held))

    def unreduced(self) -> tuple[int, ...]:
        """Return the units with gradients that were not reduced."""
        return tuple(i for i, flat in self._flats.items() if _torch.flat_grad_of(flat.handle) is not None)

    def drop_full_grads(self, units: Iterable[int]) -> None:
        """Drop all gradients of units, and forget a step that raised."""
        for index in units:
            _torch.forget_iteration(self._flats[index].handle)

    def in_no_unit(self) -> Sequence[str]:
        """Return the names of the trained parameters that are in no unit."""
        return [name for name, param in self._whole() if param.requires_grad]

    @classmethod
    def shard(
        cls, command: Shard, plain: PlainModel, plan: Sequence[Unit], device: torch.device, optimizers: Optimizers
    ) -> nn.Module:
        """Return a plain model in a wrapper, each of its units in its own; collective with meta parameters.

        Raises:
            UsageError: there is no accelerator to offload from.
            TypeError, ValueError, ...: torch refuses.
        """
        if command.offload and backend_of(device).is_host:
            raise UsageError(
                "torch's FullyShardedDataParallel offloads only from an accelerator: leave out --offload, with which "
                "nothing would move here, or use --api fully_shard"
            )
        inner = frozenset(plain.inner)
        names: dict[torch.Tensor, str] = {param: name for name, param in named_params(plain.model)}
        states = [_by_name(optimizer, names) for optimizer in optimizers]
        with warnings_in_plain_words():
            wrapper = FullyShardedDataParallel(
                plain.model,
                auto_wrap_policy=CustomPolicy(lambda module: module in inner),
                device_mesh=plain.mesh,
                device_id=device,
                **wrapper_options(command, fsdp),
                ignored_states=list(plain.ignored),
                # ranks may draw different numbers, and copies would stay different
                sync_module_states=any(param.is_meta for param in names),
            )
            for optimizer, state in zip(optimizers, states, strict=True):
                _rewrap(wrapper, plan, optimizer, state)
        return wrapper


@dataclass(frozen=True)
class _PlainOptimizer:
    """An optimizer of a plain model, by the names of parameters, as torch's functions for its wrapper take it.

    Attributes:
        state: whole state of each parameter that has some.
        groups: options of each group, with ``params``: names of its parameters.
    """

    state: dict[str, Any]
    groups: list[dict[str, Any]]


def _by_name(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> _PlainOptimizer:
    return _PlainOptimizer(
        {names[param]: state for param, state in optimizer.state.items() if param in names},
        [group | {"params": [names[p] for p in group["params"] if p in names]} for group in optimizer.param_groups],
    )


def _rewrap(
    wrapper: FullyShardedDataParallel, plan: Sequence[Unit], optimizer: torch.optim.Optimizer, plain: _PlainOptimizer
) -> None:
    """Give an optimizer the wrapper's parameters and its part of the state; collective if there is some."""
    now = dict(named_params(wrapper))
    flat_of = {part.fqn: now.get(flat.fqn) for unit in plan for flat in unit.params for part in flat.parts}
    for group, before in zip(optimizer.param_groups, plain.groups, strict=True):
        held = (now.get(name) if flat_of.get(name) is None else flat_of[name] for name in before["params"])
        group["params"] = list(dict.fromkeys(param for param in held if param is not None))
    optimizer.state.clear()
    if plain.state:
        whole = {"state": plain.state, "param_groups": plain.groups}
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(wrapper, optimizer, whole))
