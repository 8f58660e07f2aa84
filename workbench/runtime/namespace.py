"""The variables of a rank's cells, and lookups among them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from workbench.errors import UsageError

OFFERED = ("rank", "world_size", "device", "mesh", "log_metric")
"""Variables that the workbench defines for cells."""


def user_namespace() -> dict[str, Any]:
    """Return the namespace that cells run in, which in an IPython kernel is the module ``__main__``."""
    return sys.modules["__main__"].__dict__


def variables() -> dict[str, Any]:
    """Return a snapshot of the variables, safe while a cell in the main thread creates new ones."""
    return user_namespace().copy()  # atomic: iteration over the namespace itself would fail


def lookup(name: str) -> Any:  # noqa: ANN401 - whatever the user bound
    """Return the object that a dotted name refers to.

    Raises:
        UsageError: there is none on this rank.
    """
    first, *rest = name.split(".")
    namespace = user_namespace()
    if first not in namespace:
        raise UsageError(f"there is no variable {first!r} on this rank; define it in a %%fsdp cell")
    value = namespace[first]
    for i, part in enumerate(rest):
        if not hasattr(value, part):
            raise UsageError(f"{'.'.join([first, *rest[:i]])!r} has no attribute {part!r}")
        value = getattr(value, part)
    return value


def find_module(name: str) -> nn.Module:
    """Return the module that ``name`` refers to.

    Raises:
        UsageError: there is none, or it is not a module.
    """
    value = lookup(name)
    if not isinstance(value, nn.Module):
        raise UsageError(f"{name!r} is a {type(value).__name__}, not a torch.nn.Module")
    return value


def rebind(name: str, new: nn.Module) -> None:
    """Bind ``name``, and each variable that holds the same module, to ``new``.

    Raises:
        UsageError: there is no module of that name on this rank.
    """
    old = find_module(name)
    parent, _, attribute = name.rpartition(".")
    if parent:
        setattr(lookup(parent), attribute, new)
    user_namespace().update({key: new for key, value in variables().items() if value is old})


def exchange(pairs: Iterable[tuple[object, object]]) -> None:
    """Rebind variables that hold the first of a pair to the second."""
    new = {id(old): (old, by) for old, by in pairs}  # keeps the old object alive, so that its id is not reused
    user_namespace().update({name: new[id(value)][1] for name, value in variables().items() if id(value) in new})


def module_names() -> list[str]:
    """Return the variables that hold a module, in alphabetical order."""
    return sorted(k for k, v in variables().items() if isinstance(v, nn.Module) and not k.startswith("_"))


def optimizers_of(
    model: nn.Module, among: Iterable[torch.optim.Optimizer] | None = None
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold a parameter of ``model``, ``among`` some: by default the variables."""
    ids = {id(p) for p in model.parameters()}
    values = variables().values() if among is None else among
    found = {id(v): v for v in values if isinstance(v, torch.optim.Optimizer)}
    return [o for o in found.values() if any(id(p) in ids for g in o.param_groups for p in g["params"])]
