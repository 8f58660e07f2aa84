"""Judge an answer of the workbench by the right verdict. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.field.cases import Case, Cause, Kind, Moment

ABORTED = (Cause.RAISED, Cause.EXITED, Cause.KILLED_BY_SIGNAL)
RULES: Mapping[str, tuple[Cause, ...]] = {
    # where
    "dead-rank": ABORTED,
    "other-collective": (Cause.LEFT_OUT_COLLECTIVE, Cause.ALONE_IN_COLLECTIVE),
    "wrong-order": (Cause.OTHER_ORDER,),
    "other-payload": (Cause.OTHER_PAYLOAD,),
    "other-root": (Cause.OTHER_ROOT,),
    "uneven-batches": (Cause.UNEVEN_STEPS, Cause.UNEVEN_BATCH_SIZES),
    "uneven-passes": (Cause.BACKWARD_LEFT_OUT, Cause.UNEVEN_STEPS),
    "unpaired-calls": (Cause.UNPAIRED_P2P, Cause.P2P_CYCLE),
    "crossed-groups": (Cause.OTHER_ORDER,),
    "stuck-collective": (Cause.OTHER_ROOT,),
    "late-rank": (Cause.STUCK_OUTSIDE,),
    "the error": ABORTED,  # of a cell or a step in a notebook
    # verify
    "not-finite": (Cause.NOT_FINITE,),
    "rank-not-stepped": (Cause.EXTRA_OPTIMIZER_STEP,),
    "rank-stepped-twice": (Cause.EXTRA_OPTIMIZER_STEP,),
    "other-settings": (Cause.OTHER_HYPERPARAMETER,),
    "options-differ": (Cause.OTHER_HYPERPARAMETER,),
    "other-gradients": (Cause.GRADIENT_SCALE,),
    "no-sync-left-on": (Cause.SYNC_LEFT_OFF,),
    "partial-norm": (Cause.LOCAL_CLIP,),
    "wrong-scale": (Cause.GRADIENT_SCALE,),
    "scaled-per-rank": (Cause.OTHER_HYPERPARAMETER, Cause.LOCAL_CLIP),
    "drifting-replica": (),
    "uneven-copies": (),
    "optimizer-counters": (Cause.EXTRA_OPTIMIZER_STEP,),
    "stale-optimizer": (Cause.OPTIMIZER_BEFORE_SHARDING,),
    # lint
    "optimizer-before-shard": (Cause.OPTIMIZER_BEFORE_SHARDING,),
    "parameters-replaced": (Cause.OPTIMIZER_BEFORE_SHARDING,),
    "sync-left-off": (Cause.SYNC_LEFT_OFF,),
    "wrapper-bypassed": (Cause.SYNC_LEFT_OFF,),
    "in-no-unit": (Cause.NOT_AVERAGED,),
    "no-set-epoch": (Cause.NOT_RESHUFFLED,),
    "same-data": (Cause.SAME_DATA,),
    "buffers-differ": (Cause.BUFFERS_DIFFER,),
    "tied-in-two-units": (Cause.TIED_WEIGHTS_LOST,),
    "tie-lost": (Cause.TIED_WEIGHTS_LOST,),
}
"""What each rule of the tool means: the only place that knows its names. Another rule is advice, and no cause."""

ADVICE = (
    "tiny-units",
    "unsplit-unit",
    "nothing-sharded",
    "rows-lost-to-padding",
    "mesh-turned-round",
    "checkpoint-around-units",
)
"""Rules that cost memory or time, and no numbers: the models of the scripts are tiny."""


ABSTENTIONS = ("different-data",)
"""Rules that say that nothing can be compared."""


class Outcome(StrEnum):
    """How good an answer is."""

    RIGHT = "right"
    ALLOWED = "abstained, as it may"
    PARTLY = "partly"
    ABSTAINED = "abstained"
    WRONG = "wrong"
    WRONG_CULPRIT = "wrong culprit"
    FALSE_ALARM = "false alarm"
    VOID = "not as its row claims"


GOOD = (Outcome.RIGHT, Outcome.ALLOWED)
FATAL = (Outcome.WRONG_CULPRIT, Outcome.FALSE_ALARM)


@dataclass(frozen=True)
class Fault:
    """A fault as a document of the tool has it."""

    rule: str
    verdict: str
    evidence: tuple[str, ...] = ()
    fix: str = ""

    @property
    def text(self) -> str:
        """All words of the fault."""
        return "\n".join((self.verdict, *self.evidence, self.fix))

    @property
    def accused(self) -> frozenset[int]:
        """The ranks that the verdict names first."""
        found = re.search(r"\branks? (\d+(?:[-,] ?\d+)*)", self.verdict)
        return frozenset(_numbers(found.group(1))) if found else frozenset()


def _numbers(label: str) -> Iterable[int]:
    for part in label.split(","):
        low, _, high = part.strip().partition("-")
        yield from range(int(low), int(high or low) + 1)


@dataclass(frozen=True)
class Judgement:
    """An outcome, the rule that was said, and why the outcome is not better."""

    outcome: Outcome
    said: str = "nothing"
    why: str = ""


def faults(document: Mapping[str, Any] | None) -> tuple[Fault, ...]:
    """Return the faults of a document, the most important first, without advice."""
    report = (document or {}).get("report") or {}
    found = [report["cause"]] if report.get("cause") else report.get("faults") or ()
    all_ = (Fault(f["rule"], f["verdict"], tuple(f.get("evidence", ())), f.get("fix", "")) for f in found)
    return tuple(fault for fault in all_ if fault.rule not in ADVICE)


def judge(case: Case, moment: Moment, document: Mapping[str, Any] | None, torch: tuple[int, int]) -> Judgement:
    """Return how good an answer is: a document of ``where``, ``verify`` or ``lint``, or None if there was none."""
    found = faults(document)
    report = (document or {}).get("report") or {}
    if found and found[0].rule in ABSTENTIONS:
        return Judgement(Outcome.ALLOWED if case.abstain else Outcome.ABSTAINED, found[0].rule, found[0].verdict)
    if case.kind is Kind.SOUND:
        return _of_sound(case, moment, found, report)
    if not found:
        reason = case.abstain or ("" if torch >= case.min_torch else "this torch does not show it")
        heading = str(report.get("headline", "no answer"))
        return Judgement(Outcome.ALLOWED if reason else Outcome.ABSTAINED, why=reason or heading)
    judged = [_of_fault(case, fault) for fault in found]
    best = next((each for each in judged[1:] if each.outcome is Outcome.RIGHT), None)
    if best and judged[0].outcome is not Outcome.RIGHT:
        return Judgement(Outcome.PARTLY, judged[0].said, f"{best.said} comes after it")
    return judged[0]


def _of_sound(case: Case, moment: Moment, found: tuple[Fault, ...], report: Mapping[str, Any]) -> Judgement:
    if found:
        first = found[0]
        near = any(cause in RULES.get(first.rule, ()) and first.accused == ranks for cause, ranks in case.nearly)
        if near and moment is not Moment.ENDED:
            return Judgement(Outcome.RIGHT, first.rule)
        return Judgement(Outcome.FALSE_ALARM, first.rule, first.verdict)
    if report.get("is_stalled") and moment is Moment.ENDED:
        return Judgement(Outcome.FALSE_ALARM, "stalled", str(report.get("headline")))
    if not report:
        return Judgement(Outcome.ABSTAINED, why="no answer")
    if report.get("ok") is False:
        return Judgement(Outcome.FALSE_ALARM, "not the same", str(report.get("headline")))
    return Judgement(Outcome.RIGHT)


def _of_fault(case: Case, fault: Fault) -> Judgement:
    causes, said = set(RULES.get(fault.rule, ())), fault.rule
    is_cause = bool(causes & set(case.causes))
    if case.culprits and fault.accused not in case.culprits:
        return _of_other_ranks(case, fault, causes, is_cause=is_cause)
    if not is_cause:
        misleads = not case.culprits or not causes or causes & set(case.wrong)
        return Judgement(Outcome.WRONG if misleads else Outcome.PARTLY, said, "another cause")
    missing = [word for word in case.words if _plain(word) not in _plain(fault.text)]
    if case.line and not any(_names_line(fault.text, case, line) for line in case.lines):
        missing.append("line " + " or ".join(map(str, case.lines)))
    return (
        Judgement(Outcome.PARTLY, said, f"without {', '.join(missing)}") if missing else Judgement(Outcome.RIGHT, said)
    )


def _of_other_ranks(case: Case, fault: Fault, causes: set[Cause], *, is_cause: bool) -> Judgement:
    """Judge a fault that does not name the culprits, and no other ranks."""
    said, accused = fault.rule, fault.accused
    if any(cause in causes and accused == ranks for cause, ranks in case.nearly):
        return Judgement(Outcome.PARTLY, said, "true, and not the cause")
    if case.ends and causes & set(ABORTED):
        return Judgement(Outcome.PARTLY, said, f"{case.ends}; why is not said")
    if accused and not any(accused > ranks for ranks in case.culprits):
        return Judgement(Outcome.WRONG_CULPRIT, said, f"accuses {sorted(accused)}")
    return Judgement(Outcome.PARTLY if is_cause else Outcome.WRONG, said, "names victims too" if accused else "no rank")


def _plain(text: str) -> str:
    """Return a text without case, dashes and spaces: ``all_gather`` is ``all-gather``."""
    return re.sub(r"[-_ ]", "", text.lower())


def _names_line(text: str, case: Case, line: int) -> bool:
    file = re.escape(case.script.name)
    return re.search(rf"{file}:{line}\b|\bline {line} of {file}", text) is not None
