"""Events of training that the workbench's engine does not run: torch's own FSDP, and every collective of c10d.

Three sources, which :class:`Watch` starts together:

- ``c10d_calls.py``: every collective of a c10d program, through the hooks of process groups (torch 2.14 and newer), or
  else through the methods of ``ProcessGroup``, which see what Python calls but not what C++ does, such as the reducer
  of DistributedDataParallel.
- ``fully_shard.py``: the units of models that torch's ``fully_shard`` shards.
- ``flat_params.py``: those of torch's classic wrapper, ``FullyShardedDataParallel``.

Nothing changes in the program that is watched: no argument, no result, no stream, no order. All uses of torch's private
API are in ``_torch_private.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from workbench.engine import probe
from workbench.watch._torch_private import (
    HAS_HOOKS,
    Replacements,
    groups_below,
    handles_below,
    observe_calls,
    stop_observing_groups,
)
from workbench.watch.c10d_calls import CollectiveWatch
from workbench.watch.flat_params import FlatParamUnits
from workbench.watch.fully_shard import FullyShardUnits

__all__ = ["Watch", "is_sharded_by_torch", "sees_all_collectives"]


def is_sharded_by_torch(model: nn.Module) -> bool:
    """Return whether a part of a model is sharded by torch's ``fully_shard`` or in its ``FullyShardedDataParallel``."""
    return any(True for found in (groups_below(model), handles_below(model)) for _ in found)


def sees_all_collectives() -> bool:
    """Return whether this torch announces every collective, also those that C++ issues; else only Python's are seen."""
    return HAS_HOOKS


class Watch:
    """Announces to the active probe what c10d and torch's own FSDP do, from :meth:`begin` to :meth:`end`."""

    def __init__(self) -> None:
        self._changes = Replacements()
        self._collectives = CollectiveWatch()
        self._units = (FullyShardUnits(self._collectives), FlatParamUnits(self._collectives))

    def begin(self) -> Watch:
        """Begin to watch; what an earlier time told the probe still holds.

        Raises:
            AttributeError: this version of torch has other names; nothing is watched then.
        """
        if probe.active is not None:
            for units in self._units:
                probe.active.source(units)
        try:
            observe_calls(self._collectives, self._changes)
            for units in self._units:
                units.install(self._changes)
        except BaseException:
            self.end()
            raise
        return self

    def note(self, models: Iterable[nn.Module]) -> None:
        """Announce the units of models, none of which is part of another; the others are found as they train."""
        models = tuple(models)
        for units in self._units:
            units.note(models)

    def settle(self) -> None:
        """Announce what has ended meanwhile; callable from any thread."""
        self._collectives.settle()

    def renew(self, replaced: Iterable[tuple[dist.ProcessGroup, dist.ProcessGroup]]) -> None:
        """Let all models use new process groups; what was under way is over.

        Args:
            replaced: each old group with its replacement.
        """
        new_of = {id(old): new for old, new in replaced}
        for units in self._units:
            units.renew(new_of)

    def end(self) -> None:
        """Stop watching."""
        self._collectives.settle(is_last=True)
        stop_observing_groups()
        self._changes.undo()
