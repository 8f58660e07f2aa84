"""Additions of a program to a recording of itself: numbers of a step, and the units of an FSDP of your own.

Everything is a no-op where nothing records.
"""

from workbench.models.c10d import sees_all_collectives
from workbench.models.engines import Watch, is_sharded_by_torch
from workbench.models.own import OwnParam, OwnUnit, OwnUnits, log_metric
from workbench.models.tensor_memory import tensor_bytes

__all__ = [
    "OwnParam",
    "OwnUnit",
    "OwnUnits",
    "Watch",
    "is_sharded_by_torch",
    "log_metric",
    "sees_all_collectives",
    "tensor_bytes",
]
