"""Reports that say what is wrong, the most important fault first."""

from __future__ import annotations

import html
from dataclasses import dataclass

from workbench.fault import Fault, facts_of
from workbench.reports.results import Report
from workbench.text_formats import plural


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


def cause_lines(cause: Fault | None) -> list[str]:
    """Return lines about the fault that explains what a report says; none without one."""
    return [] if cause is None else [f"fault: {cause.verdict}", *map(": ".join, cause.facts())]


def cause_html(cause: Fault | None) -> str:
    """Return :func:`cause_lines` as HTML, each after a line break."""
    return "".join(f"<br>{html.escape(line)}" for line in cause_lines(cause))
