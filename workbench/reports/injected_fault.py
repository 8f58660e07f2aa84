"""The reports of ``fault`` and ``faults``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.base.text_formats import plural
from workbench.protocol.fault_kinds import KINDS, RANDOM, FaultKind, FaultReply
from workbench.reports.report import Report

_TIMED_STEPS = max(kind.steps for kind in KINDS.values() if kind.shown_by.startswith("explain"))


@dataclass(frozen=True, kw_only=True)
class InjectReport(Report):
    """A fault was injected, or removed.

    Attributes:
        name: its name; ``random`` while it is hidden.
        is_on: whether it was injected.
        words: what it does, as text; empty while it is hidden.
        rank: the rank that has it; None while it is hidden.
        unit: the unit that has it; None while it is hidden.
        notes: what its removal restored, and what it could not, a sentence each.
    """

    name: str
    is_on: bool
    words: str = ""
    rank: int | None = None
    unit: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The injected fault, or the one just removed."""
        if not self.words:
            return "a fault is on: find out which one"
        return f"fault {self.name} is {'on' if self.is_on else 'off; it was'}: {self.words}"

    def facts(self) -> list[tuple[str, str]]:
        """Return what to type next, and the notes."""
        if not self.is_on:
            return [("note", note) for note in self.notes]
        named = (
            f"%fsdp lint, verify, where and, after %fsdp step {_TIMED_STEPS}, explain step"
            if not self.words
            else instrument_words(KINDS[self.name])
        )
        solution = ", which also names it" if not self.words else ""
        return [("named by", named), ("remove it", f"%fsdp fault off{solution}")]


def instrument_words(kind: FaultKind) -> str:
    """Return what to type so that a fault is named, as text."""
    if not kind.shown_by.startswith("the "):
        line = f"%fsdp {kind.shown_by}"
        if kind.shown_by == "where":
            return f"{line}, after %fsdp step --background"
        return f"{line}, after %fsdp step {kind.steps}" if kind.steps else line
    return f"{kind.shown_by} of %fsdp step"


def inject_report(by_rank: Sequence[FaultReply]) -> InjectReport:
    """Return the report of one fault."""
    first = by_rank[0]
    if first.is_hidden and first.is_on:
        return InjectReport(name=RANDOM, is_on=True)
    return InjectReport(
        name=first.name, is_on=first.is_on, words=first.words, rank=first.rank, unit=first.unit, notes=first.notes
    )


@dataclass(frozen=True, kw_only=True)
class FaultListReport(Report):
    """The faults that can be injected.

    Attributes:
        kinds: the faults.
    """

    kinds: tuple[FaultKind, ...] = tuple(KINDS.values())

    @property
    def headline(self) -> str:
        """How many there are, and how one is injected."""
        return f"{plural(len(self.kinds), 'fault')}: inject one with %fsdp fault NAME, or with %fsdp fault random"

    def facts(self) -> list[tuple[str, str]]:
        """Return each with what it does and what names it."""
        return [(kind.name, f"{kind.summary}; named by {instrument_words(kind)}") for kind in self.kinds]
