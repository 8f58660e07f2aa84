"""Explicit prefetch: which units a unit asks for ahead, ``ahead`` of them in the order in which modules run."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from workbench.engine import FSDPModule
from workbench.engine.fsdp_state import FSDPState, state_of


def set_prefetch(model: nn.Module, ahead: int) -> None:
    """Give every unit the lists of the units that follow it in forward and in backward.

    Args:
        model: the root.
        ahead: length of the lists; 0 empties them, and the engine goes by its own order again.
    """
    for unit, following in _with_following(forward_order(model), ahead):
        unit.set_modules_to_forward_prefetch(following if ahead else None)
    for unit, following in _with_following(backward_order(model), ahead):
        unit.set_modules_to_backward_prefetch(following)


def forward_order(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of units as forward enters them: outer before inner, else as they were defined."""
    return list(_walk(model, set(), backward=False))


def backward_order(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of units as backward enters them: outer before inner, else the last defined first."""
    return list(_walk(model, set(), backward=True))


def _with_following(order: list[FSDPModule], ahead: int) -> Iterator[tuple[FSDPModule, list[FSDPModule]]]:
    for place, unit in enumerate(order, start=1):
        yield unit, order[place : place + ahead]


def _walk(module: nn.Module, seen: set[nn.Module | FSDPState], *, backward: bool) -> Iterator[FSDPModule]:
    """Yield one module of each unit, each once, also where modules are shared or one unit has several."""
    if module in seen:
        return
    state = state_of(module)
    if state is not None and state not in seen and isinstance(module, FSDPModule):
        if state._fsdp_param_group is not None:
            yield module
        seen.add(state)
    seen.add(module)
    children = list(module.children())
    for child in reversed(children) if backward else children:
        yield from _walk(child, seen, backward=backward)
