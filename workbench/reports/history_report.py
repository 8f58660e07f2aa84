"""The commands of a notebook, as the report of ``history``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from workbench.base.text_formats import plural
from workbench.reports.report import Report

Source = Literal["cell", "panel", "tool"]


@dataclass(frozen=True, kw_only=True)
class PastCommand:
    """A command that was asked for in this notebook.

    Attributes:
        line: what was typed, or could have been.
        source: who asked.
        t_s: when, in seconds since 1970.
        failed: whether it was refused or raised.
    """

    line: str
    source: Source
    t_s: float
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class HistoryReport(Report):
    """The commands of a notebook.

    Attributes:
        commands: the oldest first.
    """

    commands: tuple[PastCommand, ...]

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return plural(len(self.commands), "command") if self.commands else "no commands yet; see %fsdp help for a list"

    def facts(self) -> list[tuple[str, str]]:
        """Return each with the time of day, its source unless that was a cell, and whether it failed."""
        return [(_when(past), past.line) for past in self.commands]


def _when(past: PastCommand) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(past.t_s))
    return " ".join([moment, *([] if past.source == "cell" else [past.source]), *(["failed"] if past.failed else [])])
