"""Differences between two traces: the memory peak and its units, the collectives, and where step time went.

The sides are ``a`` and ``b``; a difference is always b minus a. The comparison covers one rank, the same on both sides.
Steps count from the first one of each side, and only steps that both have count. Arrays: ``S`` steps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.events import BESIDE, MOVES, WORK, Category, Edge, Kind, Phase, engine_named
from workbench.replay import collectives, training
from workbench.replay.alignment import Alignment, ComparedRank, align, highest
from workbench.replay.grouping import activity_key
from workbench.replay.spans import Ints, closed, exclusive, of_kind, rows_of, spans
from workbench.replay.units import unit_name
from workbench.trace.columns import RankTrace, Trace, steps
from workbench.trace.schema import Header

_COUNTED = tuple(kind for kind in Kind if kind not in BESIDE or kind in MOVES)
_GOOD_PART = 0.05  # of the difference of two peaks: a class with a smaller share is not listed
_FEWEST = 2  # steps that a side needs to have a spread
_TELLING = 0.01  # of the step: smaller changes of exposed time are noise


@dataclass(frozen=True, kw_only=True)
class PeakChange:
    """The peak bytes in use of both sides, and the classes and units that make the difference.

    Attributes:
        before: of ``a``.
        after: of ``b``.
        category: the memory class that differs most in the direction of the peaks; None if these are equal.
        units: the units that hold the difference, most first; empty if no particular units do.
        phases: in which phases, over all events, those units hold more of it on the side with the higher peak.
        parts: ``after`` minus ``before``, by class at the two peaks, of each class that makes a good part of the
            difference or lessens it, the largest first. All classes together are the difference.
        left_over: of these, the classes whose whole difference already exists before the first event.
        step: number of the step with the higher peak; -1 outside any.
    """

    before: int
    after: int
    category: Category | None = None
    units: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    parts: tuple[tuple[Category, int], ...] = ()
    left_over: tuple[Category, ...] = ()
    step: int = -1


@dataclass(frozen=True, kw_only=True)
class CollectiveChange:
    """The collectives of one kind for one unit that differ; pairs are (a, b), means over the steps.

    Attributes:
        unit: its name, ``""`` for none.
        kind: one of COLLECTIVES.
        calls: calls per step.
        num_bytes: payload per step.
        exposed_ns: time per step that compute waited for them; median over the steps.
    """

    unit: str
    kind: Kind
    calls: tuple[float, float]
    num_bytes: tuple[float, float]
    exposed_ns: tuple[float, float]

    @property
    def differs(self) -> bool:
        """Whether calls or payload differ; otherwise only the exposed time differs."""
        return self.calls[0] != self.calls[1] or self.num_bytes[0] != self.num_bytes[1]


@dataclass(frozen=True, kw_only=True)
class TimeChange:
    """What took longer or shorter in a step: nanoseconds, median over the steps.

    Attributes:
        kind: FORWARD, BACKWARD, OPTIMIZER: computing; a collective: compute waiting for it.
        unit: name, ``""`` for none.
        delta_ns: b minus a.
    """

    kind: Kind
    unit: str
    delta_ns: float


@dataclass(frozen=True, kw_only=True)
class ComparedEvent:
    """One side's event at a place where two traces differ.

    Attributes:
        kind: of the event.
        edge: of the event.
        unit: name, ``""`` for none.
        num_bytes: its payload.
        bytes_in_use: most bytes in use from it until the next event.
    """

    kind: Kind
    edge: Edge
    unit: str
    num_bytes: int
    bytes_in_use: int


@dataclass(frozen=True, kw_only=True)
class FirstEventChange:
    """The first place where an event, its payload or the bytes in use after it differ.

    Attributes:
        step: of the event, counted from the first step of each side.
        a: the event of ``a``; None: only ``b`` has it there.
        b: the event of ``b``; None: only ``a`` has it there.
    """

    step: int
    a: ComparedEvent | None
    b: ComparedEvent | None


@dataclass(frozen=True, kw_only=True)
class FirstValueChange:
    """The first logged number that differs.

    Attributes:
        name: such as ``loss``.
        steps: numbers of the step in ``a`` and in ``b``, equally far from the first of each.
        values: of ``a`` and ``b``.
    """

    name: str
    steps: tuple[int, int]
    values: tuple[float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Differences:
    """All differences, for one rank.

    Attributes:
        rank: the rank compared: by default the common rank whose peak differs most, then one whose events differ.
        ranks: the ranks both have.
        aligned: its events.
        num_steps: how many steps each side has, ``(a, b)``; the smaller number is compared.
        peak: the peak.
        collectives: those that differ, different calls or bytes first, then by exposed time.
        step_ns: median step time of both sides; NaN without a finished step.
        is_chance: whether the difference in step time may be chance: the middle halves of the two sides' step times
            overlap. False if a side has a single step.
        slower: what took longer (or shorter, if the step became shorter), largest change first.
        engines: what ran the units of each side, ``(a, b)``, as names of sources; two engines announce other events.
        first_event: the first event that differs; None: none does.
        first_value: the first logged number that differs on the compared rank; None: none does.
    """

    rank: int
    ranks: tuple[int, ...]
    aligned: Alignment
    num_steps: tuple[int, int]
    peak: PeakChange
    collectives: tuple[CollectiveChange, ...]
    step_ns: tuple[float, float]
    is_chance: bool
    slower: tuple[TimeChange, ...]
    engines: tuple[str, str]
    first_event: FirstEventChange | None = None
    first_value: FirstValueChange | None = None

    @property
    def is_same_engine(self) -> bool:
        """Whether the same engine ran both sides."""
        return self.engines[0] == self.engines[1]


def differences(a: Trace, b: Trace, rank: int | None = None) -> Differences | None:
    """Return what changed from ``a`` to ``b``; None if no rank recorded anything in both.

    Args:
        a: the first trace.
        b: the second trace.
        rank: compare this rank, which both must have; None: see :class:`Differences`.
    """
    num_steps = len(steps(a)), len(steps(b))
    parts = [_first_steps(trace, min(num_steps)) for trace in (a, b)]
    recorded = [{entry.rank for entry in part.ranks if len(entry.rows)} for part in parts]
    ranks = tuple(sorted(recorded[0] & recorded[1]))
    if not ranks:
        return None
    looked_at = _unlike(parts, ranks) if rank is None else (rank,)
    found = {r: align(*((part.header, part.rank(r)) for part in parts)) for r in looked_at}
    shown = max(found, key=lambda r: (*_weight(found[r]), -r))
    aligned, rows = found[shown], [part.rank(shown) for part in parts]
    summaries = [training.summary(part) for part in parts]
    step_ns = summaries[0].step_ns, summaries[1].step_ns
    costs = [_costs(part.header, entry) for part, entry in zip(parts, rows, strict=True)]
    return Differences(
        rank=shown,
        ranks=ranks,
        aligned=aligned,
        num_steps=num_steps,
        peak=_peak(aligned),
        collectives=tuple(_collectives(parts, rows, costs, step_ns)),
        step_ns=step_ns,
        is_chance=_overlap(*(found.step_times.high for found in summaries)),
        slower=_slower(costs, longer=step_ns[1] >= step_ns[0]),
        engines=(_engines(parts[0].header, rows[0]), _engines(parts[1].header, rows[1])),
        first_event=_first_event(aligned),
        first_value=_first_value(parts, rows),
    )


def _first_event(aligned: Alignment) -> FirstEventChange | None:
    place = aligned.first_difference
    if place < 0:
        return None
    found: list[ComparedEvent | None] = []
    step = 0
    for side, number in ((aligned.a, int(aligned.in_a[place])), (aligned.b, int(aligned.in_b[place]))):
        if number < 0:
            found.append(None)
            continue
        row, unit, step = side.rows[side.place[number]], int(side.unit[number]), int(side.step[number])
        found.append(
            ComparedEvent(
                kind=Kind(row["kind"]),
                edge=Edge(row["edge"]),
                unit=aligned.names[unit] if unit >= 0 else "",
                num_bytes=int(row["num_bytes"]),
                bytes_in_use=int(side.most[number]),
            )
        )
    return FirstEventChange(step=step, a=found[0], b=found[1])


def _first_value(parts: list[Trace], rows: list[RankTrace]) -> FirstValueChange | None:
    firsts = [next(iter(steps(part)), 0) for part in parts]
    values = [_values(part, entry, first) for part, entry, first in zip(parts, rows, firsts, strict=True)]
    for (step, name), before in values[0].items():
        after = values[1].get((step, name))
        if after is not None and before != after and not (math.isnan(before) and math.isnan(after)):
            return FirstValueChange(name=name, steps=(firsts[0] + step, firsts[1] + step), values=(before, after))
    return None


def _values(part: Trace, rank: RankTrace, first: int) -> dict[tuple[int, str], float]:
    """Return the last value of each logged number in each step, by step, counted from ``first``, and name."""
    found = rank.rows[(rank.rows["kind"] == Kind.METRIC) & (rank.rows["step"] >= 0)]
    return {
        (int(row["step"]) - first, part.header.strings[row["module"]]): float(row["value"])
        for row in found
        if 0 <= row["module"] < len(part.header.strings)
    }


def _engines(header: Header, rank: RankTrace) -> str:
    """Return the engines that ran the units of a rank's rows; the workbench's if they have none."""
    units = [unit for unit in np.unique(rank.rows["unit"]).tolist() if 0 <= unit < len(header.units)]
    return " and ".join(sorted({header.units[unit].runner.name for unit in units} or {engine_named("").name}))


def _overlap(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    """Whether the middle halves of two sides' step times ``[S]`` overlap; False if a side has one step or none.

    Example: ``[1, 2, 3]`` and ``[2, 3, 9]``: 1.5 to 2.5 and 2.5 to 6 overlap.
    """
    if min(len(a), len(b)) < _FEWEST:
        return False
    low, high = ([np.percentile(side, at) for side in (a, b)] for at in (25, 75))
    return bool(max(low) <= min(high))


def _first_steps(trace: Trace, count: int) -> Trace:
    """The first ``count`` steps of a trace; for 0, the rows before all steps."""
    found = steps(trace)
    return trace.slice(first=found[0], last=found[count - 1]) if count else trace.slice(last=-1)


def _unlike(parts: list[Trace], ranks: tuple[int, ...]) -> list[int]:
    """Return one rank, the first, of each group of ranks with the same events and bytes in both traces."""
    found: dict[tuple[object, ...], int] = {}
    for rank in ranks:
        sides = [part.rank(rank) for part in parts]
        programs = [
            activity_key(part.header, rows_of(side, _COUNTED), ("step", "num_bytes", "category"))
            for part, side in zip(parts, sides, strict=True)
        ]
        key = (*(side.start.bytes_by_category for side in sides), *(hashlib.sha256(p).digest() for p in programs))
        found.setdefault(key, rank)
    return list(found.values())


def _weight(aligned: Alignment) -> tuple[int, bool]:
    """How much a rank differs: the difference of its peaks, and whether any event differs."""
    peaks = [int(side.most.max(initial=0)) for side in (aligned.a, aligned.b)]
    return abs(peaks[1] - peaks[0]), aligned.first_difference >= 0


# -- the peak


def _peak(aligned: Alignment) -> PeakChange:
    before, after = (int(side.most.max(initial=0)) for side in (aligned.a, aligned.b))
    if before == after:
        return PeakChange(before=before, after=after)
    is_higher = after > before
    high, low = (aligned.b, aligned.a) if is_higher else (aligned.a, aligned.b)
    in_high, in_low = (aligned.in_b, aligned.in_a) if is_higher else (aligned.in_a, aligned.in_b)
    event, other = int(np.argmax(high.most)), int(np.argmax(low.most)) if len(low.most) else -1
    more = _held(high, event)
    for key, num_bytes in _held(low, other).items():
        more[key] = more.get(key, 0) - num_bytes
    by_category = {c: sum(n for (category, _), n in more.items() if category == c) for c in Category}
    most = max(by_category, key=lambda category: by_category[category])
    units = sorted((u for (c, u), n in more.items() if c == most and n > 0 and u >= 0), key=lambda u: -more[most, u])
    if 2 * sum(more[most, unit] for unit in units) < by_category[most]:
        units = []  # most of it existed before the first event
    phases = _phases(high, low, (in_high, in_low), most, units)
    names = tuple(aligned.names[unit] for unit in units)
    there = {c: num for c, num in by_category.items() if abs(num) >= _GOOD_PART * abs(after - before)}
    sign = 1 if is_higher else -1
    return PeakChange(
        before=before,
        after=after,
        category=most,
        units=names,
        phases=phases,
        parts=tuple((c, sign * num) for c, num in sorted(there.items(), key=lambda part: -abs(part[1]))),
        left_over=tuple(c for c, num in there.items() if high.start[c] - low.start[c] == num),
        step=int(high.rows["step"][high.place[event]]),
    )


def _held(side: ComparedRank, event: int) -> dict[tuple[Category, int], int]:
    """Live bytes by class and unit at an event's moment of highest use; bytes from before the rows have unit -1."""
    held: dict[tuple[Category, int], int] = {(c, -1): side.start[c] for c in Category if c is not Category.RESERVED}
    if event < 0:
        return held
    begin = int(side.place[event])
    end = int(side.place[event + 1]) if event + 1 < len(side.place) else len(side.rows)
    rows = side.rows[: begin + int(np.argmax(side.total[begin:end])) + 1]
    rows = rows[of_kind(rows, MOVES) & (rows["category"] < len(Category)) & (rows["category"] != Category.RESERVED)]
    keys = np.stack([rows["category"].astype(np.int64), side.units_of(rows)])
    keys, which = np.unique(keys, axis=1, return_inverse=True)
    sums = np.zeros(keys.shape[1], np.int64)
    np.add.at(sums, which.reshape(-1), rows["num_bytes"])
    for (category, unit), num_bytes in zip(keys.T.tolist(), sums.tolist(), strict=True):
        key = (Category(category), unit)
        held[key] = held.get(key, 0) + num_bytes
    return held


def _phases(
    high: ComparedRank, low: ComparedRank, events: tuple[Ints, Ints], category: Category, units: list[int]
) -> tuple[Phase, ...]:
    """The phases in which one side holds more of ``category`` for ``units`` than the other, over shared events."""
    shared = (events[0] >= 0) & (events[1] >= 0)
    more = _curve(high, category, units)[events[0][shared]] > _curve(low, category, units)[events[1][shared]]
    found = high.rows["phase"][high.place][events[0][shared][more]]
    return tuple(Phase(number) for number in np.unique(found).tolist() if number < len(Phase))


def _curve(side: ComparedRank, category: Category, units: list[int]) -> Ints:
    """Bytes of ``category`` of ``units`` (empty: all units) after each event, from 0 at the start."""
    rows = side.rows
    mine = of_kind(rows, MOVES) & (rows["category"] == category)
    if units:
        mine &= np.isin(side.units_of(rows), units)
    return highest(np.cumsum(np.where(mine, rows["num_bytes"], 0)), side.place)


# -- time and collectives


Cost = tuple[Kind, str]


def _costs(header: Header, rank: RankTrace) -> dict[Cost, float]:
    """Median over the steps of the nanoseconds of each kind of work and of waiting for each collective."""
    numbers = np.unique(rank.rows["step"][rank.rows["step"] >= 0])
    table: dict[Cost, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    for kind, unit, step, duration_ns in _pieces(rank):
        place = int(np.searchsorted(numbers, step))
        if place < len(numbers) and numbers[place] == step:
            table.setdefault(_cost(header, kind, unit), np.zeros(len(numbers)))[place] += duration_ns
    return {key: float(np.median(values)) for key, values in table.items()}


def _cost(header: Header, kind: int, unit: int) -> Cost:
    return Kind(kind), unit_name(header, unit) if unit >= 0 else ""


def _pieces(rank: RankTrace) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, unit, step and nanoseconds of computing (waits and holds excluded) and of waits for collectives."""
    found = closed(spans(rank.rows, (*WORK, Kind.WAIT, Kind.GATE)), rank.rows)
    owner, begin_ns, end_ns = exclusive(found)
    work = np.isin(found.kind[owner], WORK)
    owner, took = owner[work], (end_ns - begin_ns)[work]
    yield from zip(
        *(column[owner].tolist() for column in (found.kind, found.unit, found.step)), took.tolist(), strict=True
    )
    sent = collectives.table(rank)
    yield from zip(sent.kind.tolist(), sent.unit.tolist(), sent.step.tolist(), sent.wait_ns.tolist(), strict=True)


def _slower(costs: list[dict[Cost, float]], *, longer: bool) -> tuple[TimeChange, ...]:
    keys = dict.fromkeys([*costs[0], *costs[1]])
    deltas = {key: costs[1].get(key, 0.0) - costs[0].get(key, 0.0) for key in keys}
    sign = 1 if longer else -1
    ordered = sorted((key for key in keys if deltas[key] * sign > 0), key=lambda key: -abs(deltas[key]))
    return tuple(TimeChange(kind=kind, unit=unit, delta_ns=deltas[kind, unit]) for kind, unit in ordered)


def _collectives(
    parts: list[Trace], rows: list[RankTrace], costs: list[dict[Cost, float]], step_ns: tuple[float, float]
) -> list[CollectiveChange]:
    issued = [_issued(part.header, entry) for part, entry in zip(parts, rows, strict=True)]
    found = []
    for kind, unit in sorted(set(issued[0]) | set(issued[1]), key=lambda key: (key[1], key[0])):
        (calls, num_bytes), (calls_b, num_bytes_b) = (side.get((kind, unit), (0.0, 0.0)) for side in issued)
        exposed = costs[0].get((kind, unit), 0.0), costs[1].get((kind, unit), 0.0)
        change = CollectiveChange(
            unit=unit, kind=kind, calls=(calls, calls_b), num_bytes=(num_bytes, num_bytes_b), exposed_ns=exposed
        )
        if change.differs or abs(exposed[1] - exposed[0]) > _TELLING * np.nanmax([*step_ns, 0.0]):
            found.append(change)
    return sorted(found, key=lambda c: (not c.differs, -abs(c.exposed_ns[1] - c.exposed_ns[0])))


def _issued(header: Header, rank: RankTrace) -> dict[Cost, tuple[float, float]]:
    """Calls and payload per step of each kind and unit."""
    found = collectives.table(rank)
    num_steps = max(len(np.unique(found.step[found.step >= 0])), 1)
    sums: dict[Cost, list[int]] = {}
    columns = (found.kind, found.unit, found.step, found.num_bytes)
    for kind, unit, step, num_bytes in zip(*(column.tolist() for column in columns), strict=True):
        if step >= 0:
            total = sums.setdefault(_cost(header, kind, unit), [0, 0])
            total[0] += 1
            total[1] += num_bytes
    return {key: (calls / num_steps, num_bytes / num_steps) for key, (calls, num_bytes) in sums.items()}
