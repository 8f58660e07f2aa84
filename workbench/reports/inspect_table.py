"""What ranks say of one parameter, as a table with a column a rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.events import unit_words
from workbench.protocol.inspect_reply import FullFacts, InspectReply, Number, OptimizerFacts, ShardFacts, TensorFacts
from workbench.replay.grouping import label
from workbench.reports.tables import Table
from workbench.views.theme import format_bytes

Cells = dict[tuple[str, str], str]
"""The texts of one rank by the two names of their rows: of what, and which fact of it."""

SHARD = "this shard"
_FACTS = ("rows", "elements", "state", "shape", "dtype", "device", "bytes", "norm", "mean", "max abs")
_KIND = ("shape", "dtype", "device", "bytes")


def unit_of(found: InspectReply) -> str:
    """Return what a parameter is part of: ``"blocks.1 of model; 32x16 in all"``."""
    shape = "x".join(map(str, found.global_shape)) or "a scalar"
    trains = "" if found.trainable else ", not trained"
    return f"{unit_words(found.unit)} of {found.model or 'a model'}; {shape} in all{trains}"


def table_of(by_rank: Mapping[int, InspectReply]) -> Table:
    """Return the table; ranks of which all is the same share a column, and rows in which nothing is said are left out.

    Shape, dtype, device and bytes of what else there is are left out where they are those of the shard.
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


def cells_of(found: InspectReply) -> Cells:
    """Return the facts that one rank has, in the order they are read."""
    what = "elements" if found.shard.dim is None else "rows"
    cells = _facts(SHARD, {what: _rows(found.shard)} | _content(found.shard.values))
    cells |= _facts("full parameter", _full(found.full))
    cells |= _facts("full gradient", _gradient(found.full_grad))
    cells |= _facts("sharded gradient", _gradient(found.sharded_grad))
    for optimizer in found.optimizers:
        cells |= _optimizer(optimizer)
    return cells


def _facts(of: str, facts: Mapping[str, str]) -> Cells:
    return {(of, fact): text for fact, text in facts.items()}


def _rows(shard: ShardFacts) -> str:
    along = f" along dim {shard.dim}" if shard.dim else ""
    rows = f"{shard.first_row}-{shard.first_row + shard.num_rows - 1}" if shard.num_rows else "none"
    return f"{rows} of {shard.of_rows}{along}"


def _full(full: FullFacts) -> dict[str, str]:
    content = {"bytes": format_bytes(0)} if full.values is None else _content(full.values)
    return {"state": full.state.words} | content


def _gradient(gradient: TensorFacts | None) -> dict[str, str]:
    return {"state": "none"} if gradient is None else _content(gradient)


def _optimizer(optimizer: OptimizerFacts) -> Cells:
    of = f"{optimizer.name} ({optimizer.type})"
    if not optimizer.state:
        return {(of, "state"): "none yet"}
    cells: Cells = {}
    for name, part in optimizer.state.items():
        if part.shape:
            cells |= _facts(f"{of} {name}", _content(part))
        else:
            cells[of, name] = _number(part.mean)
    return cells


def _content(values: TensorFacts) -> dict[str, str]:
    """Return what is said of the values that lie on a rank."""
    return {
        "shape": "x".join(map(str, values.shape)) or "scalar",
        "dtype": values.dtype,
        "device": values.device,
        "bytes": format_bytes(values.num_bytes),
        "norm": _number(values.norm),
        "mean": _number(values.mean),
        "max abs": _number(values.max_abs),
    }


def _number(value: Number | None) -> str:
    """Return a number with four digits; one that is not finite comes as text."""
    return f"{value:.4g}" if isinstance(value, (int, float)) else value or ""
