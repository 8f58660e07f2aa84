"""The reports of ``export`` and ``open``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.base.text_formats import format_bytes, plural
from workbench.replay.grouping import ranges
from workbench.reports.report import Report
from workbench.reports.status_report import ModelStatus


@dataclass(frozen=True, kw_only=True)
class ExportReport(Report):
    """A file was written.

    Attributes:
        path: its path.
        what: its content, as text.
        num_bytes: its size.
        notes: how a script differs from what the ranks did, as sentences.
    """

    path: Path
    what: str
    num_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return f"wrote {self.path} ({format_bytes(self.num_bytes)}): {self.what}"

    def facts(self) -> list[tuple[str, str]]:
        """Return how a script differs from what the ranks did."""
        return [("note", note) for note in self.notes]


@dataclass(frozen=True, kw_only=True)
class OpenReport(Report):
    """A trace file is shown.

    Attributes:
        name: of the file.
        num_ranks: ranks that recorded anything.
        steps: numbers of the training steps in it.
        models: the sharded models.
        num_rows: rows, all ranks together.
        notes: what a recording lacks, as sentences.
        is_live: whether the run that is recorded still writes.
    """

    name: str
    num_ranks: int
    steps: tuple[int, ...]
    models: tuple[ModelStatus, ...]
    num_rows: int
    notes: tuple[str, ...] = ()
    is_live: bool = False

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        ranks, events = plural(self.num_ranks, "rank"), plural(self.num_rows, "event")
        return f"opened {self.name}: {ranks}, {plural(len(self.steps), 'step')}, {events}; no ranks needed"

    def facts(self) -> list[tuple[str, str]]:
        """Return the steps, the sharded models, and the commands that draw the trace."""
        from workbench.views import VIEWS  # noqa: PLC0415 - they load plotly

        found = [("run", "continues; views and the dashboard follow it")] if self.is_live else []
        found += [("steps", ranges(self.steps))] if self.steps else []
        found += [("sharded", str(model)) for model in self.models] or [("sharded", "nothing")]
        found += [("note", note) for note in self.notes]
        return [*found, ("now", f"%fsdp explain, %fsdp dashboard, or a view: {', '.join(VIEWS)}")]
