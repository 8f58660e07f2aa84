"""Where the time of a step went on each rank, and the rank that the others wait for.

The time of a step on a rank, from its begin to its end without holds, is cut into disjoint pieces. A piece belongs to
the innermost span that covers it, so a wait inside a forward is not forward:

- *compute*: forward, backward, optimizer, and the loss between a forward and its backward;
- *transfers and copies*: compute waits for bytes that are under way, and copies into and out of collectives. With the
  waits for a slower rank, without the copies, this is what views call exposed;
- *waiting for a slower rank*: the part of a wait before the last rank issued the collective, and waits for readers;
- *host*: the rest, before the forward and elsewhere.

The parts are a partition: they add up to the step exactly, and none is negative.

Example: step 0..100, forward 10..60 with a wait 20..50 whose collective the last rank issued at 40, loss until backward
70..90 -> before forward 10, forward 20, waiting for a slower rank 20, transfers 10, loss 10, backward 20, other host
work 10.

Arrays: ``S`` steps, ``P`` parts, ``R`` ranks, ``U`` units. Times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from workbench.events import COPIES, MOVES, WORK, Kind, Phase
from workbench.replay.arrivals import LATE, LastArrivals, last_to_come
from workbench.replay.collectives import Collectives, matches, table
from workbench.replay.spans import Ints, Spans, chosen, closed, end_aborted, exclusive, spans
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header, Rows

MIN_STEPS = 5
"""Steps that a verdict on a slow rank needs: fewer are too few to tell it from noise."""

MAX_STEPS = 16
"""Steps that a verdict looks at: the newest, if it is not found in the newest :data:`FEW_STEPS` of them."""

FEW_STEPS = 8
"""Steps that show a slow rank if little else slows ranks, so that one is named soon after it became slow."""

CLEAR = 8.5
"""The median lateness of a slow rank in n steps is more than this many times the median deviation from it, by sqrt(n).

It is 4.6 standard errors of the median of normal noise (1.2533 * 1.4826 / sqrt(n) median deviations each).
"""

LEAST_NS = 1_000_000
"""A rank that is less late than this is not slow, however short the step."""

_NEVER = np.iinfo(np.int64).min
_WAITS = (Kind.WAIT, Kind.READERS)
_KINDS = (Kind.GATE, *_WAITS, *COPIES, *WORK)
IS_WORK = np.isin(np.arange(256), WORK)
"""Whether a kind is forward, backward or the optimizer's, by its number."""
_IS_BYTES = np.isin(np.arange(256), (*MOVES, Kind.RESIDENT, Kind.METRIC, Kind.LOG, Kind.DEVICE))
_IN_BACKWARD = np.isin(np.arange(256), [phase for phase in Phase if phase.info.part is Kind.BACKWARD])


class Group(Enum):
    """The four parts of a step; the value is its name."""

    COMPUTE = "compute"
    COMMUNICATION = "transfers and copies"
    LATE = "waiting for a slower rank"
    HOST = "host"


class Part(Enum):
    """A part of a step in detail; the value is its name."""

    BEFORE = "before forward"
    FORWARD = "forward"
    LOSS = "between forward and backward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    TRANSFERS = "transfers"
    COPIES = "copies"
    LATE = "waiting for a slower rank"
    OTHER = "other host work"

    @property
    def group(self) -> Group:
        """The part that it belongs to."""
        return _GROUPS[self]


_GROUPS = {
    Part.BEFORE: Group.HOST,
    Part.FORWARD: Group.COMPUTE,
    Part.LOSS: Group.COMPUTE,
    Part.BACKWARD: Group.COMPUTE,
    Part.OPTIMIZER: Group.COMPUTE,
    Part.TRANSFERS: Group.COMMUNICATION,
    Part.COPIES: Group.COMMUNICATION,
    Part.LATE: Group.LATE,
    Part.OTHER: Group.HOST,
}
PARTS = tuple(Part)
_PLACE = {part: place for place, part in enumerate(PARTS)}
_OF_KIND = np.full(256, _PLACE[Part.OTHER])
_OF_KIND[list(COPIES)] = _PLACE[Part.COPIES]
for _kind, _part in ((Kind.FORWARD, Part.FORWARD), (Kind.BACKWARD, Part.BACKWARD), (Kind.OPTIMIZER, Part.OPTIMIZER)):
    _OF_KIND[_kind] = _PLACE[_part]

OWN = tuple(part for part in PARTS if part.group in {Group.COMPUTE, Group.HOST})
"""Parts in which a rank can be slower than others: its own work."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepParts:
    """The parts of some steps of one rank, in the order of the steps.

    Attributes:
        rank: the rank.
        step: number of each step, ``[S]``.
        total_ns: its time without holds: the sum of its parts, ``[S]``.
        parts_ns: time of each part in the order of :data:`PARTS`, ``[S, P]``.
        late_ns: time it waited for each rank of the trace, in their order there, ``[S, R]``.
        units_ns: forward and backward without nested units, waits and copies, ``[S, 2, U + 1]``; the last is no unit.
        before_ns: time since the end of the step before, 0 for the first, ``[S]``.
        has_ended: whether its end is recorded, ``[S]``.
        is_held: whether the rank was held at a breakpoint or a pause inside it, ``[S]``.
    """

    rank: int
    step: Ints
    total_ns: Ints
    parts_ns: Ints
    late_ns: Ints
    units_ns: Ints
    before_ns: Ints
    has_ended: NDArray[np.bool_]
    is_held: NDArray[np.bool_]

    def ns(self, part: Part) -> Ints:
        """Return the time of one part in each step, ``[S]``."""
        found: Ints = self.parts_ns[:, _PLACE[part]]
        return found

    def group_ns(self, group: Group) -> Ints:
        """Return the time of one of the four parts in each step, ``[S]``."""
        found: Ints = self.parts_ns[:, [part.group is group for part in PARTS]].sum(axis=1)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """Disjoint pieces of a rank's time, in order; arrays are ``[N]``.

    Attributes:
        kind: kind of the innermost span that covers it.
        unit: unit of that span, -1 none.
        begin_ns: begin of each.
        end_ns: end of each.
        late_until_ns: for a wait, when the last rank issued its collective, or had read; else the smallest int64.
        late_rank: for a wait, position of that rank in the trace; else -1.
    """

    kind: Ints
    unit: Ints
    begin_ns: Ints
    end_ns: Ints
    late_until_ns: Ints
    late_rank: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class RankTimes:
    """The raw material of a rank's parts.

    Attributes:
        collectives: those it issued.
        in_backward: whether it issued each of them in backward.
        last: the last rank to issue each of them.
        pieces: its time.
    """

    collectives: Collectives
    in_backward: NDArray[np.bool_]
    last: LastArrivals
    pieces: Pieces


def times_of(trace: Trace, error_ns: int) -> dict[int, RankTimes]:
    """Return the times of each rank of a trace that has rows.

    Args:
        trace: some steps, on the axis that is to be explained.
        error_ns: maximum error between times on different clocks.
    """
    parts = [_without_bytes(part) for part in trace.ranks if len(part.rows)]
    tables = {part.rank: table(part) for part in parts}
    last = last_to_come(trace.header, tables, error_ns) if parts else {}
    places = {part.rank: place for place, part in enumerate(trace.ranks)}
    return {
        part.rank: RankTimes(
            collectives=tables[part.rank],
            in_backward=_IN_BACKWARD[_phases(part, tables[part.rank])],
            last=last[part.rank],
            pieces=_pieces(part, tables[part.rank], last[part.rank], places),
        )
        for part in parts
    }


def _without_bytes(part: RankTrace) -> RankTrace:
    """Return a rank without the rows that only say where bytes are: half of them."""
    wanted = ~_IS_BYTES[part.kinds]
    wanted[-1] = True  # running spans end there
    return replace(part, rows=chosen(part.rows, wanted))


def _phases(part: RankTrace, issued: Collectives) -> Ints:
    """Return the phase in which each collective was issued."""
    found: Ints = part.rows["phase"][np.searchsorted(part.rows["seq"], issued.seq)]
    return found


def _pieces(part: RankTrace, issued: Collectives, last: LastArrivals, places: Mapping[int, int]) -> Pieces:
    found = closed(spans(part.rows, _KINDS), part.rows)
    owner, begin_ns, end_ns = exclusive(found)
    of_wait = np.where(found.kind == Kind.WAIT, matches(issued, found), -1)[owner]
    is_known = of_wait >= 0
    if len(issued):
        until, who = last.issue_ns[of_wait], last.rank[of_wait]
    else:
        until = who = np.zeros(len(owner), np.int64)
    reads = found.kind[owner] == Kind.READERS
    until = np.where(reads, end_ns, np.where(is_known, until, _NEVER))
    who = np.where(reads, _last_readers(part.rows, found)[owner], np.where(is_known, who, -1))
    number = np.full(max(places, default=0) + 2, -1)
    number[list(places)] = list(places.values())
    return Pieces(
        kind=found.kind[owner],
        unit=found.unit[owner],
        begin_ns=begin_ns,
        end_ns=end_ns,
        late_until_ns=until,
        late_rank=np.where((who >= 0) & (who < len(number)), number[np.clip(who, 0, len(number) - 1)], -1),
    )


def _last_readers(rows: Rows, found: Spans) -> Ints:
    """Return the last rank to read, for each wait for readers that has ended; -1 for other spans."""
    place = np.minimum(np.searchsorted(rows["seq"], found.end_seq), len(rows) - 1)
    is_end = (rows["kind"][place] == Kind.READERS) & (rows["seq"][place] == found.end_seq)  # not that of an abort
    return np.where(is_end, np.nan_to_num(rows["value"][place], nan=-1), -1).astype(np.int64)


def step_parts(trace: Trace, times: Mapping[int, RankTimes]) -> dict[int, StepParts]:
    """Return the parts of each rank's steps that begin in ``trace``; ``times`` are those of :func:`times_of`."""
    parts = (part for part in trace.ranks if part.rank in times)
    return {part.rank: _of_rank(trace.header, part, times[part.rank].pieces, len(trace.ranks)) for part in parts}


def _of_rank(header: Header, part: RankTrace, pieces: Pieces, num_ranks: int) -> StepParts:
    known = spans(part.rows, (Kind.STEP,))
    ended = closed(known, part.rows)
    begin_ns, end_ns = _in_order(ended)
    roots = np.array([*(unit.root == unit.index for unit in header.units), False])
    found = [
        _of_step(pieces, roots, int(begin), int(end), num_ranks) for begin, end in zip(begin_ns, end_ns, strict=True)
    ]
    shape = (len(found), len(PARTS)), (len(found), num_ranks), (len(found), 2, len(header.units) + 1)
    arrays = [np.array([each[place] for each in found], np.int64).reshape(size) for place, size in enumerate(shape)]
    held_ns = np.array([each[3] for each in found], np.int64)
    gates = spans(part.rows, (Kind.GATE,))
    return StepParts(
        rank=part.rank,
        step=known.step,
        total_ns=end_ns - begin_ns - held_ns,
        parts_ns=arrays[0],
        late_ns=arrays[1],
        units_ns=arrays[2],
        before_ns=np.concatenate([[0], begin_ns[1:] - end_ns[:-1]])[: len(found)],
        has_ended=(known.end_seq >= 0) & (end_aborted(known, part.rows).end_seq == known.end_seq),
        is_held=np.isin(known.step, gates.step),
    )


def _in_order(steps: Spans) -> tuple[Ints, Ints]:
    """Return begin and end of steps; a step ends no later than the next one begins, and not before its begin."""
    begin_ns = np.maximum.accumulate(steps.begin_ns)
    following = np.append(begin_ns[1:], np.iinfo(np.int64).max)[: len(begin_ns)]
    return begin_ns, np.maximum(np.minimum(steps.end_ns, following), begin_ns)


def _of_step(
    pieces: Pieces, roots: NDArray[np.bool_], begin_ns: int, end_ns: int, num_ranks: int
) -> tuple[Ints, Ints, Ints, int]:
    """Return the parts ``[P]``, the wait for each rank ``[R]``, the units' work ``[2, U + 1]``, and the held time."""
    first = int(np.searchsorted(pieces.end_ns, begin_ns, side="right"))
    last = max(int(np.searchsorted(pieces.begin_ns, end_ns, side="left")), first)
    here = slice(first, last)
    kind, unit = pieces.kind[here], pieces.unit[here]
    begin, end = np.clip(pieces.begin_ns[here], begin_ns, end_ns), np.clip(pieces.end_ns[here], begin_ns, end_ns)
    length = end - begin
    late = np.clip(pieces.late_until_ns[here], begin, end) - begin
    is_wait, is_held = np.isin(kind, _WAITS), kind == Kind.GATE
    late[~is_wait] = 0
    parts = np.zeros(len(PARTS), np.int64)
    np.add.at(parts, _OF_KIND[kind[~is_wait & ~is_held]], length[~is_wait & ~is_held])
    parts[_PLACE[Part.LATE]] += late.sum()
    parts[_PLACE[Part.TRANSFERS]] += (length - late)[is_wait].sum()
    gap_ns = np.append(begin, end_ns) - np.concatenate([[begin_ns], end])
    np.add.at(parts, _of_gaps(kind, roots[np.where(unit < len(roots) - 1, unit, -1)]), gap_ns)
    waited = np.zeros(num_ranks + 1, np.int64)  # the last entry is for -1
    np.add.at(waited, pieces.late_rank[here], late)
    units = np.zeros((2, len(roots)), np.int64)
    for row, wanted in enumerate((Kind.FORWARD, Kind.BACKWARD)):
        chosen = kind == wanted
        np.add.at(units[row], np.where(unit[chosen] < len(roots) - 1, unit[chosen], -1), length[chosen])
    return parts, waited[:-1], units, int(length[is_held].sum())


def _of_gaps(kind: Ints, is_root: NDArray[np.bool_]) -> Ints:
    """Return the place of the part of each gap before, between and after some pieces, ``[N + 1]``."""
    count = len(kind)
    worked = np.where(IS_WORK[kind], np.arange(count), -1)
    before = np.maximum.accumulate(np.concatenate([[-1], worked]))
    after = np.where(worked < 0, count, worked)
    after = np.minimum.accumulate(np.append(after, count)[::-1])[::-1]
    kinds, roots = np.append(kind, -1), np.append(is_root, False)  # at -1 and ``count``: no work
    previous, following, begins_model = kinds[before], kinds[after], roots[after]
    found = np.full(count + 1, _PLACE[Part.OTHER])
    found[(previous == Kind.FORWARD) & (following == Kind.FORWARD) & ~begins_model] = _PLACE[Part.FORWARD]
    found[(previous == Kind.FORWARD) & (following == Kind.BACKWARD)] = _PLACE[Part.LOSS]
    found[(previous == Kind.BACKWARD) & (following == Kind.BACKWARD)] = _PLACE[Part.BACKWARD]
    found[(previous == -1) & (following != -1)] = _PLACE[Part.BEFORE]
    return found


# ---- the slow rank


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that the others wait for, step after step; times are medians over the steps.

    Attributes:
        rank: the rank.
        late_ns: how long a rank waits for it, less its own waiting for others.
        step_ns: duration of a step.
        steps: the steps that decide.
        part: the part of its own work in which it is slower than the others; None: between the steps.
        own_ns: its time in that part.
        others_ns: that of the others.
        unit: in forward or backward, the unit in which it is slowest; -1: none in particular.
        unit_ns: its time there, and that of the others.
    """

    rank: int
    late_ns: int
    step_ns: int
    steps: tuple[int, ...]
    part: Part | None
    own_ns: int
    others_ns: int
    unit: int
    unit_ns: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Comparable:
    """The steps in which ranks can be compared.

    Attributes:
        steps: numbers of those that ended on all ranks without a hold, except the first one recorded.
        num_held: how many were left out because a rank was held.
    """

    steps: tuple[int, ...]
    num_held: int


def comparable(parts: Mapping[int, StepParts], first_step: int) -> Comparable:
    """Return the newest :data:`MAX_STEPS` comparable steps.

    Args:
        parts: of each rank.
        first_step: the first step that was recorded, in which engines and allocators warm up.
    """
    ended = [set(each.step[each.has_ended].tolist()) for each in parts.values()]
    held = set[int]().union(*(each.step[each.is_held].tolist() for each in parts.values()))
    common = set[int]() if not ended else ended[0].intersection(*ended[1:])
    found = sorted(common - held - {first_step})
    return Comparable(steps=tuple(found[-MAX_STEPS:]), num_held=len(common & held))


def slow_rank(parts: Mapping[int, StepParts], steps: tuple[int, ...], error_ns: int) -> SlowRank | None:
    """Return the rank that the others wait for, step after step; None if there is none, or there are too few steps.

    A rank's *lateness* in a step is the longest time that another rank waits for it, less the time that it waits for
    others itself: a rank that is late only because it waited for another one has none. A rank is slow if the median of
    its lateness is more than a bound, the largest of :data:`~workbench.replay.arrivals.LATE` of the median step, the
    clock error and :data:`LEAST_NS`; if it is more than noise explains (:data:`CLEAR`); and if the rank is later than
    the bound in n / 2 + sqrt(n) of n steps, two standard deviations more than a coin would say. Noise hits ranks in
    turns, and so fails the last two.

    Args:
        parts: of each rank.
        steps: the steps that decide (:func:`comparable`).
        error_ns: maximum error between times on different clocks.
    """
    if len(steps) < MIN_STEPS or len(parts) < 2:
        return None
    few = _slow_rank(parts, steps[-FEW_STEPS:], error_ns)
    return few if few is not None or len(steps) <= FEW_STEPS else _slow_rank(parts, steps, error_ns)


def _slow_rank(parts: Mapping[int, StepParts], steps: tuple[int, ...], error_ns: int) -> SlowRank | None:
    rows = {rank: np.searchsorted(each.step, steps) for rank, each in parts.items()}
    waited = np.stack([each.late_ns[rows[rank]] for rank, each in parts.items()])  # [R, S, R]: who waited, for whom
    late = waited.max(axis=0).T - waited.sum(axis=2)  # [R, S]
    step_ns = float(np.median(np.stack([each.total_ns[rows[rank]] for rank, each in parts.items()])))
    median = np.median(late, axis=1)
    worst = int(np.argmax(median))
    least = max(LATE * step_ns, error_ns, LEAST_NS)
    deviation = float(np.median(np.abs(late[worst] - median[worst])))
    is_steady = (late[worst] > least).sum() >= len(steps) / 2 + len(steps) ** 0.5
    if median[worst] <= max(least, CLEAR * deviation / len(steps) ** 0.5) or not is_steady:
        return None
    rank = list(parts)[worst]
    part, own, others = _slower_in(parts, rows, rank)
    unit, unit_ns = _slower_unit(parts, rows, rank, part)
    return SlowRank(
        rank=rank,
        late_ns=int(median[worst]),
        step_ns=int(step_ns),
        steps=steps,
        part=part,
        own_ns=own,
        others_ns=others,
        unit=unit,
        unit_ns=unit_ns,
    )


def _slower_in(parts: Mapping[int, StepParts], rows: Mapping[int, Ints], rank: int) -> tuple[Part | None, int, int]:
    """Return the part in which a rank is slower by most, its time there and that of the others, medians."""
    own = {
        one: np.median(
            np.column_stack([*(each.ns(part)[rows[one]] for part in OWN), each.before_ns[rows[one]]]), axis=0
        )
        for one, each in parts.items()
    }
    others = np.median(np.stack([own[one] for one in parts if one != rank]), axis=0)
    most = int(np.argmax(own[rank] - others))
    return [*OWN, None][most], int(own[rank][most]), int(others[most])


def _slower_unit(
    parts: Mapping[int, StepParts], rows: Mapping[int, Ints], rank: int, part: Part | None
) -> tuple[int, tuple[int, int]]:
    """Return the unit in whose forward or backward a rank is slower by most, and the times; -1 in other parts."""
    if part not in {Part.FORWARD, Part.BACKWARD}:
        return -1, (0, 0)
    row = 0 if part is Part.FORWARD else 1
    medians = {one: np.median(each.units_ns[rows[one], row], axis=0) for one, each in parts.items()}
    others = np.median(np.stack([medians[one] for one in parts if one != rank]), axis=0)
    excess = (medians[rank] - others)[:-1]
    if not len(excess) or excess.max() <= 0:
        return -1, (0, 0)
    unit = int(np.argmax(excess))
    return unit, (int(medians[rank][unit]), int(others[unit]))
