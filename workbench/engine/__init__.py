"""Our own Fully Sharded Data Parallel engine: per-parameter sharding on DTensor, torch's public API shape.

Follow one all-gather from hook to wire: ``state.py`` (hooks) -> ``param_group.py`` (a unit) -> ``collectives.py``
(layouts) -> ``comm.py`` (the wire).
"""

from workbench.engine.api import fully_shard, unshard_module
from workbench.engine.errors import CollectiveFailed, RanksDisagreeError, StepAborted
from workbench.engine.module import FSDPModule, UnshardHandle

__all__ = [
    "CollectiveFailed",
    "FSDPModule",
    "RanksDisagreeError",
    "StepAborted",
    "UnshardHandle",
    "fully_shard",
    "unshard_module",
]
