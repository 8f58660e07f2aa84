"""One clock for the rows of all ranks: rank 0's.

Ranks of one machine read one clock. Those of another host read one that was started at another time and runs a little
faster or slower. The notebook asks one rank of each such host where it is, and with the answer comes what its clock
showed: at a time of the notebook's between the question and the answer. So the two are known to differ by so much, give
or take half of what that took (F. Cristian, Probabilistic clock synchronization, 1989); of several questions in a row
the quickest counts. Rank 0's clock is compared with the notebook's likewise, unless it is the same: the difference of
both is what a rank's clock is ahead of rank 0's, and their errors add up. The questions go through the side doors,
which are there and are served while a rank is in a step; no rank needs a way to another one for it, and no port.

They are compared when rows are about to be collected: at first, and again when the last comparison is
:data:`EVERY_S` old. Times are converted once, as the rows come in, and never change again: what was drawn stays, and a
live view shows what the file will. Between two comparisons a drift is shared out evenly over the rows that came since
the last ones that were collected; so time never runs backwards on a rank.

Arrays: ``N`` times.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.clock import clock_here
from workbench.protocol.rank_messages import Locate
from workbench.replay.clock_error import DRIFT
from workbench.replay.spans import Ints
from workbench.session.channel_protocol import ControlChannel, answers
from workbench.trace.schema import ROW_DTYPE, ClockReading, HostClock

EVERY_S = 10.0
"""How old a comparison may be when rows are collected, in seconds."""

TIMES = 4
"""Questions of one comparison, of which the quickest counts."""

ANSWER_S = 0.5
"""How long an answer may take, in seconds, and after which nothing is asked again: what takes longer says little."""

KEPT = 120
"""Readings of a clock that are kept: of more every other one goes, so that many hours of many hosts fit a header."""

STEEPEST = 20
"""Over how many times its length a change of a clock's offset is spread at least, so that durations stay durations."""

_NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class ClockComparison:
    """A clock beside the notebook's: ``offset_ns`` ahead at ``at_ns`` of the notebook's, give or take ``error_ns``."""

    at_ns: int
    offset_ns: int
    error_ns: int

    def error_at(self, at_ns: int) -> int:
        """Return how far the offset may be off by then."""
        return self.error_ns + math.ceil(DRIFT * abs(at_ns - self.at_ns))


class ClockFit:
    """By how much a clock is ahead of rank 0's at each of its times: a line through what comparisons have found."""

    def __init__(self) -> None:
        self._t_ns: Ints = np.empty(0, np.int64)
        self._offset_ns: Ints = np.empty(0, np.int64)
        self._until_ns = int(np.iinfo(np.int64).min)  # up to where times were converted

    def __len__(self) -> int:
        return len(self._t_ns)

    def bend(self, t_ns: int, offset_ns: int) -> None:
        """Lead the line to ``offset_ns`` at ``t_ns`` of the clock, or soon after; what was converted stays."""
        if not len(self):
            self._add(t_ns, offset_ns)
            return
        if self._until_ns > self._t_ns[-1]:
            self._add(self._until_ns, self._at(self._until_ns))
        begin_ns, before_ns = int(self._t_ns[-1]), int(self._offset_ns[-1])
        self._add(max(t_ns, begin_ns + 1 + STEEPEST * abs(offset_ns - before_ns)), offset_ns)

    def on_rank_0s(self, t_ns: Ints) -> Ints:
        """Return times of the clock, ``[N]``, on rank 0's."""
        self._until_ns = int(t_ns.max(initial=self._until_ns))
        return t_ns - self._offsets(t_ns)

    def _at(self, t_ns: int) -> int:
        return int(self._offsets(np.array([t_ns], np.int64))[0])

    def _offsets(self, t_ns: Ints) -> Ints:
        first_t, first = self._t_ns[0], self._offset_ns[0]  # floats have room for differences only
        ahead = np.interp(t_ns - first_t, self._t_ns - first_t, self._offset_ns - first)
        offsets: Ints = np.rint(ahead).astype(np.int64) + first
        return offsets

    def _add(self, t_ns: int, offset_ns: int) -> None:
        self._t_ns, self._offset_ns = np.append(self._t_ns, t_ns), np.append(self._offset_ns, offset_ns)


class ClockSync:
    """Compares the clocks of ranks, and converts their times to rank 0's. Not thread-safe.

    Args:
        clock_of: by rank, the name of the clock that it reads (:func:`workbench.clock.clock_here`).
        here: the name of the notebook's.
        now_ns: reads the notebook's.
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
        self._ranks: dict[str, list[int]] = {}
        for rank, clock in sorted(self._clock_of.items()):
            self._ranks.setdefault(clock, []).append(rank)
        self._lines = {clock: ClockFit() for clock in self._ranks if clock != self._own}
        self._readings: dict[str, list[ClockReading]] = {clock: [] for clock in self._lines}
        self._compared: dict[str, ClockComparison] = {}
        self._asked_ns: dict[str, int] = {}
        self._turns: Counter[str] = Counter()  # how many of its ranks did not answer

    @property
    def readings(self) -> tuple[HostClock, ...]:
        """What was found so far, for the header of a trace."""
        found = ((tuple(self._ranks[clock]), tuple(readings)) for clock, readings in self._readings.items() if readings)
        return tuple(HostClock(ranks=ranks, readings=readings) for ranks, readings in sorted(found))

    def knows(self, rank: int) -> bool:
        """Tell whether times of ``rank`` can be converted."""
        line = self._lines.get(self._clock_of.get(rank, self._own))
        return line is None or len(line) > 0

    def on_rank_0s(self, rank: int, packed: bytes) -> bytes:
        """Return packed rows of ``rank``, the next ones that are collected, with times of rank 0's clock."""
        line = self._lines.get(self._clock_of.get(rank, self._own))
        if line is None:
            return packed
        rows = np.frombuffer(packed, ROW_DTYPE).copy()
        rows["t_ns"] = line.on_rank_0s(rows["t_ns"])
        return rows.tobytes()

    def compare(self, door: ControlChannel, ranks: Iterable[int], *, timeout_s: float) -> bool:
        """Compare clocks that were never compared, and of the others the one whose turn it is; tell if any was.

        Args:
            door: side doors of the ranks.
            ranks: who may be asked.
            timeout_s: how long they may take to answer, if that is less than :data:`ANSWER_S`.
        """
        due = self._due()
        if not due:
            return False
        fresh = self._ask(door, [self._own, *due], set(ranks), min(timeout_s, ANSWER_S))
        for clock, found in fresh.items():
            before = self._compared.get(clock)
            if before is None or found.error_ns <= before.error_at(found.at_ns):  # else less is known now than before
                self._compared[clock] = found
        own = self._compared.get(self._own)
        taken = [clock for clock in due if own is not None and clock in fresh and self._compared[clock] is fresh[clock]]
        for clock in taken:
            self._take(clock, fresh[clock], self._compared[self._own])
        return bool(taken)

    def _due(self) -> list[str]:
        """Return the clocks to compare now."""
        now_ns = self._now_ns()
        new = [clock for clock, readings in self._readings.items() if not readings]
        asked = sorted((self._asked_ns[clock], clock) for clock in self._lines.keys() - set(new))
        return new + [clock for asked_ns, clock in asked[:1] if now_ns - asked_ns >= EVERY_S * _NS]

    def _ask(
        self, door: ControlChannel, clocks: Sequence[str], ranks: set[int], timeout_s: float
    ) -> dict[str, ClockComparison]:
        """Return what was found of clocks of which a rank answers: all at the same time, then each by itself."""
        asked, begin_ns = {}, self._now_ns()
        for clock in clocks:
            self._asked_ns[clock] = begin_ns
            there = [rank for rank in self._ranks[clock] if rank in ranks]
            if there and clock != self._here:
                asked[there[self._turns[clock] % len(there)]] = clock
        found = self._locate(door, asked, timeout_s)
        self._turns.update(clock for clock in asked.values() if clock not in found)
        for rank, clock in asked.items():
            for _ in range(TIMES - 1 if clock in found else 0):
                if self._now_ns() - begin_ns > ANSWER_S * _NS:  # somebody waits for what is collected
                    break
                again = self._locate(door, {rank: clock}, timeout_s).get(clock, found[clock])
                found[clock] = min(found[clock], again, key=lambda compared: compared.error_ns)
        if self._here in clocks:
            found[self._here] = ClockComparison(at_ns=self._now_ns(), offset_ns=0, error_ns=0)
        return found

    def _locate(self, door: ControlChannel, asked: Mapping[int, str], timeout_s: float) -> dict[str, ClockComparison]:
        """Ask ranks, of a clock each, where they are at the same time; return what that says of their clocks."""
        begin_ns = self._now_ns()
        replies = answers(door, Locate(), asked, timeout_s=timeout_s) if asked else {}
        end_ns = self._now_ns()
        at_ns, error_ns = (begin_ns + end_ns) // 2, (end_ns - begin_ns) // 2 + 1
        return {
            asked[rank]: ClockComparison(at_ns=at_ns, offset_ns=position.now_ns - at_ns, error_ns=error_ns)
            for rank, position in replies.items()
        }

    def _take(self, clock: str, found: ClockComparison, own: ClockComparison) -> None:
        """Convert by what was found from now on."""
        offset_ns = found.offset_ns - own.offset_ns
        self._lines[clock].bend(found.at_ns + found.offset_ns, offset_ns)
        error_ns = found.error_ns + own.error_at(found.at_ns)
        readings = self._readings[clock]
        readings.append(ClockReading(t_ns=found.at_ns + own.offset_ns, offset_ns=offset_ns, error_ns=error_ns))
        if len(readings) > KEPT:
            del readings[1:-1:2]
