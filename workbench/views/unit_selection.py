"""Selection of units by a view's ``unit`` option."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.events import Unit
from workbench.protocol.breakpoints import chosen_units


def meant(units: Sequence[Unit], unit: str | None) -> tuple[Unit, ...]:
    """Return the ``units`` selected by a name, a pattern, or ``(root)``; all for None.

    Raises:
        UsageError: there is no such unit; the message lists the existing ones, the nearest first.
    """
    chosen = [each.name for each in units] if unit is None else chosen_units(unit, [each.name for each in units])
    return tuple(each for each in units if each.name in chosen)
