"""Events of a rank that a sentence names, so that a picture can mark them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from workbench.events import Kind
from workbench.replay.spans import of_kind
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Rows


@dataclass(frozen=True, kw_only=True)
class EventMark:
    """Consecutive events of a rank.

    Attributes:
        rank: the rank.
        first_seq: number of the first event on that rank.
        last_seq: number of the last one, included.
        unit: the unit that they are about; -1: none.
    """

    rank: int
    first_seq: int
    last_seq: int
    unit: int = -1

    def times_ns(self, rows: Rows) -> tuple[int, int] | None:
        """Return the first and the last time of the events that are among the rank's ``rows``; None if none is."""
        t_ns = rows["t_ns"][(rows["seq"] >= self.first_seq) & (rows["seq"] <= self.last_seq)]
        return (int(t_ns.min()), int(t_ns.max())) if len(t_ns) else None


def mark_of(rank: int, rows: Rows, unit: int = -1) -> EventMark | None:
    """Return the mark from the first to the last of a rank's ``rows``; None without rows."""
    if not len(rows):
        return None
    return EventMark(rank=rank, first_seq=int(rows["seq"].min()), last_seq=int(rows["seq"].max()), unit=unit)


def mark_in_step(part: RankTrace, step: int, kinds: Collection[Kind] = (), unit: int = -1) -> EventMark | None:
    """Return the mark of a rank's events in a step.

    Args:
        part: the rank.
        step: number of the step.
        kinds: only events of these kinds; empty: all.
        unit: only those of this unit; -1: all.
    """
    rows = part.rows[slice(*part.places_of(step, step))]
    wanted = rows["step"] == step
    if kinds:
        wanted &= of_kind(rows, tuple(kinds))
    if unit >= 0:
        wanted &= rows["unit"] == unit
    return mark_of(part.rank, rows[wanted], unit)


def mark_of_wait(part: RankTrace, issue_seq: int) -> EventMark | None:
    """Return the mark of a rank's waits for the collective that event ``issue_seq`` issued."""
    place = issue_seq - part.start.seq
    issued = part.rows[place]
    later = part.rows[place : part.places_of(int(issued["step"]), int(issued["step"]))[1]]
    wanted = (later["kind"] == Kind.WAIT) & (later["comm_group"] == issued["comm_group"])
    return mark_of(part.rank, later[wanted & (later["comm_seq"] == issued["comm_seq"])], int(issued["unit"]))
