"""What each rank issued in a step, as plain counts: what a comparison of the ranks is checked against."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.events import Kind
from workbench.replay.collectives import _tallies
from workbench.trace.columns import Trace


@dataclass(frozen=True, kw_only=True)
class Count:
    """The collectives of one kind and number of ranks that one rank issued for one unit in one step.

    Attributes:
        rank: global rank.
        unit: unit index, -1 none.
        kind: one of COLLECTIVES.
        num_ranks: ranks that took part in each.
        calls: how many.
        num_bytes: sum of their payloads.
        time_ns: sum of their times.
        exposed_ns: sum of the times compute waited for them; for each at most its own time.
    """

    rank: int
    unit: int
    kind: Kind
    num_ranks: int
    calls: int
    num_bytes: int
    time_ns: int
    exposed_ns: int


def counts(trace: Trace, step: int) -> tuple[Count, ...]:
    """Return what each rank issued in ``step``, by rank, unit, kind and number of participating ranks.

    Collectives that were never issued have no entry.
    """
    one_step = trace.slice(step=step)
    tallies = (tally for rank in one_step.ranks for tally in _tallies(trace.header, [rank], step).items())
    return tuple(
        Count(
            rank=tally.ranks[0],
            unit=unit,
            kind=kind,
            num_ranks=num_ranks,
            calls=tally.calls,
            num_bytes=tally.num_bytes,
            time_ns=tally.time_ns,
            exposed_ns=tally.exposed_ns,
        )
        for (unit, kind, num_ranks), tally in tallies
    )
