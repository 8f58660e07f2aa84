"""The first collective at which ranks of a group part: they issued different ones under the same number.

Every rank numbers the collectives of a group in the order of its calls, and all must issue the same ones in the same
order. Where they do not, the run hangs, fails, or goes on with wrong values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from workbench.events import COLLECTIVES, Edge, Kind
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Rows

_ALIKE = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.BROADCAST)
"""Kinds whose payload is the same on all ranks."""


class Parting(Enum):
    """How the calls of two parties differ from the first different one on; the value is its display text."""

    # each issued next what the other issued first
    ORDER = "in another order"
    # the same kind and unit
    PAYLOAD = "with another payload"
    # one party issued what the other left out
    EXTRA = "which the others leave out"
    LEFT_OUT = "where the others issue one more"
    # the calls after it do not tell
    UNKNOWN = ""


@dataclass(frozen=True, order=True)
class IssuedCall:
    """A collective as issued.

    Attributes:
        kind: Kind.
        unit: unit index; -1 none.
        num_bytes: payload; -1 for kinds whose payload may differ between ranks.
    """

    kind: Kind
    unit: int
    num_bytes: int = -1


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first collective of a group that its ranks issued differently.

    Attributes:
        group: index of the group.
        number: how many collectives the group issued before it.
        step: step of the ranks that are fewer.
        most: what most ranks issued; of two equal parties that of the lowest rank.
        most_ranks: these ranks.
        other: what others issued in its place.
        other_ranks: these ranks.
        parting: how the calls of the fewer ranks differ from those of most.
    """

    group: int
    number: int
    step: int
    most: IssuedCall
    most_ranks: tuple[int, ...]
    other: IssuedCall
    other_ranks: tuple[int, ...]
    parting: Parting


def first_divergence(trace: Trace) -> Divergence | None:
    """Return the earliest divergence, by the time of the fewer ranks' call; None if there is none in the trace.

    A rank is compared from the first row that it has, so what was dropped or lost before is not.
    """
    issued = {part.rank: _issued(part) for part in trace.ranks}
    found = []
    for group, info in enumerate(trace.header.comm_groups):
        calls = {rank: _of_group(issued[rank], group) for rank in sorted(info.ranks) if rank in issued}
        number = _first_number(calls.values())
        if number is not None:
            found.append(_divergence(group, number, calls))
    return min(found, key=lambda each: each[0])[1] if found else None


def _issued(part: RankTrace) -> Rows:
    is_issued = np.isin(part.rows["kind"], COLLECTIVES) & (part.rows["edge"] == Edge.BEGIN)
    rows: Rows = part.rows[is_issued & (part.rows["comm_seq"] >= 0)]
    return rows


def _of_group(issued: Rows, group: int) -> Rows:
    """Return the calls of a group, ``[N]``, in the order of their numbers, which are different."""
    own = issued[issued["comm_group"] == group]
    _, first = np.unique(own["comm_seq"], return_index=True)
    rows: Rows = own[first]
    return rows


def _codes(calls: Rows) -> NDArray[np.int64]:
    """Return what must be the same on all ranks, ``[N, 3]``: kind, unit, and bytes where they must."""
    num_bytes = np.where(np.isin(calls["kind"], _ALIKE), calls["num_bytes"], -1)
    return np.stack([calls["kind"].astype(np.int64), calls["unit"].astype(np.int64), num_bytes], axis=1)


def _first_number(of_ranks: Iterable[Rows]) -> int | None:
    """Return the lowest number under which two ranks issued different calls."""
    numbers, codes = np.empty(0, np.int64), np.empty((0, 3), np.int64)  # of the first rank that has each
    lowest: int | None = None
    for calls in of_ranks:
        own, own_codes = calls["comm_seq"].astype(np.int64), _codes(calls)
        common, at, own_at = np.intersect1d(numbers, own, assume_unique=True, return_indices=True)
        differ = common[(codes[at] != own_codes[own_at]).any(axis=1)]
        if len(differ) and (lowest is None or differ[0] < lowest):
            lowest = int(differ[0])
        is_new = ~np.isin(own, numbers)
        numbers, codes = np.concatenate([numbers, own[is_new]]), np.concatenate([codes, own_codes[is_new]])
    return lowest


def _divergence(group: int, number: int, calls: Mapping[int, Rows]) -> tuple[int, Divergence]:
    """Return what the ranks issued under a number at which they differ, with the time of the fewer ranks' call."""
    rows = {rank: own[own["comm_seq"] == number] for rank, own in calls.items()}
    by_rank = {rank: _call(row[0]) for rank, row in rows.items() if len(row)}
    (most, _), *_, (other, _) = Counter(by_rank.values()).most_common()  # of equal counts, the lowest rank's is first
    most_ranks, other_ranks = (
        tuple(rank for rank, call in by_rank.items() if call == which) for which in (most, other)
    )
    row = rows[other_ranks[0]][0]
    next_of = [_call_of(calls[ranks[0]], number + 1) for ranks in (most_ranks, other_ranks)]
    return int(row["t_ns"]), Divergence(
        group=group,
        number=number,
        step=int(row["step"]),
        most=most,
        most_ranks=most_ranks,
        other=other,
        other_ranks=other_ranks,
        parting=_parting(most, other, *next_of),
    )


def _call_of(calls: Rows, number: int) -> IssuedCall | None:
    found = calls[calls["comm_seq"] == number]
    return _call(found[0]) if len(found) else None


def _call(row: np.void) -> IssuedCall:
    num_bytes = int(row["num_bytes"]) if row["kind"] in _ALIKE else -1
    return IssuedCall(Kind(row["kind"]), int(row["unit"]), num_bytes)


def _parting(
    most: IssuedCall, other: IssuedCall, after_most: IssuedCall | None, after_other: IssuedCall | None
) -> Parting:
    if (most.kind, most.unit) == (other.kind, other.unit):
        return Parting.PAYLOAD
    if after_most == other and after_other == most:
        return Parting.ORDER
    if after_other == most:
        return Parting.EXTRA
    return Parting.LEFT_OUT if after_most == other else Parting.UNKNOWN
