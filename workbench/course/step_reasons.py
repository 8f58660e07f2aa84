"""Usual reasons of wrong counts and high peaks, as far as the trace of a step shows them; empty texts otherwise."""

from __future__ import annotations

from collections import Counter

import numpy as np

from workbench.base.text_formats import format_bytes, plural
from workbench.course.finding import unit_list
from workbench.events import MOVES, Category, Edge, Kind, UnitState
from workbench.replay import collectives
from workbench.replay.peak_savings import Knob
from workbench.replay.spans import of_kind
from workbench.replay.states import start as states_before
from workbench.replay.unit_history import UnitCause, histories
from workbench.reports.explain_peak import explain_peak
from workbench.reports.step_study import StepStudy
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header


def gather_reasons(trace: Trace, step: int, rank: int, *, too_few: bool) -> list[str]:
    """Return why a rank issued too few or too many all-gathers in a step."""
    part = trace.slice(step=step).rank(rank)
    if not too_few:
        passes = _passes(part)
        each = (
            f"the step has {passes} forward and backward passes, and units are gathered in each" if passes > 1 else ""
        )
        return [*filter(None, [each, _root_is_freed(trace, step, rank)]), *_often(trace, step, Kind.ALL_GATHER)]
    before = full_before(trace.header, part)
    if before:
        names = unit_list(trace.header, before)
        return [
            "FSDP gathers each unit for forward and again for backward; these are never freed, and were unsharded when "
            f"the step began: {names}{_price(trace, step)}"
        ]
    kept = kept_units(trace.header, part)
    if kept:
        return [
            "FSDP gathers each unit again for backward; these keep their full parameters after forward: "
            f"{unit_list(trace.header, kept)}{_price(trace, step)}"
        ]
    return _never(trace.header, part, Kind.ALL_GATHER, "was never gathered")


def _root_is_freed(trace: Trace, step: int, rank: int) -> str:
    """Return that the root is freed after its forward too, and so gathered again; empty if it is not."""
    part = trace.slice(step=step).rank(rank)
    found = collectives.table(part)
    for unit in trace.header.units:
        calls = int(((found.unit == unit.index) & (found.kind == Kind.ALL_GATHER)).sum())
        if unit.root == unit.index and unit.reshard_after_forward and calls == 2 * max(_passes(part), 1):
            twice = f"{unit_list(trace.header, [unit.index])} is gathered twice"
            if not unit.runner.package:  # an engine of one's own has no such option
                return twice
            return (
                f"{twice}: reshard_after_forward true frees it after forward too, and auto keeps it, as backward "
                "begins with it"
            )
    return ""


def reduction_reasons(trace: Trace, step: int, rank: int, *, too_few: bool) -> list[str]:
    """Return why a rank issued too few or too many reductions in a step."""
    part = trace.slice(step=step).rank(rank)
    found = collectives.table(part)
    if too_few:
        is_other = (found.kind == Kind.ALL_REDUCE).any()  # which has its own reason
        return [] if is_other else _never(trace.header, part, Kind.REDUCE_SCATTER, "never issued a reduce-scatter")
    passes = _passes(part)
    calls = Counter(found.unit[found.kind == Kind.REDUCE_SCATTER].tolist())
    if passes > 1 and calls and max(calls.values()) == passes:
        return [
            f"your engine reduces after each of {passes} micro-batches: let gradients accumulate, and reduce once, "
            "after the last one"
        ]
    return _often(trace, step, Kind.REDUCE_SCATTER)


def all_reduce_reasons(trace: Trace, step: int, rank: int, *, too_few: bool) -> list[str]:
    """Return why a rank all-reduces although its units have no copies."""
    part = trace.slice(step=step).rank(rank)
    found = collectives.table(part)
    units = set(found.unit[(found.kind == Kind.ALL_REDUCE) & (found.unit >= 0)].tolist())
    if too_few or not units or any(trace.header.units[unit].replicate_size > 1 for unit in units):
        return []
    return [
        "an all-reduce gives every rank the whole gradient, of which it needs its own part only: a reduce-scatter "
        "gives it that for half of the traffic"
    ]


def _passes(part: RankTrace) -> int:
    """Return how often the unit that runs backward most often does so."""
    rows = part.rows
    backwards = rows["unit"][(rows["kind"] == Kind.BACKWARD) & (rows["edge"] == Edge.BEGIN)]
    return max(Counter(backwards.tolist()).values(), default=0)


def full_before(header: Header, part: RankTrace) -> list[int]:
    """Return the units that are unsharded when a rank's step begins, without units that need no gathering."""
    found = states_before(part.start).units_in(UnitState.UNSHARDED)
    return [unit for unit in found if unit < len(header.units) and header.units[unit].runner.splits]


def kept_units(header: Header, part: RankTrace) -> list[int]:
    """Return the units that a rank keeps unsharded from their forward to the first backward, without roots."""
    rows = part.rows
    backwards = np.flatnonzero((rows["kind"] == Kind.BACKWARD) & (rows["edge"] == Edge.BEGIN))
    if not len(backwards):
        return []
    others = tuple(
        unit.index for unit in header.units if unit.index != unit.root and (rows["unit"] == unit.index).any()
    )
    at_backward = histories(part, others, int(rows["seq"][backwards[0]]) - 1)
    return [unit for unit, known in at_backward.items() if known.last is UnitCause.KEPT_AFTER_FORWARD]


def peak_reason(trace: Trace, step: int, rank: int) -> str:
    """Return which units an engine keeps that it could free; empty if there are none."""
    part = trace.slice(step=step).rank(rank)
    kept = full_before(trace.header, part)
    if kept:
        return (
            f"the full parameters of {unit_list(trace.header, kept)} were unsharded when the step began: free them "
            "after backward"
        )
    kept = kept_units(trace.header, part)
    if kept:
        return f"the full parameters of {unit_list(trace.header, kept)} stay after forward: free them until backward"
    return ""


def unfreed_units(rank: RankTrace, step: int) -> list[int]:
    """Return the units whose full parameters a rank resharded in a step, and still held when it gathered them again.

    After the last time in the step, the end of the step counts.
    """
    first, after = rank.places_of(step, step)
    moves = of_kind(rank.rows, MOVES) & (rank.rows["category"] == Category.UNSHARDED_PARAMS)
    held: Counter[int] = Counter()  # bytes of full parameters by unit
    for row in rank.rows[:first][moves[:first]]:
        held[int(row["unit"])] = max(held[int(row["unit"])] + int(row["num_bytes"]), 0)
    earlier = Counter(held)  # as of the event before: memory may come back just before it is filled again
    found, resharded = set(), set()
    for is_move, row in zip(moves[first:after], rank.rows[first:after], strict=True):
        kind, unit = row["kind"], int(row["unit"])
        if is_move:
            held[unit] = max(held[unit] + int(row["num_bytes"]), 0)
            continue
        if kind == Kind.RESHARD:
            resharded.add(unit)
        elif kind == Kind.UNSHARD and row["edge"] == Edge.BEGIN and unit in resharded:
            resharded.discard(unit)
            if min(earlier[unit], held[unit]) > 0:
                found.add(unit)
        earlier = Counter(held)
    return sorted(found | {unit for unit in resharded if held[unit] > 0})


def _price(trace: Trace, step: int) -> str:
    """Return what units that are kept cost: the peak, and by formula that without them."""
    found = explain_peak(StepStudy(trace=trace, step=step))
    saving = None if found is None else next((each for each in found.savings if each.knob is Knob.RESHARD), None)
    if found is None or saving is None:
        return ""
    return f" (peak {format_bytes(found.peak_bytes)}, by formula {format_bytes(saving.peak_bytes)} without them)"


def _never(header: Header, part: RankTrace, kind: Kind, what: str) -> list[str]:
    """Return the units that have a forward but no collective of a kind."""
    rows, found = part.rows, collectives.table(part)
    ran = set(rows["unit"][rows["kind"] == Kind.FORWARD].tolist())
    units = sorted(unit for unit in ran - set(found.unit[found.kind == kind].tolist()) if unit >= 0)
    return [f"{unit_list(header, units)} {what}"] if units else []


def _often(trace: Trace, step: int, kind: Kind) -> list[str]:
    """Return the units that issued more collectives of a kind than the closed form says."""
    more = {
        row.unit: (row.calls, row.expected.calls)
        for row in collectives.compare(trace, step)
        if row.kind == kind and row.expected is not None and row.calls > row.expected.calls
    }
    by_calls: dict[tuple[int, int], list[int]] = {}
    for unit, calls in more.items():
        by_calls.setdefault(calls, []).append(unit)
    return [
        f"{unit_list(trace.header, units)}: {plural(calls, kind.words)} {'each ' if len(units) > 1 else ''}instead of "
        f"{expected}"
        for (calls, expected), units in by_calls.items()
    ]
