"""Why a unit is sharded or unsharded, in words. Pure."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from workbench.base.fault import Fault
from workbench.base.text_formats import format_bytes
from workbench.events import Unit, UnitState, unit_words
from workbench.replay.event_marks import EventMark
from workbench.replay.grouping import label
from workbench.replay.unit_history import UnitCause, UnitHistory, histories
from workbench.reports.explain_peak import event_words, is_flat, is_ours, module_words, unit_path
from workbench.reports.explain_report import Evidence, ExplainReport, Picture, UnitExplanation, marks_in
from workbench.reports.explain_times import wait_lines
from workbench.reports.step_study import StepStudy
from workbench.reports.step_text import time_words
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name
from workbench.views.window import window

_MAX_WAITS = 3  # that a text lists

_STATES = {
    UnitState.SHARDED: "sharded",
    UnitState.ALL_GATHER_IN_FLIGHT: "being gathered",
    UnitState.UNSHARDED: "unsharded",
}


def explain_unit(study: StepStudy, unit: Unit) -> ExplainReport:
    """Return why a unit is in its state now, or was at the end of the chosen step."""
    words = unit_words(unit.name)
    known = {
        each.rank: histories(each, (unit.index,), _until(study, each.rank))[unit.index]
        for each in study.trace.ranks
        if len(each.rows)
    }
    groups: dict[tuple[UnitState, tuple[UnitCause, ...]], list[int]] = {}
    for rank, found in known.items():
        groups.setdefault((found.state, tuple(event.cause for event in found.events)), []).append(rank)
    alike = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    first = known[alike[0][0]]
    is_now = f"{words} is" if study.step is None else f"{words} was, at the end of {step_name(study.step)},"
    whose = f"{label(alike[0])}: " if len(alike) > 1 else ""
    lines = [*(f"{label(ranks)}: {_now(study.header, known[ranks[0]], unit)}" for ranks in alike[1:]), _sizes(unit)]
    evidence: Evidence = {
        **_history(study.header, alike[0][0], first, unit),
        **dict.fromkeys(lines),
        **_exposed(study, unit),
    }
    answer = Fault(
        rule="unit",
        verdict=f"{whose}{is_now} {_now(study.header, first, unit)}",
        evidence=tuple(evidence),
        fix=_free(unit, study) if first.last is UnitCause.KEPT_AFTER_FORWARD else "",
    )
    last = study.window.last if study.has_steps else None
    return ExplainReport(
        subject=words,
        step=last,
        answer=answer,
        num_checks=0,
        picture=Picture(view="states", options={"unit": words} | ({} if last is None else {"step": last})),
        units=tuple(_explanation(words, ranks, known[ranks[0]]) for ranks in alike),
        marks=marks_in(evidence),
    )


def _history(header: Header, rank: int, known: UnitHistory, unit: Unit) -> Evidence:
    """Return the events that led to the newest one, each marked until the next."""
    found: dict[str, EventMark | None] = {}
    for event, following in pairwise(known.events):
        mark = EventMark(rank=rank, first_seq=event.seq, last_seq=max(following.seq, event.seq), unit=unit.index)
        found[f"{event_words(header, event, unit.index)}{_in_step(event.step)}"] = mark if event.seq >= 0 else None
    return found


def _explanation(unit: str, ranks: list[int], known: UnitHistory) -> UnitExplanation:
    return UnitExplanation(
        unit=unit,
        ranks=tuple(ranks),
        state=known.state,
        causes=tuple(event.cause for event in known.events),
        steps=tuple(event.step if event.step >= 0 else None for event in known.events),
    )


def _until(study: StepStudy, rank: int) -> int | None:
    """Return the last row of the chosen step on a rank; None: all rows count."""
    if study.step is None:
        return None
    part = study.trace.rank(rank)
    _, end = window(study.trace, study.step, 1).places(part)
    return part.start.seq + end - 1


def _now(header: Header, known: UnitHistory, unit: Unit) -> str:
    event = known.events[-1]
    if unit.shard_size == 1:
        return "on each of its ranks in full: nothing is gathered for it"
    return f"{_STATES[known.state]}: {event_words(header, event, unit.index)}{_in_step(event.step)}"


def _in_step(step: int) -> str:
    return f" in {step_name(step)}" if step >= 0 else ""


def _sizes(unit: Unit) -> str:
    """Return the bytes of the full parameters and of a shard as text."""
    if not unit.params:
        return f"its parameters are not recorded; 1 shard of {unit.shard_size} is on each rank"
    full = sum(prod(param.shape) * unit.gathered_itemsize(param) for param in unit.params)
    shard = sum(
        param.padded_rows
        * param.itemsize
        * prod(size for dim, size in enumerate(param.shape) if dim != param.shard_dim)
        for param in unit.params
    )
    return (
        f"full parameters: {format_bytes(full)} in {unit.compute_dtype}; a shard, 1 of {unit.shard_size}: "
        f"{format_bytes(shard)}{_after_forward(unit, shard)}"
    )


def _after_forward(unit: Unit, shard: int) -> str:
    """Return what a rank holds between forward and backward, if this is a part on fewer ranks; else empty."""
    size = unit.reshard_after_forward
    if isinstance(size, bool):
        return ""
    part = shard * unit.shard_size // size * unit.compute_itemsize // unit.params[0].itemsize
    return f"; from forward to backward, 1 of {size}: {format_bytes(part)}"


def _exposed(study: StepStudy, unit: Unit) -> Evidence:
    """Return how long compute waited for the collectives of a unit."""
    if not study.has_steps or study.missing:
        return {}
    waits = [wait for wait in study.waits if wait.unit == unit.index]
    total = time_words(sum(wait.wait_ns for wait in waits))
    found = f"compute waited {total} for its collectives in {step_name(study.timed)}, mean of the ranks"
    return {found: None, **wait_lines(study, waits[:_MAX_WAITS])}


def _free(unit: Unit, study: StepStudy) -> str:
    """Return the line that frees a unit after forward; empty if its engine has none."""
    if is_flat(unit) or unit.reshard_after_forward is not False:
        return ""
    if is_ours(unit):
        return f"%fsdp reshard {unit_path(unit, study.models)} --reshard-after-forward true"
    return f"{module_words(unit, study.models)}.set_reshard_after_forward(True, recurse=False)"
