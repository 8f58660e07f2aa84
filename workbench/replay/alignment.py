"""Alignment of two traces: which event of one is which event of the other, independent of their clocks.

A *logical event* is (step, kind, edge, unit, n-th occurrence). Steps count from the first one of each side, units
match by name, and occurrences count within the other four. Kinds in ``BESIDE`` are not events: memory changes (they
form a curve over the events), logs and samples, holds at a gate, and device times. Arrays: ``N`` places on the common
axis; ``R`` rows of one side.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from workbench.events import BESIDE, MOVES, Category, Edge, Kind
from workbench.replay.memory import in_use
from workbench.replay.spans import Ints, of_kind
from workbench.replay.units import unit_name
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Header, Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedRank:
    """The logical events of one rank of one trace, ``E`` of them.

    Attributes:
        rows: the rank's rows, ``[R]``.
        place: position of each event in ``rows``, ascending, ``[E]``.
        step: of each event, counted from the first step of the side, ``[E]``.
        unit: of each event, an index into the names both sides share, -1 none, ``[E]``.
        total: bytes in use after each row, ``[R]``.
        most: most bytes in use from an event until the next, ``[E]``.
        numbers: maps a row's unit to ``unit``; the last entry is for -1.
        start: live bytes of each class before the rows.
    """

    rows: Rows
    place: Ints
    step: Ints
    unit: Ints
    total: Ints
    most: Ints
    numbers: Ints
    start: tuple[int, ...]

    def units_of(self, rows: Rows) -> Ints:
        """Return the units of some of the rows as indices into the shared names."""
        return _units(self.numbers, rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Alignment:
    """One rank's events of two traces on one axis; arrays are ``[N]``.

    Events that both sides have in the same order share a place. Events of only one side have places of their own in
    between. An event that both sides have in a different order appears twice.

    Attributes:
        names: unit names; ``unit`` of a side indexes them.
        a: the first side.
        b: the second side.
        in_a: number of the event of ``a``, -1 at a place that only ``b`` has.
        in_b: likewise for ``b``.
        num_moved: events that both have, in a different order.
    """

    names: tuple[str, ...]
    a: ComparedRank
    b: ComparedRank
    in_a: Ints
    in_b: Ints
    num_moved: int

    @property
    def first_difference(self) -> int:
        """The first place where an event, its bytes or the bytes in use after it differ; -1 if none."""
        both = (self.in_a >= 0) & (self.in_b >= 0)
        a, b = self.in_a, self.in_b
        payload = [side.rows["num_bytes"][side.place] for side in (self.a, self.b)]
        same = both.copy()
        same[both] = (payload[0][a[both]] == payload[1][b[both]]) & (self.a.most[a[both]] == self.b.most[b[both]])
        places = np.flatnonzero(~same)
        return int(places[0]) if len(places) else -1

    def curves(self) -> tuple[Ints, Ints]:
        """Return both sides' bytes in use at each place; a side without an event there keeps its previous value."""
        return _carried(self.a, self.in_a), _carried(self.b, self.in_b)


def align(first: tuple[Header, RankTrace], second: tuple[Header, RankTrace]) -> Alignment:
    """Return the events of one rank in two traces on one axis.

    Example: ``forward 0, forward 1, reshard 0`` and ``forward 0, reshard 0, forward 1`` -> ``in_a = [0, -1, 1, 2]`` and
    ``in_b = [0, 1, 2, -1]``, one moved.

    Args:
        first: header and rows of the first side, rows cut to the steps to compare.
        second: likewise for the second side.
    """
    names = tuple(dict.fromkeys(unit_name(header, u.index) for header, _ in (first, second) for u in header.units))
    a, b = (_side(header, rank, names) for header, rank in (first, second))
    id_a, id_b = _identities(_key(a), _key(b))
    _, in_a, in_b = np.intersect1d(id_a, id_b, assume_unique=True, return_indices=True)
    order = np.argsort(in_a)
    in_a, in_b = in_a[order], in_b[order]
    kept = _longest_rising(in_b)
    axis_a, axis_b = _merged(in_a[kept], in_b[kept], len(id_a), len(id_b))
    return Alignment(names=names, a=a, b=b, in_a=axis_a, in_b=axis_b, num_moved=len(in_a) - len(kept))


def same_events(first: RankTrace, second: RankTrace) -> tuple[Ints, Ints]:
    """Return the positions of the events that two ranks of one job share, in the rows of each; both ``[M]``.

    Those of ``first`` ascend. Events outside steps count within the gap between one step and the next. A step whose
    beginning is no longer in the trace is left out: its occurrences cannot be counted.
    """
    (place_a, key_a), (place_b, key_b) = _countable(first), _countable(second)
    id_a, id_b = _identities(key_a, key_b)
    _, in_a, in_b = np.intersect1d(id_a, id_b, assume_unique=True, return_indices=True)
    order = np.argsort(in_a)
    return place_a[in_a[order]], place_b[in_b[order]]


def _countable(rank: RankTrace) -> tuple[Ints, Ints]:
    """Positions of a rank's events, and their keys; both ``[E]``."""
    rows = rank.rows
    begins = np.flatnonzero((rows["kind"] == Kind.STEP) & (rows["edge"] == Edge.BEGIN))
    first = 0 if rank.start.seq == 0 else int(begins[0]) if len(begins) else len(rows)
    place = np.flatnonzero(~of_kind(rows[first:], BESIDE)) + first
    step = rows["step"][place].astype(np.int64)
    latest = np.maximum.accumulate(step)
    kind, edge, unit = (rows[name][place].astype(np.int64) for name in ("kind", "edge", "unit"))
    return place, (latest + 1 << 30) + ((step < 0) << 29) + (kind << 21) + (edge << 17) + unit + 1


def _side(header: Header, rank: RankTrace, names: tuple[str, ...]) -> ComparedRank:
    rows = rank.rows
    numbers = {name: number for number, name in enumerate(names)}
    table = np.array([*(numbers[unit_name(header, unit.index)] for unit in header.units), -1], np.int64)
    is_event = ~of_kind(rows, BESIDE)
    has_steps = bool((rows["step"] >= 0).any())
    place = np.flatnonzero(is_event & (rows["step"] >= 0) if has_steps else is_event)
    step = rows["step"][place].astype(np.int64)
    counts = of_kind(rows, MOVES) & (rows["category"] != Category.RESERVED) & (rows["category"] < len(Category))
    total = in_use(rank.start.bytes_by_category) + np.cumsum(np.where(counts, rows["num_bytes"], 0))
    return ComparedRank(
        rows=rows,
        place=place,
        step=step - step.min() if len(step) else step,
        unit=_units(table, rows[place]),
        total=total,
        most=highest(total, place),
        numbers=table,
        start=rank.start.bytes_by_category,
    )


def _units(numbers: Ints, rows: Rows) -> Ints:
    units: Ints = numbers[np.where(rows["unit"] < len(numbers) - 1, rows["unit"], -1)]
    return units


def highest(values: Ints, place: Ints) -> Ints:
    """Return the maximum of ``values`` ``[R]`` from each of ``place`` ``[E]`` up to the next one; ``[E]``."""
    found: Ints = np.maximum.reduceat(values, place) if len(place) else np.empty(0, np.int64)
    return found


def _identities(*keys: Ints) -> tuple[Ints, Ints]:
    """Return one number per event, equal for the same logical event of both sides and unique within one.

    Args:
        keys: for each of the two sides, all fields of its logical events except the occurrence.
    """
    _, group = np.unique(np.concatenate(keys), return_inverse=True)
    groups = np.split(group.astype(np.int64), [len(keys[0])])
    occurrences = [_occurrence(part) for part in groups]
    most = 1 + max(int(part.max(initial=0)) for part in occurrences)
    id_a, id_b = (part * most + nth for part, nth in zip(groups, occurrences, strict=True))
    return id_a, id_b


def _key(side: ComparedRank) -> Ints:
    kind, edge = (side.rows[name][side.place].astype(np.int64) for name in ("kind", "edge"))
    key: Ints = (side.step << 32) + (kind << 24) + (edge << 20) + side.unit + 1
    return key


def _occurrence(group: Ints) -> Ints:
    """For each entry, the number of equal entries before it: ``[7, 8, 7, 7] -> [0, 0, 1, 2]``."""
    order = np.argsort(group, kind="stable")
    changes = np.diff(group[order], prepend=-1) != 0
    number = np.arange(len(group))
    nth = np.empty(len(group), np.int64)
    nth[order] = number - np.maximum.accumulate(np.where(changes, number, 0))
    return nth


def _longest_rising(values: Ints) -> Ints:
    """Positions of a longest increasing subsequence of distinct ``values``: ``[0, 3, 1, 2] -> [0, 2, 3]``."""
    if (np.diff(values) > 0).all():  # the usual case: nothing moved
        return np.arange(len(values))
    ends: list[int] = []  # smallest last value of an increasing subsequence of each length
    places: list[int] = []
    before = []
    for place, value in enumerate(values.tolist()):
        length = bisect_left(ends, value)
        if length == len(ends):
            ends.append(value)
            places.append(place)
        else:
            ends[length], places[length] = value, place
        before.append(places[length - 1] if length else -1)
    found, place = [], places[-1]
    while place >= 0:
        found.append(place)
        place = before[place]
    return np.array(found[::-1], np.int64)


def _merged(in_a: Ints, in_b: Ints, len_a: int, len_b: int) -> tuple[Ints, Ints]:
    """Merge the events of both sides on one axis; ``in_a[i]`` and ``in_b[i]`` share a place, order is kept."""
    alone_a = np.setdiff1d(np.arange(len_a), in_a, assume_unique=True)
    alone_b = np.setdiff1d(np.arange(len_b), in_b, assume_unique=True)
    axis_a = np.concatenate([in_a, alone_a, np.full(len(alone_b), -1)])
    axis_b = np.concatenate([in_b, np.full(len(alone_a), -1), alone_b])
    gaps = [np.arange(len(in_a)), np.searchsorted(in_a, alone_a), np.searchsorted(in_b, alone_b)]
    group = np.repeat([2, 0, 1], [len(in_a), len(alone_a), len(alone_b)])  # before a shared place: a's events, then b's
    order = np.lexsort((np.maximum(axis_a, axis_b), group, np.concatenate(gaps)))
    return axis_a[order], axis_b[order]


def _carried(side: ComparedRank, event: Ints) -> Ints:
    """Bytes in use at each place; before the side's first event, those after its first row."""
    newest = np.maximum.accumulate(event)
    first = side.total[:1] if len(side.total) else np.zeros(1, np.int64)
    return np.concatenate([side.most, first])[np.where(newest >= 0, newest, len(side.most))]
