"""Cross products of options: all pairs of values in every run, all triples of values with ``-m exhaustive``.

A fault that needs four particular values at once is rare (D. R. Kuhn, D. R. Wallace and A. M. Gallo, Software fault
interactions and implications for software testing, 2004), and whole products take hours.
"""

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

Row = tuple[Any, ...]
Numbers = tuple[int, ...]
"""A row, as the position of each value in its axis."""

pairs_and_triples = pytest.mark.parametrize("part", ["pairs", pytest.param("triples", marks=pytest.mark.exhaustive)])
"""Runs a test with rows that have every pair of values, and separately with those for every triple; see `rows_of`."""


def quick(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """Return ``values`` for ``parametrize``; those not in ``chosen`` are marked `thorough` and run in CI."""
    return [value if value in chosen else _thorough(value) for value in values]


def quick_rows(rows: Iterable[Row], chosen: Container[Row]) -> list[Any]:
    """Return ``rows`` for a ``parametrize`` of several names; like :func:`quick` for one name."""
    return [row if row in chosen else _thorough(*row) for row in rows]


def covering(strength: int, *axes: Sequence[Any]) -> list[Row]:
    """Return rows with one value of each axis, such that every ``strength`` values of different axes share a row.

    The rows for pairs are the first ones for triples. Greedy and deterministic: a row starts with the first values that
    share none yet; each further axis adds the value that covers the most, and among equals the one in the fewest rows
    so far.
    """
    chosen: list[Numbers] = []
    for size in range(2, min(strength, len(axes)) + 1):
        chosen += _additional(size, [len(axis) for axis in axes], chosen)
    return [tuple(axis[value] for axis, value in zip(axes, row, strict=True)) for row in chosen]


def _additional(size: int, lengths: Sequence[int], chosen: Sequence[Numbers]) -> list[Numbers]:
    """Return the rows that ``chosen`` lacks for every ``size`` values to share one."""
    places = list(itertools.combinations(range(len(lengths)), size))
    missing = {
        tuple(zip(place, values, strict=True)): None
        for place in places
        for values in itertools.product(*(range(lengths[axis]) for axis in place))
    }
    rows: list[Numbers] = []

    def covered_by(row: Numbers) -> None:
        rows.append(row)
        for place in places:
            missing.pop(tuple((axis, row[axis]) for axis in place), None)

    for row in chosen:
        covered_by(row)
    while missing:
        made = dict(next(iter(missing)))
        for axis, length in enumerate(lengths):
            if axis not in made:
                made[axis] = max(range(length), key=partial(_gain, axis, made, size, missing, rows))
        covered_by(tuple(made[axis] for axis in range(len(lengths))))
    return rows[len(chosen) :]


def _gain(
    axis: int, row: Mapping[int, int], size: int, missing: Container[Any], rows: Sequence[Numbers], value: int
) -> tuple[int, int]:
    """Return how many missing combinations a value adds to an incomplete row, and in how few rows it is so far."""
    others = itertools.combinations(row.items(), size - 1)
    adds = sum(tuple(sorted((*each, (axis, value)))) in missing for each in others)
    return adds, -sum(done[axis] == value for done in rows)


def rows_of(part: str, *axes: Sequence[Any]) -> list[Row]:
    """Return some rows of the cross product, in its order: ``pairs``, or those that ``triples`` need in addition."""
    numbers = [range(len(axis)) for axis in axes]
    pairs = set(covering(2, *numbers))
    chosen = pairs if part == "pairs" else {*covering(3, *numbers)} - pairs
    return [
        tuple(axis[value] for axis, value in zip(axes, row, strict=True))
        for row in itertools.product(*numbers)
        if row in chosen
    ]


def _thorough(*values: Any) -> Any:
    """Return a marked ``pytest.param``; a single value may already be one, and keeps its marks."""
    param = pytest.param(*values, marks=pytest.mark.thorough)
    [first, *others] = values
    if isinstance(first, type(param)) and not others:
        return first._replace(marks=[*first.marks, *param.marks])
    return param
