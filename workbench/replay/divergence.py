"""The first collective at which ranks of a group part: they issued different ones under the same number.

Every rank numbers the collectives of a group in the order of its calls, and all must issue the same ones in the same
order. Where they do not, the run hangs, fails, or goes on with wrong values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from workbench.events import COLLECTIVES, NUMBERED, ROOTED, Edge, Kind
from workbench.replay.passes import BegunPass, passes_at, passes_before
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Rows

_ALIKE = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, *ROOTED)
"""Kinds whose payload is the same on all ranks."""

_CALCULATING = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.REDUCE)
"""Kinds whose dtype must be the same too; the others copy bytes, whatever they mean."""

# indexed by the column ``kind``
_IS_ALIKE, _IS_CALCULATING, _IS_ROOTED, _IS_COLLECTIVE, _IS_NUMBERED = (
    np.isin(np.arange(256), kinds) for kinds in (_ALIKE, _CALCULATING, ROOTED, COLLECTIVES, NUMBERED)
)

_CONTEXTS = (32, 8, 2)
"""Numbers of calls that tell what usually follows them, the longest first."""


_MIN_ALIKE = 3
"""Calls at the same place of a step, with the newest one, of which the others tell what is usual."""


class Parting(Enum):
    """How the calls of two parties differ from the first different one on; the value is its display text."""

    # each issued next what the other issued first
    ORDER = "in another order"
    # the same kind and unit
    PAYLOAD = "with another payload"
    ROOT = "with another source or destination"
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
        dtype: of the payload, as index into :attr:`Header.strings`; -1: unknown.
        root: rank of the source or the destination; -1: unknown or none.
    """

    kind: Kind
    unit: int
    num_bytes: int = -1
    dtype: int = -1
    root: int = -1


@dataclass(frozen=True, kw_only=True)
class OutsideCalls:
    """All-gathers of units outside of all passes, as a save issues them, that other ranks did not issue there.

    Attributes:
        ranks: that issued them.
        numbers: of the first and the last, among the collectives of the group.
        units: their units, in order.
    """

    ranks: tuple[int, ...]
    numbers: tuple[int, int]
    units: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first collective of a group that its ranks issued differently.

    Attributes:
        group: index of the group.
        number: how many collectives the group issued before it.
        step: step of the ranks that are fewer.
        most: what most ranks issued; of two equal parties that of the lowest rank, or of the others if only they
            issued what followed the same calls before.
        most_ranks: these ranks.
        other: what others issued in its place.
        other_ranks: these ranks.
        unknown_ranks: ranks of the group whose call is not recorded.
        aborted_ranks: such ranks of which it is known that they brought less than ``other``.
        parting: how the calls of the fewer ranks differ from those of most.
        most_passes: passes that the lowest of most ranks had begun when it issued its own.
        other_passes: passes that the lowest of the others had begun.
        is_open: whether the parties are equal, and nothing recorded of their calls tells which one is the exception.
        outside: what one party issued before, outside of all passes, where the other one issued the same in its next
            pass: so they pair, and the ranks part later.
    """

    group: int
    number: int
    step: int
    most: IssuedCall
    most_ranks: tuple[int, ...]
    other: IssuedCall
    other_ranks: tuple[int, ...]
    parting: Parting
    unknown_ranks: tuple[int, ...] = ()
    aborted_ranks: tuple[int, ...] = ()
    most_passes: tuple[BegunPass, ...] = ()
    other_passes: tuple[BegunPass, ...] = ()
    is_open: bool = False
    outside: OutsideCalls | None = None

    def swapped(self) -> Divergence:
        """Return the same with the parties swapped: ``most`` did what all did before."""
        return replace(
            self,
            most=self.other,
            most_ranks=self.other_ranks,
            most_passes=self.other_passes,
            other=self.most,
            other_ranks=self.most_ranks,
            other_passes=self.most_passes,
        )


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
    if not found:
        return None
    _, first = min(found, key=lambda each: each[0])
    most, other = (
        passes_before(trace.header, trace.rank(ranks[0]), _seq_of(issued[ranks[0]], first.group, first.number))
        for ranks in (first.most_ranks, first.other_ranks)
    )
    parties = first.most_ranks, first.other_ranks
    outside = next(filter(None, (_outside(trace, issued, first, *pair) for pair in permutations(parties))), None)
    found_first = replace(first, most_passes=most, other_passes=other, outside=outside)
    calls_of = [(trace.rank(ranks[0]), first.group, first.number) for ranks in (first.most_ranks, first.other_ranks)]
    is_even = len(first.most_ranks) == len(first.other_ranks)  # else fewer ranks are the exception, whatever they did
    is_unknown = is_even and first.parting is Parting.UNKNOWN
    usual = [is_usual(*call) for call in calls_of] if is_unknown else []
    if usual == [False, True]:
        return found_first.swapped()
    return replace(found_first, is_open=is_unknown and usual != [True, False])


def _seq_of(issued: Rows, group: int, number: int) -> int:
    """Return the row that begins a call that was issued."""
    return int(issued["seq"][(issued["comm_group"] == group) & (issued["comm_seq"] == number)][0])


def _outside(
    trace: Trace, issued: Mapping[int, Rows], found: Divergence, ranks: tuple[int, ...], others: tuple[int, ...]
) -> OutsideCalls | None:
    """Return what ``ranks`` issued outside of their passes up to a divergence, while others were in a further pass."""
    mine, theirs = (_of_group(issued[party[0]], found.group) for party in (ranks, others))
    numbers = np.intersect1d(mine["comm_seq"], theirs["comm_seq"], assume_unique=True)
    numbers = numbers[numbers < found.number]
    own, other = (calls[np.isin(calls["comm_seq"], numbers)] for calls in (mine, theirs))
    (num_own, is_outside), (num_other, _) = (
        passes_at(trace.header, trace.rank(party[0]), calls["seq"].astype(np.int64))
        for party, calls in ((ranks, own), (others, other))
    )
    is_outside &= (own["unit"] >= 0) & (own["kind"] == Kind.ALL_GATHER) & (num_own < num_other)
    calls = own[len(own) - int(np.argmin([*is_outside[::-1], False])) :]
    if not len(calls):
        return None
    units = tuple(dict.fromkeys(calls["unit"].tolist()))
    return OutsideCalls(ranks=ranks, numbers=(int(calls["comm_seq"][0]), int(calls["comm_seq"][-1])), units=units)


def is_usual(part: RankTrace, group: int, number: int) -> bool | None:
    """Return whether a rank has issued a call after the same calls before, in all of its groups.

    None: the calls before it are new, or other calls followed them too.

    Example: ``A B C A B C A B D`` -> False for ``D``, since ``C`` followed ``A B``.
    """
    rows = _numbered(part)
    at = np.flatnonzero((rows["comm_group"] == group) & (rows["comm_seq"] == number))
    if not len(at):
        return None
    rows = rows[: at[0] + 1]
    what = _codes(rows)[:, : _UNKNOWABLE[-1]]  # a root may be drawn
    _, codes = np.unique(np.column_stack([rows["comm_group"], what]), axis=0, return_inverse=True)
    return has_usual_end(codes.reshape(-1))


def has_usual_end(codes: NDArray[np.int64]) -> bool | None:
    """Return whether the last of ``codes``, ``[N]``, followed the same ones before; None if they are new, or mixed."""
    for length in (length for length in _CONTEXTS if length < len(codes) - 1):
        windows = np.lib.stride_tricks.sliding_window_view(codes[:-2], length)
        after = codes[np.flatnonzero((windows == codes[-1 - length : -1]).all(axis=1)) + length]
        if len(after):
            return bool(after[0] == codes[-1]) if (after == after[0]).all() else None
    return None


def has_left_out(part: RankTrace, left_out: int, group: int, number: int) -> bool:
    """Return whether a rank has issued one call of ``left_out`` less than usual when it issued its newest call.

    Usual is the difference to the calls of another group, or of the newest call's own, whenever it issued the like
    in the steps before: as many sends as receives, or the same number of sends in each step.

    Args:
        part: the rank's rows.
        left_out: index of the group of which a call may be missing.
        group: of the newest call.
        number: of the newest call.
    """
    rows = _numbered(part)
    newest = np.flatnonzero((rows["comm_group"] == group) & (rows["comm_seq"] == number))
    if not len(newest):
        return False
    rows = rows[: newest[0] + 1]
    at = np.flatnonzero(rows["comm_group"] == group)
    steps, first, which = np.unique(rows["step"][at], return_index=True, return_inverse=True)
    is_outside = steps[which] < 0  # if no step is known, all are alike
    in_step = np.where(is_outside, 0, np.arange(len(at)) - first[which])
    alike = at[(in_step == in_step[-1]) & (is_outside == is_outside[-1])]
    if len(alike) < _MIN_ALIKE:
        return False
    for other in set(rows["comm_group"].tolist()) - {left_out}:
        change = (rows["comm_group"] == other).astype(int) - (rows["comm_group"] == left_out)
        differ = (np.cumsum(change) - change)[alike]
        if (differ[:-1] == differ[0]).all() and differ[-1] == differ[0] + 1:
            return True
    return False


@dataclass(frozen=True, kw_only=True)
class UnsharedCall:
    """A collective, send or receive that a rank has issued and another rank of its group has not.

    Attributes:
        call: what it issued.
        group: index of the group.
        number: how many the group issued before it.
    """

    call: IssuedCall
    group: int
    number: int


def first_unshared(trace: Trace, rank: int, other: int) -> UnsharedCall | None:
    """Return the first call that a rank has issued in a group with another rank, which has not; None if none is known.

    Args:
        trace: of both.
        rank: that issued it.
        other: that did not.
    """
    mine, theirs = (_numbered(trace.rank(each)) for each in (rank, other))
    groups = [at for at, info in enumerate(trace.header.comm_groups) if {rank, other} <= set(info.ranks)]
    reached = {group: max(theirs["comm_seq"][theirs["comm_group"] == group], default=-1) for group in groups}
    own = mine[np.isin(mine["comm_group"], groups)]
    newest = own[[seq > reached[group] for group, seq in zip(own["comm_group"].tolist(), own["comm_seq"], strict=True)]]
    if not len(newest):
        return None
    first = newest[0]
    return UnsharedCall(call=_call(first), group=int(first["comm_group"]), number=int(first["comm_seq"]))


def _numbered(part: RankTrace) -> Rows:
    is_call = _IS_NUMBERED[part.kinds] & (part.rows["edge"] == Edge.BEGIN)
    rows: Rows = part.rows[is_call & (part.rows["comm_seq"] >= 0)]
    return rows


def _issued(part: RankTrace) -> Rows:
    is_issued = _IS_COLLECTIVE[part.kinds] & (part.rows["edge"] == Edge.BEGIN)
    rows: Rows = part.rows[is_issued & (part.rows["comm_seq"] >= 0)]
    return rows


def _of_group(issued: Rows, group: int) -> Rows:
    """Return the calls of a group, ``[N]``, in the order of their numbers, which are different."""
    own = issued[issued["comm_group"] == group]
    _, first = np.unique(own["comm_seq"], return_index=True)
    rows: Rows = own[first]
    return rows


_UNKNOWABLE = (1, 3, 4)
"""Columns of the codes of which -1 equals any value: unit, dtype and root."""


def _codes(calls: Rows) -> NDArray[np.int64]:
    """Return what must be the same on all ranks, ``[N, 5]``: kind, unit, bytes, dtype, root; -1 where it need not."""
    kind, unit = calls["kind"], calls["unit"].astype(np.int64)
    num_bytes = np.where(_IS_ALIKE[kind], calls["num_bytes"], -1)
    dtype = np.where(_IS_CALCULATING[kind], calls["module"], -1)
    root = np.where(_IS_ROOTED[kind], np.nan_to_num(calls["value"], nan=-1), -1).astype(np.int64)
    return np.stack([kind.astype(np.int64), unit, num_bytes, dtype, root], axis=1)


def _first_number(of_ranks: Iterable[Rows]) -> int | None:
    """Return the lowest number under which two ranks issued different calls."""
    numbers, codes = np.empty(0, np.int64), np.empty((0, 5), np.int64)  # of the first rank that has each
    lowest: int | None = None
    for calls in of_ranks:
        own, own_codes = calls["comm_seq"].astype(np.int64), _codes(calls)
        common, at, own_at = np.intersect1d(numbers, own, assume_unique=True, return_indices=True)
        differ = common[_differ(codes[at], own_codes[own_at])]
        if len(differ) and (lowest is None or differ[0] < lowest):
            lowest = int(differ[0])
        is_new = ~np.isin(own, numbers)
        numbers, codes = np.concatenate([numbers, own[is_new]]), np.concatenate([codes, own_codes[is_new]])
    return lowest


def _differ(codes: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which calls differ, ``[N]``; what is unknown does not, and a call without a unit may take a unit's place.

    A rank without a batch does so within ``torch.distributed.algorithms.Join``.
    """
    found = codes != others
    found[:, _UNKNOWABLE] &= (codes[:, _UNKNOWABLE] >= 0) & (others[:, _UNKNOWABLE] >= 0)
    differ: NDArray[np.bool_] = found.any(axis=1)
    return differ


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
        unknown_ranks=tuple(sorted(calls.keys() - by_rank.keys())),
        parting=_parting(most, other, *next_of),
    )


def _call_of(calls: Rows, number: int) -> IssuedCall | None:
    found = calls[calls["comm_seq"] == number]
    return _call(found[0]) if len(found) else None


def _call(row: np.void) -> IssuedCall:
    kind = Kind(row["kind"])
    root = int(row["value"]) if kind in ROOTED and not np.isnan(row["value"]) else -1
    if kind not in _ALIKE:
        return IssuedCall(kind, int(row["unit"]))
    return IssuedCall(kind, int(row["unit"]), int(row["num_bytes"]), int(row["module"]), root)


def _parting(
    most: IssuedCall, other: IssuedCall, after_most: IssuedCall | None, after_other: IssuedCall | None
) -> Parting:
    is_same = (most.kind, most.unit) == (other.kind, other.unit)
    if is_same and most.root == other.root:
        return Parting.PAYLOAD
    if after_most == other and after_other == most:
        return Parting.ORDER
    if after_other == most:
        return Parting.EXTRA
    if after_most == other:
        return Parting.LEFT_OUT
    return Parting.ROOT if is_same else Parting.UNKNOWN
