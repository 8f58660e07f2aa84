"""Events of training that the workbench's engine does not run: torch's own FSDP, and every collective of c10d.

Two sources, which :func:`watch` starts together:

- ``collectives.py``: every collective of a c10d program, through the hooks of process groups (torch 2.14 and newer), or
  else through the methods of ``ProcessGroup``, which see what Python calls but not what C++ does, such as the reducer
  of DistributedDataParallel.
- ``fully_shard.py``: the units of models that torch's ``fully_shard`` shards.

Nothing is changed in the program that is watched: no argument, no result, no stream, no order. ``_torch.py`` holds all
that is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.engine import probe
from workbench.watch._torch import Replacements, observe_calls, stop_observing_groups
from workbench.watch.collectives import Collectives
from workbench.watch.fully_shard import FullyShardUnits

__all__ = ["watch"]


def watch() -> Callable[[], None]:
    """Announce to the active probe what c10d and torch's ``fully_shard`` do from now on; return what ends it.

    Raises:
        AttributeError: this version of torch has other names; nothing is watched then.
    """
    changes = Replacements()
    collectives = Collectives()
    units = FullyShardUnits(collectives)
    if probe.active is not None:
        probe.active.source(units)
    try:
        observe_calls(collectives, changes)
        units.install(changes)
    except BaseException:
        changes.undo()
        raise

    def end() -> None:
        stop_observing_groups()
        changes.undo()

    return end
