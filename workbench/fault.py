"""A fault of a model or a run: the verdict, what shows it, and what to type against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. All texts are plain, without a full stop at the end.

    Attributes:
        rule: name of the check that found it, such as ``optimizer-before-shard``; scripts rely on it.
        verdict: what is wrong, in one sentence.
        evidence: what shows it, a phrase each: rank, unit, parameter, bytes, milliseconds.
        fix: what to type: a line of code or an ``%fsdp`` line; empty if nothing that is typed helps.
    """

    rule: str
    verdict: str
    evidence: tuple[str, ...] = ()
    fix: str = ""

    def facts(self) -> list[tuple[str, str]]:
        """Return the evidence and the fix as (name, text), in display order."""
        return [*(("evidence", text) for text in self.evidence), *([("fix", self.fix)] if self.fix else [])]


def facts_of(faults: Sequence[Fault]) -> list[tuple[str, str]]:
    """Return evidence and fix of each fault as (name, text), in display order; the first verdict is the headline's."""
    found: list[tuple[str, str]] = []
    for place, fault in enumerate(faults):
        found += [*([("also", fault.verdict)] if place else []), *fault.facts()]
    return found
