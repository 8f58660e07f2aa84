"""Reports that say what is wrong, the most important fault first."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.base.fault import Fault, facts_of
from workbench.base.text_formats import plural
from workbench.reports.report import Report


@dataclass(frozen=True, kw_only=True)
class FaultReport(Report):
    """The faults that some checks found.

    Attributes:
        faults: the faults, the most important first.
        num_checks: checks that could decide.
        abstained: why other checks could not decide, naming the missing signal, a sentence each.
    """

    faults: tuple[Fault, ...] = ()
    num_checks: int
    abstained: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The most important verdict, or that there is none."""
        if not self.faults:
            return f"no faults found by {plural(self.num_checks, 'check')}"
        first, *others = self.faults
        return f"{first.verdict} (and {plural(len(others), 'further fault')})" if others else first.verdict

    @property
    def problem(self) -> str:
        """The headline, if there is a fault."""
        return self.headline if self.faults else ""

    def facts(self) -> list[tuple[str, str]]:
        """Return evidence and fix of each fault, and which checks could not decide."""
        return [*facts_of(self.faults), *(("not checked", reason) for reason in self.abstained)]


def cause_facts(cause: Fault | None) -> list[tuple[str, str]]:
    """Return the fault that explains what a report says, as facts; none without one."""
    return [] if cause is None else [("fault", cause.verdict), *cause.facts()]


def cause_lines(cause: Fault | None, instead_of: str | None = None) -> list[str]:
    """Return lines about the fault that explains what a report says; none without one.

    Args:
        cause: the fault.
        instead_of: what the ranks do, in words, if the verdict is the headline in its place; None: it is not.
    """
    if cause is None:
        return []
    if instead_of is None:
        return [*map(": ".join, cause_facts(cause))]
    return [*map(": ".join, cause.facts()), *([f"ranks: {instead_of}"] if instead_of else [])]


def cause_html(lines: Sequence[str]) -> str:
    """Return lines of :func:`cause_lines` as HTML, each after a line break."""
    return "".join(f"<br>{html.escape(line)}" for line in lines)
