"""The model that a unit belongs to: unsharding a model and sharding it again keeps its identity."""

from __future__ import annotations

from workbench.events import Unit
from workbench.trace.schema import Header


def models(header: Header) -> tuple[int, ...]:
    """Return the number of each unit's model, which is the index of the root it was first sharded under.

    A root continues the model of an earlier one if that was unsharded and they share parameters, by name and shape.
    Otherwise it is a new model, even under the same name: the cell that makes the model was run again.

    Example: root 0, undone, then root 3 with the same parameters, then root 6 -> ``(0, 0, 0, 0, 0, 0, 6, ...)``.
    """
    roots: dict[int, list[Unit]] = {}
    for unit in header.units:
        roots.setdefault(_root(unit), []).append(unit)
    params = {
        root: {
            (each.fqn, each.global_shape)
            for unit in units
            for param in unit.params
            for each in param.parts or (param,)  # a flat parameter holds several
        }
        for root, units in roots.items()
    }
    undone: list[int] = []
    found: dict[int, int] = {}
    for root, units in sorted(roots.items()):
        before = next((other for other in reversed(undone) if params[other] & params[root]), None)
        if before is not None:
            undone.remove(before)
        found[root] = root if before is None else found[before]
        if all(unit.retired for unit in units):
            undone.append(root)
    return tuple(found[_root(unit)] for unit in header.units)


def _root(unit: Unit) -> int:
    return unit.root if unit.root >= 0 else unit.index
