"""The ranks' replies on one parameter as a table, one column per rank or group of equal ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.base.text_formats import format_bytes
from workbench.protocol.inspect_reply import FullFacts, InspectReply, Number, OptimizerFacts, ShardFacts, TensorFacts
from workbench.replay.grouping import by_value, label
from workbench.reports.tables import Table

Cells = dict[tuple[str, str], str]
"""The texts of one rank, keyed by the two labels of their rows: the object, and the fact about it."""

SHARD = "this shard"
_FACTS = ("rows", "elements", "state", "shape", "dtype", "device", "bytes", "norm", "mean", "max abs")
_KIND = ("shape", "dtype", "device", "bytes")


def unit_of(found: InspectReply) -> str:
    """Return unit, model and full shape of a parameter: ``"blocks.1 of model; 32x16 in all"``."""
    shape = "x".join(map(str, found.global_shape)) or "a scalar"
    trains = "" if found.trainable else ", not trained"
    return f"{found.unit} of {found.model or 'a model'}; {shape} in all{trains}"


def table_of(by_rank: Mapping[int, InspectReply]) -> Table:
    """Return the table; equal ranks share a column, and empty rows are left out.

    Shape, dtype, device and bytes of other tensors are left out where they equal those of the shard.
    """
    cells = {rank: cells_of(found) for rank, found in by_rank.items()}
    names = [name for name in _names(cells) if _says(name, cells)]
    columns = by_value((rank, tuple(own.get(name, "") for name in names)) for rank, own in sorted(cells.items()))
    rows = [
        ("" if place and names[place - 1][0] == of else of, fact, *(column[place] for column in columns))
        for place, (of, fact) in enumerate(names)
    ]
    return Table(head=("", "", *(label(ranks) for ranks in columns.values())), rows=rows, num_labels=2)


def _names(cells: Mapping[int, Cells]) -> list[tuple[str, str]]:
    """Return the names of the rows of all ranks in display order."""
    every = list(dict.fromkeys(name for own in cells.values() for name in own))
    parts = list(dict.fromkeys(of for of, _ in every))
    return sorted(every, key=lambda name: (parts.index(name[0]), _FACTS.index(name[1]) if name[1] in _FACTS else -1))


def _says(name: tuple[str, str], cells: Mapping[int, Cells]) -> bool:
    """Whether a row adds something to the rows of the shard."""
    of, fact = name
    repeats = of != SHARD and fact in _KIND
    return any(own.get(name) and not (repeats and own[name] == own.get((SHARD, fact))) for own in cells.values())


def cells_of(found: InspectReply) -> Cells:
    """Return the facts of one rank in display order."""
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
    """Return the facts about a tensor on a rank."""
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
    """Return a number with four digits; values that are not finite are already text."""
    return f"{value:.4g}" if isinstance(value, (int, float)) else value or ""
