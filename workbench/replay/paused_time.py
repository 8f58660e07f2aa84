"""Time in which a job is paused by the user, and the time axis without it.

A rank held at a gate waits for the user, and other ranks wait for it. On a full time axis, minutes of nothing would
dwarf milliseconds of work. So time is cut out where at least one rank is held and none works: every other rank is held
too, waits for communication, or is between steps. One mapping serves all ranks, which keeps the order of events across
ranks.

Long idle time can be cut out as well: time between steps in which no rank does anything. What a rank did after the last
row of an aborted step was not recorded and counts as idle.

Example: rank 0 is held from 10 to 50; rank 1 works until 14 and is held from then to 52. No rank works from 14 to 50,
so that time is cut out: 14 and 50 map to the same place, and 52 is 2 after it. Rank 0 is still drawn as held from 10
to 14.

Arrays: ``C`` cuts, ``N`` times. Times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from workbench.events import WORK, Edge, Kind, Phase
from workbench.replay.spans import Ints, chosen, extent_ns, of_kind, within_ns
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Rows

LEAST_IDLE_NS = 1_000_000_000
"""Pictures cut idle time of at least this length out of their axes."""

_WAITS = (Kind.WAIT, Kind.READERS)
_TELLING = (Kind.STEP, Kind.GATE, *_WAITS, *WORK, Kind.RESET)


def _no_times() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cuts:
    """Intervals cut out of a time axis, in order and without overlaps; arrays are ``[C]``.

    Attributes:
        begin_ns: begin of each.
        end_ns: end of each, later than its begin.
        is_held: whether a rank is held when the trace ends: the begin of a cut that has no length yet.
    """

    begin_ns: Ints = field(default_factory=_no_times)
    end_ns: Ints = field(default_factory=_no_times)
    is_held: bool = False

    def __len__(self) -> int:
        return len(self.begin_ns)

    @property
    def lengths_ns(self) -> Ints:
        """Length of each cut, ``[C]``."""
        return self.end_ns - self.begin_ns

    def shown(self, t_ns: Ints) -> Ints:
        """Return the positions of times ``[N]`` on the axis: earlier by the cuts before them."""
        return t_ns - within_ns(self.begin_ns, self.end_ns, t_ns)

    def shown_at(self, t_ns: int) -> int:
        """Return the position of one time on the axis."""
        return int(self.shown(np.array([t_ns], np.int64))[0])

    def true_at(self, shown_ns: int) -> int:
        """Return the latest time that is shown at ``shown_ns``."""
        past = int(np.searchsorted(self.shown(self.begin_ns), shown_ns, side="right"))
        return shown_ns + int(self.lengths_ns[:past].sum())

    def rows(self, rows: Rows) -> Rows:
        """Return rows with their times on the axis."""
        if not len(self):
            return rows
        moved = rows.copy()
        moved["t_ns"] = self.shown(rows["t_ns"])
        return moved

    def joined(self) -> Cuts:
        """Return the cuts with adjacent ones merged."""
        apart = self.begin_ns[1:] > self.end_ns[:-1]
        first, last = np.append(True, apart)[: len(self)], np.append(apart, True)[: len(self)]
        return replace(self, begin_ns=self.begin_ns[first], end_ns=self.end_ns[last])


@dataclass(frozen=True, kw_only=True)
class _Stance:
    """State of a rank after some rows."""

    is_held: bool = False
    is_waiting: bool = False
    works: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class _Changes:
    """Times at which a rank's stance may change, ascending, and its stance from then on."""

    t_ns: Ints
    is_held: NDArray[np.bool_]
    works: NDArray[np.bool_]
    is_busy: NDArray[np.bool_]  # not idle
    begins_with_reset: bool


def without_holds(trace: Trace, least_idle_ns: int | None = None) -> tuple[Trace, Cuts]:
    """Return the trace with its times on the cut axis, and the cuts; without cuts, the trace itself.

    Args:
        trace: the trace.
        least_idle_ns: also cut out idle time of at least this length; None: keep idle time.
    """
    found = cuts(trace, least_idle_ns)
    if not len(found):
        return trace, found
    ranks = (replace(r, rows=found.rows(r.rows)) for r in trace.ranks)
    return Trace(trace.header, tuple(ranks)), found


def cuts(trace: Trace, least_idle_ns: int | None = None) -> Cuts:
    """Return the cuts of a trace's time axis, with idle time of at least ``least_idle_ns``; None: keep idle time."""
    first_ns, last_ns = extent_ns(trace)
    is_long = least_idle_ns is not None and last_ns - first_ns >= least_idle_ns
    if not is_long and not any((r.kinds == Kind.GATE).any() for r in trace.ranks):
        return Cuts()
    changes = [_changes(r.rows, _Stance())[0] for r in trace.ranks]
    is_held = any(each.is_held[-1:].any() for each in changes)
    return replace(_cuts(changes, first_ns, last_ns, least_idle_ns).joined(), is_held=is_held)


class GrowingCuts:
    """The cuts of a growing trace. Later cuts never move what was already shown.

    Args:
        least_idle_ns: also cut out idle time of at least this length; None: keep idle time.
    """

    def __init__(self, least_idle_ns: int | None = None) -> None:
        self.cuts = Cuts()
        self._least_idle_ns = least_idle_ns
        self._stances: dict[int, _Stance] = {}
        self._pending: dict[int, _Changes] = {}  # since a time at which no rank was held
        self._seen: dict[int, int] = {}
        self._known_ns = self._until_ns = np.iinfo(np.int64).min

    def update(self, trace: Trace) -> Cuts:
        """Return the cuts of ``trace``, a later state of the same trace."""
        for rank_trace in trace.ranks:
            self._read(rank_trace)
        last_ns = _last_ns(trace)
        if self._least_idle_ns is not None or any(changes.is_held.any() for changes in self._pending.values()):
            first_ns = min((int(r.rows["t_ns"][0]) for r in trace.ranks if len(r.rows)), default=0)
            from_ns = max(first_ns, self._until_ns)
            self._add(_cuts(list(self._pending.values()), from_ns, last_ns, self._least_idle_ns, self._known_ns))
        self._until_ns = max(self._until_ns, last_ns)
        if not any(stance.is_held for stance in self._stances.values()):
            self._pending = {rank: _tail(changes) for rank, changes in self._pending.items()}
            known = [int(changes.t_ns[0]) for changes in self._pending.values() if len(changes.t_ns)]
            self._known_ns = max(known, default=self._known_ns)
        return self.cuts

    def _read(self, rank_trace: RankTrace) -> None:
        rank = rank_trace.rank
        rows = rank_trace.rows[max(self._seen.get(rank, 0) - rank_trace.start.seq, 0) :]
        found, self._stances[rank] = _changes(rows, self._stances.get(rank, _Stance()))
        before = self._pending.get(rank)
        self._pending[rank] = found if before is None else _together(before, found)
        self._seen[rank] = rank_trace.end_seq

    def _add(self, found: Cuts) -> None:
        begin_ns = np.maximum(found.begin_ns, self._until_ns)
        fresh = found.end_ns > begin_ns
        self.cuts = Cuts(
            begin_ns=np.concatenate([self.cuts.begin_ns, begin_ns[fresh]]),
            end_ns=np.concatenate([self.cuts.end_ns, found.end_ns[fresh]]),
        )


def _last_ns(trace: Trace) -> int:
    return max((int(r.rows["t_ns"][-1]) for r in trace.ranks if len(r.rows)), default=0)


def _changes(rows: Rows, before: _Stance) -> tuple[_Changes, _Stance]:
    """Return a rank's stance from each relevant row on, and after all rows."""
    rows = chosen(rows, of_kind(rows, _TELLING))
    kind, begins = rows["kind"], rows["edge"] == Edge.BEGIN
    new_step = kind == Kind.STEP  # closes everything still open before it
    is_held = _latest(new_step | (kind == Kind.GATE), begins & (kind == Kind.GATE), before=before.is_held)
    waits = np.isin(kind, _WAITS)
    is_waiting = _latest(new_step | waits, begins & waits, before=before.is_waiting)
    ends_step = new_step & ~begins
    is_at_it = ((rows["step"] >= 0) | (rows["phase"] != Phase.IDLE)) & ~ends_step
    works = is_at_it & ~is_held & ~is_waiting
    t_ns = np.maximum.accumulate(rows["t_ns"])
    after = (
        _Stance(is_held=bool(is_held[-1]), is_waiting=bool(is_waiting[-1]), works=bool(works[-1]))
        if len(rows)
        else before
    )
    is_busy = is_at_it | is_held | is_waiting
    resets = kind == Kind.RESET
    is_busy[:-1] &= ~resets[1:]
    begins_with_reset = bool(resets[:1].any())
    found = _Changes(t_ns=t_ns, is_held=is_held, works=works, is_busy=is_busy, begins_with_reset=begins_with_reset)
    return found, after


def _latest(is_known: NDArray[np.bool_], value: NDArray[np.bool_], *, before: bool) -> NDArray[np.bool_]:
    """Return for each row the ``value`` of the last row up to it where ``is_known``; ``before`` if there is none."""
    place = np.maximum.accumulate(np.where(is_known, np.arange(len(is_known)), -1))
    found: NDArray[np.bool_] = np.where(place >= 0, value[place], before) if len(is_known) else value
    return found


def _together(first: _Changes, second: _Changes) -> _Changes:
    is_busy = first.is_busy.copy()
    is_busy[-1:] &= not second.begins_with_reset
    return _Changes(
        t_ns=np.concatenate([first.t_ns, second.t_ns]),
        is_held=np.concatenate([first.is_held, second.is_held]),
        works=np.concatenate([first.works, second.works]),
        is_busy=np.concatenate([is_busy, second.is_busy]),
        begins_with_reset=first.begins_with_reset,
    )


def _tail(changes: _Changes) -> _Changes:
    return _Changes(
        t_ns=changes.t_ns[-1:],
        is_held=changes.is_held[-1:],
        works=changes.works[-1:],
        is_busy=changes.is_busy[-1:],
        begins_with_reset=False,
    )


def _cuts(
    ranks: Sequence[_Changes], from_ns: int, last_ns: int, least_idle_ns: int | None = None, known_ns: int | None = None
) -> Cuts:
    """Return the times up to ``last_ns`` in which a rank is held and none works; adjacent cuts are not merged.

    Includes times in which all ranks are idle for at least ``least_idle_ns``; None: keep idle time. Ranks without
    earlier rows are idle at ``from_ns``. All ranks are known from ``known_ns`` on: earlier times never count as idle.
    """
    t_ns = np.concatenate([[from_ns], *(changes.t_ns for changes in ranks), [last_ns]])
    order = np.argsort(t_ns, kind="stable")
    t_ns = t_ns[order]
    held, working, busy = (
        np.cumsum(_count([getattr(c, name) for c in ranks])[order])[:-1] for name in ("is_held", "works", "is_busy")
    )
    lasts = t_ns[1:] > t_ns[:-1]
    stands = (held > 0) & (working == 0) & lasts
    if least_idle_ns is not None:
        is_idle = (busy == 0) & (known_ns is None or t_ns[:-1] >= known_ns)
        run = np.cumsum(np.diff(is_idle, prepend=False))  # consecutive idle pieces share a number
        run_ns = np.bincount(run, np.diff(t_ns))
        stands |= is_idle & lasts & (run_ns[run] >= least_idle_ns)
    return Cuts(begin_ns=t_ns[:-1][stands], end_ns=t_ns[1:][stands])


def _count(flags: Sequence[NDArray[np.bool_]]) -> Ints:
    """Change of the number of ranks with the flag at each entry of each rank; 0 for the first and last time."""
    return np.concatenate([[0], *(np.diff(flag.astype(np.int64), prepend=0) for flag in flags), [0]]).astype(np.int64)
