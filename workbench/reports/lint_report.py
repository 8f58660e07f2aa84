"""The report of ``lint``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.protocol.lint_reply import LintReply
from workbench.reports.fault_report import FaultReport
from workbench.reports.lint_faults import abstained, lint_faults, num_decided


@dataclass(frozen=True, kw_only=True)
class LintReport(FaultReport):
    """Sharded models were checked without running them; attributes as in :class:`FaultReport`, and one more.

    Attributes:
        models: variables of the models.
    """

    models: tuple[str, ...]

    @property
    def headline(self) -> str:
        """The most important verdict, or that there is none in these models."""
        return super().headline if self.faults else f"{', '.join(self.models)}: {super().headline}"


def lint_report(by_rank: Sequence[LintReply]) -> LintReport:
    """Return the report of the checks of all ranks."""
    return LintReport(
        models=by_rank[0].models,
        faults=lint_faults(by_rank),
        num_checks=num_decided(by_rank),
        abstained=abstained(by_rank),
    )
