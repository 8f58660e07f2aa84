"""A finding of a check: whether what was expected of a run is so, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.events import unit_words
from workbench.replay.grouping import by_value, join_names, pattern
from workbench.replay.units import by_number
from workbench.trace.schema import Header


@dataclass(frozen=True, kw_only=True)
class CheckFinding:
    """One finding.

    Attributes:
        ok: whether it is as expected.
        sentence: what was found; if not ``ok``, also what was expected and the usual reason. Plain text without a full
            stop at the end.
    """

    ok: bool
    sentence: str

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'FAILED'}: {self.sentence}"


def fails(sentence: str, *reasons: str) -> CheckFinding:
    """Return a finding that something is wrong: what was found, then the reasons that are not empty."""
    return CheckFinding(ok=False, sentence=": ".join(filter(None, (sentence, "; ".join(filter(None, reasons))))))


def holds(sentence: str) -> CheckFinding:
    """Return a finding that something is as expected."""
    return CheckFinding(ok=True, sentence=sentence)


def unit_list(header: Header, units: Iterable[int]) -> str:
    """Return the names of units as text, with numbers joined and the root last: ``"blocks.0-3 and (root)"``."""
    names = {header.units[unit].name for unit in units if unit < len(header.units)}
    groups = by_value((name, pattern(name)) for name in sorted(names - {""}, key=by_number))
    return and_list([*map(join_names, groups.values()), *([unit_words("")] if "" in names else [])])


def and_list(texts: Sequence[str]) -> str:
    """Return texts as a list in a sentence: ``"a, b and c"``."""
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1]))) if texts else ""
