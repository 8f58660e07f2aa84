"""Clock synchronization: converts the times of all ranks to rank 0's clock.

Ranks on one machine share a clock. The clock of another host has another origin and a slightly different rate. The
notebook sends one rank of each such host a request whose reply includes the reading of its clock, taken at a time
between request and reply on the notebook's clock. This gives the offset of the two clocks, with an error of half the
round-trip time (F. Cristian, Probabilistic clock synchronization, 1989); of several requests in a row the fastest
counts. Rank 0's clock is compared with the notebook's in the same way, unless they are the same. The difference of the
two offsets is that of a rank's clock to rank 0's, and their errors add up. The requests use the control
channels, which are served during a step, so the ranks need no further connections or ports.

Clocks are compared just before rows are collected: the first time, and when the last comparison is :data:`EVERY_S` old.
Times are converted once, when the rows arrive, and never change again, so a live view shows the same as the file later.
The drift between two comparisons is spread evenly over the rows since the last collection, so time never runs backwards
on a rank.

Arrays: ``N`` times.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.base.clock import clock_here
from workbench.cluster.channel_protocol import ControlChannel, answers
from workbench.protocol.rank_messages import Locate
from workbench.replay.clock_error import DRIFT
from workbench.replay.grouping import by_value
from workbench.replay.spans import Ints
from workbench.trace.schema import ROW_DTYPE, ClockReading, HostClock

EVERY_S = 10.0
"""Maximum age of a comparison when rows are collected, in seconds."""

TIMES = 4
"""Requests per comparison; the fastest counts."""

ANSWER_S = 0.5
"""Timeout of a reply, and limit of the repeated requests of a comparison, in seconds: slow replies are inaccurate."""

KEPT = 120
"""Limit of stored readings of a clock; beyond it every other one is dropped, so that long runs fit into a header."""

STEEPEST = 20
"""A change of a clock's offset is spread over at least this many times its size, so that durations stay realistic."""

_NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class ClockComparison:
    """A clock relative to the notebook's: ``offset_ns`` ahead at the notebook's ``at_ns``, within ``error_ns``."""

    at_ns: int
    offset_ns: int
    error_ns: int

    def error_at(self, at_ns: int) -> int:
        """Return the error of the offset at ``at_ns``, drift included, in nanoseconds."""
        return self.error_ns + math.ceil(DRIFT * abs(at_ns - self.at_ns))


class ClockFit:
    """The offset of a clock to rank 0's as a function of its time: a polyline through the comparisons."""

    def __init__(self) -> None:
        self._t_ns: Ints = np.empty(0, np.int64)
        self._offset_ns: Ints = np.empty(0, np.int64)
        self._until_ns = int(np.iinfo(np.int64).min)  # newest converted time

    def __len__(self) -> int:
        return len(self._t_ns)

    def bend(self, t_ns: int, offset_ns: int) -> None:
        """Extend the line to ``offset_ns`` at ``t_ns`` of the clock, or soon after; converted times stay unchanged."""
        if not len(self):
            self._add(t_ns, offset_ns)
            return
        if self._until_ns > self._t_ns[-1]:
            self._add(self._until_ns, self._at(self._until_ns))
        begin_ns, before_ns = int(self._t_ns[-1]), int(self._offset_ns[-1])
        self._add(max(t_ns, begin_ns + 1 + STEEPEST * abs(offset_ns - before_ns)), offset_ns)

    def on_rank_0s(self, t_ns: Ints) -> Ints:
        """Return times of the clock, ``[N]``, converted to rank 0's clock."""
        self._until_ns = int(t_ns.max(initial=self._until_ns))
        return t_ns - self._offsets(t_ns)

    def _at(self, t_ns: int) -> int:
        return int(self._offsets(np.array([t_ns], np.int64))[0])

    def _offsets(self, t_ns: Ints) -> Ints:
        first_t, first = self._t_ns[0], self._offset_ns[0]  # floats are exact enough for differences only
        ahead = np.interp(t_ns - first_t, self._t_ns - first_t, self._offset_ns - first)
        offsets: Ints = np.rint(ahead).astype(np.int64) + first
        return offsets

    def _add(self, t_ns: int, offset_ns: int) -> None:
        self._t_ns, self._offset_ns = np.append(self._t_ns, t_ns), np.append(self._offset_ns, offset_ns)


class ClockSync:
    """Compares the clocks of ranks, and converts their times to rank 0's. Not thread-safe.

    Args:
        clock_of: name of each rank's clock (:func:`workbench.base.clock.clock_here`), by rank.
        here: name of the notebook's clock.
        now_ns: reads the notebook's clock.
    """

    def __init__(
        self,
        clock_of: Mapping[int, str] | None = None,
        here: str | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock_of = dict(clock_of or {})
        self._now_ns = now_ns
        self._own = self._clock_of.get(0, "")
        self._here = clock_here() if here is None else here
        self._ranks = by_value(sorted(self._clock_of.items()))
        self._lines = {clock: ClockFit() for clock in self._ranks if clock != self._own}
        self._readings: dict[str, list[ClockReading]] = {clock: [] for clock in self._lines}
        self._compared: dict[str, ClockComparison] = {}
        self._polled_ns: dict[str, int] = {}
        self._turns: Counter[str] = Counter()  # by clock, requests without an answer: the next one goes to another rank

    @property
    def readings(self) -> tuple[HostClock, ...]:
        """The readings so far, for the header of a trace."""
        found = ((tuple(self._ranks[clock]), tuple(readings)) for clock, readings in self._readings.items() if readings)
        return tuple(HostClock(ranks=ranks, readings=readings) for ranks, readings in sorted(found))

    def knows(self, rank: int) -> bool:
        """Return whether times of ``rank`` can be converted."""
        line = self._lines.get(self._clock_of.get(rank, self._own))
        return line is None or len(line) > 0

    def on_rank_0s(self, rank: int, packed: bytes) -> bytes:
        """Return ``packed``, the next rows of ``rank``, with times on rank 0's clock."""
        line = self._lines.get(self._clock_of.get(rank, self._own))
        if line is None:
            return packed
        rows = np.frombuffer(packed, ROW_DTYPE).copy()
        rows["t_ns"] = line.on_rank_0s(rows["t_ns"])
        return rows.tobytes()

    def compare(self, channel: ControlChannel, ranks: Iterable[int], *, timeout_s: float) -> bool:
        """Compare all new clocks and the one whose comparison is oldest and due; return whether there is a new reading.

        Args:
            channel: control channels of the ranks.
            ranks: ranks that may be polled.
            timeout_s: timeout of the replies in seconds, at most :data:`ANSWER_S`.
        """
        due = self._due()
        if not due:
            return False
        fresh = self._ask(channel, [self._own, *due], set(ranks), min(timeout_s, ANSWER_S))
        for clock, found in fresh.items():
            before = self._compared.get(clock)
            if before is None or found.error_ns <= before.error_at(found.at_ns):  # else the old one is more accurate
                self._compared[clock] = found
        own = self._compared.get(self._own)
        taken = [clock for clock in due if own is not None and clock in fresh and self._compared[clock] is fresh[clock]]
        for clock in taken:
            self._use(clock, fresh[clock], self._compared[self._own])
        return bool(taken)

    def _due(self) -> list[str]:
        """Return the clocks to compare now."""
        now_ns = self._now_ns()
        new = [clock for clock, readings in self._readings.items() if not readings]
        polled = sorted((self._polled_ns[clock], clock) for clock in self._lines.keys() - set(new))
        return new + [clock for polled_ns, clock in polled[:1] if now_ns - polled_ns >= EVERY_S * _NS]

    def _ask(
        self, channel: ControlChannel, clocks: Sequence[str], ranks: set[int], timeout_s: float
    ) -> dict[str, ClockComparison]:
        """Return a comparison of each clock with a rank that answers: first all in parallel, then one at a time."""
        polled, begin_ns = {}, self._now_ns()
        for clock in clocks:
            self._polled_ns[clock] = begin_ns
            there = [rank for rank in self._ranks[clock] if rank in ranks]
            if there and clock != self._here:
                polled[there[self._turns[clock] % len(there)]] = clock
        found = self._locate(channel, polled, timeout_s)
        self._turns.update(clock for clock in polled.values() if clock not in found)
        for rank, clock in polled.items():
            for _ in range(TIMES - 1 if clock in found else 0):
                if self._now_ns() - begin_ns > ANSWER_S * _NS:  # the caller waits for the rows
                    break
                again = self._locate(channel, {rank: clock}, timeout_s).get(clock, found[clock])
                found[clock] = min(found[clock], again, key=lambda compared: compared.error_ns)
        if self._here in clocks:
            found[self._here] = ClockComparison(at_ns=self._now_ns(), offset_ns=0, error_ns=0)
        return found

    def _locate(
        self, channel: ControlChannel, polled: Mapping[int, str], timeout_s: float
    ) -> dict[str, ClockComparison]:
        """Send a locate request to one rank of each clock, in parallel; return the comparisons by clock."""
        begin_ns = self._now_ns()
        replies = answers(channel, Locate(), polled, timeout_s=timeout_s)
        end_ns = self._now_ns()
        at_ns, error_ns = (begin_ns + end_ns) // 2, (end_ns - begin_ns) // 2 + 1
        return {
            polled[rank]: ClockComparison(at_ns=at_ns, offset_ns=position.now_ns - at_ns, error_ns=error_ns)
            for rank, position in replies.items()
        }

    def _use(self, clock: str, found: ClockComparison, own: ClockComparison) -> None:
        """Use a comparison for later conversions, and record it as a reading."""
        offset_ns = found.offset_ns - own.offset_ns
        self._lines[clock].bend(found.at_ns + found.offset_ns, offset_ns)
        error_ns = found.error_ns + own.error_at(found.at_ns)
        readings = self._readings[clock]
        readings.append(ClockReading(t_ns=found.at_ns + own.offset_ns, offset_ns=offset_ns, error_ns=error_ns))
        if len(readings) > KEPT:
            del readings[1:-1:2]
