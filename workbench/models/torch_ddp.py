"""Models in torch's ``DistributedDataParallel``: their parameters, steps and all-reduces, as events."""

# ruff: noqa: ANN401 - arguments and results of torch's functions are passed on

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from workbench.engine import probe
from workbench.engine.module_names import clean, named_params, names_below
from workbench.engine.probe import BufferHandle
from workbench.engine.unsharding import copied
from workbench.errors import UsageError
from workbench.events import (
    C10D,
    ENGINES,
    TORCH_DDP,
    Category,
    Edge,
    Kind,
    Param,
    ParamTensors,
    Phase,
    Unit,
    unit_words,
)
from workbench.models import _torch_private as _torch
from workbench.models.c10d import CollectiveWatch, Within, count, holds
from workbench.models.patches import RESULT, Patches, Watching
from workbench.models.sharded_model import (
    Averaged,
    Casts,
    Largest,
    Optimizers,
    OwnGrads,
    UnitLayout,
    average_over,
    join,
)
from workbench.models.source import TorchUnits, UnitPlace, WatchedModel, WatchedUnit, drop


class DataParallelUnits(TorchUnits[DistributedDataParallel]):
    """Source of the events of every model in ``DistributedDataParallel``, which is one unit.

    Its backward begins when the first gradient reaches an output, and ends when all gradients are averaged.
    """

    name = TORCH_DDP
    what = "models in torch's DistributedDataParallel are"

    def __init__(self, collectives: CollectiveWatch) -> None:
        super().__init__(collectives)
        # by id, which no other one can get: a wrapper keeps its parameters
        self._averaged: weakref.WeakKeyDictionary[DistributedDataParallel, Container[int]] = weakref.WeakKeyDictionary()

    def install(self, changes: Patches) -> None:
        """Watch until ``changes`` are undone."""
        self._patches = changes
        changes.wrap(DistributedDataParallel, "__init__", self._made)
        changes.wrap(DistributedDataParallel, "forward", self._forward, if_probed=True)
        if hasattr(DistributedDataParallel, "finalize_backward"):  # torch 2.15; called by the program
            changes.wrap(DistributedDataParallel, "finalize_backward", self._finalize, if_probed=True)

    def _made(self, model: DistributedDataParallel, *_: Any, **__: Any) -> Watching:
        """Watch the making of a wrapper."""
        yield
        self._remember(model)

    def _remember(self, model: DistributedDataParallel) -> None:
        """Remember which parameters a wrapper averages: those that are trainable when it makes its buckets."""
        self._averaged[model] = {id(param) for param in model.module.parameters() if param.requires_grad}

    def averages(self, model: DistributedDataParallel, param: nn.Parameter) -> bool:
        """Return whether a wrapper averages the gradients of a parameter of its; True if it was not seen being made."""
        known = self._averaged.get(model)
        return known is None or id(param) in known

    # ---- descriptions

    def groups_in(self, model: nn.Module) -> list[tuple[Unit, DistributedDataParallel]]:
        """Return the units of a model that were announced; one whose parameters have changed is announced again."""
        found = super().groups_in(model)
        for unit, group in found:
            now = self._describe(group, UnitPlace(unit.name, {}, unit.index, unit.root))
            if now.params != unit.params:
                self._announce(group, now)
        return [(self._watched[group].unit, group) for _, group in found]

    @staticmethod
    def groups_below(model: nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
        """Yield the wrappers of a model, in the order of its modules, with their paths."""
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
        is_new = group not in self._watched
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
        if group in self._averaged:
            self._remember(group)

    def layout_of(self, group: DistributedDataParallel) -> UnitLayout:
        """Return where a unit is."""
        replicas = tuple(dist.get_process_group_ranks(group.process_group))
        return UnitLayout(modules=(group.module,), shard_ranks=(dist.get_rank(),), replicas=replicas)

    def _tensors_of(self, group: DistributedDataParallel, unit: Unit) -> Mapping[str, ParamTensors]:
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in group.module.modules():
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(param, []).append((module, name))
        return {
            info.fqn: ParamTensors(
                shard=param,
                shard_rank=0,
                full=param,
                full_grads=(),
                sharded_grad=param.grad,
                places=tuple(places[param]),
            )
            for info, param in zip(unit.params, group.module.parameters(), strict=True)
        }

    # ---- forward and backward

    def unreduced(self) -> Iterator[int]:
        """Yield the indices of models whose newest forward that trains was within ``no_sync``."""
        yield from (watched.index for watched in tuple(self._watched.values()) if not watched.is_synced)

    def backwards(self) -> Mapping[int, int]:
        """Return the number of backwards of each model that has gradients; empty once they are not watched."""
        return (
            {}
            if self._patches.is_off
            else {
                watched.index: watched.num_backwards
                for model, watched in tuple(self._watched.items())
                if any(param.grad is not None for param in model.parameters())
            }
        )

    def num_backwards(self, group: DistributedDataParallel) -> int | None:
        """Return the number of backwards of a model, or None once they are not watched."""
        return None if self._patches.is_off else self._watched[group].num_backwards

    def _forward(self, model: DistributedDataParallel, *_: Any, **__: Any) -> Watching:
        watched = self._watched_unit(model)
        if torch.is_grad_enabled():
            watched.is_synced = model.require_backward_grad_sync
        probe.phase(Phase.FORWARD)
        probe.event(Kind.FORWARD, Edge.BEGIN, watched.index)
        with Within(self._collectives, watched.index):  # buffers are broadcast
            result = yield RESULT
        probe.event(Kind.FORWARD, Edge.END, watched.index)
        begun = _Backward(self, model, watched, self._patches)
        for output in _torch.tensors_in(result):
            if output.requires_grad:
                output.register_hook(self._patches.hook(begun, "gradients of DistributedDataParallel's outputs"))

    def _watched_unit(self, model: DistributedDataParallel) -> WatchedUnit:
        watched = self._watched.get(model)
        if watched is None or watched.unit.num_reductions != _torch.num_buckets(model):
            if watched is not None:
                place = UnitPlace(watched.unit.name, {}, watched.index, watched.unit.root)
                self._announce(model, self._describe(model, place))
            else:
                self.note([model])
        return self._watched[model]

    def begin_backward(self, watched: WatchedUnit) -> None:
        """Announce that the backward of a model begins; its all-reduces belong to its unit."""
        probe.phase(Phase.BACKWARD)
        watched.in_backward = True
        probe.event(Kind.BACKWARD, Edge.BEGIN, watched.index)
        self._collectives.unit = watched.index

    def end_backward(self, model: DistributedDataParallel, watched: WatchedUnit) -> None:
        """Announce that the backward of a model has ended, and count the gradients that it left."""
        self._collectives.unit = probe.NO_UNIT
        self._collectives.settle()
        watched.in_backward = False
        watched.num_backwards += 1
        probe.event(Kind.BACKWARD, Edge.END, watched.index)
        probe.phase(Phase.IDLE)
        self._count_grads(model, watched)

    def _finalize(self, model: DistributedDataParallel) -> Watching:
        yield
        self._collectives.settle()
        self._count_grads(model, self._watched_unit(model))

    @staticmethod
    def _count_grads(model: DistributedDataParallel, watched: WatchedUnit) -> None:
        for param in () if model.gradient_as_bucket_view else model.module.parameters():
            grad = param.grad
            if grad is None:
                continue
            counted = holds(grad)
            if counted is None or not counted.is_announced:
                count(grad, BufferHandle(Category.SHARDED_GRADS, watched.index, grad.nbytes))


class _Backward:
    """Hook on the outputs of a forward: the first gradient begins the backward."""

    def __init__(
        self, units: DataParallelUnits, model: DistributedDataParallel, watched: WatchedUnit, patches: Patches
    ) -> None:
        self._units, self._watched, self._model = units, watched, weakref.ref(model)
        self._finish = patches.hook(self._end, "the end of DistributedDataParallel's backward")
        self._has_begun = False

    def __call__(self, _: torch.Tensor) -> None:
        if self._has_begun or self._watched.in_backward or probe.active is None:
            return
        self._has_begun = True
        self._units.begin_backward(self._watched)
        # the reducer queues its own end of the backward after this one, and what is queued there comes after it
        _torch.at_end_of_backward(lambda: _torch.at_end_of_backward(self._finish))

    def _end(self) -> None:
        model = self._model()
        if model is not None and self._watched.in_backward and probe.active is not None:
            self._units.end_backward(model, self._watched)


def _described(path: str, name: str, param: torch.Tensor) -> Param:
    shape = tuple(param.shape) or (1,)
    return Param(
        fqn=clean(join(path, name)),
        shape=shape,
        global_shape=shape,
        dtype=str(param.dtype).removeprefix("torch."),
        itemsize=param.dtype.itemsize,
        shard_dim=0,
        rows_per_rank=(shape[0],),
        padded_rows=shape[0],
        trainable=param.requires_grad,
    )


def without_wrappers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the path of each module of a model, without wrappers, those of ``DistributedDataParallel`` included."""
    tops = [path for path, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
    return {module: _without(tops, path) for module, path in names_below([model]).items()}


def _without(tops: Sequence[str], path: str) -> str:
    """Return a path without what the wrappers at ``tops`` add."""
    for top in tops:
        inner = join(top, "module")
        if path == inner or path.startswith(f"{inner}."):
            return ".".join(filter(None, (top, path[len(inner) + 1 :])))
    return path


class ReplicatedModel(WatchedModel[DistributedDataParallel]):
    """A model in, or with parts in, torch's ``DistributedDataParallel``."""

    engine = ENGINES[TORCH_DDP]
    wrapper_class = DistributedDataParallel
    source_class = DataParallelUnits
    _source: DataParallelUnits

    def __init__(self, model: nn.Module, source: DataParallelUnits) -> None:
        super().__init__(model, source)
        self._parts = {path: part for path, part in model.named_modules() if isinstance(part, DistributedDataParallel)}

    def check_can_copy(self, name: str, largest: Largest) -> None:
        """Raise UsageError if ``DistributedDataParallel`` itself has mixed precision, or ignores parameters.

        Args:
            name: of the model.
            largest: unused.
        """
        ignored = next(iter(self.ignored()), None)
        if ignored:
            raise UsageError(
                f"DistributedDataParallel ignores parameters of {name!r}, such as {ignored!r}: whether each rank has "
                "its own, as of experts, is unknown, so there is no unsharded copy to compare with"
            )
        if any(part.mixed_precision is not None for part in self._parts.values()):
            raise UsageError(
                f"{name!r} has the mixed_precision of DistributedDataParallel, which verify does not know: use "
                "torch.autocast in the step, or leave it out"
            )

    @functools.cached_property
    def paths(self) -> dict[nn.Module, str]:
        """The path of each module, without wrappers."""
        return without_wrappers(self.model)

    def reshard(self) -> None:
        """No-op: every rank holds all parameters."""

    @torch.no_grad()
    def copy(
        self, memo: dict[int, Any], optimizers: Optimizers, largest: Largest
    ) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
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
        return {name: (part.process_group,) for name, part, _, is_ignored in self._params() if not is_ignored}

    def _params(self) -> Iterator[tuple[str, DistributedDataParallel, nn.Parameter, bool]]:
        """Yield the name of each parameter in a wrapper, the wrapper, the parameter, and whether it is ignored."""
        for path, part in self._parts.items():
            for name, param in part.module.named_parameters():
                yield clean(join(path, name)), part, param, name in part.parameters_to_ignore

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
        return set(map(id, self._groups[unit].parameters()))

    def part_of(self, unit: Unit, name: str) -> tuple[str, set[int]]:
        """Return the module that has a parameter, as text, and the ids of its parameters: a unit is the whole model."""
        path = name.rpartition(".")[0]
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

    def in_no_unit(self) -> Sequence[str]:
        """Return the names of the trained parameters that no wrapper averages."""
        averaged, names, late = self.groups(), self.names, self.late()
        trained = (names[id(param)] for param in self.model.parameters() if param.requires_grad)
        return [name for name in trained if name not in averaged or name in late]

    def late(self) -> Sequence[str]:
        """Return the names of the trained parameters that were added or unfrozen after their wrapper was made."""
        return [
            name
            for name, part, param, is_ignored in self._params()
            if param.requires_grad and not is_ignored and not self._source.averages(part, param)
        ]

    def ignored(self) -> Sequence[str]:
        """Return the names of the trained parameters that the user listed for a wrapper to ignore."""
        told = {name for name, _, _, is_ignored in self._params() if is_ignored}
        return [name for name in self.in_no_unit() if name in told]

    def own_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that no wrapper broadcasts, with their names without wrappers."""
        broadcast = {
            id(buffer)
            for part in self._parts.values()
            if part.broadcast_buffers
            for name, buffer in part.module.named_buffers()
            if name not in part.parameters_to_ignore
        }
        for name, buffer in self.model.named_buffers():
            if id(buffer) not in broadcast:
                yield _without(tuple(self._parts), clean(name)), buffer


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
            _torch.at_end_of_backward(self._average)

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

    def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
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
