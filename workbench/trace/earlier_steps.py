"""Steps of a rank from before the left edge of its trace: what spans a whole run needs few of their rows.

Kept are the STEP, GATE and METRIC rows of a step, and its first FORWARD, which tells the model. If these become too
many, every second step is dropped, then every second of the others, so what is left still spans the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from workbench.events import Edge, Kind
from workbench.trace.schema import ROW_DTYPE, Rows

MAX_EARLIER_ROWS = 4096
"""Maximum rows of a rank: about 1000 steps that log a loss."""

_IS_KEPT = np.isin(np.arange(256), (Kind.STEP, Kind.GATE, Kind.METRIC, Kind.FORWARD))  # indexed by the ``kind`` column


@dataclass(frozen=True, eq=False)
class EarlierSteps:
    """Rows of steps before the left edge. Equal by value (NaN equals NaN).

    Attributes:
        rows: in order, with their own ``seq``, which has gaps.
        every: a power of two: only steps whose number is a multiple of it are kept.
        step: the step begun last, -1 if none: values logged right after a step belong to it.
        forward_step: the step of the last FORWARD; -1 if none.
    """

    rows: Rows = field(default_factory=lambda: np.empty(0, ROW_DTYPE))
    every: int = 1
    step: int = -1
    forward_step: int = -1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EarlierSteps):
            return NotImplemented
        mine, theirs = ((e.every, e.step, e.forward_step, e.rows.tobytes()) for e in (self, other))
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    def then(self, rows: Rows, max_rows: int = MAX_EARLIER_ROWS) -> EarlierSteps:
        """Return the steps after further ``rows``; splitting these into several calls gives the same."""
        own = rows[_IS_KEPT[rows["kind"]]]
        numbers = _numbers(own, self.step)
        first = _first_forwards(own, self.forward_step)
        chosen = np.where(own["kind"] == Kind.FORWARD, first, (own["kind"] != Kind.GATE) | (own["step"] >= 0))
        found = replace(
            self,
            rows=_joined(self.rows, own[chosen & (np.maximum(numbers, 0) % self.every == 0)]),
            step=int(numbers[-1]) if len(numbers) else self.step,
            forward_step=int(own["step"][first].max(initial=self.forward_step)),
        )
        return found._thinned(max_rows)

    def joined(self, later: EarlierSteps) -> EarlierSteps:
        """Return these and ``later`` steps."""
        sparser = replace(self, every=max(self.every, later.every))
        return sparser.then(later.rows) if len(later.rows) else self

    def _thinned(self, max_rows: int) -> EarlierSteps:
        rows, every = self.rows, self.every
        while len(rows) > max_rows and every < 2**31:
            every *= 2
            rows = rows[np.maximum(_numbers(rows, -1), 0) % every == 0]
        return replace(self, rows=rows[-max_rows:], every=every) if len(self.rows) > max_rows else self


NO_STEPS = EarlierSteps()


def _numbers(rows: Rows, step: int) -> NDArray[np.int64]:
    """Return the step to which each row belongs: its own, or that of the last STEP row before it. ``[rows]``."""
    places = np.where(rows["kind"] == Kind.STEP, np.arange(len(rows)), -1)
    latest = np.maximum.accumulate(places)
    last = np.where(latest >= 0, rows["step"][latest], step)
    return np.where(rows["step"] >= 0, rows["step"], last).astype(np.int64)


def _first_forwards(rows: Rows, forward_step: int) -> NDArray[np.bool_]:
    """Return which rows are the first FORWARD of a step after ``forward_step``. ``[rows]``."""
    begins = np.flatnonzero((rows["kind"] == Kind.FORWARD) & (rows["edge"] == Edge.BEGIN) & (rows["unit"] >= 0))
    _, first = np.unique(rows["step"][begins], return_index=True)
    begins = begins[first]
    found = np.zeros(len(rows), np.bool_)
    found[begins[rows["step"][begins] > forward_step]] = True
    return found


def _joined(rows: Rows, more: Rows) -> Rows:
    """Return rows one after the other; numpy would join each field on its own, which is slow."""
    pieces = [np.ascontiguousarray(each).view(np.uint8) for each in (rows, more)]
    found: Rows = np.concatenate(pieces).view(ROW_DTYPE)
    return found
