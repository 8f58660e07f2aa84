"""A finding of a check: whether what was expected of a run is so, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

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
        answer: the right answer, which the sentence does not have; shown to a teacher only.
        measured: name and value of the number that was compared with a limit, such as ``("peak", 1536.0)``; it ranks
            solutions on a leader board, where fewer is better. None: there is none.
    """

    ok: bool
    sentence: str
    answer: str = ""
    measured: tuple[str, float] | None = None

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


def whole_number(value: object) -> int | None:
    """Return an answer as a whole number; None if it is none, such as a text or a fraction."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        return None
    number = float(value)
    return int(number) if math.isfinite(number) and number.is_integer() else None


def not_an_answer(value: object, what: str, example: str) -> CheckFinding:
    """Return the finding that a value is no answer, and what one looks like: ``"a whole number, such as 12"``."""
    if value is None or value is ... or (isinstance(value, str | Mapping) and not value):
        return fails(f"{what}: there is no answer yet", f"write {example}")
    return fails(f"{what}: {short(value)} is a {type(value).__name__}", f"write {example}")


def short(value: object) -> str:
    """Return a value as text of at most 60 characters."""
    text = repr(value) if not isinstance(value, float) else f"{value:.7g}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def unit_list(header: Header, units: Iterable[int]) -> str:
    """Return the names of units as text, with numbers joined and the root last: ``"blocks.0-3 and (root)"``."""
    names = {header.units[unit].name for unit in units if unit < len(header.units)}
    groups = by_value((name, pattern(name)) for name in sorted(names - {""}, key=by_number))
    return and_list([*map(join_names, groups.values()), *([unit_words("")] if "" in names else [])])


def and_list(texts: Sequence[str]) -> str:
    """Return texts as a list in a sentence: ``"a, b and c"``."""
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1]))) if texts else ""
