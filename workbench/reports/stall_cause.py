"""Why the ranks of a run do not continue, as a fault: what was done differently, by whom, and what to change. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from workbench.events import COLLECTIVES, Edge, Kind, unit_words
from workbench.fault import Fault
from workbench.replay.divergence import Divergence, IssuedCall, Parting, first_divergence
from workbench.replay.grouping import label
from workbench.replay.run_positions import RunPosition, RunState
from workbench.reports.stop_positions import unit_names
from workbench.text_formats import format_bytes, format_long, plural
from workbench.trace.columns import Trace
from workbench.trace.recording import Activity
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name

_SAME_CALLS = "let all ranks issue the same collectives: none within `if rank == 0:`, nor in a branch that data decides"
_FIX = {
    Parting.ORDER: "let all ranks run the same units in the same order",
    Parting.PAYLOAD: "pass tensors of the same shape and dtype on all ranks",
    Parting.EXTRA: _SAME_CALLS,
    Parting.LEFT_OUT: _SAME_CALLS,
    Parting.UNKNOWN: _SAME_CALLS,
}
_RULE = {Parting.ORDER: "wrong-order", Parting.PAYLOAD: "other-payload"}


def stall_cause(trace: Trace, positions: Sequence[RunPosition]) -> Fault | None:
    """Return why a stalled run does not continue; None if what is recorded does not tell.

    Args:
        trace: of the run.
        positions: of its recorded ranks.
    """
    gone = [position for position in positions if position.state in (RunState.LOST, RunState.FAILED)]
    early = [position for position in positions if position.state is RunState.ENDED]
    if gone and early and _issued_less(trace, early[0].rank, gone[0].rank):
        return _of_ended(trace, early, gone)
    if gone:
        return _of_lost(gone)
    found = parted(trace, positions)
    if found is not None:
        return found
    waiting = [position for position in positions if position.state is RunState.WAITS and position.pending is not None]
    by_rank = {position.rank: position for position in positions}
    absent = sorted({rank for each in waiting if each.pending is not None for rank in each.pending.absent})
    late = [by_rank[rank] for rank in absent if rank in by_rank]
    ended = [position for position in late if position.state is RunState.ENDED]
    if ended:
        return _of_ended(trace, ended, waiting)
    if late and all(position.state is RunState.WAITS for position in late):
        return _of_crossed(late, waiting, unit_names(trace.header))
    silent = [position for position in late if position.state is RunState.SILENT]
    return _of_silent(silent) if silent else None


def parted(trace: Trace, positions: Sequence[RunPosition] = ()) -> Fault | None:
    """Return where ranks issued different collectives; None if they did not.

    Args:
        trace: of the run.
        positions: of ranks, whose own lines are evidence.
    """
    found = first_divergence(trace)
    return None if found is None else _of_divergence(found, trace.header, positions)


def _of_divergence(found: Divergence, header: Header, positions: Sequence[RunPosition]) -> Fault:
    units = unit_names(header)
    most, other = _call_words(found.most, units), _call_words(found.other, units)
    mine, theirs = label(found.other_ranks), label(found.most_ranks)
    match found.parting:
        case Parting.PAYLOAD:
            sizes = format_bytes(found.other.num_bytes), format_bytes(found.most.num_bytes)
            verdict = f"{mine} issued {other} with {sizes[0]}, {theirs} with {sizes[1]}"
        case Parting.ORDER:
            verdict = f"{mine} issued {other} before {most}, {theirs} the other way round"
        case Parting.EXTRA:
            verdict = f"{mine} issued {other}, which {theirs} left out"
        case Parting.LEFT_OUT:
            verdict = f"{mine} left out {most}, which {theirs} issued"
        case Parting.UNKNOWN:
            verdict = f"{mine} issued {other} where {theirs} issued {most}"
    step = f" of {step_name(found.step)}" if found.step >= 0 else ""
    place = f"number {found.number} of {header.comm_groups[found.group].name}{step}: {mine} {other}, {theirs} {most}"
    lines = (f"rank {each.rank} is in {each.users_frame}" for each in positions if each.users_frame)
    return Fault(
        rule=_RULE.get(found.parting, "other-collective"),
        verdict=verdict,
        evidence=(place, *lines),
        fix=_FIX[found.parting],
    )


def _call_words(call: IssuedCall, units: Mapping[int, str]) -> str:
    return f"{call.kind.words} of {unit_words(units[call.unit])}" if call.unit in units else call.kind.words


def _of_lost(gone: Sequence[RunPosition]) -> Fault:
    reasons = (f"rank {each.rank}: {each.reason or each.state.value}" for each in gone)
    ranks = label([each.rank for each in gone])
    return Fault(
        rule="dead-rank",
        verdict=f"{ranks} {'are' if len(gone) > 1 else 'is'} gone, and no collective ends without all ranks",
        evidence=tuple(reasons),
        fix="end the other ranks, and start the run again",
    )


def _of_ended(trace: Trace, ended: Sequence[RunPosition], waiting: Sequence[RunPosition]) -> Fault:
    counts = [f"rank {each.rank}: {_progress(trace, each.rank)}" for each in (*ended, *waiting)]
    ranks = label([each.rank for each in ended])
    have, others = "have" if len(ended) > 1 else "has", label([each.rank for each in waiting])
    return Fault(
        rule="uneven-batches",
        verdict=f"{ranks} {have} ended, while {others} still issued collectives",
        evidence=tuple(counts),
        fix="give all ranks the same number of batches, such as by DistributedSampler(dataset, drop_last=True)",
    )


def _issued_less(trace: Trace, rank: int, other: int) -> bool:
    """Return whether ``rank`` issued fewer collectives of a group than ``other``, whose last one had no partner."""
    counts = [
        Counter(rows["comm_group"][np.isin(rows["kind"], COLLECTIVES) & (rows["edge"] == Edge.BEGIN)].tolist())
        for rows in (trace.rank(rank).rows, trace.rank(other).rows)
    ]
    return any(counts[0][group] < count for group, count in counts[1].items() if group in counts[0])


def _progress(trace: Trace, rank: int) -> str:
    rows = trace.rank(rank).rows
    steps, forwards = (
        int(np.count_nonzero((rows["kind"] == kind) & (rows["edge"] == Edge.BEGIN) & (rows["unit"] == unit)))
        for kind, unit in ((Kind.OPTIMIZER, -1), (Kind.FORWARD, _root_of(trace.header)))
    )
    return f"{plural(forwards, 'forward')}, {plural(steps, 'step')} of the optimizer"


def _root_of(header: Header) -> int:
    """Return the index of the first root in use; -1: none."""
    return next((unit.index for unit in header.units if unit.in_use and unit.root == unit.index), -1)


def _of_crossed(late: Sequence[RunPosition], waiting: Sequence[RunPosition], units: Mapping[int, str]) -> Fault:
    def words(position: RunPosition) -> str:
        pending = position.pending
        if pending is None:
            return ""
        call = _call_words(IssuedCall(pending.kind, pending.unit), units)
        return (
            f"rank {position.rank} waits for {call} in {pending.group}, which {label(pending.absent)} has not started"
        )

    both = {each.rank: each for each in (*waiting, *late)}
    told = [each for each in both.values() if each.pending is not None and each.pending.absent]
    return Fault(
        rule="crossed-groups",
        verdict=f"{label(both)} wait for each other, in different groups",
        evidence=tuple(map(words, sorted(told, key=lambda each: each.rank))),
        fix="let all ranks use the groups in the same order",
    )


_WHAT_TO_DO: Mapping[Activity, str] = {
    "": "look at that line: it sleeps, waits for data, or computes for long",
    "asleep": "look at that line: it sleeps, or waits for data, a lock or another process",
    "computing": "look at that line: it computes for long, in Python or in a library",
    "reading a disk or swapped memory": "look at that line, and at the free memory of its host",
}


def _of_silent(silent: Sequence[RunPosition]) -> Fault:
    ranks = label([each.rank for each in silent])
    places = (
        f"rank {each.rank} has recorded no event for {format_long(each.for_ns)}"
        + (f", {each.activity}" if each.activity else "")
        + (f", in {each.users_frame or each.frames[-1]}" if each.frames else "; it has written no stack since")
        for each in silent
    )
    known = {each.activity for each in silent}
    return Fault(
        rule="late-rank",
        verdict=f"{ranks} {'do' if len(silent) > 1 else 'does'} not come: the others wait for what it does outside of "
        "collectives",
        evidence=tuple(places),
        fix=_WHAT_TO_DO[known.pop() if len(known) == 1 else ""],
    )
