"""What a unit is called, and the order in which units are listed."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.events import Unit, unit_words
from workbench.trace.schema import Header

_MAX_LISTED = 12  # names in a sentence
_MAX_LETTERS = 80  # of one of them


def unit_name(header: Header, unit: int) -> str:
    """Return how a person calls a unit: its module path, ``(root)`` for the root module itself; plain text.

    A unit the header does not (yet) describe is called by its number, ``"unit 7"``.
    """
    if 0 <= unit < len(header.units):
        return unit_words(header.units[unit].name)
    return f"unit {unit}"


def listed(paths: Sequence[str]) -> str:
    """List units or parameters by name; the middle of a long list, and of a long name, is left out."""
    names = [unit_words(path) for path in paths]
    if len(names) > _MAX_LISTED:
        names = [*names[: _MAX_LISTED - 2], f"... {len(names) - _MAX_LISTED + 1} more ...", names[-1]]
    half = _MAX_LETTERS // 2
    return ", ".join(n if len(n) <= _MAX_LETTERS else f"{n[:half]}...{n[3 - half :]}" for n in names)


def unmanaged_words(model: str, params: Sequence[str]) -> str:
    """Say that ``params`` of ``model`` (the variable that has it; empty: not known) are in no unit, and what to do."""
    first = f"{model or 'model'}.get_parameter({params[0]!r})"
    return (
        f"in no unit, so that nothing averages their gradients: {listed(params)}. After "
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
    """Return what to sort names by, their numbers as numbers: ``layers.2`` before ``layers.10``; the root first."""
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".") if part]


def model_order(header: Header) -> list[int]:
    """Return all units from the top of the model: each root, then its own by name, numbers as numbers.

    First come those whose root has no parameters, and is no unit.
    """

    def key(unit: Unit) -> tuple[object, ...]:
        return unit.root, unit.index != unit.root, by_number(unit.name), unit.index

    return [unit.index for unit in sorted(header.units, key=key)]
