"""A rank that begins again in its process, because another rank was lost: its variables, and its random numbers.

All ranks repeat the cells from the beginning, together with the new one, so that they are alike. A variable that no
cell makes again is kept, unless it belongs to the model that is gone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from workbench.engine._torch import local_of
from workbench.models import garbage
from workbench.runtime.namespace import OFFERED, user_namespace
from workbench.runtime.program_state import RandomStates, fingerprint, is_iterator, reachable
from workbench.runtime.training_state import unreached

_OF_LAST_MODEL = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, DTensor, DeviceMesh)

_born: tuple[RandomStates, tuple[Any, ...]] | None = None
_kept: dict[str, Any] = {}
_before: dict[str, object] = {}
_ITERATOR = "an iterator"  # its position cannot be compared


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
    if not _before:  # else another rank was lost while the cells were repeated
        _before.update(_shown())
    _kept.update({name: own.pop(name) for name in names})
    for name, value in [*_kept.items()]:
        if name in OFFERED or isinstance(value, _OF_LAST_MODEL):
            del _kept[name]
    garbage.collect()
    if _born is not None:
        states, at_birth = _born
        states.set(at_birth)


def give_back() -> dict[str, list[str]]:
    """Give the variables back that were not made again.

    Returns:
        ``kept``: their names; ``other``: the variables, or what they reach, that are not as they were before.
    """
    own, now = user_namespace(), _shown()
    other = [name for name, value in _before.items() if now.get(name, value) != value or value == _ITERATOR]
    found = {name: value for name, value in _kept.items() if name not in own}
    _kept.clear()
    _before.clear()
    own.update(found)
    other = sorted({name.partition("[")[0] for name in other})
    return {"kept": sorted(found), "other": [*other, *unreached(own)]}


def _shown() -> dict[str, object]:
    """Return what shows whether something has another value, by expression: variables and what they reach."""
    own, hidden = user_namespace(), _hidden()
    named = {name: value for name, value in own.items() if name not in OFFERED and name not in hidden}
    found: dict[str, object] = {}
    for name, value in reachable(named):
        if isinstance(value, torch.Tensor):
            part = local_of(value) if isinstance(value, DTensor) else value.detach()
            if part.layout == torch.strided and not part.is_meta and part.untyped_storage().nbytes():
                found[name] = f"{tuple(part.shape)} {part.sum().item()}"
        elif isinstance(value, torch.optim.Optimizer):
            groups = [{key: option for key, option in group.items() if key != "params"} for group in value.param_groups]
            found[name] = repr(groups)
        elif is_iterator(value):
            found[name] = _ITERATOR
        elif (shown := fingerprint(value)) is not None:
            found[name] = shown
    return found


def _hidden() -> set[str]:
    """Return the names that are not variables of cells."""
    get_ipython = user_namespace().get("get_ipython")
    return set() if get_ipython is None else set(get_ipython().user_ns_hidden)
