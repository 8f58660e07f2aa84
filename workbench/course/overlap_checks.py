"""Findings about communication beside compute in a step; for ``step`` see :mod:`workbench.course.call_checks`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.base.text_formats import format_duration, plural
from workbench.course.finding import CheckFinding, and_list, fails, holds, unit_list
from workbench.course.run_steps import read_call, runs_no_unit, step_of
from workbench.errors import UsageError
from workbench.events import WORK, Edge, Kind
from workbench.replay import collectives
from workbench.replay.grouping import by_value, label
from workbench.replay.step_parts import Group
from workbench.reports.step_study import StepStudy
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.step_names import step_name

NOISE = 0.05
"""Exposed communication that differs from the reference's by less than this fraction of the step never fails."""


def overlaps(
    trace: Trace, kind: str = "all_gather", at_least: int = 1, step: int = -1, *, to_end: bool = False
) -> CheckFinding:
    """Return whether collectives are issued ahead: each rank runs another unit between the issue and the wait.

    Args:
        trace: of the run.
        kind: ``all_gather`` or another kind of collective.
        at_least: how many of them each rank issues ahead in the step.
        step: the step.
        to_end: whether a rank may wait for them only after the last work of its units.

    Raises:
        UsageError: there is no such kind of collective.
    """
    what = read_call(kind)
    number = step_of(trace, step)
    if isinstance(number, CheckFinding):
        return number
    early = {rank.rank: _waited_in_work(rank, what.kind) for rank in trace.slice(step=number).ranks if to_end}
    ahead = ahead_of_work(trace, what.kind, number)
    is_none = any(total and not count for count, total in ahead.values())
    if any(early.values()) and not is_none:
        each = [
            f"{label(ranks)} wait{'s' if len(ranks) == 1 else ''} for {plural(count, what.kind.words)}"
            for count, ranks in by_value(early).items()
            if count
        ]
        return fails(
            f"{and_list(each)} in {step_name(number)} while units still have work to do",
            "issue them while units work, and wait for all of them after the last unit",
        )
    few = {rank: count for rank, count in ahead.items() if count[0] < at_least}
    word = what.kind.words
    if not few:
        least, total = min(ahead.values())
        return holds(
            f"each rank issues {least} of {total} {word}s ahead of another unit's work, in {step_name(number)}"
        )
    each = [f"{issuing(ranks)} {count} of {total} {word}s ahead" for (count, total), ranks in by_value(few).items()]
    return fails(
        f"{and_list(each)} in {step_name(number)}, not at least {at_least}",
        f"the {word} of each unit is waited for before anything else runs; issue it with async_op=True before another "
        "unit runs, and wait for it when its result is needed"
        if is_none
        else "",
    )


def waited(trace: Trace, step: int = -1) -> CheckFinding:
    """Return whether each rank waits for the all-gather of a unit before the unit computes.

    Without the wait, the unit computes with whatever is in the memory at that moment.
    """
    number = step_of(trace, step)
    if isinstance(number, CheckFinding):
        return number
    early = {rank.rank: _computed_early(rank, number) for rank in trace.slice(step=number).ranks}
    units = unit_list(trace.header, {unit for some in early.values() for unit in some})
    if not units:
        return holds(f"each unit waits for its all-gather before it computes, in {step_name(number)}")
    return fails(
        f"{label([rank for rank, some in early.items() if some])} compute with {units} in {step_name(number)} before "
        "their all-gathers were waited for",
        "the right numbers are luck then; wait for the handle of the unit that computes",
    )


def _computed_early(rank: RankTrace, step: int) -> list[int]:
    """Return the units that begin to compute while an all-gather of theirs is in flight and not waited for."""
    found = collectives.table(rank)
    rows = rank.rows
    begins = rows[np.isin(rows["kind"], WORK) & (rows["edge"] == Edge.BEGIN) & (rows["unit"] >= 0)]
    units = []
    for place in np.flatnonzero((found.kind == Kind.ALL_GATHER) & (found.step == step) & (found.unit >= 0)).tolist():
        own = begins[(begins["unit"] == found.unit[place]) & (begins["seq"] > found.seq[place])]
        of_call = (rows["comm_group"] == found.comm_group[place]) & (rows["comm_seq"] == found.comm_seq[place])
        is_end = of_call & (rows["edge"] == Edge.END)
        waits = rows["seq"][is_end & (rows["kind"] == Kind.WAIT)]
        ends = waits if (of_call & (rows["kind"] == Kind.WAIT)).any() else rows["seq"][is_end]
        is_at_once = len(ends) and (len(waits) or ends[0] == found.seq[place] + 1)  # it was not asynchronous
        is_over = is_at_once and len(own) and ends[0] < own["seq"][0]
        if len(own) and not is_over:
            units.append(int(found.unit[place]))
    return units


def issuing(ranks: Sequence[int]) -> str:
    """Return the begin of a sentence on what some ranks issue."""
    return f"{label(ranks)} issue{'s' if len(ranks) == 1 else ''}"


def ahead_of_work(trace: Trace, kind: Kind, step: int) -> dict[int, tuple[int, int]]:
    """Return by rank how many collectives of a kind have work of another unit between issue and wait, and their total.

    One that no wait of compute follows counts if such work follows its issue.
    """
    return {rank.rank: _issued_ahead(rank, kind, step) for rank in trace.slice(step=step).ranks}


def _waited_in_work(rank: RankTrace, kind: Kind) -> int:
    """Return how many collectives of a kind are waited for before the last work of a unit."""
    rows, found = rank.rows, collectives.table(rank)
    last_work = rows["seq"][np.isin(rows["kind"], WORK) & (rows["unit"] >= 0)].max(initial=-1)
    waits = rows[(rows["kind"] == Kind.WAIT) & (rows["edge"] == Edge.BEGIN) & (rows["seq"] < last_work)]
    mine = found.kind == kind
    calls = set(zip(found.comm_group[mine].tolist(), found.comm_seq[mine].tolist(), strict=True))
    return len(calls.intersection(zip(waits["comm_group"].tolist(), waits["comm_seq"].tolist(), strict=True)))


def _issued_ahead(rank: RankTrace, kind: Kind, step: int) -> tuple[int, int]:
    found = collectives.table(rank)
    mine = np.flatnonzero((found.kind == kind) & (found.step == step))
    rows = rank.rows
    work = rows[np.isin(rows["kind"], WORK) & (rows["unit"] >= 0)]
    waits = rows[(rows["kind"] == Kind.WAIT) & (rows["edge"] == Edge.BEGIN)]
    count = 0
    for place in mine.tolist():
        own = waits[(waits["comm_group"] == found.comm_group[place]) & (waits["comm_seq"] == found.comm_seq[place])]
        until = own["seq"][0] if len(own) else rank.end_seq
        between = work[(work["seq"] > found.seq[place]) & (work["seq"] < until)]
        count += bool((between["unit"] != found.unit[place]).any())
    return count, len(mine)


def exposed(
    trace: Trace,
    at_most_ns: float | None = None,
    *,
    reference: Trace | None = None,
    ratio: float = 1.5,
    step: int = -1,
) -> CheckFinding:
    """Return whether compute waits for communication no longer than a limit.

    Time until the last rank joins is left out. The time is the median over the steps up to the chosen one that can be
    compared. Times vary on a busy machine: a difference below :data:`NOISE` of the step never fails.

    Args:
        trace: of the run.
        at_most_ns: the limit in nanoseconds.
        reference: of another run, whose exposed communication times ``ratio`` is the limit instead.
        ratio: see there.
        step: the newest of the steps.

    Raises:
        UsageError: neither or both of ``at_most_ns`` and ``reference`` are given.
    """
    if (at_most_ns is None) == (reference is None):
        raise UsageError("exposed needs a limit: at_most_ns=NANOSECONDS, or reference=other_trace")
    number = step_of(trace, step)
    if isinstance(number, CheckFinding):
        return number
    if problem := runs_no_unit(trace, number):
        return fails(problem)
    mine_ns, step_ns = _exposed_ns(trace, number)
    limit = at_most_ns
    against = ""
    if reference is not None:
        other = step_of(reference, step, "the reference run")
        if isinstance(other, CheckFinding):
            return other
        best, _ = _exposed_ns(reference, other)
        limit = ratio * best
        against = f", {mine_ns / max(best, 1):.2f} times the {format_duration(best)} of the reference"
    assert limit is not None
    words = (
        f"compute waits {format_duration(mine_ns)} of a step of {format_duration(step_ns)} for communication{against}"
    )
    if mine_ns <= limit + NOISE * step_ns:
        return holds(words)
    more = f", more than {ratio:g}" if reference is not None else f", more than {format_duration(limit)}"
    return fails(words + more, overlaps_reason(trace, number))


def overlaps_reason(trace: Trace, step: int) -> str:
    """Return that no all-gather of a step is issued ahead; empty if one is."""
    finding = overlaps(trace, step=step)
    return "" if finding.ok else finding.sentence.partition(": ")[2]


def _exposed_ns(trace: Trace, step: int) -> tuple[float, float]:
    """Return the median of exposed communication and of the time of a step, mean over the ranks, in nanoseconds."""
    study = StepStudy(trace=trace, step=step)
    chosen = study.comparable.steps or (step,)
    waits, totals = [], []
    for each in study.parts.values():
        here = np.isin(each.step, chosen)
        waits.append(each.group_ns(Group.COMMUNICATION)[here])
        totals.append(each.total_ns[here])
    if not waits:
        return 0.0, 0.0
    return float(np.median(np.mean(waits, axis=0))), float(np.median(np.mean(totals, axis=0)))
