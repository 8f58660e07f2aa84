"""``check``: show the findings of an exercise, keep them in the notebook, and fail if one of them fails."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from workbench.base.text_formats import plural
from workbench.course.finding import CheckFinding
from workbench.course.notebook_output import find_workbench, publish
from workbench.errors import UsageError, WorkbenchError
from workbench.reports.report import Report

CHECK_MIME = "application/vnd.fsdp-workbench.check+json"
"""Type of the record of a check in an output of a notebook."""

REVEAL = "WORKBENCH_REVEAL"
"""Environment variable of a teacher: findings that failed have the right answer."""

RECORD_VERSION = 1
"""Version of the records of checks and predictions."""


class CheckFailed(WorkbenchError, AssertionError):
    """A check of an exercise failed; the message has the sentence of each finding that failed."""


@dataclass(frozen=True, kw_only=True)
class CheckReport(Report):
    """The findings of a check.

    Attributes:
        name: of the check.
        points: what it is worth.
        findings: in the order in which they were given; at least one.
        parts: those of the findings that are worth an equal part of the points each, once all others are as expected;
            empty: the points are for all findings together.
    """

    internal = ("parts",)

    name: str
    points: float
    findings: tuple[CheckFinding, ...]
    parts: tuple[CheckFinding, ...] = ()

    @property
    def failed(self) -> tuple[CheckFinding, ...]:
        """The findings that failed, each once."""
        return tuple(dict.fromkeys(finding for finding in self.findings if not finding.ok))

    @property
    def score(self) -> float:
        """The points that it gets."""
        if not self.failed:
            return self.points
        if set(self.failed) - set(self.parts):
            return 0
        return self.points * sum(finding.ok for finding in self.parts) / len(self.parts)

    @property
    def headline(self) -> str:
        """Whether it passed, in one sentence."""
        if not self.failed:
            return f"passed: {self.name}"
        part = f", {self.score:g} of {self.points:g} points" if self.parts else ""
        return f"FAILED: {self.name} ({len(self.failed)} of {plural(len(self.findings), 'finding')}{part})"

    @property
    def problem(self) -> str:
        """The headline, if it failed."""
        return self.headline if self.failed else ""

    def facts(self) -> list[tuple[str, str]]:
        """Return the findings, those that failed first."""
        passed = [finding for finding in self.findings if finding.ok]
        return [*(("wrong", _words(each)) for each in self.failed), *(("ok", each.sentence) for each in passed)]

    def record(self) -> dict[str, Any]:
        """Return the record that the notebook keeps, as data that JSON can hold."""
        return {
            "version": RECORD_VERSION,
            "name": self.name,
            "points": self.points,
            "passed": not self.failed,
            "findings": [{"ok": each.ok, "sentence": _words(each)} for each in self.findings],
            **self._partial(),
        }

    def _partial(self) -> dict[str, Any]:
        """Return what the record has in addition for a check in parts."""
        if not self.parts:
            return {}
        return {"score": self.score, "measured": dict(each.measured for each in self.parts if each.measured)}


def check(
    name: str,
    *findings: CheckFinding | Iterable[CheckFinding],
    points: float = 1,
    parts: Iterable[CheckFinding] = (),
) -> None:
    """Show whether an exercise is solved, and keep the result in the output of the cell.

    Args:
        name: of the check, unique in the notebook; ``workbench grade`` lists it.
        findings: made by the functions of this package, or iterables of them.
        points: what the check is worth.
        parts: more findings, for partial credit: if all ``findings`` are as expected, each of these that is so too gets
            an equal part of the points. The numbers that they measured rank solutions on a leader board.

    Raises:
        CheckFailed: a finding failed. In a notebook the output above the error has the sentences.
        UsageError: there is no name or no finding, something else than a finding was given, or a prediction that names
            ``check`` is open.
    """
    workbench = find_workbench()
    if workbench is not None and (why := workbench.open_question("check")):
        raise UsageError(why)
    in_parts = tuple(_flat([parts]))
    every = (*_flat(findings), *in_parts)
    if not name or not isinstance(name, str):
        raise UsageError('a check needs a name: check("gathers", counts(trace, {"all_gather": 9}))')
    if not every:
        raise UsageError(f"check {name!r} has no finding, so it checks nothing: add one, such as counts(trace, ...)")
    report = CheckReport(name=name, points=points, findings=every, parts=in_parts)
    publish(report, {CHECK_MIME: report.record()})
    if report.failed:
        raise CheckFailed("\n".join([report.headline, *(f"- {_words(finding)}" for finding in report.failed)]))


def _words(finding: CheckFinding) -> str:
    """Return the sentence of a finding, for a teacher with the right answer."""
    is_shown = finding.answer and os.environ.get(REVEAL)
    return f"{finding.sentence}; the answer: {finding.answer}" if is_shown else finding.sentence


def _flat(given: Iterable[object]) -> Iterator[CheckFinding]:
    for each in given:
        if isinstance(each, CheckFinding):
            yield each
        elif isinstance(each, Iterable) and not isinstance(each, str):
            yield from _flat(each)
        else:
            raise UsageError(
                f"check takes findings, such as counts(trace, ...), not {type(each).__name__} {str(each)[:80]}"
            )
