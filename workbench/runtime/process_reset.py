"""A rank that begins again in its process, because another rank was lost: its variables, and its random numbers.

All ranks repeat the cells from the beginning, together with the new one, so that they are alike. A variable that no
cell makes again is kept, unless it belongs to the model that is gone.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from workbench.runtime.namespace import OFFERED, user_namespace
from workbench.runtime.program_state import RandomStates

_OF_LAST_MODEL = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, DTensor, DeviceMesh)

_born: tuple[RandomStates, tuple[Any, ...]] | None = None
_kept: dict[str, Any] = {}


def note_birth() -> None:
    """Keep the states of random number generators before the first cell; no-op from the second call on."""
    global _born  # noqa: PLW0603 - one per process
    if _born is None:
        states = RandomStates()
        _born = states, states.get()


def begin_again() -> None:
    """Set variables and random number generators as in a new process; what the cells do not make again is kept."""
    own = user_namespace()
    names = [name for name in own if name in OFFERED or not (name.startswith("_") or name in _hidden())]
    _kept.update({name: own.pop(name) for name in names})
    for name, value in [*_kept.items()]:
        if name in OFFERED or isinstance(value, _OF_LAST_MODEL):
            del _kept[name]
    gc.collect()
    if _born is not None:
        states, at_birth = _born
        states.set(at_birth)


def give_back() -> list[str]:
    """Give the variables back that were not made again; return their names."""
    own = user_namespace()
    found = {name: value for name, value in _kept.items() if name not in own}
    _kept.clear()
    own.update(found)
    return sorted(found)


def _hidden() -> set[str]:
    """Return the names that are not variables of cells."""
    get_ipython = user_namespace().get("get_ipython")
    return set() if get_ipython is None else set(get_ipython().user_ns_hidden)
