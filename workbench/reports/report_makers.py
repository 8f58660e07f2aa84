"""Which function makes the report of a command from the replies of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workbench.protocol import commands
from workbench.reports import checkpoint_reports, injected_fault, sharding_reports, step_reports
from workbench.reports.lint_report import lint_report
from workbench.reports.report import Report
from workbench.reports.verify_report import verify_report

ReportMaker = Callable[[Sequence[Any]], Report]
"""Makes a report from the replies of all ranks, in rank order."""

REPORT_MAKERS: dict[type[commands.Command], ReportMaker] = {
    commands.InjectFault: injected_fault.inject_report,
    commands.Lint: lint_report,
    commands.Load: checkpoint_reports.loaded_report,
    commands.Reshard: sharding_reports.reshard_report,
    commands.Run: step_reports.run_report,
    commands.Save: checkpoint_reports.saved_report,
    commands.Shard: sharding_reports.shard_report,
    commands.Snapshot: checkpoint_reports.snapshot_report,
    commands.Step: step_reports.step_report,
    commands.Unshard: sharding_reports.unshard_report,
    commands.Verify: verify_report,
}
