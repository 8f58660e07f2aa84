"""A step and the steps before it, as explanations need them: each number is derived once. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from workbench.base.fault import Fault
from workbench.base.text_formats import format_bytes, format_share, plural
from workbench.events import WORK
from workbench.protocol.rank_messages import ModelInfo
from workbench.replay import memory
from workbench.replay.arrivals import TOO_CLOSE, UNTOLD
from workbench.replay.clock_error import error_ns
from workbench.replay.device import ClockSource
from workbench.replay.exposed_waits import ExposedWait, exposed_waits
from workbench.replay.spans import rows_of
from workbench.replay.step_parts import (
    MAX_STEPS,
    MIN_STEPS,
    PARTS,
    Comparable,
    Group,
    RankTimes,
    SlowRank,
    StepParts,
    comparable,
    slow_rank,
    step_parts,
    times_of,
)
from workbench.replay.units import unit_name, unseen_words
from workbench.replay.unreduced import unreduced_units
from workbench.reports.explain_report import (
    Evidence,
    ExplainReport,
    PeakSaving,
    Picture,
    RankParts,
    WaitCause,
    marks_in,
)
from workbench.reports.step_text import slow_rank_evidence, slow_rank_fault, time_words, unreduced_fault
from workbench.trace.columns import Trace, steps
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name
from workbench.views.window import DrawnSteps, Window, window

_UNKNOWN = 0.1
"""Collectives whose last rank is unknown are mentioned from this fraction on."""


@dataclass(frozen=True, kw_only=True)
class StepStudy:
    """A step of a trace and the steps before it.

    Attributes:
        trace: what happened.
        step: the chosen step; None: the newest.
        models: the variables that hold models.
        is_live: whether ranks run, so that a fix may be a line for them.
        num_steps: the step and how many before it.
    """

    trace: Trace
    step: int | None
    models: tuple[ModelInfo, ...] = ()
    is_live: bool = False
    num_steps: int = MAX_STEPS + 1

    @property
    def header(self) -> Header:
        """The header of the trace."""
        return self.trace.header

    @cached_property
    def has_steps(self) -> bool:
        """Whether any step is recorded."""
        return bool(steps(self.trace))

    @cached_property
    def window(self) -> Window:
        """The chosen step, whether it has ended or not, and enough steps before it to compare ranks."""
        return window(self.trace, self.step, self.num_steps)

    @cached_property
    def drawn(self) -> DrawnSteps:
        """The rows of these steps, with the times that pictures show."""
        return self.window.drawn(self.trace)

    @cached_property
    def clock_error_ns(self) -> int:
        """Maximum error between times on different clocks."""
        return error_ns(Trace(self.header, tuple(map(self.window.stateless, self.trace.ranks))))

    @cached_property
    def times(self) -> dict[int, RankTimes]:
        """The times of each rank."""
        return times_of(self.drawn.trace, self.clock_error_ns)

    @cached_property
    def parts(self) -> dict[int, StepParts]:
        """The parts of the steps of each rank that has any."""
        found = step_parts(self.drawn.trace, self.times)
        return {rank: each for rank, each in found.items() if len(each.step)}

    @cached_property
    def timed(self) -> int:
        """The step whose times are explained: the chosen one; if none was, the newest that has ended on all ranks."""
        ended = [set(each.step[each.has_ended].tolist()) for each in self.parts.values()]
        common = set[int]() if not ended else ended[0].intersection(*ended[1:])
        return self.window.last if self.step is not None else max(common, default=self.window.last)

    def name(self, step: int) -> str:
        """Return the name of a step, with ``(aborted)`` or ``(not ended)`` after that of one without an end."""
        how = Window(first=step, last=step).unfinished(self.trace)
        return f"{step_name(step)} ({how})" if how else step_name(step)

    def unfinished(self, subject: str) -> tuple[str, ...]:
        """Return a line about a step without an end: the explained one, or the newest; none if both have ended.

        Args:
            subject: what is explained, as ``%fsdp explain`` names it.
        """
        newest, how = self.window.last, self.window.unfinished(self.trace)
        if not how:
            return ()
        state = f"{step_name(newest)} {'was aborted' if how == 'aborted' else 'has not ended'}"
        if newest == self.timed:
            return (f"{state}: this is what ran of it",)
        until = self.peak_bytes(newest) if subject == "peak" else 0
        peak = f", with a peak of {format_bytes(until)} until then" if until else ""
        line = " ".join(filter(None, ("%fsdp explain", subject, f"--step {newest}")))
        return (f"{state}{peak}; to explain what ran of it: {line}",)

    def peak_bytes(self, step: int) -> int:
        """Return the most bytes in use in a step, on any rank."""
        shown = Window(first=step, last=step)
        parts = map(shown.cut, self.trace.ranks)
        return max((memory.peak(part).num_bytes for part in parts if len(part.rows)), default=0)

    @cached_property
    def comparable(self) -> Comparable:
        """The steps in which ranks can be compared."""
        return comparable(self.parts, min(steps(self.trace)))

    @cached_property
    def slow(self) -> SlowRank | None:
        """The slow rank; None if there is none."""
        return slow_rank(self.parts, self.comparable.steps, self.clock_error_ns)

    @cached_property
    def fault(self) -> Fault | None:
        """Units whose gradients were not reduced as a fault, or else the slow rank; None if there is neither."""
        unreduced = unreduced_units(self.trace, self.timed)
        if unreduced:
            return unreduced_fault(self.header, self.models, unreduced, self.timed)
        if self.slow is None:
            return None
        return slow_rank_fault(self.slow, self.fault_evidence, is_live=self.is_live)

    @cached_property
    def fault_evidence(self) -> Evidence:
        """What shows the slow rank, with the events; empty if there is none."""
        return {} if self.slow is None else slow_rank_evidence(self.trace, self.slow, self.waits, self.timed)

    @cached_property
    def waits(self) -> tuple[ExposedWait, ...]:
        """The exposed waits of the step, the longest first."""
        return exposed_waits(self.times, self.timed)

    @cached_property
    def ranks(self) -> tuple[RankParts, ...]:
        """The parts of the step on each rank that recorded its begin."""
        found = ((each, np.flatnonzero(each.step == self.timed)) for each in self.parts.values())
        return tuple(self._rank_parts(each, int(places[0])) for each, places in found if len(places))

    def _rank_parts(self, each: StepParts, place: int) -> RankParts:
        everyone = [part.rank for part in self.drawn.trace.ranks]
        shown = Window(first=self.timed, last=self.timed)
        return RankParts(
            rank=each.rank,
            step_ns=int(each.total_ns[place]),
            groups_ns={group: int(each.group_ns(group)[place]) for group in Group},
            parts_ns=dict(zip(PARTS, each.parts_ns[place].tolist(), strict=True)),
            waited_for_ns={
                rank: waited for rank, waited in zip(everyone, each.late_ns[place].tolist(), strict=True) if waited
            },
            peak_bytes=memory.peak(shown.cut(self.trace.rank(each.rank))).num_bytes,
        )

    @property
    def mean_ns(self) -> float:
        """Mean time of the step over the ranks, at least 1."""
        return max(sum(each.step_ns for each in self.ranks) / max(len(self.ranks), 1), 1)

    @property
    def longest_ns(self) -> int:
        """Time of the step on its slowest rank, as for the steps of a command."""
        return max((each.step_ns for each in self.ranks), default=0)

    def share(self, group: Group) -> float:
        """Return the fraction of the step that a part takes, over all ranks."""
        return sum(each.groups_ns[group] for each in self.ranks) / max(sum(each.step_ns for each in self.ranks), 1)

    @cached_property
    def missing(self) -> str:
        """Why nothing can be said about times; empty if something can."""
        if self.drawn.clock is ClockSource.ENQUEUED:
            return "times of the GPU are not recorded, and the host only enqueues work: where the time went is unknown"
        if not self.ranks:
            return f"no rank recorded where {step_name(self.timed)} begins: where its time went is unknown"
        return ""

    @cached_property
    def abstained(self) -> tuple[str, ...]:
        """What could not be decided, naming the missing signal."""
        unseen = [f"{self.unseen}; they count as compute"] if self.unseen else []
        return (*unseen, *self._no_work(), *self._not_last(), *self._too_few())

    @cached_property
    def unseen(self) -> str:
        """What the trace lacks of collectives and waits of torch's engines; empty if nothing is known to lack."""
        return unseen_words(self.header)

    def _no_work(self) -> list[str]:
        if any(len(rows_of(part, WORK)) for part in self.drawn.trace.ranks):
            return []
        return ["what is compute: no forward or backward is recorded, so all but waits and copies counts as host"]

    def _not_last(self) -> list[str]:
        here = (each.last.rank[each.collectives.step == self.timed] for each in self.times.values())
        last = np.concatenate([np.empty(0), *here])
        found = []
        if len(last) and (last == UNTOLD).mean() > _UNKNOWN:
            share = format_share(float((last == UNTOLD).mean()))
            found.append(
                f"which rank was last: for {share} of the collectives it is not recorded when all ranks issued them; "
                "waits for them count as communication"
            )
        if (last == TOO_CLOSE).any():
            found.append(
                f"which rank was last, where that is within {time_words(self.clock_error_ns)}, the clock error"
            )
        return found

    def _too_few(self) -> list[str]:
        num = len(self.comparable.steps)
        if len(self.parts) < 2 or num >= MIN_STEPS:
            return []
        held = f", without {plural(self.comparable.num_held, 'step')} with a hold" if self.comparable.num_held else ""
        more = ": %fsdp step 10" if self.is_live else ""
        there = f"there {'is' if num == 1 else 'are'} {num}{held}"
        return [f"which rank is slow: that takes {MIN_STEPS} ended steps after the first, and {there}{more}"]

    def report(
        self,
        subject: str,
        answer: Fault,
        picture: Picture | None,
        evidence: Evidence,
        savings: tuple[PeakSaving, ...] = (),
    ) -> ExplainReport:
        """Return the report of an answer about times, with :attr:`fault`.

        Args:
            subject: what is explained.
            answer: the answer.
            picture: the view that shows it.
            evidence: its evidence with the events; that of :attr:`fault` is added.
            savings: what would lower the peak.
        """
        marks = marks_in({**self.fault_evidence, **evidence})
        answer = replace(answer, evidence=(*answer.evidence, *self.unfinished(subject)))
        found = () if self.fault is None else (answer if answer.rule == self.fault.rule else self.fault,)
        return ExplainReport(
            subject=subject,
            step=self.timed,
            answer=answer,
            faults=found,
            num_checks=int(len(self.comparable.steps) >= MIN_STEPS),
            abstained=self.abstained,
            picture=picture,
            ranks=self.ranks,
            waits=tuple(_wait_cause(self.header, wait) for wait in self.waits),
            marks={line: marks[line] for line in answer.evidence if line in marks},
            savings=savings,
        )

    def unknown(self, subject: str, reason: str) -> ExplainReport:
        """Return the report that a missing signal leaves."""
        answer = Fault(rule="unknown", verdict=f"{self.name(self.timed)}: {reason}", evidence=self.unfinished(subject))
        return ExplainReport(subject=subject, step=self.timed, answer=answer, num_checks=0, abstained=(reason,))


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
