"""The reports of ``save`` and ``load``, and what ``verify --resume`` makes of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.base.text_formats import format_bytes, format_duration, plural
from workbench.protocol.checkpoint_replies import LoadReply, SaveReply
from workbench.protocol.commands import Load, Save
from workbench.reports.report import Report
from workbench.reports.results import says


@dataclass(frozen=True, kw_only=True)
class SaveReport(Report):
    """A checkpoint is whole.

    Attributes:
        folder: its folder.
        step: number of steps that led to it.
        num_bytes: bytes of its files, all ranks together.
        blocked_s: time in seconds that training waited for it, on the rank that waited longest.
        variables: the variables that are in it.
        notes: what is not in it, a sentence each.
    """

    folder: str
    step: int
    num_bytes: int
    blocked_s: float
    variables: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return f"saved {self.folder}: {format_bytes(self.num_bytes)}, after {plural(self.step, 'step')}"

    def facts(self) -> list[tuple[str, str]]:
        """Return what is in it, how long training waited, and what to type next."""
        return [
            ("holds", f"{', '.join(self.variables)}; random numbers of each rank"),
            ("waited", format_duration(self.blocked_s * 1e9)),
            *(("note", note) for note in self.notes),
            ("next", f"%fsdp verify --resume {self.folder}, or %fsdp load {self.folder}"),
        ]


@dataclass(frozen=True, kw_only=True)
class LoadReport(Report):
    """A checkpoint was loaded.

    Attributes:
        folder: its folder.
        step: number of steps that led to it.
        saved_ranks: number of ranks that saved it.
        variables: the variables that have its state now.
        notes: what stays as it is, a sentence each.
    """

    folder: str
    step: int
    saved_ranks: int
    variables: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return f"loaded {self.folder}: {', '.join(self.variables)}, after {plural(self.step, 'step')}"

    def facts(self) -> list[tuple[str, str]]:
        """Return how many ranks saved it, and what stays as it is."""
        return [("saved by", plural(self.saved_ranks, "rank")), *(("note", note) for note in self.notes)]


def saved_report(by_rank: Sequence[SaveReply]) -> SaveReport:
    """Return the report of one checkpoint."""
    first = by_rank[0]
    return SaveReport(
        folder=first.folder,
        step=first.step,
        num_bytes=sum(saved.num_bytes for saved in by_rank),
        blocked_s=max(saved.blocked_s for saved in by_rank),
        variables=first.variables,
        notes=tuple(dict.fromkeys(note for saved in by_rank for note in saved.notes)),
    )


says(Save)(saved_report)


@says(Load)
def _load(by_rank: Sequence[LoadReply]) -> LoadReport:
    first = by_rank[0]
    notes = dict.fromkeys(note for loaded in by_rank for note in loaded.notes)
    return LoadReport(**{**vars(first), "notes": tuple(notes)})
