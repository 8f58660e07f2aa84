"""Events of training that the workbench's engine does not run: torch's own FSDP, and every collective of c10d.

Five sources. :class:`Watch` starts all but the last one:

- ``c10d.py``: every collective of a c10d program, through the hooks of process groups (torch 2.14 and newer), or
  else through the methods of ``ProcessGroup`` and the operators of functional collectives, which see what Python calls
  but not what C++ does, such as the reducer of DistributedDataParallel.
- ``torch_fully_shard.py``: the units of models that torch's ``fully_shard`` shards;
- ``torch_wrapper.py``: those of torch's classic wrapper, ``FullyShardedDataParallel``;
- ``torch_ddp.py``: models in torch's ``DistributedDataParallel``;
- ``own.py``: those of an FSDP of your own, whose code announces them.

Nothing changes in the program that is watched: no argument, no result, no stream, no order. All uses of torch's private
API are in ``_torch_private.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from workbench.engine import probe
from workbench.events import Unit
from workbench.models import c10d
from workbench.models._torch_private import (
    HAS_HOOKS,
    groups_below,
    handles_below,
    observe_calls,
    stop_observing_groups,
)
from workbench.models.c10d import CollectiveWatch
from workbench.models.own import OwnParam, OwnUnit, OwnUnits, reset_all
from workbench.models.patches import Patches, complain
from workbench.models.source import UnitLayout
from workbench.models.torch_ddp import DataParallelUnits
from workbench.models.torch_fully_shard import FullyShardUnits
from workbench.models.torch_wrapper import FlatParamUnits

__all__ = [
    "OwnParam",
    "OwnUnit",
    "OwnUnits",
    "Watch",
    "is_sharded_by_torch",
    "log_metric",
    "sees_all_collectives",
]


def log_metric(name: str, value: float) -> None:
    """Record a number of the step, such as its loss; ``%fsdp training`` draws it. No-op where nothing records.

    After the end of a step it belongs to that step.
    """
    if probe.active is not None:
        probe.active.metric(name, float(value))


def is_sharded_by_torch(model: nn.Module) -> bool:
    """Return whether a part of a model is sharded by torch's ``fully_shard`` or in its ``FullyShardedDataParallel``."""
    return any(True for found in (groups_below(model), handles_below(model)) for _ in found)


def sees_all_collectives() -> bool:
    """Return whether this torch announces every collective, also those that C++ issues; else only Python's are seen."""
    return HAS_HOOKS


class Watch:
    """Announces to the active probe what c10d and torch's own FSDP do, from :meth:`begin` to :meth:`end`.

    What cannot be watched with this version of torch, or fails later, is left out.

    Args:
        say: receives a sentence about it.
    """

    def __init__(self, say: Callable[[str], object] = complain) -> None:
        self._collectives = CollectiveWatch()
        self._replicated = DataParallelUnits(self._collectives)
        self._units: tuple[FullyShardUnits | FlatParamUnits | DataParallelUnits, ...] = (
            FullyShardUnits(self._collectives),
            FlatParamUnits(self._collectives),
            self._replicated,
        )
        self._say = say
        self._new_patches()

    def _new_patches(self) -> None:
        """Make the patches of one time: hooks of an earlier one stay where they are, and do nothing any more."""
        self._calls = Patches("collectives are", self._say, self._abandon_calls)
        self._patches = [Patches(units.what, self._say, units.abandon) for units in self._units]

    def begin(self) -> Watch:
        """Begin to watch; what an earlier time told the probe still holds."""
        self._new_patches()
        if probe.active is not None:
            for units in self._units:
                probe.active.source(units)
        c10d.active = self._collectives
        self._calls.install(lambda patches: observe_calls(self._collectives, patches))
        for units, patches in zip(self._units, self._patches, strict=True):
            patches.install(units.install)
        return self

    def _abandon_calls(self) -> None:
        self._collectives.abandon()
        for units in self._units:
            units.announce_again()

    def note(self, models: Iterable[nn.Module]) -> None:
        """Announce the units of models, none of which is part of another; the others are found as they train."""
        models = tuple(models)
        for units in self._units:
            units.note(models)

    def units_of(self, model: nn.Module) -> tuple[Unit, ...]:
        """Return the announced units of a model that torch shards; empty if torch does not."""
        return tuple(unit for units in self._units for unit in units.units_of(model))

    def layout_of(self, unit: Unit) -> UnitLayout | None:
        """Return where an announced unit is; None: it belongs to another source."""
        return next(filter(None, (units.layout_of(unit.index) for units in self._units)), None)

    def unreduced(self) -> tuple[int, ...]:
        """Return the indices of the units whose newest gradients are this rank's own, as under ``no_sync``."""
        return tuple(index for units in self._units for index in units.unreduced())

    def backwards(self) -> Mapping[int, int]:
        """Return how often ``DistributedDataParallel`` averaged gradients, by unit, of models that have some."""
        return self._replicated.backwards()

    def num_backwards(self, unit: int) -> int | None:
        """Return how often a model in ``DistributedDataParallel`` ran a backward; None: unknown, or no such model."""
        return self._replicated.num_backwards(unit)

    def settle(self) -> None:
        """Announce what has ended meanwhile; callable from any thread."""
        self._collectives.settle()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not announce the collectives of the body, which are the workbench's own, as the program's."""
        before, self._collectives.is_paused = self._collectives.is_paused, True
        try:
            yield
        finally:
            self._collectives.is_paused = before

    def renew(self, replaced: Iterable[tuple[dist.ProcessGroup, dist.ProcessGroup]]) -> None:
        """Let all models use new process groups; what was under way is over.

        Args:
            replaced: each old group with its replacement.
        """
        new_of = {id(old): new for old, new in replaced}
        self._collectives.num_renewals += 1
        for units in self._units:
            units.renew(new_of)
        reset_all()

    def end(self) -> None:
        """Stop watching."""
        c10d.active = None
        for patches in (self._calls, *self._patches):
            patches.undo()
        self._collectives.settle(is_last=True)
        stop_observing_groups()
