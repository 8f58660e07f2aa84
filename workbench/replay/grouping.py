"""Groups of equal things under one name: ``ranks 0-6, 8-63`` behaved alike, ``blocks.0-3`` are split alike.

A label of many separate ranks names a few of them and counts the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header, Rows

K = TypeVar("K")
V = TypeVar("V", bound=Hashable)


def by_value(values: Mapping[K, V] | Iterable[tuple[K, V]]) -> dict[V, list[K]]:
    """Return the keys of each value, in order: ``{0: "a", 1: "b", 2: "a"}`` -> ``{"a": [0, 2], "b": [1]}``."""
    found: dict[V, list[K]] = {}
    for key, value in values.items() if isinstance(values, Mapping) else values:
        found.setdefault(value, []).append(key)
    return found


def groups(trace: Trace, key: Callable[[RankTrace], Hashable]) -> list[tuple[int, ...]]:
    """Return the ranks of ``trace`` grouped by ``key``; larger groups first, then by lowest rank.

    Example: ``groups(trace, key=lambda r: len(r.rows))`` -> ``[(0, 1, 3), (2,)]`` when rank 2 has more rows.
    """
    found = by_value((rank_trace.rank, key(rank_trace)) for rank_trace in trace.ranks)
    return sorted((tuple(sorted(ranks)) for ranks in found.values()), key=lambda ranks: (-len(ranks), ranks))


def activity_key(header: Header, rows: Rows, more: Sequence[str] = ()) -> bytes:
    """Return a key that is equal for ranks with the same rows in the same order, at whatever times.

    A collective counts by its number of ranks and its number in the group, not by which ranks take part.

    Args:
        header: of the trace.
        rows: of one rank, those that matter.
        more: further fields that matter, besides kind, edge, unit and ``comm_seq``.
    """
    sizes = np.array([*(len(group.ranks) for group in header.comm_groups), 0], np.int32)  # the last is for index -1
    group = rows["comm_group"]
    columns = [rows[name] for name in ("kind", "edge", "unit", "comm_seq", *more)]
    columns.append(sizes[np.where(group < len(sizes) - 1, group, -1)])
    return b"".join(column.tobytes() for column in columns)


MAX_RUNS = 8
"""Maximum number of runs of consecutive ranks that a label names in full."""

NAMED_RUNS = 3
"""Runs that a label names if there are more than :data:`MAX_RUNS`; the other ranks are counted."""


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text with consecutive ones joined: ``(5, 0, 1, 2)`` -> ``"0-2, 5"``; none -> ``""``."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs(numbers))


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return first and last of each run of consecutive numbers: ``(5, 0, 1, 2)`` -> ``[[0, 2], [5, 5]]``."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def label(ranks: Iterable[int]) -> str:
    """Return a label for these ranks: ``(0, 1, 2, 5)`` -> ``"ranks 0-2, 5"``, ``(3,)`` -> ``"rank 3"``.

    With more than :data:`MAX_RUNS` runs, the label counts the rest: ``"ranks 0, 15, 30 and 31 more"``.
    """
    numbers = sorted(set(ranks))
    found = runs(numbers)
    if not numbers:
        return "no rank"
    if len(found) <= MAX_RUNS:
        return f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"
    named = [number for number in numbers if number <= found[NAMED_RUNS - 1][1]]
    return f"ranks {ranges(named)} and {len(numbers) - len(named)} more"


_NUMBER = re.compile(r"\d+")


def pattern(name: str) -> str:
    """Return a dotted name with ``#`` for numbers: ``"blocks.3.norm1.weight"`` -> ``"blocks.#.norm1.weight"``."""
    return ".".join("#" if _NUMBER.fullmatch(part) else part for part in name.split("."))


def join_names(names: Sequence[str]) -> str:
    """Return one name for names of one :func:`pattern`: ``blocks.0.w, blocks.1.w, blocks.3.w`` -> ``blocks.0-1,3.w``.

    Raises:
        ValueError: the names have different patterns, or there are none.
    """
    if len({pattern(name) for name in names}) != 1:
        raise ValueError(f"expected names that differ in their numbers only, got {', '.join(names) or 'none'}")
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(parts[0] if len(set(parts)) == 1 else ranges(map(int, parts)).replace(" ", "") for parts in columns)


def by_rank_words(values: Sequence[str]) -> str:
    """Return the texts with their ranks, equal ones once, without empty ones: ``"cpu on every rank"``."""
    return "; ".join(
        f"{value} {on_words(own, len(values))}" for value, own in by_value(enumerate(values)).items() if value
    )


def on_words(ranks: Sequence[int], num_ranks: int) -> str:
    """Return on which of all ranks something is so: ``on every rank``, ``on ranks 1, 3``."""
    return "on every rank" if len(ranks) == num_ranks else f"on {label(ranks)}"


def first_on_words(ranks: Sequence[int], num_ranks: int) -> str:
    """Return on which ranks something was so first, unless it was so on all at once."""
    return f"{', first' if len(ranks) < num_ranks else ''} {on_words(ranks, num_ranks)}"


def notes_of(by_rank: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the notes of all ranks, each once, with the ranks that have it unless all have."""
    found = dict.fromkeys(note for notes in by_rank for note in notes)
    having = {note: [rank for rank, notes in enumerate(by_rank) if note in notes] for note in found}
    return tuple(note if len(ranks) == len(by_rank) else f"{note} ({label(ranks)})" for note, ranks in having.items())
