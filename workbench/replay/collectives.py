"""Collectives: what was sent for which unit, how long it took and how much of that compute had to wait.

*payload* is the logical size of a collective (all-gather: its whole output; reduce-scatter: its whole input);
:func:`ring_bytes` is what one rank sends for it. *exposed* time is compute blocked on it. Time that a rank was held
by a breakpoint or a pause counts for neither. Arrays: ``N`` collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from workbench.replay.spans import Ints, Spans, closed, durations_ns, spans
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import COLLECTIVES, Edge, Header, Kind, Param, Rows, Unit


@dataclass(frozen=True, kw_only=True, eq=False)
class Collectives:
    """The collectives one rank issued, in that order; arrays are ``[N]``.

    Attributes:
        kind: Kind.
        unit: unit index, -1 none.
        step: training step it was issued in, -1 outside any.
        num_bytes: payload.
        comm_group: index into ``Header.comm_groups``, -1 none.
        comm_seq: its number within the group; equal on all ranks that took part; -1 none.
        seq: the row that issued it.
        issue_ns: when it was issued.
        end_ns: when its last byte arrived; -1 if it has not ended.
        time_ns: from issue to end (if it has not ended: to the last row of its step), not held.
        wait_begin_ns: when compute first waited for it; -1 if never.
        wait_end_ns: when compute went on; -1 if it never waited or waits still.
        wait_ns: exposed time: all its waits (a wait not ended: to the last row of its step), not held.
    """

    kind: Ints
    unit: Ints
    step: Ints
    num_bytes: Ints
    comm_group: Ints
    comm_seq: Ints
    seq: Ints
    issue_ns: Ints
    end_ns: Ints
    time_ns: Ints
    wait_begin_ns: Ints
    wait_end_ns: Ints
    wait_ns: Ints

    def __len__(self) -> int:
        return len(self.kind)


def table(rank_trace: RankTrace) -> Collectives:
    """Return the collectives issued in a rank's trace; those issued before its first row are left out."""
    rows = rank_trace.rows
    issued = spans(rows, COLLECTIVES)
    waits = spans(rows, (Kind.WAIT,))
    place = _matches(issued, waits)
    waits_ns = durations_ns(rows, waits.begin_ns, closed(waits, rows).end_ns)
    exposed = np.zeros(len(issued), np.int64)
    np.add.at(exposed, place[place >= 0], waits_ns[place >= 0])
    return Collectives(
        kind=issued.kind,
        unit=issued.unit,
        step=issued.step,
        num_bytes=issued.num_bytes,
        comm_group=issued.comm_group,
        comm_seq=issued.comm_seq,
        seq=issued.begin_seq,
        issue_ns=issued.begin_ns,
        end_ns=issued.end_ns,
        time_ns=durations_ns(rows, issued.begin_ns, closed(issued, rows).end_ns),
        wait_begin_ns=_first_of(place, waits.begin_ns, len(issued)),
        wait_end_ns=_first_of(place, waits.end_ns, len(issued)),
        wait_ns=exposed,
    )


def _matches(issued: Spans, waits: Spans) -> Ints:
    """For each wait the position of the collective it is for, -1 if that was issued before the trace."""
    if not len(issued):
        return np.full(len(waits), -1)
    order = np.argsort(_identity(issued), kind="stable")
    keys, wanted = _identity(issued)[order], _identity(waits)
    found = order[np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)]
    return np.where((_identity(issued)[found] == wanted) & (waits.comm_seq >= 0), found, -1)


def _identity(found: Spans) -> Ints:
    """One number per collective, the same in the collective and in its waits."""
    return (found.comm_group << 32) + found.comm_seq


def _first_of(place: Ints, values: Ints, count: int) -> Ints:
    """For each of ``count`` collectives the value of its first wait, -1 without one."""
    first = np.full(count, -1, np.int64)
    matched = np.flatnonzero(place >= 0)[::-1]  # the first one is written last
    first[place[matched]] = values[matched]
    return first


def ring_bytes(kind: Kind, payload: int, num_ranks: int) -> float:
    """Return the bytes one rank sends on a ring of ``num_ranks`` for a collective of ``payload`` bytes.

    All-gather and reduce-scatter: ``(F - 1) / F * payload``; an all-reduce is one after the other, so twice that; in
    a broadcast all but the last rank pass the whole payload on, which is the same share on average.
    """
    share = (num_ranks - 1) / num_ranks * payload
    return 2 * share if kind == Kind.ALL_REDUCE else share


@dataclass(frozen=True, kw_only=True)
class Count:
    """The collectives of one kind that one rank issued for one unit in one step.

    Attributes:
        rank: global rank.
        unit: unit index, -1 none.
        kind: one of COLLECTIVES.
        calls: how many.
        num_bytes: their payloads together.
        time_ns: their times together.
        exposed_ns: how long compute waited for them, together.
    """

    rank: int
    unit: int
    kind: Kind
    calls: int
    num_bytes: int
    time_ns: int
    exposed_ns: int


def counts(trace: Trace, step: int) -> tuple[Count, ...]:
    """Return what each rank issued in ``step``, by rank, unit and kind; what was never issued has no entry."""
    one_step = trace.slice(step=step)
    return tuple(count for rank in one_step.ranks for count in _counts(rank, step))


def _counts(rank_trace: RankTrace, step: int) -> Iterator[Count]:
    found = table(rank_trace)
    here = np.flatnonzero(found.step == step)
    pairs, which = np.unique(np.stack([found.unit[here], found.kind[here]]), axis=1, return_inverse=True)
    columns = (np.ones(len(found), np.int64), found.num_bytes, found.time_ns, found.wait_ns)
    sums = np.zeros((len(columns), pairs.shape[1]), np.int64)
    for total, column in zip(sums, columns, strict=True):
        np.add.at(total, which, column[here])
    for (unit, kind), (calls, num_bytes, time_ns, exposed_ns) in zip(pairs.T.tolist(), sums.T.tolist(), strict=True):
        yield Count(
            rank=rank_trace.rank,
            unit=unit,
            kind=Kind(kind),
            calls=calls,
            num_bytes=num_bytes,
            time_ns=time_ns,
            exposed_ns=exposed_ns,
        )


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one training step should do for one unit: see :func:`closed_form`."""

    unit: int
    kind: Kind
    calls: int
    num_bytes: int


def closed_form(header: Header) -> tuple[Expected, ...]:
    """Return the collectives of one plain training step on each rank: one forward, one backward, gradients reduced.

    With ``p^ = padded_rows * F * elements of a row``, F the unit's shard size, b_c and b_r the bytes per element of
    its all-gathers and reductions: each unit gathers ``sum of p^ * b_c`` in forward and, if it is resharded after
    forward, once more in backward; it reduces ``sum of p^ * b_r`` of its trainable parameters once. A unit with
    F = 1 communicates nothing. Retired units are left out.

    Example: G units, only the root kept unsharded after forward -> 2 G - 1 all-gathers and G reduce-scatters.
    """
    live = (unit for unit in header.units if not unit.retired)
    return tuple(expected for unit in live for expected in _closed_form(unit))


def _closed_form(unit: Unit) -> Iterator[Expected]:
    trainable = [param for param in unit.params if param.trainable]
    gathers = (1 + unit.reshard_after_forward) if unit.shard_size > 1 else 0
    reduces = 1 if unit.shard_size > 1 and trainable else 0
    payload = unit.compute_itemsize * sum(_padded_elements(param, unit.shard_size) for param in unit.params)
    yield Expected(unit=unit.index, kind=Kind.ALL_GATHER, calls=gathers, num_bytes=gathers * payload)
    payload = unit.reduce_itemsize * sum(_padded_elements(param, unit.shard_size) for param in trainable)
    yield Expected(unit=unit.index, kind=Kind.REDUCE_SCATTER, calls=reduces, num_bytes=reduces * payload)


def _padded_elements(param: Param, shard_size: int) -> int:
    others = prod(size for dim, size in enumerate(param.shape) if dim != param.shard_dim)
    return param.padded_rows * shard_size * others


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Measured beside expected, for one unit and kind, of ranks that issued equally many calls and bytes.

    Attributes:
        unit: unit index, -1 none.
        kind: one of COLLECTIVES.
        ranks: the ranks this is about, ascending.
        calls: how many each issued.
        num_bytes: payloads of one rank together.
        time_ns: mean over the ranks of the times together.
        exposed_ns: mean over the ranks of the exposed times together.
        expected: what the closed form says; None if it says nothing: a retired unit, no unit, another kind, or a
            step whose beginning or end is not in the trace.
    """

    unit: int
    kind: Kind
    ranks: tuple[int, ...]
    calls: int
    num_bytes: int
    time_ns: float
    exposed_ns: float
    expected: Expected | None

    @property
    def differs(self) -> bool:
        """Whether something else was expected. A step that accumulates gradients differs, and rightly so."""
        found = (self.calls, self.num_bytes)
        return self.expected is not None and found != (self.expected.calls, self.expected.num_bytes)


def compare(trace: Trace, step: int) -> tuple[Comparison, ...]:
    """Return measured beside expected for every unit that a rank did anything with in ``step``.

    Ordered by unit and kind; several entries of one unit and kind where ranks differ, the most common first.
    """
    one_step = trace.slice(step=step)
    forms = {(e.unit, e.kind): e for e in closed_form(trace.header)}
    found: dict[tuple[int, Kind, int, int, Expected | None], list[Count]] = {}
    for rank in one_step.ranks:
        for count, expected in _with_expected(rank, step, forms):
            found.setdefault((count.unit, count.kind, count.calls, count.num_bytes, expected), []).append(count)
    rows = [_comparison(alike, key[-1]) for key, alike in found.items()]
    return tuple(sorted(rows, key=lambda c: (c.unit, c.kind, -len(c.ranks), c.ranks)))


def _with_expected(
    rank_trace: RankTrace, step: int, forms: dict[tuple[int, Kind], Expected]
) -> Iterator[tuple[Count, Expected | None]]:
    """What one rank issued in ``step``, each with what was expected; also what was expected and never issued."""
    measured = {(count.unit, count.kind): count for count in _counts(rank_trace, step)}
    rows = rank_trace.rows[rank_trace.rows["step"] == step]
    active = set(np.unique(rows["unit"]).tolist()) if _is_whole(rows) else set()
    expected = {key: form for key, form in forms.items() if key[0] in active}
    for unit, kind in measured | {key: form for key, form in expected.items() if form.calls}:
        nothing = Count(rank=rank_trace.rank, unit=unit, kind=kind, calls=0, num_bytes=0, time_ns=0, exposed_ns=0)
        yield measured.get((unit, kind), nothing), expected.get((unit, kind))


def _is_whole(rows: Rows) -> bool:
    """Whether the rows of a step hold its beginning and its end."""
    edges = rows["edge"][rows["kind"] == Kind.STEP]
    return Edge.BEGIN in edges and Edge.END in edges


def _comparison(alike: list[Count], expected: Expected | None) -> Comparison:
    first = alike[0]
    return Comparison(
        unit=first.unit,
        kind=first.kind,
        ranks=tuple(count.rank for count in alike),
        calls=first.calls,
        num_bytes=first.num_bytes,
        time_ns=sum(count.time_ns for count in alike) / len(alike),
        exposed_ns=sum(count.exposed_ns for count in alike) / len(alike),
        expected=expected,
    )
