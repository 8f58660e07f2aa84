"""What ranks say of one parameter, plain data, as a table with a column a rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.replay.alike import label
from workbench.reports.tables import Table
from workbench.views.theme import format_bytes

Data = Mapping[str, Any]
Cells = dict[tuple[str, str], str]
"""The texts of one rank by the two names of their rows: of what, and which fact of it."""

SHARD = "this shard"
_FACTS = ("rows", "state", "shape", "dtype", "device", "bytes", "norm", "mean", "max abs")
_KIND = ("shape", "dtype", "bytes")


def unit_of(found: Data) -> str:
    """Return what a parameter is part of: ``"blocks.1 of model; 32x16 in all"``; nothing if the rank does not say."""
    if "unit" not in found:
        return ""
    shape = "x".join(map(str, found.get("global_shape", ())))
    trains = "" if found.get("trainable", True) else ", not trained"
    return f"{found['unit']} of {found.get('model') or 'a model'}; {shape or 'a scalar'} in all{trains}"


def table_of(by_rank: Mapping[int, Data]) -> Table:
    """Return the table; ranks of which all is the same share a column, and rows in which nothing is said are left out.

    Shape, dtype and bytes of a gradient and of optimizer state are left out where they are those of the shard.
    """
    cells = {rank: cells_of(found) for rank, found in by_rank.items()}
    names = [name for name in _names(cells) if _says(name, cells)]
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank, own in sorted(cells.items()):
        columns.setdefault(tuple(own.get(name, "") for name in names), []).append(rank)
    rows = [
        ("" if place and names[place - 1][0] == of else of, fact, *(column[place] for column in columns))
        for place, (of, fact) in enumerate(names)
    ]
    return Table(head=("", "", *(label(ranks) for ranks in columns.values())), rows=rows, num_labels=2)


def _names(cells: Mapping[int, Cells]) -> list[tuple[str, str]]:
    """Return the names of all rows in the order they are read, whichever rank has them."""
    every = list(dict.fromkeys(name for own in cells.values() for name in own))
    parts = list(dict.fromkeys(of for of, _ in every))
    return sorted(every, key=lambda name: (parts.index(name[0]), _FACTS.index(name[1]) if name[1] in _FACTS else -1))


def _says(name: tuple[str, str], cells: Mapping[int, Cells]) -> bool:
    """Whether a row says something that is not said above it."""
    of, fact = name
    repeats = of != SHARD and fact in _KIND
    return any(own.get(name) and not (repeats and own[name] == own.get((SHARD, fact))) for own in cells.values())


def cells_of(found: Data) -> Cells:
    """Return the facts that one rank has, in the order they are read."""
    cells: Cells = {}
    if "shard" in found:
        cells |= _facts(SHARD, {"rows": _rows(found["shard"])} | _content(found["shard"]))
    if "full" in found:
        cells |= _facts("full parameter", _full(found["full"]))
    for name in ("full_grad", "sharded_grad"):
        if name in found:
            cells |= _facts(_GRADIENTS[name], _tensor(found[name]))
    for optimizer in found.get("optimizers", ()):
        cells |= _optimizer(optimizer)
    return cells


_GRADIENTS = {"full_grad": "full gradient", "sharded_grad": "sharded gradient"}


def _facts(of: str, facts: Mapping[str, str]) -> Cells:
    return {(of, fact): text for fact, text in facts.items()}


def _rows(shard: Data) -> str:
    along = f" along dim {shard['dim']}" if shard.get("dim") else ""
    rows = f"{shard['first_row']}-{shard['last_row'] - 1}" if shard.get("num_rows") else "none"
    return f"{rows} of {shard.get('of_rows')}{along}"


def _full(full: Data) -> dict[str, str]:
    return {"state": str(full.get("state", ""))} | (
        _content(full) if full.get("exists") else {"bytes": format_bytes(0)}
    )


def _tensor(tensor: Data) -> dict[str, str]:
    return _content(tensor) if tensor.get("present") else {"state": "none"}


def _optimizer(optimizer: Data) -> Cells:
    of = f"{optimizer['name']} ({optimizer.get('type', '')})"
    if not optimizer.get("state"):
        return {(of, "state"): "none yet"}
    cells: Cells = {}
    for part in optimizer["state"]:
        if part.get("shape"):
            cells |= _facts(f"{of} {part['name']}", _content(part))
        else:
            cells[of, part["name"]] = _number(part.get("mean"))
    return cells


def _content(tensor: Data) -> dict[str, str]:
    """Return what is said of the values that lie on a rank."""
    return {
        "shape": "x".join(map(str, tensor.get("shape") or ())) or "scalar",
        "dtype": str(tensor.get("dtype", "")),
        "device": str(tensor.get("device", "")),
        "bytes": format_bytes(tensor.get("bytes", 0)),
        "norm": _number(tensor.get("norm")),
        "mean": _number(tensor.get("mean")),
        "max abs": _number(tensor.get("max_abs")),
    }


def _number(value: float | str | None) -> str:
    """Return a number with four digits; one that is not finite comes as text."""
    return f"{value:.4g}" if isinstance(value, (int, float)) else value or ""
