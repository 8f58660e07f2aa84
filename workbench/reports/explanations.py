"""Why: the peak, the time of a step, the waits, a unit or a rank, in words and with the picture that shows it. Pure.

Each answer is a verdict, the evidence, and what to type. Only a loss that is not finite, gradients that were used again
or not reduced, and a slow rank are faults; the other answers say what is there. ``docs/explain.md`` describes how each
number is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from workbench.base.fault import Fault
from workbench.base.text_formats import format_bytes, plural
from workbench.errors import UsageError, did_you_mean
from workbench.events import Kind, Unit, unit_words
from workbench.protocol.breakpoints import is_unit
from workbench.protocol.rank_messages import ModelInfo
from workbench.replay.grouping import label, ranges
from workbench.replay.training import LOSS, summary
from workbench.replay.units import under_policies_of
from workbench.reports.explain_peak import explain_peak, peak_report
from workbench.reports.explain_report import ExplainReport, Picture
from workbench.reports.explain_times import (
    avoidable_ns,
    explain_rank,
    explain_step,
    explain_wait,
    rank_lines,
    shares_words,
    timeline_of,
)
from workbench.reports.explain_unit import explain_unit
from workbench.reports.step_study import StepStudy
from workbench.reports.verify_report import NAN_IN_PARAMETERS
from workbench.trace.columns import Trace
from workbench.trace.step_names import step_name
from workbench.views.unit_selection import meant

PROMINENT = 0.1
"""Waits that a setting avoids, or memory that one frees, are the first answer from this fraction on."""


def explain(
    trace: Trace,
    subject: str = "",
    which: str = "",
    *,
    step: int | None = None,
    models: Sequence[ModelInfo] = (),
    is_live: bool = False,
) -> ExplainReport:
    """Return why something is as it is.

    Args:
        trace: what happened.
        subject: ``peak``, ``step``, ``wait``, a unit, a rank such as ``1``, or ``rank`` or ``unit`` with ``which``;
            empty: what matters most.
        which: the rank or the unit, after ``rank`` or ``unit``.
        step: which step; None: the newest.
        models: the variables that hold models.
        is_live: whether ranks run, so that a fix may be a line for them.

    Raises:
        UsageError: nothing is recorded, the trace has no such step, unit or rank, or a number is the name of a unit
            and a rank; the message says what to type.
    """
    if not trace.num_rows:
        raise UsageError("nothing is recorded yet, so nothing can be explained: %fsdp shard MODEL, then %fsdp step 5")
    if step is not None:
        trace = Trace(under_policies_of(trace.header, step), trace.ranks)
    study = StepStudy(trace=trace, step=step, models=tuple(models), is_live=is_live)
    if subject in {"", *ANSWERS} and not which:
        _check_steps(study)
        return _primary(study) if not subject else ANSWERS[subject](study)
    if subject not in {"rank", "unit"} and which:
        raise UsageError(f"explain takes one unit or rank, not {subject!r} and {which!r}")
    if subject in {"rank", "unit"} and not which:
        example = "rank 1" if subject == "rank" else "unit blocks.0"
        raise UsageError(f"explain {subject} needs to know which one: %fsdp explain {example}")
    if subject == "rank" or (subject.isdecimal() and not _is_a_unit(trace, subject)):
        rank = _rank(trace, which or subject)
        _check_steps(study)
        return explain_rank(study, rank)
    is_known = any(is_unit(unit_words(unit.name), subject) for unit in trace.header.units if unit.in_use)
    if not is_known and not which and (hint := did_you_mean(subject, ANSWERS, cutoff=0.7)):
        raise UsageError(f"there is no unit {subject!r}{hint}")
    return explain_unit(replace(study, num_steps=2), _unit(trace, which or subject))  # one may not have ended


ANSWERS: dict[str, Callable[[StepStudy], ExplainReport]] = {
    "peak": lambda study: peak_report(study, "peak"),
    "step": explain_step,
    "wait": explain_wait,
}
"""What :func:`explain` explains besides units and ranks."""


def _check_steps(study: StepStudy) -> None:
    if study.has_steps:
        return
    if any((part.rows["kind"] == Kind.FORWARD).any() for part in study.trace.ranks):
        raise UsageError(
            "only forwards without a training step are recorded, as of an evaluation under torch.no_grad(); of those, "
            f"units can be explained: %fsdp explain {_first_unit(study.trace)}"
            + ("; to train: %fsdp step 5" if study.is_live else "")
        )
    if study.is_live:
        raise UsageError("no training step is recorded yet, so nothing can be explained: %fsdp step 5")
    raise UsageError("the trace has no training step; only units can be explained: %fsdp explain UNIT")


def _first_unit(trace: Trace) -> str:
    return next((unit_words(unit.name) for unit in trace.header.units if unit.in_use), "UNIT")


def _is_a_unit(trace: Trace, text: str) -> bool:
    """Return whether a number is the name of a unit, or else a rank.

    Raises:
        UsageError: it is both: with fewer ranks, the same line would mean something else.
    """
    is_unit = any(unit.name == text and unit.in_use for unit in trace.header.units)
    if is_unit and int(text) in {each.rank for each in trace.ranks}:
        raise UsageError(f"{text} is a unit and a rank: %fsdp explain unit {text}, or %fsdp explain rank {text}")
    return is_unit


def _rank(trace: Trace, text: str) -> int:
    known = [each.rank for each in trace.ranks]
    if not text.isdecimal() or int(text) not in known:
        raise UsageError(f"the trace has no rank {text}; its ranks are {ranges(known)}: %fsdp explain {known[0]}")
    return int(text)


def _unit(trace: Trace, name: str) -> Unit:
    chosen = meant([unit for unit in trace.header.units if unit.in_use], name)
    if len(chosen) > 1:
        first = unit_words(chosen[0].name)
        raise UsageError(f"explain takes one unit, and {len(chosen)} are called {name!r}: %fsdp explain {first}")
    return chosen[0]


def _not_finite(study: StepStudy) -> Fault | None:
    """Return since when the loss is not finite; None if it is, or was not logged."""
    loss = summary(study.trace).metrics.get(LOSS)
    if loss is None or not len(loss.mean) or np.isfinite(loss.mean[-1]):
        return None
    finite = np.flatnonzero(np.isfinite(loss.mean))
    since = step_name(int(loss.steps[finite[-1] + 1 if len(finite) else 0]))
    some = 0 < len(loss.first_not_finite) < loss.num_ranks
    return Fault(
        rule="not-finite",
        verdict=f"the loss is NaN or infinite since {since}" + f", first on {label(loss.first_not_finite)}" * some,
        evidence=(f"{plural(len(loss.steps), 'step')} logged a loss, {plural(len(finite), 'finite one')}",),
        fix=NAN_IN_PARAMETERS if study.is_live else "",
    )


def _never_cleared(study: StepStudy) -> list[Fault]:
    """Return the optimizers of the ranks' models whose steps use the gradients of earlier steps again."""
    names = dict.fromkeys(name for model in study.models for name in model.never_cleared)
    return [
        Fault(
            rule="no-zero-grad",
            verdict=f"nothing clears the gradients that {name} has used, and the next backward adds to them",
            evidence=(f"the newest steps of {name} used the gradients of the step before again",),
            fix=f"once in each step, before backward or after {name}.step(): {name}.zero_grad()",
        )
        for name in names
    ]


def _primary(study: StepStudy) -> ExplainReport:
    """Return what matters most.

    A loss that is not finite, gradients that are used again, units that were not reduced, a slow rank, waits that a
    setting avoids, then memory that one frees.
    """
    loss = _not_finite(study)
    wrong = [*([] if loss is None else [loss]), *_never_cleared(study)]
    if wrong:
        report = study.report("", wrong[0], Picture(view="training"), {})
        return replace(report, faults=(*wrong, *report.faults))
    if study.missing:
        return peak_report(study, "")
    if study.fault is not None:
        return explain_step(study, "")
    if avoidable_ns(study) > PROMINENT * study.mean_ns:
        return explain_wait(study, "")
    found = explain_peak(study)
    fix = None if found is None else next((each for each in found.savings if each.line == found.answer.fix), None)
    if found is not None and fix is not None and not fix.is_bound and fix.saved_bytes > PROMINENT * found.peak_bytes:
        return peak_report(study, "")
    peak = "" if found is None else f"; the peak is {format_bytes(found.peak_bytes)} on rank {found.rank}"
    lines = rank_lines(study)
    verdict = f"nothing stands out: {shares_words(study)}{peak}"
    answer = Fault(rule="nothing", verdict=verdict, evidence=tuple(lines))
    return study.report("", answer, timeline_of(study.timed), lines, savings=() if found is None else found.savings)
