"""A leader board: the results of ``workbench grade --json`` in a folder, as one page without scripts."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.text_formats import format_bytes
from workbench.errors import UsageError

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin-bottom: 2rem }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8884 }
th:nth-child(2), td:nth-child(2) { text-align: left; overflow-wrap: anywhere }
tr.first { font-weight: 600 }
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One check in one result.

    Attributes:
        who: the file of the result, relative to the folder, without its ending.
        check: name of the check.
        score: points that it got.
        points: points that it is worth.
        measured: numbers by name; the fewer, the better.
    """

    who: str
    check: str
    score: float
    points: float
    measured: Mapping[str, float]

    @property
    def rank_key(self) -> tuple[float, float]:
        """Sorts the better first: by score, then by the product of the numbers."""
        numbers = self.measured.values()
        return -self.score, math.prod(numbers) if self.measured else math.inf


def read_results(folder: Path) -> tuple[list[Entry], list[str]]:
    """Return the checks in all results in a folder and below, and the names of files that are no results.

    Raises:
        UsageError: there is no result.
    """
    entries: list[Entry] = []
    others = []
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).as_posix()
        found = _entries(path, name.removesuffix(".json").removesuffix(".ipynb"))
        entries += found
        if not found:
            others.append(name)
    if not entries:
        raise UsageError(
            f"{folder} has no results: write some first, such as: workbench grade ann.ipynb --json {folder}/ann.json"
        )
    return entries, others


def _entries(path: Path, who: str) -> list[Entry]:
    try:
        checks = json.loads(path.read_text("utf-8"))["report"]["checks"]
        return [
            Entry(
                who=who,
                check=str(each["name"]),
                score=_number(each["score"]),
                points=_number(each["points"]),
                measured={str(name): _number(number) for name, number in each.get("measured", {}).items()},
            )
            for each in checks
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def _number(value: object) -> float:
    """Return a number of a result.

    Raises:
        ValueError: it is none, or is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def to_page(entries: Sequence[Entry]) -> str:
    """Return the board as HTML: a table for each check that measures something, and one of the sums of points."""
    measuring = dict.fromkeys(entry.check for entry in entries if entry.measured)
    tables = [_table(check, [entry for entry in entries if entry.check == check]) for check in measuring]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Leader board</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>Leader board</h1>{''.join([*tables, _table('All checks', _sums(entries))])}"
        "<p>More points come first. With the same points, the smaller product of the measured numbers does.</p>"
        "</body></html>"
    )


def _sums(entries: Sequence[Entry]) -> list[Entry]:
    """Return an entry with the sum of the points for each result."""
    of = {who: [entry for entry in entries if entry.who == who] for who in dict.fromkeys(each.who for each in entries)}
    return [
        Entry(
            who=who,
            check="",
            score=sum(entry.score for entry in own),
            points=sum(entry.points for entry in own),
            measured={},
        )
        for who, own in of.items()
    ]


def _table(title: str, entries: Sequence[Entry]) -> str:
    names = list(dict.fromkeys(name for entry in entries for name in entry.measured))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", "who", "points", *names))
    rows = "".join(_rows(entries, names))
    return f"<h2>{html.escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _rows(entries: Sequence[Entry], names: Sequence[str]) -> Iterator[str]:
    ordered = sorted(entries, key=lambda entry: entry.rank_key)
    for entry in ordered:
        place = 1 + sum(other.rank_key < entry.rank_key for other in ordered)  # equal ones share it
        numbers = [format_bytes(entry.measured[name]) if name in entry.measured else "-" for name in names]
        cells = [str(place), entry.who, f"{entry.score:g} of {entry.points:g}", *numbers]
        row = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        mark = ' class="first"' if place == 1 else ""
        yield f"<tr{mark}>{row}</tr>"
