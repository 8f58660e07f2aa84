"""Why: the peak, the time of a step, the waits, a unit or a rank in words, with the picture that shows it. Pure.

:func:`explain` answers ``%fsdp explain``. Each answer is a verdict, the evidence, and what to type. Only a slow rank is a
fault; the other answers say what is there. docs/explain.md describes how each number is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from workbench.errors import UsageError
from workbench.events import TORCH_DDP, WORK, Kind, Unit, UnitState, unit_words
from workbench.fault import Fault
from workbench.protocol.rank_messages import ModelInfo
from workbench.replay import memory
from workbench.replay.arrivals import TOO_CLOSE, UNTOLD
from workbench.replay.clock_error import error_ns
from workbench.replay.device import ClockSource
from workbench.replay.exposed_waits import Cause, ExposedWait, exposed_waits
from workbench.replay.grouping import label, ranges
from workbench.replay.spans import rows_of
from workbench.replay.step_parts import (
    MAX_STEPS,
    MIN_STEPS,
    OWN,
    PARTS,
    Comparable,
    Group,
    Part,
    RankTimes,
    SlowRank,
    StepParts,
    comparable,
    slow_rank,
    step_parts,
    times_of,
)
from workbench.replay.unit_history import Cause as UnitCause
from workbench.replay.unit_history import UnitHistory, histories
from workbench.replay.units import unit_name, unseen_words
from workbench.reports.explain_peak import (
    PeakSaving,
    event_words,
    explain_peak,
    is_flat,
    is_ours,
    model_of,
    module_words,
)
from workbench.reports.fault_report import FaultReport, proof
from workbench.trace.columns import Trace, steps
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name
from workbench.views.theme import format_bytes, format_duration, format_share, plural
from workbench.views.unit_selection import meant
from workbench.views.window import DrawnSteps, Window, window

SUBJECTS = ("peak", "step", "wait")
"""What ``explain`` takes besides units and ranks."""

PROMINENT = 0.1
"""Exposed communication, or a saving of memory, is the first answer if it is more than this fraction."""

MAX_LINES = 6
"""Waits, and ranks, that a text lists."""

STRAY = 0.05
"""Differences of a rank's parts are mentioned from this fraction of the step on."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The view that shows what an explanation says.

    Attributes:
        view: name of the view.
        options: its options.
    """

    view: str
    options: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The line that draws it: ``%fsdp timeline --step 3``."""
        return " ".join([f"%fsdp {self.view}", *(f"--{name} {value}" for name, value in self.options.items())])


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """Where the time of a step went on one rank.

    Attributes:
        rank: the rank.
        step_ns: its time without holds, the sum of ``parts_ns``.
        groups_ns: compute, exposed communication, waiting for a slower rank, and host.
        parts_ns: the same in detail.
        waited_for_ns: time that it waited for each rank that was last, by rank.
        peak_bytes: most bytes in use in the step.
    """

    rank: int
    step_ns: int
    groups_ns: Mapping[Group, int]
    parts_ns: Mapping[Part, int]
    waited_for_ns: Mapping[int, int]
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class WaitCause:
    """Exposed waits of a step with one cause.

    Attributes:
        unit: name of the unit; None: none.
        kind: kind of collective.
        in_backward: whether it was issued in backward.
        cause: why compute waited.
        late_rank: the rank that issued it last, for a late rank; else None.
        ranks: the ranks that waited.
        calls: the most waits of one of them.
        wait_ns: time waited, mean over all ranks.
        most_ns: time waited by the rank that waited most.
        transfer_ns: mean time of a transfer once all ranks had joined.
        num_bytes: payload of one.
    """

    unit: str | None
    kind: Kind
    in_backward: bool
    cause: Cause
    late_rank: int | None
    ranks: tuple[int, ...]
    calls: int
    wait_ns: float
    most_ns: int
    transfer_ns: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class UnitExplanation:
    """The state of a unit on some ranks, and the events that led to it.

    Attributes:
        unit: name of the unit.
        ranks: the ranks.
        state: state of its parameters.
        causes: what led to it, the oldest first.
        steps: the step of each; None: outside any.
    """

    unit: str
    ranks: tuple[int, ...]
    state: UnitState
    causes: tuple[UnitCause, ...]
    steps: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class ExplainReport(FaultReport):
    """An explanation, with the faults that were found on the way.

    Attributes:
        subject: what is explained; empty: what matters most.
        step: the step that the numbers are of; None: none.
        answer: verdict, evidence and what to type.
        picture: the view that shows it; None: none does.
        ranks: where the time of the step went; empty if the answer needs no times.
        waits: its exposed waits, the longest first; likewise.
        savings: what would lower its peak.
        units: state of a unit, the most common first.
    """

    subject: str
    step: int | None
    answer: Fault
    picture: Picture | None = None
    ranks: tuple[RankParts, ...] = ()
    waits: tuple[WaitCause, ...] = ()
    savings: tuple[PeakSaving, ...] = ()
    units: tuple[UnitExplanation, ...] = ()

    @property
    def headline(self) -> str:
        """The verdict of the answer."""
        return self.answer.verdict

    @property
    def problem(self) -> str:
        """The headline, if the answer is a fault."""
        return self.headline if self.answer in self.faults else ""

    def facts(self) -> list[tuple[str, str]]:
        """Return evidence and fix of the answer, further faults, the line of the picture, and what is missing."""
        found = list(proof(self.answer))
        for fault in self.faults:
            if fault != self.answer:
                found += [("also", fault.verdict), *proof(fault)]
        found += [("picture", self.picture.line)] if self.picture is not None else []
        return [*found, *(("not decided", reason) for reason in self.abstained)]


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
        subject: ``peak``, ``step``, ``wait``, a unit, a rank such as ``1``, or ``rank`` or ``unit`` with ``which``; empty:
            what matters most.
        which: the rank or the unit after ``rank`` or ``unit``.
        step: which step; None: the newest.
        models: the variables that hold models.
        is_live: whether ranks run, so that a fix may be a line for them.

    Raises:
        UsageError: nothing is recorded, or the trace has no such step, unit or rank; the message says what to type.
    """
    if not trace.num_rows:
        raise UsageError(
            "nothing is recorded yet, so there is nothing to explain: %fsdp shard MODEL, then %fsdp step 5"
        )
    kind, name = _subject(trace, subject, which)
    study = _Study(trace=trace, step=step, models=tuple(models), is_live=is_live)
    if kind == "unit":
        return _unit(study, name)
    if not steps(trace):
        raise UsageError("no training step is recorded yet, so there is nothing to explain: %fsdp step 5")
    if kind == "rank":
        return _rank(study, int(name))
    return {"": _primary, "peak": _peak, "step": _step, "wait": _wait}[kind](study)


def _subject(trace: Trace, subject: str, which: str) -> tuple[str, str]:
    """Return ``(kind, name)``: a subject, or ``rank`` or ``unit`` and which."""
    if subject in {"rank", "unit"} and which:
        kind, name = subject, which
    elif which:
        raise UsageError(f"explain takes one unit or rank, not {subject!r} and {which!r}")
    elif subject in {"", *SUBJECTS}:
        return subject, ""
    elif subject in {"rank", "unit"}:
        raise UsageError(
            f"explain {subject} needs to know which: %fsdp explain {subject} {'1' if subject == 'rank' else 'NAME'}"
        )
    else:
        kind, name = "rank" if subject.isdecimal() else "unit", subject
    if kind == "rank":
        known = [each.rank for each in trace.ranks]
        if not name.isdecimal() or int(name) not in known:
            raise UsageError(f"the trace has no rank {name}; its ranks are: {ranges(known)}: %fsdp explain {known[0]}")
        return kind, name
    chosen = meant([unit for unit in trace.header.units if unit.in_use], name)
    if len(chosen) > 1:
        raise UsageError(
            f"explain takes one unit, and {name!r} names {len(chosen)}: %fsdp explain {unit_words(chosen[0].name)!r}"
        )
    return kind, chosen[0].name


# ---- what the answers are made of


@dataclass(frozen=True, kw_only=True)
class _Study:
    """A step of a trace and the steps before it; what is derived from them is computed once."""

    trace: Trace
    step: int | None
    models: tuple[ModelInfo, ...]
    is_live: bool

    @property
    def header(self) -> Header:
        return self.trace.header

    @cached_property
    def window(self) -> Window:
        """The chosen step, and enough before it to compare ranks."""
        return window(self.trace, self.step, MAX_STEPS + 1)

    @cached_property
    def newest(self) -> Window:
        """The chosen step alone, whether it has ended or not."""
        return Window(first=self.window.last, last=self.window.last)

    @cached_property
    def drawn(self) -> DrawnSteps:
        return self.window.drawn(self.trace)

    @cached_property
    def clock_error_ns(self) -> int:
        return error_ns(Trace(self.header, tuple(map(self.window.stateless, self.trace.ranks))))

    @cached_property
    def times(self) -> dict[int, RankTimes]:
        return times_of(self.drawn.trace, self.clock_error_ns)

    @cached_property
    def parts(self) -> dict[int, StepParts]:
        found = step_parts(self.drawn.trace, self.times)
        return {rank: each for rank, each in found.items() if len(each.step)}

    @cached_property
    def timed(self) -> int:
        """The step whose times are explained: the chosen one, or if none was, the newest that has ended on all ranks."""
        ended = [set(each.step[each.has_ended].tolist()) for each in self.parts.values()]
        common = set[int]() if not ended else ended[0].intersection(*ended[1:])
        return self.window.last if self.step is not None else max(common, default=self.window.last)

    @cached_property
    def comparable(self) -> Comparable:
        return comparable(self.parts, min(steps(self.trace)))

    @cached_property
    def slow(self) -> SlowRank | None:
        return slow_rank(self.parts, self.comparable.steps, self.clock_error_ns)

    @cached_property
    def waits(self) -> tuple[ExposedWait, ...]:
        return exposed_waits(self.times, self.timed)

    @cached_property
    def ranks(self) -> tuple[RankParts, ...]:
        """The parts of the step on the ranks that recorded it."""
        everyone = [each.rank for each in self.drawn.trace.ranks]
        shown = Window(first=self.timed, last=self.timed)
        found = []
        for rank, each in self.parts.items():
            place = int(np.searchsorted(each.step, self.timed))
            if place == len(each.step) or each.step[place] != self.timed:
                continue
            waited = zip(everyone, each.late_ns[place].tolist(), strict=True)
            found.append(
                RankParts(
                    rank=rank,
                    step_ns=int(each.total_ns[place]),
                    groups_ns={group: int(each.group_ns(group)[place]) for group in Group},
                    parts_ns=dict(zip(PARTS, each.parts_ns[place].tolist(), strict=True)),
                    waited_for_ns={other: ns for other, ns in waited if ns},
                    peak_bytes=memory.peak(shown.cut(self.trace.rank(rank))).num_bytes,
                )
            )
        return tuple(found)

    @property
    def mean_ns(self) -> float:
        """Mean time of the step over the ranks, at least 1."""
        return max(sum(each.step_ns for each in self.ranks) / max(len(self.ranks), 1), 1)

    def share(self, group: Group) -> float:
        """Return the fraction of the step that a part takes, over all ranks."""
        return sum(each.groups_ns[group] for each in self.ranks) / len(self.ranks) / self.mean_ns if self.ranks else 0.0

    @cached_property
    def missing(self) -> str:
        """Why nothing can be said about times; empty if something can."""
        if self.drawn.clock is ClockSource.ENQUEUED:
            return "times of the GPU were not recorded, and the host only enqueues work: where the time went is unknown"
        if not self.ranks:
            return f"begin and end of {step_name(self.timed)} are not recorded: where its time went is unknown"
        return ""

    @cached_property
    def abstained(self) -> tuple[str, ...]:
        """What could not be decided, naming the missing signal."""
        found = [_unseen(self), *self._no_work(), *self._not_last(), *self._too_few()]
        return tuple(filter(None, found))

    def _no_work(self) -> list[str]:
        if any(len(rows_of(part, WORK)) for part in self.drawn.trace.ranks):
            return []
        return ["no forward or backward is recorded, so compute counts as host"]

    def _not_last(self) -> list[str]:
        here = [each.last.rank[each.collectives.step == self.timed] for each in self.times.values()]
        last = np.concatenate(here) if here else np.empty(0, np.int64)
        found = []
        if len(last) and (last == UNTOLD).mean() > PROMINENT:
            found.append(
                f"which rank was last: for {format_share(float((last == UNTOLD).mean()))} of the collectives the issue "
                "times of all their ranks are not recorded; waits for them count as communication"
            )
        if (last == TOO_CLOSE).any():
            found.append(f"ranks that are less than {format_duration(self.clock_error_ns)} apart, the clock error")
        return found

    def _too_few(self) -> list[str]:
        num = len(self.comparable.steps)
        if len(self.parts) < 2 or num >= MIN_STEPS:
            return []
        held = f" ({plural(self.comparable.num_held, 'step')} with a hold left out)" if self.comparable.num_held else ""
        more = ": %fsdp step 5" if self.is_live else ""
        return [f"which rank is slow: {MIN_STEPS} ended steps after the first decide, and there are {num}{held}{more}"]

    def report(self, subject: str, answer: Fault, picture: Picture | None, **more: object) -> ExplainReport:
        """Return the report of an answer about times."""
        fault = self.fault
        return ExplainReport(
            subject=subject,
            step=self.timed,
            answer=answer,
            faults=() if fault is None else (fault,),
            num_checks=int(len(self.comparable.steps) >= MIN_STEPS),
            abstained=self.abstained,
            picture=picture,
            ranks=self.ranks,
            waits=tuple(_wait_cause(self.header, wait) for wait in self.waits),
            **more,  # type: ignore[arg-type]
        )

    @cached_property
    def fault(self) -> Fault | None:
        """The slow rank, as a fault."""
        return None if self.slow is None else _slow_words(self, self.slow)


def _unseen(study: _Study) -> str:
    words = unseen_words(study.header)
    is_replicated = any(unit.engine == TORCH_DDP and unit.in_use for unit in study.header.units)
    return f"{words}, so they count as compute" if words and is_replicated else words


def _wait_cause(header: Header, wait: ExposedWait) -> WaitCause:
    return WaitCause(
        unit=unit_name(header, wait.unit) if wait.unit >= 0 else None,
        kind=wait.kind,
        in_backward=wait.in_backward,
        cause=wait.cause,
        late_rank=wait.late_rank if wait.late_rank >= 0 else None,
        ranks=wait.ranks,
        calls=wait.calls,
        wait_ns=wait.wait_ns,
        most_ns=wait.most_ns,
        transfer_ns=wait.time_ns,
        num_bytes=wait.num_bytes,
    )


# ---- the slow rank


def _slow_words(study: _Study, slow: SlowRank) -> Fault:
    late, step_ns = format_duration(slow.late_ns), format_duration(slow.step_ns)
    where = "between the steps" if slow.part is None else _PART_WORDS[slow.part]
    numbers = f"steps {ranges(slow.steps)}"
    evidence = [
        f"medians of {numbers}: the others wait {late} for rank {slow.rank} in a step of {step_ns}",
        f"{where}: rank {slow.rank} {format_duration(slow.own_ns)}, the others {format_duration(slow.others_ns)}",
    ]
    if slow.unit >= 0:
        own, others = map(format_duration, slow.unit_ns)
        evidence.append(
            f"most of it in {unit_name(study.header, slow.unit)}: rank {slow.rank} {own}, the others {others}"
        )
    longest = next((w for w in study.waits if w.cause is Cause.LATE_RANK and w.late_rank == slow.rank), None)
    if longest is not None:
        evidence.append(
            f"the longest wait in {step_name(study.timed)}: {_waiters(longest)} {format_duration(longest.most_ns)} for "
            f"the {_collective(study.header, longest)}"
        )
    verdict = f"rank {slow.rank} is slow {where}: the others wait {late} of each step of {step_ns} for it"
    return Fault(rule="slow-rank", verdict=verdict, evidence=tuple(evidence), fix=_slow_fix(study, slow))


_PART_WORDS = {
    Part.BEFORE: "before forward (input or host)",
    Part.FORWARD: "in forward (compute, or host code inside it)",
    Part.LOSS: "between forward and backward (loss)",
    Part.BACKWARD: "in backward (compute, or host code inside it)",
    Part.OPTIMIZER: "in the optimizer (compute)",
    Part.OTHER: "after backward or between passes (host)",
}


def _slow_fix(study: _Study, slow: SlowRank) -> str:
    """Return lines that show the code in which the rank is slow; empty without ranks."""
    return "%fsdp step 5 --background, then %fsdp where --stacks" if study.is_live else ""


# ---- the answers


def _primary(study: _Study) -> ExplainReport:
    """Return what matters most: a slow rank, then exposed communication, then memory that a knob frees, else nothing."""
    if study.missing:
        return _peak(study, "")
    if study.fault is not None:
        return _step(study, "")
    if study.share(Group.COMMUNICATION) > PROMINENT and any(_wait_fix(study, wait) for wait in study.waits):
        return _wait(study, "")
    found = explain_peak(study.trace, study.newest, study.models)
    if found is not None and found.answer.fix and found.savings[0].saved_bytes > PROMINENT * found.peak_bytes:
        return _peak(study, "")
    peak = "" if found is None else f"; the peak is {format_bytes(found.peak_bytes)} on rank {found.rank}"
    verdict = f"nothing stands out: {_shares(study)}{peak}"
    answer = Fault(rule="nothing", verdict=verdict, evidence=tuple(_rank_lines(study)))
    return study.report("", answer, _timeline(study.timed), savings=() if found is None else found.savings)


def _peak(study: _Study, subject: str = "peak") -> ExplainReport:
    found = explain_peak(study.trace, study.newest, study.models)
    if found is None:
        missing = "no memory is recorded in this trace"
        last = study.window.last
        answer = Fault(rule="unknown", verdict=f"the peak of {step_name(last)} is unknown: {missing}")
        return ExplainReport(
            subject=subject, step=last, answer=answer, num_checks=0, abstained=(f"the peak: {missing}",)
        )
    options = {"step": study.window.last, "rank": found.rank}
    return ExplainReport(
        subject=subject,
        step=study.window.last,
        answer=found.answer,
        num_checks=0,
        abstained=(study.missing,) if study.missing and not subject else (),
        picture=Picture(view="memory", options=options),
        savings=found.savings,
    )


def _unknown(study: _Study, subject: str) -> ExplainReport:
    answer = Fault(rule="unknown", verdict=f"{step_name(study.timed)}: {study.missing}")
    return ExplainReport(subject=subject, step=study.timed, answer=answer, num_checks=0, abstained=(study.missing,))


def _step(study: _Study, subject: str = "step") -> ExplainReport:
    if study.missing:
        return _unknown(study, subject)
    lines = _rank_lines(study)
    picture = _timeline(study.timed)
    if study.fault is not None:
        slow = study.fault
        answer = Fault(rule=slow.rule, verdict=slow.verdict, evidence=(*slow.evidence, *lines), fix=slow.fix)
        return _with_fault(study.report(subject, answer, picture))
    decided = "" if len(study.comparable.steps) < MIN_STEPS or len(study.parts) == 1 else "; no rank is slow"
    answer = Fault(rule="step", verdict=f"{_shares(study)}{decided}", evidence=tuple(lines))
    return study.report(subject, answer, picture)


def _with_fault(report: ExplainReport) -> ExplainReport:
    """Return the report with its answer as the fault, which has more evidence."""
    members = {name: getattr(report, name) for name in report.__dataclass_fields__}
    return ExplainReport(**members | {"faults": (report.answer,)})


def _shares(study: _Study) -> str:
    """Return the duration of the step, and its four parts as fractions."""
    parts = ", ".join(f"{group.value} {format_share(study.share(group))}" for group in Group)
    several = f", mean of {len(study.ranks)} ranks" if len(study.ranks) > 1 else ""
    return f"{step_name(study.timed)} took {format_duration(study.mean_ns)}: {parts}{several}"


def _rank_lines(study: _Study) -> list[str]:
    """Return the parts of the step on each rank; of many ranks, those that waited least and most."""
    ranks = sorted(study.ranks, key=lambda each: (each.groups_ns[Group.LATE], each.rank))
    shown = ranks if len(ranks) <= MAX_LINES else [*ranks[: MAX_LINES // 2], *ranks[-(MAX_LINES // 2) :]]
    left_out = len(ranks) - len(shown)
    lines = [_rank_line(each) for each in sorted(shown, key=lambda each: each.rank)]
    return [*lines, *([f"{plural(left_out, 'further rank')} between these"] if left_out else [])]


def _rank_line(each: RankParts) -> str:
    parts = " + ".join(f"{group.value} {format_duration(each.groups_ns[group])}" for group in Group)
    return f"rank {each.rank}: {format_duration(each.step_ns)} = {parts}"


def _timeline(step: int) -> Picture:
    return Picture(view="timeline", options={"step": step})


def _wait(study: _Study, subject: str = "wait") -> ExplainReport:
    if study.missing:
        return _unknown(study, subject)
    total_ns = sum(wait.wait_ns for wait in study.waits)
    if not study.waits:
        answer = Fault(rule="wait", verdict=f"compute waited for no collective in {step_name(study.timed)}")
        return study.report(subject, answer, _timeline(study.timed))
    share = format_share(total_ns / study.mean_ns)
    several = f", mean of {len(study.ranks)} ranks" if len(study.ranks) > 1 else ""
    by_cause = {cause: sum(w.wait_ns for w in study.waits if w.cause is cause) for cause in Cause}
    most = max(by_cause, key=lambda cause: by_cause[cause])
    verdict = (
        f"compute waited {format_duration(total_ns)} of {step_name(study.timed)} for collectives ({share}{several}), most "
        f"of it ({format_duration(by_cause[most])}) because {_CAUSE_WORDS[most]}"
    )
    evidence = [_wait_line(study.header, wait) for wait in study.waits[:MAX_LINES]]
    rest = study.waits[MAX_LINES:]
    if rest:
        evidence.append(f"{plural(len(rest), 'further wait')}: {format_duration(sum(w.wait_ns for w in rest))}")
    fix = next(filter(None, (_wait_fix(study, wait) for wait in study.waits)), "")
    answer = Fault(rule="wait", verdict=verdict, evidence=tuple(evidence), fix=fix)
    return study.report(subject, answer, _timeline(study.timed))


_CAUSE_WORDS = {
    Cause.LATE_RANK: "a rank was late",
    Cause.ISSUED_LATE: "all-gathers were issued only when they were needed",
    Cause.AT_ONCE: "reductions were waited for as soon as they were issued",
    Cause.NOTHING: "nothing was left to run meanwhile",
    Cause.BANDWIDTH: "transfers take longer than the compute beside them",
}


def _collective(header: Header, wait: ExposedWait) -> str:
    """Return a collective as text: ``"all-gather of blocks.2 in backward"``."""
    of = f" of {unit_name(header, wait.unit)}" if wait.unit >= 0 else ""
    return f"{wait.kind.words}{of}{' in backward' if wait.in_backward and wait.kind is Kind.ALL_GATHER else ''}"


def _waiters(wait: ExposedWait) -> str:
    return label(wait.ranks)


def _wait_line(header: Header, wait: ExposedWait) -> str:
    each = {
        Cause.LATE_RANK: f"rank {wait.late_rank} issued it last",
        Cause.ISSUED_LATE: "issued only when it was needed",
        Cause.AT_ONCE: "waited for as soon as it was issued",
        Cause.NOTHING: "nothing was left to run meanwhile",
        Cause.BANDWIDTH: f"issued ahead, but a transfer of {format_bytes(wait.num_bytes)} takes "
        f"{format_duration(wait.time_ns)}",
    }[wait.cause]
    times = f", {wait.calls} times" if wait.calls > 1 else ""
    return f"{_collective(header, wait)}: {_waiters(wait)} up to {format_duration(wait.most_ns)}{times}; {each}"


def _wait_fix(study: _Study, wait: ExposedWait) -> str:
    """Return what to type against a wait; empty if no setting helps."""
    if wait.cause is Cause.LATE_RANK:
        return ""
    unit = study.header.units[wait.unit] if 0 <= wait.unit < len(study.header.units) else None
    if unit is None or wait.wait_ns < STRAY * study.mean_ns:
        return ""
    name = model_of(unit, study.models)
    if wait.cause is Cause.BANDWIDTH and unit.compute_itemsize > 2:
        return f"%fsdp reshard {name} --mp bf16" if is_ours(unit) else _MP.get(is_flat(unit), "")
    if wait.cause is not Cause.ISSUED_LATE or wait.kind is not Kind.ALL_GATHER:
        return ""
    if wait.in_backward and not is_flat(unit):
        return _keep(unit, study.models)
    if is_ours(unit):
        return f"%fsdp reshard {name} --prefetch 1"
    if not study.header.is_enqueued:  # on the CPU, torch's engines wait for each collective as they issue it
        return ""
    return "forward_prefetch=True" if is_flat(unit) else f"{name}.set_modules_to_forward_prefetch([NEXT]) for each unit"


_MP = {
    False: "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    True: "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)",
}
"""What to type for torch's engines, by whether units are flat."""


def _keep(unit: Unit, models: Sequence[ModelInfo]) -> str:
    """Return the line that keeps a unit unsharded after forward, so that backward need not gather it."""
    if is_ours(unit):
        path = ".".join(filter(None, (model_of(unit, models), unit.name)))
        return f"%fsdp reshard {path} --reshard-after-forward false"
    return f"{module_words(unit, models)}.set_reshard_after_forward(False, recurse=False)"


# ---- a rank


def _rank(study: _Study, rank: int) -> ExplainReport:
    subject = f"rank {rank}"
    mine = next((each for each in study.ranks if each.rank == rank), None)
    if study.missing or mine is None:
        study.__dict__.setdefault("missing", "")
        reason = study.missing or f"rank {rank} did not record it: where its time went is unknown"
        answer = Fault(rule="unknown", verdict=f"{step_name(study.timed)}: {reason}")
        return ExplainReport(subject=subject, step=study.timed, answer=answer, num_checks=0, abstained=(reason,))
    others = [each for each in study.ranks if each.rank != rank]
    for_others = sum(mine.waited_for_ns.values())
    for_it = max((each.waited_for_ns.get(rank, 0) for each in others), default=0)
    whom = ""
    if others:
        whom = f"; it waited {format_duration(for_others)} for slower ranks, and others up to {format_duration(for_it)} for it"
    parts = ", ".join(f"{g.value} {format_share(mine.groups_ns[g] / max(mine.step_ns, 1))}" for g in Group)
    verdict = f"rank {rank}: {step_name(study.timed)} took {format_duration(mine.step_ns)}: {parts}{whom}"
    evidence = [_rank_line(mine), *_against(mine, others)]
    if others and mine.peak_bytes:
        low, high = (format_bytes(pick(each.peak_bytes for each in others)) for pick in (min, max))
        there = low if low == high else f"{low} to {high}"
        evidence.append(f"peak of memory: {format_bytes(mine.peak_bytes)}, the others {there}")
    picture = Picture(view="timeline", options={"step": study.timed, "rank": rank})
    if study.slow is not None and study.slow.rank == rank and study.fault is not None:
        slow = study.fault
        answer = Fault(rule=slow.rule, verdict=slow.verdict, evidence=(*slow.evidence, *evidence), fix=slow.fix)
        return _with_fault(study.report(subject, answer, _timeline(study.timed)))
    answer = Fault(rule="rank", verdict=verdict, evidence=tuple(evidence))
    return study.report(subject, answer, picture)


def _against(mine: RankParts, others: Sequence[RankParts]) -> list[str]:
    """Return the parts of a rank that differ from the others', the most first."""
    if not others:
        return []
    differences = {
        part: mine.parts_ns[part] - float(np.median([each.parts_ns[part] for each in others]))
        for part in (*OWN, Part.TRANSFERS, Part.COPIES, Part.LATE)
    }
    told = sorted(
        (part for part, ns in differences.items() if abs(ns) > STRAY * mine.step_ns),
        key=lambda part: -abs(differences[part]),
    )
    return [
        f"{part.value}: {format_duration(mine.parts_ns[part])}, the others "
        f"{format_duration(mine.parts_ns[part] - differences[part])}"
        for part in told
    ]


# ---- a unit


def _unit(study: _Study, name: str) -> ExplainReport:
    unit = next(unit for unit in study.header.units if unit.in_use and unit.name == name)
    words = unit_words(name)
    until = {each.rank: _until(study, each.rank) for each in study.trace.ranks}
    known = {
        each.rank: histories(each, (unit.index,), until[each.rank])[unit.index]
        for each in study.trace.ranks
        if len(each.rows)
    }
    groups: dict[tuple[UnitState, tuple[UnitCause, ...]], list[int]] = {}
    for rank, found in known.items():
        groups.setdefault((found.state, tuple(event.cause for event in found.events)), []).append(rank)
    alike = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    first = known[alike[0][0]]
    when = "" if study.step is None else f" at the end of {step_name(study.step)}"
    verdict = f"{words} {'is' if study.step is None else 'was'} {_STATES[first.state]}{when}: {_last(study.header, first, unit)}"
    if len(alike) > 1:
        verdict = f"{label(alike[0])}: {verdict}"
    evidence = [f"{event_words(study.header, event, unit.index)}{_in_step(event.step)}" for event in first.events]
    evidence += [
        f"{label(ranks)}: {_STATES[known[ranks[0]].state]}, {_last(study.header, known[ranks[0]], unit)}"
        for ranks in alike[1:]
    ]
    evidence += [_sizes(unit), *_exposed(study, unit)]
    kept = first.state == UnitState.UNSHARDED and first.events[-1].cause is UnitCause.KEPT_AFTER_FORWARD
    picture = None
    options: dict[str, str | int] = {"unit": words}
    if steps(study.trace):
        options["step"] = study.window.last
    picture = Picture(view="states", options=options)
    return ExplainReport(
        subject=words,
        step=study.step if not steps(study.trace) else study.window.last,
        answer=Fault(rule="unit", verdict=verdict, evidence=tuple(evidence), fix=_free(unit, study) if kept else ""),
        num_checks=0,
        picture=picture,
        units=tuple(
            UnitExplanation(
                unit=words,
                ranks=tuple(ranks),
                state=known[ranks[0]].state,
                causes=tuple(event.cause for event in known[ranks[0]].events),
                steps=tuple(event.step if event.step >= 0 else None for event in known[ranks[0]].events),
            )
            for ranks in alike
        ),
    )


_STATES = {
    UnitState.SHARDED: "sharded",
    UnitState.ALL_GATHER_IN_FLIGHT: "being gathered",
    UnitState.UNSHARDED: "unsharded",
}


def _until(study: _Study, rank: int) -> int | None:
    """Return the last row of the chosen step on a rank; None: all rows count."""
    if study.step is None:
        return None
    part = study.trace.rank(rank)
    _, end = window(study.trace, study.step, 1).places(part)
    return part.start.seq + end - 1


def _last(header: Header, known: UnitHistory, unit: Unit) -> str:
    event = known.events[-1]
    return f"{event_words(header, event, unit.index)}{_in_step(event.step)}"


def _in_step(step: int) -> str:
    return f" in {step_name(step)}" if step >= 0 else ""


def _sizes(unit: Unit) -> str:
    whole = sum(int(np.prod(param.shape)) for param in unit.params)
    at_rest = sum(
        param.padded_rows
        * int(np.prod([s for dim, s in enumerate(param.shape) if dim != param.shard_dim]))
        * param.itemsize
        for param in unit.params
    )
    return (
        f"full parameters {format_bytes(whole * unit.compute_itemsize)} in {unit.compute_dtype}, a shard "
        f"{format_bytes(at_rest)} of {unit.shard_size}"
    )


def _exposed(study: _Study, unit: Unit) -> list[str]:
    """Return how long compute waited for the collectives of a unit."""
    if not steps(study.trace) or study.missing:
        return []
    waits = [wait for wait in study.waits if wait.unit == unit.index]
    total_ns = sum(wait.wait_ns for wait in waits)
    found = [f"compute waited {format_duration(total_ns)} for its collectives in {step_name(study.timed)}"]
    return [*found, *(_wait_line(study.header, wait) for wait in waits[:MAX_LINES])]


def _free(unit: Unit, study: _Study) -> str:
    """Return the line that frees a unit after forward; empty if there is none for its engine."""
    if is_flat(unit) or unit.reshard_after_forward is not False:
        return ""
    if is_ours(unit):
        path = ".".join(filter(None, (model_of(unit, study.models), unit.name)))
        return f"%fsdp reshard {path} --reshard-after-forward true"
    return f"{module_words(unit, study.models)}.set_reshard_after_forward(True, recurse=False)"
