"""Explicit prefetch: the lists of ``ahead`` units that each unit prefetches, in execution order."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from workbench.engine import FSDPModule
from workbench.engine.fsdp_state import FSDPState, state_of


def set_prefetch(model: nn.Module, ahead: int) -> None:
    """Set each unit's lists of the units that follow it in forward and in backward.

    Args:
        model: the root.
        ahead: length of the lists; 0 empties them, which restores the engine's own order.
    """
    for unit, following in _with_following(forward_order(model), ahead):
        unit.set_modules_to_forward_prefetch(following if ahead else None)
    for unit, following in _with_following(backward_order(model), ahead):
        unit.set_modules_to_backward_prefetch(following)


def forward_order(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of units in forward order: outer before inner, otherwise in definition order."""
    return list(_walk(model, set(), backward=False))


def backward_order(model: nn.Module) -> list[FSDPModule]:
    """Return the modules of units in backward order: outer before inner, otherwise in reverse definition order."""
    return list(_walk(model, set(), backward=True))


def _with_following(order: list[FSDPModule], ahead: int) -> Iterator[tuple[FSDPModule, list[FSDPModule]]]:
    for place, unit in enumerate(order, start=1):
        yield unit, order[place : place + ahead]


def _walk(module: nn.Module, seen: set[nn.Module | FSDPState], *, backward: bool) -> Iterator[FSDPModule]:
    """Yield one module of each unit once, even where modules are shared or a unit has several modules."""
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
