"""Where the time of a step went, why compute waited, and how a rank compares, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from workbench.base.fault import Fault
from workbench.base.text_formats import format_bytes, format_share, plural
from workbench.replay.event_marks import EventMark, mark_in_step
from workbench.replay.exposed_waits import ExposedWait, WaitReason
from workbench.replay.step_parts import MIN_STEPS, OWN, Group, Part
from workbench.reports.explain_peak import is_flat, is_ours, module_words, unit_path
from workbench.reports.explain_report import Evidence, ExplainReport, Picture, RankParts
from workbench.reports.step_study import StepStudy
from workbench.reports.step_text import KINDS_OF_PART, model_of, time_words, wait_mark, wait_words

MAX_LINES = 6
"""Waits, and ranks, that a text lists."""

WORTH = 0.05
"""A wait, or a difference between ranks, is worth a line from this fraction of the step on."""

LARGE = 1 << 20
"""Payload from which fewer bytes make a transfer shorter; a smaller one takes the time of its messages."""

_BF16 = 2  # bytes of an element


def timeline_of(step: int) -> Picture:
    """Return the picture of a step's times."""
    return Picture(view="timeline", options={"step": step})


# ---- the step


def explain_step(study: StepStudy, subject: str = "step") -> ExplainReport:
    """Return where the time of a step went on each rank, and which rank is slow."""
    if study.missing:
        return study.unknown(subject, study.missing)
    lines, picture = rank_lines(study), timeline_of(study.timed)
    if study.fault is not None:
        return study.report(subject, with_more(study.fault, lines), picture, lines)
    is_decided = len(study.comparable.steps) >= MIN_STEPS and len(study.parts) > 1 and not study.abstained
    verdict = f"{shares_words(study)}{'; no rank is slow' if is_decided else ''}"
    return study.report(subject, Fault(rule="step", verdict=verdict, evidence=tuple(lines)), picture, lines)


def with_more(fault: Fault, lines: Iterable[str]) -> Fault:
    """Return a fault with further evidence."""
    return Fault(rule=fault.rule, verdict=fault.verdict, evidence=(*fault.evidence, *lines), fix=fault.fix)


def shares_words(study: StepStudy) -> str:
    """Return the duration of the step on its slowest rank, and its four parts as fractions of the ranks' time."""
    parts = ", ".join(f"{group.value} {format_share(study.share(group))}" for group in Group)
    return f"{study.name(study.timed)} took {time_words(study.longest_ns)}: {parts}{_mean(study)}"


def _mean(study: StepStudy) -> str:
    return f" (of the time of {len(study.ranks)} ranks together)" if len(study.ranks) > 1 else ""


def rank_lines(study: StepStudy) -> Evidence:
    """Return the parts of the step on each rank; of many ranks, those that waited least and most."""
    ranks = sorted(study.ranks, key=lambda each: (each.groups_ns[Group.LATE], each.rank))
    half = MAX_LINES // 2
    shown = ranks if len(ranks) <= MAX_LINES else [*ranks[:half], *ranks[-half:]]
    lines: dict[str, EventMark | None] = {
        _rank_line(each): mark_in_step(study.trace.rank(each.rank), study.timed)
        for each in sorted(shown, key=lambda each: each.rank)
    }
    left_out = len(ranks) - len(shown)
    more = f"{plural(left_out, 'other rank')} waited for slower ranks in between"
    return lines | ({more: None} if left_out else {})


def _rank_line(each: RankParts) -> str:
    parts = " + ".join(f"{group.value} {time_words(each.groups_ns[group])}" for group in Group)
    return f"rank {each.rank}: {time_words(each.step_ns)} = {parts}"


# ---- the waits


def explain_wait(study: StepStudy, subject: str = "wait") -> ExplainReport:
    """Return why compute waited for the collectives of a step, and the setting that helps."""
    if study.missing:
        return study.unknown(subject, study.missing)
    picture = timeline_of(study.timed)
    if not study.waits and study.unseen:
        return study.unknown(subject, f"why compute waited is unknown: {study.unseen}")
    if not study.waits:
        verdict = f"compute waited for no collective in {study.name(study.timed)}"
        return study.report(subject, Fault(rule="wait", verdict=verdict), picture, {})
    by_cause = {cause: sum(w.wait_ns for w in study.waits if w.cause is cause) for cause in WaitReason}
    most, total_ns = max(by_cause, key=lambda cause: by_cause[cause]), sum(by_cause.values())
    mean = f" (mean of {len(study.ranks)} ranks)" if len(study.ranks) > 1 else ""
    verdict = (
        f"compute waited {time_words(total_ns)} of {study.name(study.timed)} for collectives, "
        f"{format_share(total_ns / study.mean_ns)} of it{mean}, mostly ({time_words(by_cause[most])}) because "
        f"{_CAUSES[most]}"
    )
    evidence = wait_lines(study, study.waits[:MAX_LINES])
    rest, lines = study.waits[MAX_LINES:], list(evidence)
    if rest:
        lines.append(f"{len(rest)} shorter waits: {time_words(sum(w.wait_ns for w in rest))} together")
    fix, price = _best_fix(study)
    answer = Fault(rule="wait", verdict=verdict, evidence=(*lines, *price), fix=fix)
    return study.report(subject, answer, picture, evidence)


def wait_lines(study: StepStudy, waits: Iterable[ExposedWait]) -> Evidence:
    """Return a line for each of some exposed waits, with the longest wait."""
    return {wait_words(study.header, wait): wait_mark(study.trace, wait) for wait in waits}


_CAUSES = {
    WaitReason.LATE_RANK: "a rank was late",
    WaitReason.ISSUED_LATE: "all-gathers were issued only when they were needed",
    WaitReason.AT_ONCE: "reductions were waited for as soon as they were issued",
    WaitReason.NOTHING: "nothing was left to run meanwhile",
    WaitReason.BANDWIDTH: "transfers take longer than the compute beside them",
}


def avoidable_ns(study: StepStudy) -> float:
    """Return the time waited in a step that a setting may avoid, mean of the ranks."""
    return sum(wait.wait_ns for waits in _by_fix(study).values() for wait in waits)


def _best_fix(study: StepStudy) -> tuple[str, list[str]]:
    """Return the line that helps against most of the waits, and its price as text; empty if no setting helps."""
    by_line = _by_fix(study)
    if not by_line:
        return "", []
    line = max(by_line, key=lambda each: sum(wait.wait_ns for wait in by_line[each]))
    waits = by_line[line]
    price = {
        WaitReason.BANDWIDTH: "for less precise compute and reductions",
        WaitReason.ISSUED_LATE: f"for up to {format_bytes(max(wait.num_bytes for wait in waits))} more in memory",
    }[waits[0].cause]
    saved = time_words(sum(wait.wait_ns for wait in waits))
    return line, [f"by formula, {line} saves at most {saved} of a step, {price}"]


def _by_fix(study: StepStudy) -> dict[str, list[ExposedWait]]:
    """Return the waits against which a line helps, by the line; those that take a worthwhile part of the step."""
    found: dict[str, list[ExposedWait]] = {}
    for wait in study.waits:
        if line := _fix(study, wait):
            found.setdefault(line, []).append(wait)
    least_ns = WORTH * study.mean_ns
    return {line: waits for line, waits in found.items() if sum(wait.wait_ns for wait in waits) >= least_ns}


def _fix(study: StepStudy, wait: ExposedWait) -> str:
    """Return what to type against a wait; empty if no setting helps."""
    if not 0 <= wait.unit < len(study.header.units):
        return ""
    if wait.cause is WaitReason.BANDWIDTH:
        return _precision(study, wait)
    return _earlier(study, wait) if wait.cause is WaitReason.ISSUED_LATE else ""


def _precision(study: StepStudy, wait: ExposedWait) -> str:
    unit = study.header.units[wait.unit]
    if unit.compute_itemsize <= _BF16 or wait.num_bytes < LARGE:
        return ""
    if is_ours(unit):
        return f"%fsdp reshard {model_of(unit, study.models)} --mp bf16"
    if is_flat(unit):
        return "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)"
    return "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"


def _earlier(study: StepStudy, wait: ExposedWait) -> str:
    """Return the line that keeps the one unit that backward gathers late, or gathers several units ahead."""
    unit, name = study.header.units[wait.unit], model_of(study.header.units[wait.unit], study.models)
    late = {each.unit for each in study.waits if each.cause is WaitReason.ISSUED_LATE and each.in_backward}
    if wait.in_backward and len(late) == 1 and not is_flat(unit):
        if is_ours(unit):
            return f"%fsdp reshard {unit_path(unit, study.models)} --reshard-after-forward false"
        return f"{module_words(unit, study.models)}.set_reshard_after_forward(False, recurse=False)"
    if is_ours(unit):
        return f"%fsdp reshard {name} --prefetch 1"
    if not study.header.is_enqueued:  # on the CPU, torch's engines wait for each collective as they issue it
        return ""
    direction = "backward" if wait.in_backward else "forward"
    return f"set_modules_to_{direction}_prefetch([NEXT]) of each unit" if not is_flat(unit) else _AHEAD[direction]


_AHEAD = {"forward": "forward_prefetch=True", "backward": "backward_prefetch=BackwardPrefetch.BACKWARD_PRE"}
"""What to type for torch's classic API."""


# ---- a rank


def explain_rank(study: StepStudy, rank: int) -> ExplainReport:
    """Return where the time of a step went on one rank, against the others."""
    subject = f"rank {rank}"
    mine = next((each for each in study.ranks if each.rank == rank), None)
    if study.missing or mine is None:
        absent = f"rank {rank} did not record where it begins: where its time went is unknown"
        return study.unknown(subject, study.missing or absent)
    others = [each for each in study.ranks if each.rank != rank]
    part = study.trace.rank(rank)
    evidence: dict[str, EventMark | None] = {_rank_line(mine): mark_in_step(part, study.timed)}
    for line, which in _against(mine, others).items():
        kinds = KINDS_OF_PART.get(which)
        evidence[line] = None if kinds is None else mark_in_step(part, study.timed, kinds)
    evidence |= dict.fromkeys(_peaks(mine, others))
    if study.fault is not None and study.slow is not None and study.slow.rank == rank:
        return study.report(subject, with_more(study.fault, evidence), timeline_of(study.timed), evidence)
    parts = ", ".join(f"{group.value} {format_share(mine.groups_ns[group] / max(mine.step_ns, 1))}" for group in Group)
    verdict = f"{study.name(study.timed)} took {time_words(mine.step_ns)} on rank {rank}: {parts}"
    if others:
        for_it = max(each.waited_for_ns.get(rank, 0) for each in others)
        waited = time_words(sum(mine.waited_for_ns.values()))
        verdict += f"; it waited {waited} for slower ranks, and the others at most {time_words(for_it)} for it"
    answer = Fault(rule="rank", verdict=verdict, evidence=tuple(evidence))
    picture = Picture(view="timeline", options={"step": study.timed, "rank": rank})
    return study.report(subject, answer, picture, evidence)


def _against(mine: RankParts, others: Sequence[RankParts]) -> dict[str, Part]:
    """Return the parts of a rank that differ from the others' median by their text, the most first."""
    if not others:
        return {}
    parts = (*OWN, Part.TRANSFERS, Part.COPIES, Part.LATE)
    there = {part: float(np.median([each.parts_ns[part] for each in others])) for part in parts}
    differs = [part for part in parts if abs(mine.parts_ns[part] - there[part]) > WORTH * mine.step_ns]
    differs.sort(key=lambda part: -abs(mine.parts_ns[part] - there[part]))
    return {f"{p.value}: {time_words(mine.parts_ns[p])}, the others {time_words(there[p])}": p for p in differs}


def _peaks(mine: RankParts, others: Sequence[RankParts]) -> list[str]:
    if not others or not mine.peak_bytes:
        return []
    low, high = (format_bytes(pick(each.peak_bytes for each in others)) for pick in (min, max))
    return [f"peak: {format_bytes(mine.peak_bytes)}, the others {low if low == high else f'{low} to {high}'}"]
