"""What a unit is called, and the order in which units are listed."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.events import Unit, unit_words
from workbench.trace.schema import Header

_MAX_NAMES = 10  # of parameters in a sentence


def unit_name(header: Header, unit: int) -> str:
    """Return how a person calls a unit: its module path, ``(root)`` for the root module itself; plain text.

    A unit the header does not (yet) describe is called by its number, ``"unit 7"``.
    """
    if 0 <= unit < len(header.units):
        return unit_words(header.units[unit].name)
    return f"unit {unit}"


def unmanaged_words(model: str, params: Sequence[str]) -> str:
    """Say that ``params`` of ``model`` (the variable that has it; empty: not known) are in no unit, and what to do."""
    first = f"{model or 'model'}.get_parameter({params[0]!r})"
    more = f" and {len(params) - _MAX_NAMES} more" if len(params) > _MAX_NAMES else ""
    return (
        f"in no unit, so that nothing averages their gradients: {', '.join(params[:_MAX_NAMES])}{more}. After "
        f"backward, for each: p = {first}; torch.distributed.all_reduce(p.grad); p.grad /= world_size. Or freeze them, "
        "or unshard and shard again without --ignore"
    )


def unmanaged_notes(header: Header) -> tuple[str, ...]:
    """Return :func:`unmanaged_words` of each model that has such parameters."""
    found: dict[str, list[str]] = {}
    for path in header.unmanaged:
        model, _, param = path.partition(".")
        found.setdefault(model, []).append(param)
    return tuple(unmanaged_words(model, params) for model, params in found.items())


def by_number(name: str) -> list[tuple[bool, int, str]]:
    """Return what to sort names by, their numbers as numbers: ``layers.2`` before ``layers.10``."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def model_order(header: Header) -> list[int]:
    """Return all units from the top of the model: each root, then its own by name, numbers as numbers.

    First come those whose root has no parameters, and is no unit.
    """

    def key(unit: Unit) -> tuple[object, ...]:
        return unit.root, unit.index != unit.root, by_number(unit.name), unit.index

    return [unit.index for unit in sorted(header.units, key=key)]
