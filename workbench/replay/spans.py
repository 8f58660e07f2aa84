"""Spans: what a rank was doing from when to when, paired from BEGIN and END rows.

Times are nanoseconds. Arrays: ``N`` spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from workbench.events import COLLECTIVES, Edge, Kind
from workbench.trace.begin_end import partners
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Rows

Ints = NDArray[np.int64]

_IS_COLLECTIVE = np.isin(np.arange(256), COLLECTIVES)


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """What one rank did, in the order in which it began; arrays are ``[N]``.

    Attributes:
        kind: Kind.
        unit: unit index, -1 none.
        step: the step each began in, -1 outside any.
        num_bytes: payload: that of the BEGIN row.
        comm_group: of a collective or a wait for one, index into ``Header.comm_groups``; else -1.
        comm_seq: likewise, its number within the group; equal on all participating ranks.
        end_ns: time of the END row, of a collective when its last byte arrived; -1 where there is none (yet).
    """

    kind: Ints
    unit: Ints
    step: Ints
    num_bytes: Ints
    comm_group: Ints
    comm_seq: Ints
    end_ns: Ints

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans(Work):
    """Spans of one rank; arrays are ``[N]``.

    Attributes:
        begin_ns: time of the BEGIN row.
        begin_seq: the BEGIN row.
        end_seq: the END row, -1 where there is none.
    """

    begin_ns: Ints
    begin_seq: Ints
    end_seq: Ints


def of_kind(rows: Rows, kinds: Iterable[Kind]) -> NDArray[np.bool_]:
    """Return a mask of the rows of one of ``kinds``; ``[len(rows)]``."""
    wanted = np.zeros(256, np.bool_)
    wanted[list(kinds)] = True
    found: NDArray[np.bool_] = wanted[rows["kind"]]
    return found


def rows_of(rank_trace: RankTrace, kinds: Iterable[Kind]) -> Rows:
    """Return a rank's rows of some ``kinds``."""
    wanted = np.zeros(256, np.bool_)
    wanted[list(kinds)] = True
    return chosen(rank_trace.rows, wanted[rank_trace.kinds])


def chosen(rows: Rows, which: NDArray[np.bool_]) -> Rows:
    """Return ``rows[which]``, in a third of the time."""
    return rows.take(np.flatnonzero(which))


def spans(rows: Rows, kinds: Iterable[Kind]) -> Spans:
    """Return the spans of ``kinds`` that begin in a rank's ``rows``; spans begun before them are left out.

    Example: ``FORWARD BEGIN 0, FORWARD BEGIN 1, FORWARD END 1`` -> unit 0 not ended, unit 1 ended.
    """
    rows = chosen(rows, of_kind(rows, kinds))
    partner = partners(rows)
    begin = np.flatnonzero(rows["edge"] == Edge.BEGIN)
    end = partner[begin]
    opened = {name: rows[name][begin].astype(np.int64) for name in ("kind", "unit", "step", "num_bytes")}
    comm = {name: rows[name][begin].astype(np.int64) for name in ("comm_group", "comm_seq")}
    return Spans(
        **opened,
        **comm,
        begin_ns=rows["t_ns"][begin],
        end_ns=np.where(end >= 0, rows["t_ns"][end], -1),
        begin_seq=rows["seq"][begin],
        end_seq=np.where(end >= 0, rows["seq"][end], -1),
    )


def last_ns(rows: Rows) -> int:
    """Return the latest time of any row; 0 without rows."""
    return int(rows["t_ns"].max(initial=0))


def first_ns(trace: Trace) -> int:
    """Return the time of the first row of any rank; 0 without rows."""
    return min((int(rank_trace.rows["t_ns"][0]) for rank_trace in trace.ranks if len(rank_trace.rows)), default=0)


def extent_ns(trace: Trace) -> tuple[int, int]:
    """Return the times of the first and the last row of any rank; zeros without rows."""
    last = max((int(rank_trace.rows["t_ns"].max()) for rank_trace in trace.ranks if len(rank_trace.rows)), default=0)
    return first_ns(trace), last


def has_steps(trace: Trace) -> bool:
    """Whether any rank has begun a step."""
    return any(rank_trace.place_after(-1) < len(rank_trace.rows) for rank_trace in trace.ranks)


def zero_ns(trace: Trace) -> int:
    """Return time 0 of an axis over the whole trace: the begin of the first step.

    Without a step it is the time of the first row, and 0 without rows. Earlier events, such as sharding, have negative
    times.
    """
    places = [(rank_trace.rows, rank_trace.place_after(-1)) for rank_trace in trace.ranks]
    begun = [int(rows["t_ns"][place]) for rows, place in places if place < len(rows)]
    return min(begun) if begun else first_ns(trace)


def end_aborted(found: Spans, rows: Rows) -> Spans:
    """Return spans with an end for each aborted one; only running spans have none.

    A span without an END row is aborted once its unit is reset, or its rank has left the step in which it began. It
    ends at the last row before that row, whose number becomes its ``end_seq``. A collective issued outside any step is
    aborted only by a reset: another step may still wait for it.

    Args:
        found: spans of ``rows``.
        rows: all rows of the rank in order, not only those of the spans.
    """
    is_open = np.flatnonzero(found.end_seq < 0)
    if not len(is_open):
        return found
    step = rows["step"]
    changes = np.flatnonzero(step[1:] != step[:-1]) + 1
    resets = np.flatnonzero((rows["kind"] == Kind.RESET) & (rows["unit"] >= 0))
    t_ns, end_ns, end_seq = np.maximum.accumulate(rows["t_ns"]), found.end_ns.copy(), found.end_seq.copy()
    begun = np.searchsorted(rows["seq"], found.begin_seq[is_open])
    for span, begin in zip(is_open.tolist(), begun.tolist(), strict=True):
        leaves = changes if found.step[span] >= 0 or not _IS_COLLECTIVE[found.kind[span]] else changes[:0]
        over = min(_first_after(leaves, begin), _first_after(resets[rows["unit"][resets] == found.unit[span]], begin))
        if over < len(rows):
            end_ns[span], end_seq[span] = max(int(t_ns[over - 1]), int(found.begin_ns[span])), rows["seq"][over]
    return replace(found, end_ns=end_ns, end_seq=end_seq)


def unfinished(trace: Trace, step: int) -> str:
    """Return ``aborted`` or ``not ended`` if a rank that began a step did not end it; otherwise empty."""
    if step < 0:
        return ""
    left = [part for part in trace.ranks if _has_begun_only(part, step)]
    has_later = any(part.places_of(step, step)[1] < len(part.rows) for part in left)
    return "" if not left else "aborted" if has_later else "not ended"


def _has_begun_only(part: RankTrace, step: int) -> bool:
    begin, end = part.places_of(step, step)
    edges = part.rows["edge"][begin:end][part.kinds[begin:end] == Kind.STEP]
    return len(edges) > 0 and Edge.END not in edges


def _first_after(places: Ints, begin: int) -> int:
    """Return the first of ascending ``places`` after ``begin``; the largest int64 if there is none."""
    at = int(np.searchsorted(places, begin, side="right"))
    return int(places[at]) if at < len(places) else np.iinfo(np.int64).max


def closed(found: Spans, rows: Rows) -> Spans:
    """Return spans that all have an end: aborted ones as in :func:`end_aborted`, running ones at the last row."""
    ended = end_aborted(found, rows)
    goes_on = ended.end_seq < 0
    if not goes_on.any():
        return ended
    end_ns = np.where(goes_on, np.maximum(last_ns(rows), ended.begin_ns), ended.end_ns)
    return replace(ended, end_ns=end_ns, end_seq=np.where(goes_on, rows["seq"][-1] + 1, ended.end_seq))


def exclusive(found: Spans) -> tuple[Ints, Ints, Ints]:
    """Return the exclusive time of each span: where it is the innermost running one.

    Example: spans 0..8 and, within it, 2..5 -> pieces of span 0, 1, 0 at 0..2, 2..5, 5..8.

    Args:
        found: spans that all have an end (:func:`closed`).

    Returns:
        Position of the span, begin and end in nanoseconds of each piece, in order of time.
    """
    begin, end = 2 * found.begin_seq + 1, 2 * found.end_seq  # the row that shows an abort may begin another span
    seqs, first = np.unique(np.concatenate([begin, end]), return_index=True)
    t_ns = np.maximum.accumulate(np.concatenate([found.begin_ns, found.end_ns])[first])
    top = owners(np.searchsorted(seqs, begin), np.searchsorted(seqs, end), len(seqs))
    changes = np.flatnonzero(np.diff(top, prepend=-2))
    owner, begin_ns, end_ns = top[changes], t_ns[changes], t_ns[np.append(changes[1:], len(seqs) - 1)[: len(changes)]]
    kept = (owner >= 0) & (end_ns > begin_ns)
    return owner[kept], begin_ns[kept], end_ns[kept]


def durations_ns(rows: Rows, begin_ns: Ints, end_ns: Ints) -> Ints:
    """Return the length of each interval ``[N]`` without the time its rank was held at a gate.

    Example: held from 40 to 90, the interval 10..100 lasts 40 and the interval 50..60 lasts 0.
    """
    gates = closed(spans(rows, (Kind.GATE,)), rows)
    held = within_ns(gates.begin_ns, gates.end_ns, end_ns) - within_ns(gates.begin_ns, gates.end_ns, begin_ns)
    return end_ns - begin_ns - held


def total_ns(rank_trace: RankTrace, kind: Kind) -> int:
    """Return the total duration of the spans of ``kind`` that begin in a rank's trace, without holds.

    Running spans end at the last row, aborted ones as in :func:`end_aborted`. The spans must not nest.
    """
    rows, mine = rank_trace.rows, rows_of(rank_trace, (kind,))
    begins, is_held = mine["edge"] == Edge.BEGIN, (rank_trace.kinds == Kind.GATE).any()
    if len(mine) % 2 == 0 and begins[::2].all() and not begins[1::2].any() and not is_held:
        return int(mine["t_ns"][1::2].sum() - mine["t_ns"][::2].sum())
    found = closed(spans(rows, (kind,)), rows)
    return int(durations_ns(rows, found.begin_ns, found.end_ns).sum())


def within_ns(begin_ns: Ints, end_ns: Ints, t_ns: Ints) -> Ints:
    """Return how much of some intervals is before each ``t_ns``, ``[N]``; they are in order and do not overlap."""
    if not len(begin_ns):
        return np.zeros_like(t_ns)
    whole = np.concatenate([[0], np.cumsum(end_ns - begin_ns)])
    begun = np.searchsorted(begin_ns, t_ns, side="right")  # number of intervals begun by t_ns
    rest = np.where(begun > 0, np.maximum(end_ns[begun - 1] - t_ns, 0), 0)
    return whole[begun] - rest


def owners(begin: Ints, end: Ints, num_slots: int) -> Ints:
    """Return, for each slot, which of the spans that cover it began last; -1 where none does. ``[num_slots]``.

    For nested (or overlapping) spans this is the exclusive part of each; slots are rows, or any other axis. Takes
    ``O((N + num_slots) log num_slots)``: each span is entered as the two blocks of a power of two slots that cover it;
    then every block passes its span on to its two halves, and the later span wins.

    Example: spans 0..8 and 2..5 over 9 slots -> ``[0, 0, 1, 1, 1, 0, 0, 0, -1]``.

    Args:
        begin: first slot of each span, ``[N]``, ascending.
        end: the slot after its last; spans with ``end <= begin`` cover nothing.
        num_slots: number of slots.
    """
    length = np.maximum(end - begin, 0)
    level = np.frexp(np.maximum(length, 1))[1] - 1  # the largest power of two that fits
    number = np.arange(len(begin))
    top = np.full(num_slots, -1, np.int64)
    for power in range(int(level.max(initial=0)), -1, -1):
        size = 1 << power
        if power < level.max(initial=0):
            top = _halve(top, size)
        here = (level == power) & (length > 0)
        np.maximum.at(top, begin[here], number[here])
        np.maximum.at(top, end[here] - size, number[here])
    return top


def _halve(top: Ints, size: int) -> Ints:
    """Turn the winners of blocks of ``2 * size`` slots, named by their first slot, into those of ``size``."""
    halves = top.copy()
    np.maximum(halves[size:], top[:-size], out=halves[size:])
    return halves
