"""What a unit is called."""

from __future__ import annotations

from workbench.trace.schema import Header


def unit_name(header: Header, unit: int) -> str:
    """Return how a person calls a unit: its module path, ``"root"`` for the root module itself; plain text.

    A unit the header does not (yet) describe is called by its number, ``"unit 7"``.
    """
    if 0 <= unit < len(header.units):
        return header.units[unit].name or "root"
    return f"unit {unit}"
