"""Cross products of options: all pairs of values in every run, the rest of the product with ``-m exhaustive``."""

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest

Row = tuple[Any, ...]

pairs_and_rest = pytest.mark.parametrize("part", ["pairs", pytest.param("rest", marks=pytest.mark.exhaustive)])
"""Runs a test with the rows that :func:`pairwise` chooses, and separately with all others; see :func:`rows_of`."""


def quick(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """Return ``values`` for ``parametrize``; those not in ``chosen`` are marked `thorough` and run in CI."""
    return [value if value in chosen else _thorough(value) for value in values]


def quick_rows(rows: Iterable[Row], chosen: Container[Row]) -> list[Any]:
    """Return ``rows`` for a ``parametrize`` of several names; like :func:`quick` for one name."""
    return [row if row in chosen else _thorough(*row) for row in rows]


def pairwise(*axes: Sequence[Any]) -> list[Row]:
    """Return rows with one value of each axis, such that every two values of different axes share a row.

    Greedy and deterministic: a row starts with the first uncovered pair; each further axis adds the value that covers
    the most pairs, and among equals the one in the fewest rows so far.
    """
    numbers = [range(len(axis)) for axis in axes]
    places = list(itertools.combinations(range(len(axes)), 2))
    missing = {(a, x, b, y): None for a, b in places for x in numbers[a] for y in numbers[b]}
    rows: list[list[int]] = []
    while missing:
        a, x, b, y = next(iter(missing))
        row = {a: x, b: y}
        for axis in range(len(axes)):
            if axis not in row:
                row[axis] = max(
                    numbers[axis],
                    key=lambda value, axis=axis, row=row: (
                        sum(_pair(axis, value, other, row[other]) in missing for other in row),
                        -sum(done[axis] == value for done in rows),
                    ),
                )
        rows.append([row[axis] for axis in range(len(axes))])
        for a, b in places:
            missing.pop((a, row[a], b, row[b]), None)
    return [tuple(axis[value] for axis, value in zip(axes, row, strict=True)) for row in rows]


def rows_of(part: str, *axes: Sequence[Any]) -> list[Row]:
    """Return the rows of one part of the cross product, in its order: ``pairs`` or ``rest``."""
    chosen = pairwise(*(range(len(axis)) for axis in axes))
    numbers = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        tuple(axis[value] for axis, value in zip(axes, row, strict=True))
        for row in numbers
        if (row in chosen) == (part == "pairs")
    ]


def _thorough(*values: Any) -> Any:
    """Return a marked ``pytest.param``; a single value may already be one, and keeps its marks."""
    param = pytest.param(*values, marks=pytest.mark.thorough)
    [first, *others] = values
    if isinstance(first, type(param)) and not others:
        return first._replace(marks=[*first.marks, *param.marks])
    return param


def _pair(a: int, x: int, b: int, y: int) -> tuple[int, int, int, int]:
    return (a, x, b, y) if a < b else (b, y, a, x)
