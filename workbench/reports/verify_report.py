"""The report of ``verify``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from workbench.base.fault import Fault, facts_of, listed
from workbench.base.text_formats import format_loss, plural
from workbench.protocol.commands import (
    StepComparison,
    UnmanagedState,
    VerifyReply,
)
from workbench.replay.grouping import by_rank_words, first_on_words, notes_of
from workbench.replay.units import differing, unmanaged_sentences
from workbench.reports.repeat_faults import first_repeated, repeat_faults
from workbench.reports.report import Report, next_facts
from workbench.reports.resume_faults import NOT_COMPARED, resume_faults
from workbench.reports.verify_faults import DATA, DRIFT, UNEVEN_COPIES, FirstDifference, faults_of, first_differences

NAN_IN_PARAMETERS = (
    "run the model's cell again or %fsdp load CHECKPOINT, after %fsdp fault off if one is injected; then "
    "%fsdp break add nan, and a step stops at the first NaN and names its rank and parameter"
)
"""What to do with parameters of NaN: every step gives NaN again, so only earlier parameters show where it begins."""


@dataclass(frozen=True, kw_only=True)
class VerifyReport(StepComparison, Report):
    """The comparison over all ranks: the largest differences, and the mean losses.

    Attributes:
        buffers: buffers that hold NaN or infinity, and on which ranks, as text; empty if none.
        since: since which step the loss is not finite, and on which ranks first, as text; empty if it is finite.
        notes: what is probably unintended, and what to do, a sentence each.
        faults: why the steps differ, as far as the evidence decides it, the most important first.
        first_differences: the first output, gradient and parameter that differ.
        is_repeated: whether the sharded step was compared with itself instead of an unsharded copy.
        resumed: the checkpoint from which the step was taken for the comparison; empty: from none.
        left_out: the variables that the step changes and a checkpoint does not hold.
    """

    buffers: str = ""
    since: str = ""
    notes: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    first_differences: tuple[FirstDifference, ...] = ()
    is_repeated: bool = False
    resumed: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence, with the most important fault."""
        if not self.faults:
            return self._comparison
        is_right = self.ok and self.could_compare and not self.not_finite
        return f"{self._comparison}{', but ' if is_right else ': '}{self.faults[0].verdict}"

    @property
    def _comparison(self) -> str:
        if self.ok and len(self.undecided) == self.num_params:
            return "cannot compare: the gradients of all parameters are rounding noise"
        if self.faults and not self.could_compare:
            return "cannot compare"
        if self.ok and self.not_finite:
            bad, compared = len(self.not_finite), plural(self.num_params, "parameter")
            those = f"all {compared}" if bad == self.num_params else f"{bad} of {compared}"
            since = f"; {self.since}" if self.since else ""
            return f"cannot compare: {those} hold NaN or infinity in both{since}"
        if self.resumed:
            verdict = "gives the same bits" if self.ok else "does NOT give the same bits"
            rest = f"; not part of it: {listed(self.left_out)}" if self.left_out else ""
            return f"one step from {self.resumed} {verdict} ({plural(self.num_params, 'tensor')} compared){rest}"
        if self.is_repeated:
            verdict = "gives the same bits twice" if self.ok else "does NOT give the same bits twice"
            return f"the sharded step {verdict}: outputs, gradients and parameters compared"
        verdict = "the same as" if self.ok else "NOT the same as"
        return (
            f"sharded training is {verdict} unsharded: {plural(self.num_params, 'parameter')} compared after one step"
        )

    @property
    def could_compare(self) -> bool:
        """Whether the comparison, or a fault, says anything about the recipe."""
        if self.faults:
            return self.faults[0].rule not in {DATA, *NOT_COMPARED}
        return not self.ok or (not self.not_finite and len(self.undecided) < self.num_params)

    @property
    def problem(self) -> str:
        """The headline, unless all values are equal and finite, and no fault was found."""
        return "" if self.ok and self.could_compare and not self.faults else self.headline

    def facts(self) -> list[tuple[str, str]]:
        """Return the faults, and the differences, term by term."""
        places = [(f"first {each.what}", each.words) for each in self.first_differences]
        return [*facts_of(self.faults), *places, *self._numbers(), *next_facts(self._after_nan)]

    @property
    def _after_nan(self) -> str:
        """What names the first NaN of parameters that hold some already; empty if none does."""
        return NAN_IN_PARAMETERS if self.not_finite and self.ok and not self.is_repeated and not self.resumed else ""

    def _numbers(self) -> list[tuple[str, str]]:
        worst = f", in {self.worst_param}" if self.max_rel_diff and self.worst_param else ""
        of = "parameter" if self.is_repeated or self.resumed else "update"
        largest = f"{self.max_abs_diff:.3g}; {self.max_rel_diff:.3g} of the {of}{worst}"
        if not self.max_rel_diff:
            largest = f"{self.max_abs_diff:.3g}; no more than rounding" if self.max_abs_diff else "none"
        found = [
            ("largest difference", largest),
            ("tolerance", self.tolerance),
            ("bitwise equal", f"{self.equal_bits} of {plural(self.num_params, 'parameter')}"),
        ]
        is_of_another_step = bool(self.resumed) and not self.could_compare
        if is_of_another_step or (self.ok and len(self.not_finite) == self.num_params):
            found = []  # nothing could be compared
        if self.loss_sharded is not None and self.loss_reference is not None and not is_of_another_step:
            both = (format_loss(loss, ".6g") for loss in (self.loss_sharded, self.loss_reference))
            which = "{} in the second run, {} in the first" if self.is_repeated else "{} sharded, {} unsharded"
            which = "{} from the checkpoint, {} without" if self.resumed else which
            found.append(("loss", which.format(*both)))
        if self.not_finite:
            found.append(("NaN or infinity in", listed(self.not_finite)))
        if self.undecided:
            found.append(("not compared", f"{listed(self.undecided)}: their gradients are rounding noise"))
        if self.buffers:
            found.append(("NaN in buffers", self.buffers))
        return [*found, *(("note", note) for note in self.notes)]


def verify_report(by_rank: Sequence[VerifyReply]) -> VerifyReport:
    """Return the report of one comparison on all ranks."""
    worst = max(by_rank, key=lambda verified: verified.max_rel_diff)
    repeats = [verified.repetition for verified in by_rank if verified.repetition is not None]
    resumes = [verified.resume for verified in by_rank if verified.resume is not None]
    compared = repeat_faults(repeats) if repeats else faults_of(by_rank)
    faults = resume_faults(resumes) if resumes else compared
    differences = [verified.differences for verified in by_rank if verified.differences is not None]
    return VerifyReport(
        num_params=worst.num_params,
        max_abs_diff=worst.max_abs_diff,
        max_rel_diff=max(verified.max_rel_diff for verified in by_rank),
        worst_param=worst.worst_param,
        loss_sharded=_mean([verified.loss_sharded for verified in by_rank]),
        loss_reference=_mean([verified.loss_reference for verified in by_rank]),
        equal_bits=min(verified.equal_bits for verified in by_rank),
        ok=all(verified.ok for verified in by_rank)
        and not any(fault.rule in {DRIFT, UNEVEN_COPIES} for fault in faults),
        tolerance=worst.tolerance,
        not_finite=worst.not_finite,
        undecided=worst.undecided,
        buffers=by_rank_words([", ".join(verified.buffers_not_finite) for verified in by_rank]),
        since=_since([verified.since for verified in by_rank]),
        notes=(
            *_passed_again(by_rank),
            *_initial_rate(by_rank),
            *_notes("", [verified.unmanaged for verified in by_rank]),
            *_not_seen(by_rank),
            *notes_of([resume.notes for resume in resumes]),
        ),
        faults=faults,
        first_differences=first_repeated(repeats) if repeats else first_differences(differences),
        is_repeated=bool(repeats),
        resumed=resumes[0].folder if resumes else "",
        left_out=tuple(dict.fromkeys(name for resume in resumes for name in resume.changed)),
    )


def _initial_rate(by_rank: Sequence[VerifyReply]) -> tuple[str, ...]:
    rate = by_rank[0].initial_rate
    return (f"a schedule has ended at learning rate 0: both steps take its first one, {rate:g}",) if rate else ()


def _notes(model: str, by_rank: Sequence[UnmanagedState]) -> tuple[str, ...]:
    """Return notes on what the engine does not manage in ``model`` (its name on the ranks, or empty)."""
    params, hooks = ({name: None for rank in by_rank for name in getattr(rank, kind)} for kind in ("params", "hooks"))
    buffers = differing([rank.buffers for rank in by_rank])
    return unmanaged_sentences({model: tuple(params)}, tuple(hooks), {model: buffers})


def _passed_again(by_rank: Sequence[VerifyReply]) -> tuple[str, ...]:
    found = listed(by_rank[0].arguments) if by_rank[0].arguments else ""
    return (f"the step function got {found} as in its last call by the script",) if found else ()


def _not_seen(by_rank: Sequence[VerifyReply]) -> tuple[str, ...]:
    """Return what the comparison cannot see, as both steps do it, a sentence each."""
    sizes = [verified.num_inputs for verified in by_rank]
    if len(set(sizes)) <= 1:
        return ()
    return (
        f"the ranks' inputs have {', '.join(map(str, sizes[:8]))} elements. Both steps weigh them alike, so whether "
        "the weights are right was not compared: in a mean over each rank's own batch, samples of a small batch count "
        "more. For equal weights, take the sum of losses, times the number of ranks, over the number of all samples",
    )


def _since(by_rank: Sequence[int | None]) -> str:
    steps = [step for step in by_rank if step is not None]
    if not steps:
        return ""
    first = [rank for rank, step in enumerate(by_rank) if step == min(steps)]
    return f"the loss has not been finite since step {min(steps)}{first_on_words(first, len(by_rank))}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
