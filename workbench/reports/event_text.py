"""Events and units as text."""

from __future__ import annotations

from workbench.events import Edge, Kind, unit_words
from workbench.trace.schema import Header

_OF_ALL_UNITS = (Kind.OPTIMIZER, Kind.STEP)


def event_words(kind: Kind, edge: Edge, unit: str | None) -> str:
    """Return an event as text: ``(ALL_GATHER, END, "blocks.2")`` -> ``"the end of all-gather of blocks.2"``."""
    of = "" if unit is None or kind in _OF_ALL_UNITS else f" {kind.info.of} {unit_words(unit)}"
    return f"{'the end of ' if edge is Edge.END else ''}{kind.words}{of}"


def unit_names(header: Header) -> dict[int, str]:
    """Return the names of all units by index, root ``""`` included."""
    return {unit.index: unit.name for unit in header.units}
