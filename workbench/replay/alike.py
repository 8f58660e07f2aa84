"""What is the same is said once: ``ranks 0-6, 8-63`` behaved alike, ``blocks.0-3`` are split alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence

from workbench.trace.columns import RankTrace, Trace


def groups(trace: Trace, key: Callable[[RankTrace], Hashable]) -> list[tuple[int, ...]]:
    """Return the ranks of ``trace``, those of equal ``key`` together; larger groups first, then by lowest rank.

    Example: ``groups(trace, key=lambda r: len(r.rows))`` -> ``[(0, 1, 3), (2,)]`` when rank 2 has more rows.
    """
    found: dict[Hashable, list[int]] = {}
    for rank_trace in trace.ranks:
        found.setdefault(key(rank_trace), []).append(rank_trace.rank)
    return sorted((tuple(sorted(ranks)) for ranks in found.values()), key=lambda ranks: (-len(ranks), ranks))


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers with runs of neighbours joined: ``(5, 0, 1, 2)`` -> ``"0-2, 5"``; none -> ``""``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def label(ranks: Iterable[int]) -> str:
    """Return how a person names these ranks: ``(0, 1, 2, 5)`` -> ``"ranks 0-2, 5"``, ``(3,)`` -> ``"rank 3"``."""
    numbers = sorted(set(ranks))
    if not numbers:
        return "no rank"
    return f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


_NUMBER = re.compile(r"\d+")


def pattern(name: str) -> str:
    """Return a dotted name without its numbers: ``"blocks.3.norm1.weight"`` -> ``"blocks.#.norm1.weight"``."""
    return ".".join("#" if _NUMBER.fullmatch(part) else part for part in name.split("."))


def join_names(names: Sequence[str]) -> str:
    """Return one name for names of one :func:`pattern`: ``blocks.0.w, blocks.1.w, blocks.3.w`` -> ``blocks.0-1,3.w``.

    Raises:
        ValueError: the names have different patterns, or there is none.
    """
    if len({pattern(name) for name in names}) != 1:
        raise ValueError(f"expected names that differ in their numbers only, got {', '.join(names) or 'none'}")
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(_join_parts(parts) for parts in columns)


def _join_parts(parts: tuple[str, ...]) -> str:
    return parts[0] if len(set(parts)) == 1 else ranges(int(part) for part in parts).replace(" ", "")
