"""The limit of a reply: a document that is too large loses the ends of its long lists and the middles of its texts."""

from __future__ import annotations

from typing import Any

from workbench.base.text_formats import plural
from workbench.reports.json_document import to_line

MAX_CHARS = 40_000
"""Most characters of a document in a reply."""

MAX_NOTES = 10
"""Most notices about what was left out."""

_ITEMS = (400, 100, 30, 10, 3)
"""Items of each list that stay: the first of these numbers with which the document is small enough."""

_CHARS = 40
"""Characters of each text that stay, for each item of a list that stays."""

_MEMBERS = 64
"""Most members of an object of a report that is not a table by rank or by name."""


def limited(document: dict[str, Any], max_chars: int = MAX_CHARS) -> dict[str, Any]:
    """Return a document in at most ``max_chars`` characters; its notices say what was left out.

    Example: ``report.ranks: 10 of 512 items`` is the notice for the ends of a list.
    """
    if len(to_line(document)) <= max_chars:
        return document
    for most in _ITEMS:
        notes: list[str] = []
        found = {**document, **{name: _cut(document[name], name, most, notes) for name in ("report", "error")}}
        more = [f"and {plural(len(notes) - MAX_NOTES, 'other part')}"] * (len(notes) > MAX_NOTES)
        left_out = f"Too long for one reply; of these only a part is here: {'; '.join(notes[:MAX_NOTES] + more)}"
        found["notices"] = [*(_text(each, _CHARS * most, "", []) for each in document["notices"][:most]), left_out]
        if len(to_line(found)) <= max_chars:
            return found
    left_out = f"Too long for a reply, {len(to_line(document)):,} characters: ask for one step, unit or rank"
    return {**found, "type": None, "report": None, "notices": [left_out]}


def _cut(value: Any, where: str, most: int, notes: list[str]) -> Any:  # noqa: ANN401 - JSON data
    """Return ``value`` with at most ``most`` items of each list or table in it."""
    if isinstance(value, str):
        return _text(value, _CHARS * most, where, notes)
    if isinstance(value, list):
        if len(value) > most:
            notes.append(f"{where}: {most} of {len(value)} items")
        return [_cut(each, where, most, notes) for each in value[:most]]
    if isinstance(value, dict):
        if len(value) > max(most, _MEMBERS):
            notes.append(f"{where}: {most} of {len(value)} members")
            value = dict(list(value.items())[:most])
        return {name: _cut(each, f"{where}.{name}", most, notes) for name, each in value.items()}
    return value


def _text(text: str, most: int, where: str, notes: list[str]) -> str:
    """Return ``text`` without its middle if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    notes.append(f"{where}: {most} of {len(text)} characters")
    return f"{text[: most // 2]} ... {text[len(text) - most // 2 :]}"
