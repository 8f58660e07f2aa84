"""Waits and the slow rank of a step in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.base.fault import Fault, listed
from workbench.base.text_formats import format_bytes, format_duration
from workbench.events import Kind, Unit
from workbench.protocol.rank_messages import ModelInfo
from workbench.replay.event_marks import EventMark, mark_in_step, mark_of_wait
from workbench.replay.exposed_waits import ExposedWait, WaitReason
from workbench.replay.grouping import label, ranges
from workbench.replay.step_parts import Part, SlowRank
from workbench.replay.units import unit_name
from workbench.reports.explain_report import Evidence
from workbench.trace.columns import Trace
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name

_PARTS = {
    Part.BEFORE: "before forward (input or host)",
    Part.FORWARD: "in forward (compute, or host code inside it)",
    Part.LOSS: "between forward and backward (loss)",
    Part.BACKWARD: "in backward (compute, or host code inside it)",
    Part.OPTIMIZER: "in the optimizer (compute)",
    Part.OTHER: "after backward or between passes (host)",
    None: "between the steps (input or host)",
}

KINDS_OF_PART: Mapping[Part | None, tuple[Kind, ...]] = {
    Part.FORWARD: (Kind.FORWARD,),
    Part.BACKWARD: (Kind.BACKWARD,),
    Part.OPTIMIZER: (Kind.OPTIMIZER,),
}
"""Kinds of the events of a part of a step that lies together; other parts have pieces in all of it."""

_CAUSES = {
    WaitReason.ISSUED_LATE: "issued only when it was needed",
    WaitReason.AT_ONCE: "waited for as soon as it was issued",
    WaitReason.NOTHING: "nothing was left to run meanwhile",
}


def time_words(duration_ns: float) -> str:
    """Return a duration in nanoseconds as text, ``0`` for none."""
    return format_duration(duration_ns) if duration_ns else "0"


def slow_rank_evidence(trace: Trace, slow: SlowRank, waits: Sequence[ExposedWait], step: int) -> Evidence:
    """Return what shows a slow rank.

    Args:
        trace: what happened.
        slow: the rank.
        waits: exposed waits of a step, the longest first.
        step: number of that step.
    """
    header, part = trace.header, trace.rank(slow.rank)
    kinds = KINDS_OF_PART.get(slow.part, ())
    late, step_time = time_words(slow.late_ns), time_words(slow.step_ns)
    first = f"median of steps {ranges(slow.steps)}: others wait {late} for rank {slow.rank} in a step of {step_time}"
    own, others = time_words(slow.own_ns), time_words(slow.others_ns)
    evidence = {
        first: mark_in_step(part, step),
        f"{_PARTS[slow.part]}: rank {slow.rank} takes {own}, the others {others}": mark_in_step(part, step, kinds),
    }
    if slow.unit >= 0:
        own, others = map(time_words, slow.unit_ns)
        line = f"most of it in {unit_name(header, slow.unit)}: rank {slow.rank} takes {own}, the others {others}"
        evidence[line] = mark_in_step(part, step, kinds, slow.unit)
    longest = next((w for w in waits if w.cause is WaitReason.LATE_RANK and w.late_rank == slow.rank), None)
    if longest is not None:
        waited = f"{label(longest.ranks)} up to {time_words(longest.most_ns)}"
        line = f"longest wait in {step_name(step)}: {waited} for the {collective_words(header, longest)}"
        evidence[line] = wait_mark(trace, longest)
    return evidence


def slow_rank_fault(slow: SlowRank, evidence: Evidence, *, is_live: bool) -> Fault:
    """Return a slow rank as a fault.

    Args:
        slow: the rank.
        evidence: what shows it.
        is_live: whether ranks run, so that a fix may be a line for them.
    """
    late, step_time = time_words(slow.late_ns), time_words(slow.step_ns)
    return Fault(
        rule="slow-rank",
        verdict=f"rank {slow.rank} is slow {_PARTS[slow.part]}: others wait {late} of each step of {step_time} for it",
        evidence=tuple(evidence),
        fix="%fsdp step 5 --background, then %fsdp where --stacks" if is_live else "",
    )


def model_of(unit: Unit, models: Sequence[ModelInfo]) -> str:
    """Return the variable that holds a unit's model; ``MODEL`` if it is unknown, as on an opened trace."""
    holders = sorted(models, key=lambda model: -len(model.units))
    return next((model.name for model in holders if unit.index in model.units), "MODEL")


def unreduced_fault(
    header: Header, models: Sequence[ModelInfo], unreduced: Mapping[int, Sequence[int]], step: int
) -> Fault:
    """Return units whose gradients were not reduced as a fault.

    Args:
        header: of the trace.
        models: the variables that hold models.
        unreduced: ranks on which this is so, by unit.
        step: number of the step.
    """
    names = listed([unit_name(header, unit) for unit in unreduced])
    units = f"{'unit' if len(unreduced) == 1 else 'units'} {names}"
    ranks = label(sorted({rank for own in unreduced.values() for rank in own}))
    return Fault(
        rule="no-sync-left-on",
        verdict=f"gradients of {units} were not reduced before the optimizer stepped, in {step_name(step)}",
        evidence=(f"{ranks}: {units} had a backward and 0 reductions, and full gradients were left",),
        fix=f"run the last backward before optimizer.step() with {model_of(header.units[min(unreduced)], models)}."
        "set_requires_gradient_sync(True), or outside no_sync()",
    )


def collective_words(header: Header, wait: ExposedWait) -> str:
    """Return the collective of a wait as text: ``"all-gather of blocks.2 in backward"``."""
    where = f" in {'backward' if wait.in_backward else 'forward'}" if wait.kind is Kind.ALL_GATHER else ""
    of = f" of {unit_name(header, wait.unit)}" if wait.unit >= 0 else ""
    return f"{wait.kind.words}{of}{where}"


def wait_words(header: Header, wait: ExposedWait) -> str:
    """Return who waited how long for which collective, and why, as text."""
    times = f" in {wait.calls} waits" if wait.calls > 1 else ""
    waited = f"{label(wait.ranks)} up to {time_words(wait.most_ns)}{times}"
    return f"{collective_words(header, wait)}: {waited}; {_cause_words(wait)}"


def wait_mark(trace: Trace, wait: ExposedWait) -> EventMark | None:
    """Return the mark of the longest of some exposed waits."""
    return mark_of_wait(trace.rank(wait.longest_rank), wait.longest_seq)


def _cause_words(wait: ExposedWait) -> str:
    if wait.cause is WaitReason.LATE_RANK:
        return f"rank {wait.late_rank} issued it last"
    if wait.cause is WaitReason.BANDWIDTH:
        payload = format_bytes(wait.num_bytes) if wait.num_bytes else "transfers"
        return f"issued ahead, but {payload} take {time_words(wait.time_ns)} on average"
    return _CAUSES[wait.cause]
