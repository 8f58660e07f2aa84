"""Why compute waited for collectives: each exposed wait of a step, by unit and cause.

The part of a wait before the last rank issued the collective is due to that rank. The rest is communication:

- *nothing to overlap*: nothing that could run meanwhile, as for the first all-gather of a step and the last reductions;
- *issued late*: an all-gather was issued only when its parameters were needed, though the rank had computed before;
- *waited for at once*: a reduction that was waited for directly after it was issued, though backward went on;
- *bandwidth*: it was issued ahead, and takes longer than the compute meanwhile.

A collective counts as issued ahead if the rank computed between its issue and the wait for at least :data:`AHEAD` of
the time that the transfer takes once all ranks have joined.

Times are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from workbench.events import Kind
from workbench.replay.spans import Ints, within_ns
from workbench.replay.step_parts import IS_WORK, Pieces, RankTimes

AHEAD = 0.1
"""Part of a transfer's time for which a rank must compute after the issue, for it to count as issued ahead."""


_Key = tuple[int, int, bool, int, int]
"""Unit, kind, whether in backward, place of the cause, and late rank."""

_Wait = tuple[int, int, int, int]
"""Time waited, time of the transfer, payload, and the event that issued it."""


class WaitReason(Enum):
    """Why compute waited; the value is its name."""

    LATE_RANK = "late rank"
    ISSUED_LATE = "issued late"
    AT_ONCE = "waited for at once"
    NOTHING = "nothing to overlap"
    BANDWIDTH = "bandwidth"


REASONS = tuple(WaitReason)


@dataclass(frozen=True, kw_only=True)
class ExposedWait:
    """The waits of some ranks for one kind of collective of a unit in a step, with one cause.

    Attributes:
        unit: unit index, -1 none.
        kind: kind of collective.
        in_backward: whether it was issued in backward.
        cause: why compute waited.
        late_rank: the rank that issued it last, for a late rank; else -1.
        ranks: the ranks that waited, ascending.
        calls: the most waits of one of them.
        wait_ns: mean of the time waited over all ranks of the trace.
        most_ns: time waited by the rank that waited most.
        time_ns: mean time of a transfer once all ranks had joined.
        num_bytes: payload of one.
        longest_rank: the rank of the longest single wait.
        longest_seq: number of the event on that rank that issued its collective.
    """

    unit: int
    kind: Kind
    in_backward: bool
    cause: WaitReason
    late_rank: int
    ranks: tuple[int, ...]
    calls: int
    wait_ns: float
    most_ns: int
    time_ns: float
    num_bytes: int
    longest_rank: int
    longest_seq: int


def exposed_waits(times: Mapping[int, RankTimes], step: int) -> tuple[ExposedWait, ...]:
    """Return the exposed waits of a step, the longest first."""
    found: dict[_Key, dict[int, list[_Wait]]] = {}
    for rank, each in times.items():
        for key, wait in _of_rank(each, step):
            found.setdefault(key, {}).setdefault(rank, []).append(wait)
    waits = [_together(key, by_rank, len(times)) for key, by_rank in found.items()]
    return tuple(sorted(waits, key=lambda wait: (-wait.wait_ns, wait.unit, wait.kind)))


def _together(key: _Key, by_rank: Mapping[int, list[_Wait]], num_ranks: int) -> ExposedWait:
    unit, kind, in_backward, cause, late_rank = key
    waited = {rank: sum(wait[0] for wait in waits) for rank, waits in by_rank.items()}
    every = [wait for waits in by_rank.values() for wait in waits]
    longest_rank = max(by_rank, key=lambda rank: max(by_rank[rank]))
    return ExposedWait(
        unit=unit,
        kind=Kind(kind),
        in_backward=in_backward,
        cause=REASONS[cause],
        late_rank=late_rank,
        ranks=tuple(sorted(by_rank)),
        calls=max(map(len, by_rank.values())),
        wait_ns=sum(waited.values()) / num_ranks,
        most_ns=max(waited.values()),
        time_ns=sum(wait[1] for wait in every) / len(every),
        num_bytes=every[0][2],
        longest_rank=longest_rank,
        longest_seq=max(by_rank[longest_rank])[3],
    )


def _of_rank(times: RankTimes, step: int) -> list[tuple[_Key, _Wait]]:
    """Return the waits of a rank."""
    issued, last = times.collectives, times.last
    here = np.flatnonzero((issued.step == step) & (issued.wait_ns > 0) & (issued.wait_begin_ns >= 0))
    if not len(here):
        return []
    begin_ns, issue_ns = issued.wait_begin_ns[here], issued.issue_ns[here]
    wait_ns = issued.wait_ns[here]
    late_ns = np.clip(last.issue_ns[here], begin_ns, begin_ns + wait_ns) - begin_ns
    end_ns = np.where(issued.end_ns[here] >= 0, issued.end_ns[here], begin_ns + wait_ns)
    joined_ns = np.where(last.rank[here] >= 0, last.issue_ns[here], issue_ns)
    time_ns = np.maximum(end_ns - np.maximum(joined_ns, issue_ns), 0)
    cause = _causes(times.pieces, issued.kind[here], issue_ns, begin_ns, time_ns)
    found = []
    columns = (
        issued.unit[here],
        issued.kind[here],
        times.in_backward[here],
        cause,
        last.rank[here],
        wait_ns,
        late_ns,
        time_ns,
    )
    rows = zip(*(column.tolist() for column in (*columns, issued.num_bytes[here], issued.seq[here])), strict=True)
    for unit, kind, back, why, rank, waited, late, took, num_bytes, seq in rows:
        if late > 0:
            found.append(((unit, kind, back, REASONS.index(WaitReason.LATE_RANK), rank), (late, took, num_bytes, seq)))
        if waited > late:
            found.append(((unit, kind, back, why, -1), (waited - late, took, num_bytes, seq)))
    return found


def _causes(pieces: Pieces, kind: Ints, issue_ns: Ints, begin_ns: Ints, time_ns: Ints) -> Ints:
    """Return the place in :data:`REASONS` of the communication part of each wait, ``[N]``."""
    is_work = IS_WORK[pieces.kind]
    work = pieces.begin_ns[is_work], pieces.end_ns[is_work]
    is_training = is_work & (pieces.kind != Kind.OPTIMIZER)
    steps = pieces.end_ns[pieces.kind == Kind.OPTIMIZER]  # parameters change there: nothing is gathered across
    training = pieces.begin_ns[is_training], pieces.end_ns[is_training]
    overlap_ns = within_ns(*work, begin_ns) - within_ns(*work, issue_ns)
    begun = np.searchsorted(steps, issue_ns, side="right")
    since = np.where(begun > 0, np.append(steps, 0)[begun - 1], pieces.begin_ns[0])
    until = np.append(pieces.begin_ns[pieces.kind == Kind.OPTIMIZER], pieces.end_ns[-1])
    until = until[np.minimum(np.searchsorted(until, begin_ns), len(until) - 1)]
    earlier_ns = within_ns(*training, issue_ns) - within_ns(*training, since)
    later_ns = within_ns(*training, until) - within_ns(*training, begin_ns)
    is_gather = kind == Kind.ALL_GATHER
    could_ns = np.where(is_gather, earlier_ns, later_ns)
    enough = AHEAD * time_ns
    late = np.where(is_gather, REASONS.index(WaitReason.ISSUED_LATE), REASONS.index(WaitReason.AT_ONCE))
    alone = np.where(could_ns > enough, late, REASONS.index(WaitReason.NOTHING))
    return np.where(overlap_ns >= np.maximum(enough, 1), REASONS.index(WaitReason.BANDWIDTH), alone)
