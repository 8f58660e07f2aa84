"""The peak of a step in words: what set it, and what would lower it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.base.fault import Fault, listed
from workbench.base.text_formats import format_bytes, format_duration, format_share, plural
from workbench.events import Category, Unit
from workbench.protocol.rank_messages import ModelInfo
from workbench.replay import activations, memory, process
from workbench.replay.event_marks import EventMark
from workbench.replay.memory import Peak
from workbench.replay.peak_savings import Knob, Saving, parts_of, savings
from workbench.replay.unit_history import UnitCause, UnitEvent, UnitHistory, histories
from workbench.replay.units import unit_name
from workbench.reports.explain_report import Evidence, ExplainReport, PeakSaving, Picture, marks_in
from workbench.reports.step_study import StepStudy
from workbench.reports.step_text import model_of
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Header
from workbench.views.window import Window

WORTH = 0.01
"""A knob is mentioned if it saves at least this fraction of the peak."""

_ENDED = "its backward has just ended"
_SETTINGS = (Knob.RESHARD, Knob.FEWER_AHEAD, Knob.OFFLOAD)
"""Knobs that change neither numbers nor the program."""

_MAX_UNITS = 6  # named one by one
_MAX_PARTS = 4  # of a model, whose activations are named


@dataclass(frozen=True, kw_only=True)
class PeakExplanation:
    """The highest peak of a step.

    Attributes:
        answer: what set it, and the knob that lowers it most without a change of numbers.
        rank: its rank.
        peak_bytes: bytes in use.
        savings: what would lower it; those that change no numbers first.
        evidence: what shows it, with the events.
    """

    answer: Fault
    rank: int
    peak_bytes: int
    savings: tuple[PeakSaving, ...]
    evidence: Evidence


def peak_report(study: StepStudy, subject: str) -> ExplainReport:
    """Return the report on the peak of a step."""
    step, found = study.timed, explain_peak(study)
    missing = () if subject else (study.missing,) if study.missing else study.abstained
    if found is None:
        reason = "no memory is recorded in this trace"
        answer = Fault(rule="unknown", verdict=f"the peak of {study.name(step)} is unknown: {reason}")
        return ExplainReport(
            subject=subject, step=step, answer=answer, num_checks=0, abstained=(*missing, f"the peak: {reason}")
        )
    return ExplainReport(
        subject=subject,
        step=step,
        answer=found.answer,
        num_checks=0,
        abstained=missing,
        picture=Picture(view="memory", options={"step": step, "rank": found.rank}),
        savings=found.savings,
        marks=marks_in(found.evidence),
    )


def explain_peak(study: StepStudy) -> PeakExplanation | None:
    """Return what set the highest peak of a step; None if no memory is recorded in it."""
    trace, models = study.trace, study.models
    shown = Window(first=study.timed, last=study.timed)
    parts = [shown.cut(each) for each in trace.ranks]
    peaks = [(part, memory.peak(part)) for part in parts if len(part.rows)]
    if not peaks or not any(found.num_bytes for _, found in peaks):
        return None
    part, found = max(peaks, key=lambda each: each[1].num_bytes)
    header = trace.header
    held = tuple(dict.fromkeys((*found.unsharded_units, *found.in_flight)))
    at_peak = histories(trace.rank(part.rank), held, found.seq)
    device = header.info_of[part.rank].device if part.rank in header.info_of else "cpu"
    known = savings(header, part, found, at_peak, on_device=not device.startswith("cpu"))
    worth = [_in_words(header, each, models) for each in known if each.saved_bytes >= WORTH * found.num_bytes]
    worth = _largest_cut([each for each in worth if each.line])
    verdict = (
        f"the peak of {study.name(study.timed)} is {format_bytes(found.num_bytes)} on rank {part.rank}: "
        f"{memory.moment(header, found)}"
    )
    moment = EventMark(rank=part.rank, first_seq=found.seq, last_seq=found.seq)
    since = {line: _until(moment, at_peak[unit]) for line, unit in _units(header, at_peak).items()}
    lines = [*_others(peaks, part), *map(price_words, worth), *_loading(study), *study.unfinished("peak")]
    kept = _activations(header, trace.rank(part.rank), found)
    evidence: Evidence = {_classes(found): moment, **dict.fromkeys(kept, moment), **since, **dict.fromkeys(lines)}
    fix = next((each.line for each in worth if each.knob in _SETTINGS), "")
    answer = Fault(rule="peak", verdict=verdict, evidence=tuple(evidence), fix=fix)
    return PeakExplanation(
        answer=answer, rank=part.rank, peak_bytes=found.num_bytes, savings=tuple(worth), evidence=evidence
    )


def _largest_cut(worth: Sequence[PeakSaving]) -> list[PeakSaving]:
    """Return the savings with the best of those that cut units alone; of equal ones, the first."""
    cuts = [each for each in worth if each.knob is Knob.SMALLER_UNITS]
    best = max(cuts, key=lambda each: each.saved_bytes, default=None)
    return [each for each in worth if each.knob is not Knob.SMALLER_UNITS or each is best]


def _until(peak: EventMark, known: UnitHistory) -> EventMark | None:
    """Return the events from the first of a unit, such as its all-gather, to the peak; None if that is not recorded."""
    first = next((event.seq for event in known.events if event.seq >= 0), None)
    return None if first is None else replace(peak, first_seq=min(first, peak.last_seq))


def price_words(saving: PeakSaving) -> str:
    """Return what a knob saves and costs, as text."""
    about = "about " if saving.knob is Knob.SMALLER_UNITS else ""
    most, least = ("at most ", "at least ") if saving.is_bound else (about, about)
    saved = f"by formula, {saving.line} saves {most}{format_bytes(saving.saved_bytes)}: "
    peak = f"a peak of {least}{format_bytes(saving.peak_bytes)}"
    if not saving.more_calls:
        return f"{saved}{peak}, {_PRICES[saving.knob]}"
    calls = f"{plural(saving.more_calls, 'more all-gather')} in each step"
    payload = f" of {format_bytes(saving.more_bytes)} together" if saving.more_bytes else ""
    time = f", {format_duration(saving.more_ns)} if nothing overlaps with them" if saving.more_ns else ""
    return f"{saved}{peak}, for {calls}{payload}{time}"


_PRICES = {
    Knob.RESHARD: "for no further collective",
    Knob.PRECISION: "for less precise compute and reductions",
    Knob.FEWER_AHEAD: "for all-gathers that are issued later",
    Knob.OFFLOAD: "for copies between host and device in each step",
    Knob.SMALLER_UNITS: "for more and smaller collectives",
    Knob.CHECKPOINT: "for one more forward of them in each step",
}


def module_words(unit: Unit, models: Sequence[ModelInfo]) -> str:
    """Return a unit's module as code: ``model.blocks[2]`` -> ``model.get_submodule("blocks.2")``."""
    name = model_of(unit, models)
    return f'{name}.get_submodule("{unit.name}")' if unit.name else name


def unit_path(unit: Unit, models: Sequence[ModelInfo]) -> str:
    """Return a unit as ``%fsdp reshard`` names it: ``model.blocks.2``."""
    return ".".join(filter(None, (model_of(unit, models), unit.name)))


def is_flat(unit: Unit) -> bool:
    """Return whether a unit is one of the classic API, with a flat parameter."""
    return unit.is_flat or unit.runner.is_flat


def is_ours(unit: Unit) -> bool:
    """Return whether ``%fsdp reshard`` changes a unit."""
    return unit.runner.can_reshard and len(unit.params) > 0  # files of other tools have no parameters


def _in_words(header: Header, saving: Saving, models: Sequence[ModelInfo]) -> PeakSaving:
    chosen = saving.units or tuple(unit.index for unit in header.units if unit.in_use)
    return PeakSaving(
        knob=saving.knob,
        line=_line(header, saving, header.units[chosen[0]], models) if chosen else "",
        saved_bytes=saving.saved_bytes,
        peak_bytes=saving.peak_bytes,
        is_bound=saving.is_bound,
        more_calls=saving.more_calls,
        more_bytes=saving.more_bytes,
        more_ns=saving.more_ns,
    )


def _line(header: Header, saving: Saving, unit: Unit, models: Sequence[ModelInfo]) -> str:
    """Return the line that turns a knob; empty if the engine that runs the unit has none."""
    name = model_of(unit, models)
    if saving.knob is Knob.CHECKPOINT:
        those = ".".join(filter(None, (name, saving.modules)))
        return f"apply_activation_checkpointing({name}, check_fn=set({those}).__contains__) before sharding"
    if saving.knob is Knob.SMALLER_UNITS:
        return _wrapping(header, saving, models) if saving.modules else _sharding_inner(unit, models)
    ours = is_ours(unit)
    if saving.knob is Knob.RESHARD and is_flat(unit):
        full = "sharding_strategy=ShardingStrategy.FULL_SHARD"
        return f"%fsdp reshard {name} --strategy full" if ours else full
    if saving.knob is Knob.RESHARD:
        has_root = any(header.units[each].root == each for each in saving.units)
        policy = "true" if has_root else "auto"
        return f"%fsdp reshard {name} --reshard-after-forward {policy}" if ours else _TORCH[saving.knob].format(name)
    if ours:
        return f"%fsdp reshard {name} {_OPTIONS[saving.knob]}"
    return _TORCH[saving.knob].format(name) if unit.runner.package else ""


def _sharding_inner(unit: Unit, models: Sequence[ModelInfo]) -> str:
    """Return the code that makes a unit of a unit's largest submodule; empty for the classic API."""
    inner = ".".join(filter(None, (unit.name, parts_of(unit).most_common(1)[0][0])))
    line = f'fully_shard({model_of(unit, models)}.get_submodule("{inner}")) before {module_words(unit, models)}'
    return "" if is_flat(unit) else line


def _wrapping(header: Header, saving: Saving, models: Sequence[ModelInfo]) -> str:
    """Return the line that makes units of all submodules of a name; empty if their class is unknown.

    A trace has no classes. One of the model's is theirs if it has as many modules, with as many elements together.
    """
    units = [header.units[unit] for unit in saving.units]
    model = next((each for each in models if {unit.index for unit in units} <= {*each.units}), None)
    if model is None or model.policy is None or not all(map(is_ours, units)):
        return ""
    alike = len(units), sum(parts_of(unit)[saving.modules] for unit in units)
    names = [each.name for each in model.classes if (each.count, each.num_elements) == alike]
    wrap = ",".join((*model.policy.wrap, *names))
    return f"%fsdp reshard {model.name} --wrap {wrap}" if len(names) == 1 else ""


_OPTIONS = {Knob.PRECISION: "--mp bf16", Knob.FEWER_AHEAD: "--prefetch 1", Knob.OFFLOAD: "--offload"}
_TORCH = {
    Knob.RESHARD: "{}.set_reshard_after_forward(True)",
    Knob.PRECISION: "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    Knob.FEWER_AHEAD: "{}.set_modules_to_backward_prefetch([]) for each unit",
    Knob.OFFLOAD: "offload_policy=CPUOffloadPolicy()",
}
"""What to type for torch's own ``fully_shard``."""


def _classes(found: Peak) -> str:
    """Return the bytes of each class at a peak, the largest first."""
    sizes = sorted(zip(Category, found.bytes_by_category, strict=True), key=lambda each: -each[1])
    parts = [
        f"{category.words} {format_bytes(size)} ({format_share(size / found.num_bytes)})"
        for category, size in sizes
        if size > 0 and category is not Category.RESERVED
    ]
    return ", ".join(parts)


def _activations(header: Header, whole: RankTrace, found: Peak) -> list[str]:
    """Return whose activations there are at a peak, as one line; none if they are not among its classes."""
    total = found.bytes_by_category[Category.ACTIVATIONS]
    if not total:
        return []
    kept = activations.kept_at(header, whole, found.seq)
    by_module = activations.grouped(kept, "module", total)
    parts = [f"{name} {format_bytes(size)}" for name, size in [*by_module.items()][:_MAX_PARTS]]
    rest = total - sum([*by_module.values()][:_MAX_PARTS])
    others = [f"others {format_bytes(rest)}"] if rest else []
    return [
        f"{format_bytes(total)} of {format_bytes(found.num_bytes)} at the peak are activations, kept for backward: "
        f"{', '.join([*parts, *others])}"
    ]


def _units(header: Header, at_peak: Mapping[int, UnitHistory]) -> dict[str, int]:
    """Return why each unit was unsharded or being gathered at a peak, alike ones together, with the first of them."""
    alike: dict[str, list[int]] = {}
    is_short = len(at_peak) > _MAX_UNITS
    for unit, known in at_peak.items():
        words = [event_words(header, event, unit, is_short=is_short) for event in known.events]
        if known.last is UnitCause.KEPT_AFTER_BACKWARD:
            words[-1] = _ENDED
        alike.setdefault(", ".join(words), []).append(unit)
    lines = {}
    for why, units in alike.items():
        names = listed([unit_name(header, unit) for unit in units])
        lines[f"{names if len(units) <= _MAX_UNITS else f'{len(units)} units, {names}'}: {why}"] = units[0]
    return lines


def event_words(header: Header, event: UnitEvent, unit: int, *, is_short: bool = False) -> str:
    """Return an event of a unit's history as text.

    Args:
        header: of the trace.
        event: the event.
        unit: index of the unit.
        is_short: leave out which unit gathered it ahead.
    """
    policy = header.units[unit].reshard_after_forward if unit < len(header.units) else True
    if event.cause is UnitCause.KEPT_AFTER_FORWARD and policy is False:
        return f"{event.cause.value} (reshard_after_forward is False)"
    ahead = "" if event.by_unit < 0 or is_short else f" by {unit_name(header, event.by_unit)}"
    return f"{event.cause.value}{ahead}"


def _loading(study: StepStudy) -> list[str]:
    """Return that a process used most of its host's memory while it loaded, as text, and what to type."""
    found = process.loading_peak(study.header, study.trace.ranks, WORTH)
    if found is None:
        return []
    return [
        f"the whole process of rank {found.rank} used most while it loaded: {format_bytes(found.num_bytes)} after "
        f"{found.after}, and at most {format_bytes(found.other_bytes)} otherwise; %fsdp memory --process shows each "
        "part of loading, and %fsdp lint names a checkpoint that every rank reads"
    ]


def _others(peaks: Sequence[tuple[RankTrace, Peak]], part: RankTrace) -> list[str]:
    """Return the peaks of the other ranks as text."""
    others = [found.num_bytes for each, found in peaks if each.rank != part.rank]
    if not others:
        return []
    low, high = format_bytes(min(others)), format_bytes(max(others))
    return [f"peaks of the other ranks: {low if low == high else f'{low} to {high}'}"]
