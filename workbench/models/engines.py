"""The engines that run models, one class each, and the watch that records those that are not the workbench's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import nn

from workbench import engine
from workbench.engine import classic, fsdp_state, probe
from workbench.engine.event_source import SOURCE
from workbench.events import ENGINES, Engine
from workbench.models import c10d
from workbench.models._torch_private import observe_calls, stop_observing_groups
from workbench.models.activation_watch import ActivationWatch
from workbench.models.c10d import CollectiveWatch
from workbench.models.ours import WorkbenchModel
from workbench.models.own import reset_all
from workbench.models.patches import Patches, complain
from workbench.models.sharded_model import ShardedModel
from workbench.models.source import WatchedModel
from workbench.models.torch_ddp import without_wrappers
from workbench.models.torch_fully_shard import FullyShardModel
from workbench.models.torch_wrapper import WrapperModel
from workbench.protocol.policy import CLASSIC, FULLY_SHARD

MODELS: tuple[type[ShardedModel], ...] = tuple(resolve_name(row.model) for row in ENGINES.values())
"""The models of all engines, the workbench's first."""

WATCHED: tuple[type[WatchedModel[Any]], ...] = tuple(each for each in MODELS if issubclass(each, WatchedModel))
"""The models of engines that are watched."""

OF_COMMANDS: Mapping[str, type[FullyShardModel] | type[WrapperModel]] = {
    FULLY_SHARD: FullyShardModel,
    CLASSIC: WrapperModel,
}
"""The models that ``shard --engine torch`` makes, by API."""


def is_sharded(model: nn.Module) -> bool:
    """Return whether an engine runs a part of a model."""
    return any(each.runs(model) for each in MODELS)


def is_sharded_by_torch(model: nn.Module) -> bool:
    """Return whether a part of a model is sharded by torch's ``fully_shard`` or in its ``FullyShardedDataParallel``."""
    return any(each.runs(model) for each in WATCHED if each.engine.splits)


def fully_shard_of(module: nn.Module) -> Engine | None:
    """Return the engine whose ``fully_shard`` was called on a module, or None if none was."""
    classes = ((each.engine, each.module_class) for each in MODELS)
    return next((found for found, made in classes if made is not None and isinstance(module, made)), None)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is an engine's, around one of the program's."""
    return isinstance(module, _WRAPPERS)


_WRAPPERS = tuple(each.wrapper_class for each in MODELS if each.wrapper_class is not None)
_FSDP_WRAPPERS = tuple(each.wrapper_class for each in MODELS if each.wrapper_class is not None and each.engine.splits)
_SHARDED = tuple(each.module_class for each in MODELS if each.module_class is not None)


def class_name(module: nn.Module) -> str:
    """Return the name of a module's own class, which ``fully_shard`` replaces, or of that in a wrapper of FSDP."""
    if isinstance(module, _FSDP_WRAPPERS):
        return class_name(cast("nn.Module", module.module))
    return next(cls.__name__ for cls in type(module).__mro__ if not issubclass(cls, _SHARDED))


def paths_below(model: nn.Module) -> dict[nn.Module, str]:
    """Return the path of each module of a model, without the wrappers of any engine."""
    return without_wrappers(model)


def use_ours_as_torchs() -> None:
    """Let what a script imports from torch's FSDP be the workbench's engine."""
    for ours in (engine, classic):
        vars(torchs).update({name: getattr(ours, name) for name in ours.__all__ if hasattr(torchs, name)})


def missed_grads() -> list[str]:
    """Return the names of all units with full gradients that no reduction took, of engines that know."""
    return fsdp_state.missed_grads()


ACTIVATIONS = "WORKBENCH_ACTIVATIONS"
"""Environment variable of the ranks; ``1``: watch activations."""


class Watch:
    """Announces to the active probe what c10d, torch's own FSDP and autograd do, from :meth:`begin` to :meth:`end`.

    What cannot be watched with this version of torch, or fails later, is left out.

    Args:
        say: receives a sentence about it.
    """

    def __init__(self, say: Callable[[str], object] = complain) -> None:
        self.collectives = CollectiveWatch()
        self._units = tuple(each.source_class(self.collectives) for each in WATCHED)
        self._activations = ActivationWatch()
        self._say = say
        self._new_patches()

    def _new_patches(self) -> None:
        """Make the patches of one time: hooks of an earlier one stay where they are, and do nothing any more."""
        self._calls = Patches("collectives are", self._say, self._abandon_calls)
        self._patches = [Patches(units.what, self._say, units.abandon) for units in self._units]
        self._saved = Patches("activations are", self._say)

    def begin(self) -> Watch:
        """Begin to watch; what an earlier watch announced still holds."""
        self._new_patches()
        if probe.active is not None:
            probe.active.source(SOURCE)
            for units in self._units:
                probe.active.source(units)
        c10d.active = self.collectives
        self._calls.install(lambda patches: observe_calls(self.collectives, patches))
        for units, patches in zip(self._units, self._patches, strict=True):
            patches.install(units.install)
        if os.environ.get(ACTIVATIONS) == "1":
            self._saved.install(self._activations.install)
        return self

    def _abandon_calls(self) -> None:
        self.collectives.abandon()
        for units in self._units:
            units.announce_again()

    def note(self, models: Iterable[nn.Module]) -> None:
        """Announce the units of models, none of which is part of another; the others are found as they train."""
        models = tuple(models)
        self._activations.note(models)
        for units in self._units:
            units.note(models)

    def models_in(self, model: nn.Module) -> tuple[ShardedModel, ...]:
        """Return a model as each engine that runs parts of it sees them; units that were not announced are left out."""
        own: tuple[ShardedModel, ...] = (WorkbenchModel(model),) if WorkbenchModel.runs(model) else ()
        pairs = zip(WATCHED, self._units, strict=True)
        return (*own, *(each(model, units) for each, units in pairs if each.runs(model)))

    def unreduced(self) -> tuple[int, ...]:
        """Return the indices of the units whose newest gradients are this rank's own, as under ``no_sync``."""
        return (*fsdp_state.unreduced_units(), *(index for units in self._units for index in units.unreduced()))

    @staticmethod
    def raised_in() -> int:
        """Return the index of the innermost unit in which a model's last forward raised; -1 if none did, or unknown."""
        return fsdp_state.raised_in()

    @staticmethod
    def discard_step() -> None:
        """Let the workbench's engine drop what is left of a step under way, without waiting for anything."""
        for root in tuple(fsdp_state.roots):
            root.reset_iter_state()

    def backwards(self) -> Mapping[int, int]:
        """Return how often gradients were averaged, by unit, of models that have some, where the engine counts it."""
        return {unit: count for units in self._units for unit, count in units.backwards().items()}

    def settle(self) -> None:
        """Announce what has ended meanwhile; callable from any thread."""
        self.collectives.settle()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not announce the collectives of the body, which are the workbench's own, as the program's."""
        before, self.collectives.is_paused = self.collectives.is_paused, True
        try:
            yield
        finally:
            self.collectives.is_paused = before

    def renew(self, replaced: Iterable[tuple[dist.ProcessGroup, dist.ProcessGroup]]) -> None:
        """Let all models use new process groups; what was under way is over.

        Args:
            replaced: each old group with its replacement.
        """
        new_of = {id(old): new for old, new in replaced}
        self.collectives.num_renewals += 1
        for units in self._units:
            units.renew(new_of)
        reset_all()

    def end(self) -> None:
        """Stop watching."""
        c10d.active = None
        for patches in (self._calls, *self._patches, self._saved):
            patches.undo()
        self.collectives.settle(is_last=True)
        stop_observing_groups()
