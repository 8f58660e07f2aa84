"""The reports of ``save``, ``load`` and ``snapshot``, and what ``verify --resume`` makes of a checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.base.text_formats import format_bytes, format_duration, plural
from workbench.protocol.checkpoint_replies import LoadReply, SaveReply
from workbench.protocol.commands import SnapshotReply
from workbench.replay.grouping import notes_of
from workbench.reports.report import Report


@dataclass(frozen=True, kw_only=True)
class SaveReport(SaveReply, Report):
    """A checkpoint is whole.

    Attributes:
        num_bytes: bytes of its files, all ranks together.
        blocked_s: time in seconds that training waited for it, on the rank that waited longest.
    """

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
            ("next", self._next()),
        ]

    def _next(self) -> str:
        load, first = f"%fsdp load {shlex.quote(self.folder)}", self.models[:1]
        if not first:
            return load
        name = f" {first[0]}" if len(self.models) > 1 or "." in first[0] else ""
        return f"%fsdp verify{name} --resume {shlex.quote(self.folder)}, or {load}"


@dataclass(frozen=True, kw_only=True)
class LoadReport(LoadReply, Report):
    """A checkpoint was loaded."""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        after = "of an unknown step" if self.step is None else f"after {plural(self.step, 'step')}"
        return f"loaded {self.folder}: {', '.join(self.variables)}, {after}"

    def facts(self) -> list[tuple[str, str]]:
        """Return how many ranks saved it, and what stays as it is."""
        return [("saved by", plural(self.saved_ranks, "rank")), *(("note", note) for note in self.notes)]


def saved_report(by_rank: Sequence[SaveReply]) -> SaveReport:
    """Return the report of one checkpoint."""
    of_all = {
        "num_bytes": sum(saved.num_bytes for saved in by_rank),
        "blocked_s": max(saved.blocked_s for saved in by_rank),
        "notes": notes_of([saved.notes for saved in by_rank]),
    }
    return SaveReport(**{**vars(by_rank[0]), **of_all})


def loaded_report(by_rank: Sequence[LoadReply]) -> LoadReport:
    """Return the report of one loaded checkpoint."""
    return LoadReport(**{**vars(by_rank[0]), "notes": notes_of([loaded.notes for loaded in by_rank])})


@dataclass(frozen=True, kw_only=True)
class SnapshotReport(SnapshotReply, Report):
    """A snapshot was taken.

    Attributes:
        num_bytes: bytes of the largest state of a rank.
        kept_bytes: the largest number of bytes of snapshots that a rank keeps.
        seconds: how long it took.
        left_out: what has a state that is not part of it, on any rank.
    """

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return (
            f"snapshot taken in {self.seconds:.2f} s: each rank keeps its state, {format_bytes(self.num_bytes)}, and "
            f"that of the rank before; {format_bytes(self.kept_bytes)} in all"
        )

    def facts(self) -> list[tuple[str, str]]:
        """Return what is not part of it."""
        return [("left out", ", ".join(self.left_out))] if self.left_out else []


def snapshot_report(by_rank: Sequence[SnapshotReply]) -> SnapshotReport:
    """Return the report of one snapshot of all ranks."""
    return SnapshotReport(**{name: max(vars(each)[name] for each in by_rank) for name in vars(by_rank[0])})
