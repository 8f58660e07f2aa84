"""Memory: live bytes by class at any row, and what the rank was doing at the peak.

Bytes are those that the engine owns and reports: exact, in the order in which the rank's program allocated them. All
classes are *in use*, except RESERVED: pools hold those bytes unused, and no peak counts them. Arrays: ``C`` memory
classes (:class:`~workbench.events.Category`), ``M`` ALLOC / FREE rows, ``N`` moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from workbench.events import MOVES, NOT_SPLIT, Category, Edge, Kind, Phase, UnitState
from workbench.replay import states
from workbench.replay.spans import Ints, of_kind, spans
from workbench.replay.units import unit_name
from workbench.trace.columns import RankTrace
from workbench.trace.schema import NO_CATEGORY, ROW_DTYPE, Header, KeyFrame, Rows


@dataclass(frozen=True, kw_only=True)
class MemoryState:
    """Live bytes after some rows, and their peak; ``C`` entries per tuple.

    Attributes:
        bytes_by_category: live bytes of each class.
        peak_bytes: most bytes in use at once, all classes except RESERVED together.
        peak_bytes_by_category: the classes at that moment.
        peak_seq: the first row after which the peak was reached; the key frame's ``seq - 1`` for the start.
    """

    bytes_by_category: tuple[int, ...]
    peak_bytes: int
    peak_bytes_by_category: tuple[int, ...]
    peak_seq: int


def start(key_frame: KeyFrame) -> MemoryState:
    """Return the state before row ``key_frame.seq``; earlier peaks are unknown and ignored."""
    live = key_frame.bytes_by_category
    return MemoryState(
        bytes_by_category=live, peak_bytes=in_use(live), peak_bytes_by_category=live, peak_seq=key_frame.seq - 1
    )


def resume(state: MemoryState, key_frame: KeyFrame) -> MemoryState:
    """Return the state at ``key_frame``, which rows that are missing lead to; the highest peak known so far stays."""
    fresh = start(key_frame)
    if fresh.peak_bytes > state.peak_bytes:
        return fresh
    return replace(state, bytes_by_category=fresh.bytes_by_category)


def in_use(bytes_by_category: Sequence[int]) -> int:
    """Return the bytes of all classes except RESERVED."""
    return sum(bytes_by_category) - bytes_by_category[Category.RESERVED]


def advance(state: MemoryState, rows: Rows) -> MemoryState:
    """Return the state after ``rows``; splitting the rows into several calls gives the same state."""
    places = _moves(rows)
    if not len(places):
        return state
    category, deltas = rows["category"][places], rows["num_bytes"][places]
    total = in_use(state.bytes_by_category) + np.cumsum(_in_use(category, deltas))
    top = int(np.argmax(total))
    live = _add(state.bytes_by_category, category, deltas)
    if total[top] <= state.peak_bytes:
        return replace(state, bytes_by_category=live)
    return MemoryState(
        bytes_by_category=live,
        peak_bytes=int(total[top]),
        peak_bytes_by_category=_add(state.bytes_by_category, category[: top + 1], deltas[: top + 1]),
        peak_seq=int(rows["seq"][places[top]]),
    )


def _moves(rows: Rows) -> Ints:
    """Positions of the rows that move bytes of a known class."""
    return np.flatnonzero(of_kind(rows, MOVES) & (rows["category"] < len(Category)))


def _in_use(category: NDArray[np.uint8], num_bytes: Ints) -> Ints:
    """Change of the bytes in use by each of some rows that move bytes."""
    deltas: Ints = np.where(category == Category.RESERVED, 0, num_bytes)
    return deltas


def _add(before: tuple[int, ...], category: NDArray[np.uint8], num_bytes: Ints) -> tuple[int, ...]:
    live = np.array(before, np.int64)
    np.add.at(live, category, num_bytes)
    return tuple(live.tolist())


def most_reserved(rank_trace: RankTrace) -> int:
    """Return the most bytes that pools held unused at once in a rank's trace."""
    rows = rank_trace.rows
    deltas = rows["num_bytes"][of_kind(rows, MOVES) & (rows["category"] == Category.RESERVED)]
    return int(rank_trace.start.bytes_by_category[Category.RESERVED] + np.cumsum(deltas).max(initial=0))


def not_split(header: Header, rows: Rows) -> int:
    """Return the bytes of optimizer state, of those that rows allocated and did not free, of no sharded parameter."""
    if NOT_SPLIT not in header.strings:
        return 0
    is_whole = (rows["category"] == Category.OPTIMIZER_STATE) & (rows["module"] == header.strings.index(NOT_SPLIT))
    return int(rows["num_bytes"][of_kind(rows, MOVES) & is_whole].sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class MemorySeries:
    """Live bytes of one rank at ``N`` moments, in order; each holds until the next.

    Attributes:
        t_ns: time of each moment, ``[N]``.
        seq: the row just before each moment, ``[N]``; the key frame's ``seq - 1`` for the state before the first row.
        num_bytes: live bytes of each class, ``[N, C]``.
        is_exact: whether these are all moments at which live bytes changed.
    """

    t_ns: Ints
    seq: Ints
    num_bytes: Ints
    is_exact: bool = True

    @property
    def total(self) -> Ints:
        """Bytes in use, ``[N]``."""
        total: Ints = self.num_bytes.sum(axis=1, dtype=np.int64) - self.reserved
        return total

    @property
    def reserved(self) -> Ints:
        """Bytes that pools hold in addition, ``[N]``."""
        reserved: Ints = self.num_bytes[:, Category.RESERVED]
        return reserved


def series(rank_trace: RankTrace, max_moments: int | None = None) -> MemorySeries:
    """Return the live bytes before the first row and after every row that moved any; empty for an empty trace.

    Args:
        rank_trace: a rank's trace.
        max_moments: about how many moments to return. If there are more, time is cut into equal bins, and the first,
            lowest, highest and last moment of each are kept: what a screen can show, always with the peak.
    """
    rows = rank_trace.rows
    if not len(rows):
        return MemorySeries(t_ns=rows["t_ns"], seq=rows["seq"], num_bytes=np.empty((0, len(Category)), np.int64))
    places = _moves(rows)
    moments = places
    if max_moments is not None and len(places) > max_moments:
        total = np.cumsum(_in_use(rows["category"][places], rows["num_bytes"][places]))
        moments = places[envelope(rows["t_ns"][places], total, max(max_moments // 4, 1))]
    return MemorySeries(
        t_ns=np.concatenate([rows["t_ns"][:1], rows["t_ns"][moments]]),
        seq=np.concatenate([[rank_trace.start.seq - 1], rows["seq"][moments]]),
        num_bytes=_bytes_at(rank_trace, places, moments),
        is_exact=len(moments) == len(places),
    )


def _bytes_at(rank_trace: RankTrace, places: Ints, moments: Ints) -> Ints:
    """Live bytes ``[1 + N, C]``: before all rows, and after those at ``moments``, a subset of ``places``."""
    rows, num_classes = rank_trace.rows, len(Category)
    moment = np.searchsorted(moments, places)  # the first moment that includes a move; len(moments): none does
    cell = moment * num_classes + rows["category"][places]
    # sums of integers below 2**53 are exact in float64
    deltas = np.bincount(cell, rows["num_bytes"][places], (len(moments) + 1) * num_classes).astype(np.int64)
    deltas = np.concatenate([rank_trace.start.bytes_by_category, deltas[: len(moments) * num_classes]])
    return np.cumsum(deltas.reshape(-1, num_classes), axis=0, dtype=np.int64)


def envelope(t_ns: Ints, total: Ints, num_bins: int) -> Ints:
    """Return the positions, ascending, of the first, lowest, highest and last of ``total`` in each equal bin of time.

    Args:
        t_ns: times ``[N]``, at least one.
        total: values ``[N]``.
        num_bins: bins.
    """
    ran = np.maximum.accumulate(t_ns) - t_ns[0]
    bins = ran * num_bins // (ran[-1] + 1)
    first = np.flatnonzero(np.diff(bins, prepend=-1))
    last = np.append(first[1:], len(t_ns)) - 1
    lowest, highest = (
        _first_equal(total, extreme.reduceat(total, first), last - first + 1) for extreme in (np.minimum, np.maximum)
    )
    return np.unique(np.concatenate([first, last, lowest, highest]))


def _first_equal(values: Ints, wanted: Ints, lengths: Ints) -> Ints:
    """For each run of ``lengths`` values, the position of the first that equals the run's ``wanted`` value."""
    run = np.repeat(np.arange(len(lengths)), lengths)
    found = np.flatnonzero(values == wanted[run])
    return found[np.diff(run[found], prepend=-1) > 0]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment with most bytes in use; the first of several equal ones.

    Attributes:
        num_bytes: bytes in use.
        bytes_by_category: live bytes of each class, ``C`` entries.
        seq: the row just before it; the key frame's ``seq - 1`` if the peak is at the start.
        t_ns: time of that row (at the start: of the first row; 0 without rows).
        step: its step, -1 outside any.
        phase: its phase.
        unit: the unit whose forward or backward it was part of, -1 none.
        unsharded_units: units whose full parameters were in memory.
        in_flight: units whose all-gather was under way.
        reducing: units whose gradients were being reduced.
        is_loss: whether that row counts what autograd keeps of no unit's forward, such as a loss's.
    """

    num_bytes: int
    bytes_by_category: tuple[int, ...]
    seq: int
    t_ns: int
    step: int
    phase: Phase
    unit: int
    unsharded_units: tuple[int, ...]
    in_flight: tuple[int, ...]
    reducing: tuple[int, ...]
    is_loss: bool = False


def peak(rank_trace: RankTrace) -> Peak:
    """Return the moment with most bytes in use in a rank's trace."""
    rows, before = rank_trace.rows, rank_trace.start
    top = advance(start(before), rows)
    place = top.peak_seq - before.seq
    row = rows[place] if place >= 0 else _row_before(rows)
    unsharded, in_flight, reducing = _units_held(states.at(rank_trace, top.peak_seq), row)
    return Peak(
        num_bytes=top.peak_bytes,
        bytes_by_category=top.peak_bytes_by_category,
        seq=top.peak_seq,
        t_ns=int(row["t_ns"]),
        step=int(row["step"]),
        phase=Phase(row["phase"]),
        unit=_unit_at_work(rows, place) if place >= 0 else -1,
        unsharded_units=unsharded,
        in_flight=in_flight,
        reducing=reducing,
        is_loss=bool(row["category"] == Category.ACTIVATIONS and row["num_bytes"] > 0 and row["phase"] == Phase.IDLE),
    )


def _row_before(rows: Rows) -> np.void:
    """Placeholder for the row before the key frame; it holds only a time."""
    row: np.void = np.zeros(1, ROW_DTYPE)[0]
    row["t_ns"] = rows["t_ns"][0] if len(rows) else 0
    row["step"] = row["unit"] = -1
    row["category"] = NO_CATEGORY
    return row


def _units_held(found: states.States, row: np.void) -> tuple[tuple[int, ...], ...]:
    """Units unsharded, with an all-gather in flight, and reducing, at the row after which most bytes were live."""
    unsharded, in_flight = set(found.units_in(UnitState.UNSHARDED)), set(found.units_in(UnitState.ALL_GATHER_IN_FLIGHT))
    if row["category"] == Category.UNSHARDED_PARAMS:  # gathered; the row that makes it usable follows
        unsharded.add(int(row["unit"]))
        in_flight.discard(int(row["unit"]))
    if row["category"] == Category.ALL_GATHER_BUFFERS:  # its buffer is allocated; it is issued next
        in_flight.add(int(row["unit"]))
    return tuple(sorted(unsharded)), tuple(sorted(in_flight)), found.units_in(UnitState.REDUCING)


def _unit_at_work(rows: Rows, place: int) -> int:
    """The unit whose forward or backward the row at ``place`` is part of, -1 if none."""
    row = rows[place]
    if row["phase"] == Phase.PRE_BACKWARD:
        return _nearest(rows[place:], Edge.BEGIN, 0, int(row["unit"]))
    if row["phase"] == Phase.POST_BACKWARD:
        return _nearest(rows[:place], Edge.END, -1, int(row["unit"]))
    if row["phase"] not in (Phase.FORWARD, Phase.BACKWARD) or row["category"] == Category.UNSHARDED_PARAMS:
        return int(row["unit"])
    work = spans(rows, (Kind.FORWARD, Kind.BACKWARD))
    is_open = (work.begin_seq <= row["seq"]) & ((work.end_seq > row["seq"]) | (work.end_seq < 0))
    return int(work.unit[is_open][-1]) if is_open.any() else int(row["unit"])


def _nearest(rows: Rows, edge: Edge, which: int, default: int) -> int:
    """The unit of the first (0) or last (-1) of the rows that begins or ends a backward."""
    found = np.flatnonzero((rows["kind"] == Kind.BACKWARD) & (rows["edge"] == edge))
    return int(rows["unit"][found[which]]) if len(found) else default


def moment(header: Header, found: Peak) -> str:
    """Return what a rank was doing at a peak, such as ``"backward of blocks.3"``; plain text, names not escaped."""
    if found.is_loss:
        return "between forward and backward"
    in_unit = found.unit >= 0 and found.phase not in (Phase.IDLE, Phase.OPTIMIZER)
    return found.phase.info.doing + (f" of {unit_name(header, found.unit)}" if in_unit else "")


def describe_peak(header: Header, found: Peak) -> str:
    """Return what a rank was doing at a peak and what memory held then; plain text, names not escaped.

    Example: ``"backward of blocks.3: 2 units unsharded, next all-gather (blocks.2) in flight"``.
    """
    parts = [_count(len(found.unsharded_units), "unit", "unsharded")]
    if len(found.in_flight) == 1:
        parts.append(f"next all-gather ({unit_name(header, found.in_flight[0])}) in flight")
    elif found.in_flight:
        parts.append(_count(len(found.in_flight), "all-gather", "in flight"))
    if found.reducing:
        names = ", ".join(unit_name(header, unit) for unit in found.reducing)
        parts.append(f"gradients of {names} being reduced")
    return f"{moment(header, found)}: {', '.join(parts)}"


def _count(number: int, noun: str, rest: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'} {rest}"
