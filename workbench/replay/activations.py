"""Activations by module and by operation: whose storages autograd keeps at a moment.

Each ALLOC and FREE row of the class names its :class:`~workbench.events.Activation`. What was kept before a trace's
first row has no owner there: the class has its bytes, and no owner does. Arrays: ``N`` moments, ``G`` groups of owners.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from workbench.events import MOVES, Activation, Category
from workbench.replay.spans import Ints, of_kind
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header, Rows

UNKNOWN = "kept from before"
"""Group of what has no owner in a trace."""

_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


def block_of(path: str) -> str:
    """Return the outermost numbered module that a path is in: ``"blocks.2.mlp.0"`` -> ``"blocks.2"``; empty: none."""
    found = _BLOCK.match(path)
    return found.group() if found else ""


def part_of(path: str) -> str:
    """Return the part of a model that a path is in, numbers as ``*``: ``"blocks.2.mlp.0"`` -> ``"blocks.*.mlp"``."""
    block = block_of(path)
    if not block:
        return path.partition(".")[0]
    inner = path[len(block) + 1 :].partition(".")[0]
    alike = re.sub(r"\d+$", "*", block)
    return f"{alike}.{inner}" if inner else alike


GROUPINGS: Mapping[str, Callable[[Activation], str]] = {
    "module": lambda owner: part_of(owner.module),
    "op": lambda owner: owner.op,
}
"""Ways to group activations, by name: the group of an owner."""


def moves(rows: Rows) -> Ints:
    """Return the places of the rows that move activations."""
    return np.flatnonzero(of_kind(rows, MOVES) & (rows["category"] == Category.ACTIVATIONS))


def comparable(first: Trace, second: Trace) -> tuple[Trace, Trace, str]:
    """Return two traces without the activations that only one of them has, and a note about it; empty: there are none.

    Their rows stay, without bytes: a trace without watched activations does not hold less.
    """
    have = [any(len(moves(rank.rows)) for rank in trace.ranks) for trace in (first, second)]
    if have[0] == have[1]:
        return first, second, ""
    both = tuple(_without(trace) if own else trace for trace, own in zip((first, second), have, strict=True))
    return both[0], both[1], "without activations"


def _without(trace: Trace) -> Trace:
    return Trace(trace.header, tuple(_without_on(rank) for rank in trace.ranks))


def _without_on(rank: RankTrace) -> RankTrace:
    rows, live = rank.rows.copy(), list(rank.start.bytes_by_category)
    rows["num_bytes"][moves(rows)] = 0
    live[Category.ACTIVATIONS] = 0
    return replace(rank, rows=rows, start=replace(rank.start, bytes_by_category=tuple(live)))


def owners(header: Header, rows: Rows) -> list[Activation | None]:
    """Return the owner of each of some rows that move activations; None where it is unknown."""
    known = {
        int(index): Activation.from_text(header.strings[index]) if 0 <= index < len(header.strings) else None
        for index in np.unique(rows["module"])
    }
    return [known[index] for index in rows["module"].tolist()]


def kept_at(header: Header, part: RankTrace, seq: int) -> Mapping[Activation, int]:
    """Return the live bytes of each owner just after row ``seq`` of a rank's trace, the largest first."""
    rows = part.rows[: max(seq + 1 - part.start.seq, 0)]
    rows = rows[moves(rows)]
    found = Counter[Activation]()
    for owner, num_bytes in zip(owners(header, rows), rows["num_bytes"].tolist(), strict=True):
        if owner is not None:
            found[owner] += num_bytes
    return dict((+found).most_common())


def grouped(kept: Mapping[Activation, int], by: str, total: int) -> dict[str, int]:
    """Return live bytes by group, the largest first, and what has no owner last.

    Args:
        kept: live bytes of each owner.
        by: name of a grouping.
        total: live bytes of the class.
    """
    found = Counter[str]()
    for owner, num_bytes in kept.items():
        found[GROUPINGS[by](owner)] += num_bytes
    rest = total - found.total()
    return dict(found.most_common()) | ({UNKNOWN: rest} if rest > 0 else {})


def series(header: Header, part: RankTrace, seq: Ints, names: Sequence[str], by: str) -> Ints:
    """Return the live bytes of some groups at moments, ``[N, G + 1]``; the last column has all other activations.

    Args:
        header: of the trace.
        part: a rank's trace.
        seq: the row just before each moment, ascending, ``[N]``.
        names: the groups.
        by: name of their grouping.
    """
    rows = part.rows[moves(part.rows)]
    column = {name: place for place, name in enumerate(names)}
    of = [
        len(names) if owner is None else column.get(GROUPINGS[by](owner), len(names)) for owner in owners(header, rows)
    ]
    cells = np.zeros((len(seq), len(names) + 1), np.int64)
    moment = np.searchsorted(seq, rows["seq"])
    here = moment < len(seq)
    np.add.at(cells, (moment[here], np.array(of, np.int64)[here]), rows["num_bytes"][here])
    live = np.cumsum(cells, axis=0)
    live[:, -1] += part.start.bytes_by_category[Category.ACTIVATIONS]
    freed = np.minimum(live[:, :-1], 0)  # what was kept before the first row has an owner when it is freed
    live[:, :-1] -= freed
    live[:, -1] += freed.sum(axis=1)
    return live
