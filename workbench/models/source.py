"""The common part of the sources of torch's own units: the announced units, and the bytes that they hold."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine import probe
from workbench.engine.module_names import named_params, names_below
from workbench.engine.probe import BufferHandle
from workbench.events import UNIT_INDICES, UNWATCHED, Category, Edge, Kind, ParamTensors, Phase, Unit
from workbench.models.c10d import CollectiveWatch, Within
from workbench.models.patches import Patches, Watching
from workbench.models.sharded_model import ShardedModel, UnitLayout

Group = TypeVar("Group")


@dataclass(frozen=True)
class UnitPlace:
    """Place of a group in its model.

    Attributes:
        path: of its module.
        paths: of all modules of the model.
        index: of the unit.
        root: index of the model's root unit.
    """

    path: str
    paths: Mapping[nn.Module, str]
    index: int
    root: int


@dataclass(eq=False)
class WatchedUnit:
    """A unit that was announced.

    Attributes:
        unit: its description, as last announced.
        index: of the unit.
        full_nbytes: bytes of the full parameters, padded, in the compute dtype.
        grads_nbytes: announced bytes of full gradients.
        in_backward: whether its backward was announced, and not its end.
        holds_full: whether the full parameters are counted.
        num_backwards: of DistributedDataParallel: backwards that have ended.
        is_synced: of DistributedDataParallel: whether the newest forward that trains was outside of ``no_sync``.
    """

    unit: Unit
    full_nbytes: int
    grads_nbytes: int = 0
    in_backward: bool = False
    holds_full: bool = False
    num_backwards: int = 0
    is_synced: bool = True
    index: int = field(init=False)

    def __post_init__(self) -> None:
        self.index = self.unit.index

    def hold_full(self) -> None:
        """Announce that the full parameters are allocated, unless they were."""
        if not self.holds_full:
            self.holds_full = True
            probe.memory(Category.UNSHARDED_PARAMS, self.index, self.full_nbytes)

    def free_full(self) -> None:
        """Announce that the full parameters are freed, unless they were."""
        if self.holds_full:
            self.holds_full = False
            probe.memory(Category.UNSHARDED_PARAMS, self.index, -self.full_nbytes)

    def set_grads(self, nbytes: int) -> None:
        """Announce the change of the bytes of full gradients."""
        probe.memory(Category.UNSHARDED_GRADS, self.index, nbytes - self.grads_nbytes)
        self.grads_nbytes = nbytes

    def forget(self) -> None:
        """Announce that no full parameters and no full gradients are held."""
        self.free_full()
        self.set_grads(0)
        self.in_backward = False


class TorchUnits(ABC, Generic[Group]):
    """A source whose units are objects of torch's, here called groups."""

    name: str
    what: str
    """Subject of the sentence that says that they are not seen, with its verb."""

    @abstractmethod
    def install(self, changes: Patches) -> None:
        """Watch until ``changes`` are undone."""

    def __init__(self, collectives: CollectiveWatch) -> None:
        self._collectives = collectives
        self._watched: weakref.WeakKeyDictionary[Group, WatchedUnit] = weakref.WeakKeyDictionary()
        self._by_index: dict[int, WatchedUnit] = {}

    # ---- Source

    def has(self, unit: int) -> bool:
        """Return whether a unit exists."""
        return unit in self._by_index

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return this rank's tensors of a unit's parameters, by name."""
        pairs = self._watched.items()
        return next((self._tensors_of(group, watched.unit) for group, watched in pairs if watched.index == unit), {})

    @abstractmethod
    def layout_of(self, group: Group) -> UnitLayout:
        """Return where a unit is."""

    @abstractmethod
    def _tensors_of(self, group: Group, unit: Unit) -> Mapping[str, ParamTensors]: ...

    # ---- descriptions

    @staticmethod
    @abstractmethod
    def groups_below(model: nn.Module) -> Iterator[tuple[str, Group]]:
        """Yield the groups of a model, in the order of its modules, with the paths of their modules."""

    @abstractmethod
    def _describe(self, group: Group, place: UnitPlace) -> Unit: ...

    @abstractmethod
    def _nbytes(self, group: Group, unit: Unit) -> tuple[int, int]:
        """Return the bytes of this rank's shards and of the full parameters, both padded."""

    @abstractmethod
    def _policy(self, group: Group) -> bool | int:
        """Return ``reshard_after_forward`` of a group: a number of ranks, if it is not all."""

    def note(self, models: Iterable[nn.Module]) -> None:
        """Announce the units of models that are new, or whose place was unknown, in the order of their modules.

        Args:
            models: none is part of another.
        """
        for model in models:
            paths = names_below([model])
            roots: list[tuple[str, int]] = []
            for path, group in self.groups_below(model):
                watched = self._watched.get(group)
                index = next(UNIT_INDICES) if watched is None else watched.index
                root = next((top for above, top in roots if not above or path.startswith(f"{above}.")), None)
                if root is None:
                    root = index
                    roots.append((path, index))
                if watched is None or (watched.unit.name, watched.unit.root) != (path, root):
                    self._announce(group, self._describe(group, UnitPlace(path, paths, index, root)))

    def _announce(self, group: Group, unit: Unit) -> None:
        if unit.comm and not self._collectives.is_watching:
            unit = replace(unit, comm=UNWATCHED)
        if probe.active is not None:
            probe.active.unit(unit)
        watched = self._watched.get(group)
        if watched is not None:
            watched.unit = unit
            return
        shard_nbytes, full_nbytes = self._nbytes(group, unit)
        self._watched[group] = self._by_index[unit.index] = WatchedUnit(unit, full_nbytes)
        handle = BufferHandle(Category.SHARDED_PARAMS, unit.index, shard_nbytes)
        weakref.finalize(group, self._drop, unit.index, handle).atexit = False

    def _drop(self, unit: int, handle: BufferHandle) -> None:
        """Forget a unit whose group is gone, and let its handle go."""
        del self._by_index[unit]

    def _refreshed(self, group: Group, watched: WatchedUnit) -> WatchedUnit:
        """Return the unit; announce its policy if it has changed."""
        policy = self._policy(group)
        if policy != watched.unit.reshard_after_forward:
            self._announce(group, replace(watched.unit, reshard_after_forward=policy))
        return watched

    def renew(self, new_of: Mapping[int, dist.ProcessGroup]) -> None:
        """Let all models use new process groups, by the ids of the old ones; what was under way is over."""
        for group, watched in tuple(self._watched.items()):
            probe.event(Kind.RESET, Edge.INSTANT, watched.index)
            self._renew(group, new_of)
            watched.forget()

    def announce_again(self) -> None:
        """Announce all units, as their collectives are not watched any more."""
        for group, watched in tuple(self._watched.items()):
            self._announce(group, watched.unit)

    def abandon(self) -> None:
        """Announce that no unit is watched any more."""
        for watched in self._watched.values():
            probe.event(Kind.RESET, Edge.INSTANT, watched.index)
            watched.forget()
        probe.phase(Phase.IDLE)

    @abstractmethod
    def _renew(self, group: Group, new_of: Mapping[int, dist.ProcessGroup]) -> None: ...

    def unreduced(self) -> Iterator[int]:
        """Yield the indices of units with full gradients that were not reduced, outside a backward."""
        yield from (watched.index for watched in tuple(self._watched.values()) if watched.grads_nbytes)

    def groups_in(self, model: nn.Module) -> list[tuple[Unit, Group]]:
        """Return the units of a model that were announced, in the order of its modules, and what they are to torch."""
        found = ((self._watched.get(group), group) for _, group in self.groups_below(model))
        return [(watched.unit, group) for watched, group in found if watched is not None]

    def backwards(self) -> Mapping[int, int]:
        """Return how often gradients were averaged, by unit, of models that have some; empty: it is not counted."""
        return {}

    def num_backwards(self, group: Group) -> int | None:
        """Return how many backwards of a unit were averaged, or None if they are not counted."""
        return None

    # ---- backward

    @staticmethod
    def _begin_backward(watched: WatchedUnit) -> Watching:
        """Watch a call that unshards a unit for its backward: announce that the backward begins."""
        probe.phase(Phase.PRE_BACKWARD)
        yield
        probe.phase(Phase.BACKWARD)
        watched.in_backward = True
        probe.event(Kind.BACKWARD, Edge.BEGIN, watched.index)

    def _finish_backward(self, watched: WatchedUnit, nbytes: Callable[[], int]) -> Watching:
        """Watch a call that reshards a unit and reduces its gradients: announce that its backward ends."""
        if watched.in_backward:
            watched.in_backward = False
            probe.event(Kind.BACKWARD, Edge.END, watched.index)
        probe.phase(Phase.POST_BACKWARD)
        watched.set_grads(nbytes())
        with Within(self._collectives, watched.index):
            yield
        if watched.grads_nbytes:  # not reduced: there are no others
            watched.set_grads(nbytes())

    @staticmethod
    def _end_of_backward(*_: Any, **__: Any) -> Watching:  # noqa: ANN401 - as the original
        """Watch the function that ends the backward of a whole model."""
        yield
        probe.phase(Phase.IDLE)


class WatchedModel(ShardedModel, Generic[Group]):
    """A model that torch shards: its units are those that a source has announced."""

    source_class: ClassVar[type[TorchUnits[Any]]]

    def __init__(self, model: nn.Module, source: TorchUnits[Any]) -> None:
        found = source.groups_in(model)
        super().__init__(model)
        self._source = source
        self._units = [unit for unit, _ in found]
        self._groups = {unit.index: group for unit, group in found}

    @classmethod
    def runs(cls, model: nn.Module) -> bool:
        """Return whether the engine runs a part of a model."""
        return any(True for _ in cls.source_class.groups_below(model))

    @property
    def units(self) -> Sequence[Unit]:
        """Its units, in the order of its modules."""
        return self._units

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return this rank's tensors of a unit's parameters, by name."""
        return self._source.tensors(unit)

    def num_backwards(self, unit: int) -> int | None:
        """Return how many backwards of a unit were averaged, or None if they are not counted."""
        return self._source.num_backwards(self._groups[unit])

    def layout_of(self, unit: int) -> UnitLayout:
        """Return where a unit is."""
        return self._source.layout_of(self._groups[unit])

    def unaveraged(self) -> Sequence[str]:
        """Return the names of ``in_no_unit``, but no DTensors: a mesh of their own may average them, as of experts."""
        split = {name for name, param in named_params(self.model) if isinstance(param, DTensor)}
        return [name for name in self.in_no_unit() if name not in split]


def drop(handle: BufferHandle) -> None:
    """Hold the handle until a group is gone, and let it go then."""
