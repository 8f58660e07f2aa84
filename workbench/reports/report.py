"""The base of all reports: small frozen results that print as sentences and display as a small table.

All texts are escaped when they become HTML.
"""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from workbench.base.text_formats import ERROR_TEXT

_MUTED = "color:var(--jp-ui-font-color2, #757575)"


def next_facts(line: str) -> list[tuple[str, str]]:
    """Return the fact that says what to type next."""
    return [("next", line)] if line else []


class Report(ABC):
    """Base of all reports: a headline, and facts as (name, value) pairs. All plain text.

    Attributes:
        computed: properties that its JSON object has in addition to its fields.
        internal: fields that its JSON object does not have.
    """

    computed: ClassVar[tuple[str, ...]] = ("headline", "problem")
    internal: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def headline(self) -> str:
        """The result in one sentence."""

    @property
    def problem(self) -> str:
        """The part of the headline that describes a failure, shown as an error; empty if there is none."""
        return ""

    def facts(self) -> list[tuple[str, str]]:
        """Return further facts as (name, value), in display order."""
        return []

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.facts()), default=0)
        return "\n".join([self.headline, *(f"  {name:<{width}}  {value}" for name, value in self.facts())])

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        return self.as_html()

    def as_html(self, text: Callable[[str], str] = html.escape) -> str:
        """Return the report as HTML; ``text`` returns the value of a fact as HTML."""
        rows = "".join(
            f'<tr><td style="text-align:left;white-space:nowrap;{_MUTED}">{html.escape(name)}</td>'
            f'<td style="text-align:left;overflow-wrap:anywhere">{text(value)}</td></tr>'
            for name, value in self.facts()
        )
        table = f'<table style="margin:4px 0 0 0">{rows}</table>' if rows else ""
        first, *others = self._headline_lines()
        return f"<div><strong>{first}</strong>{''.join(f'<br>{line}' for line in others)}{table}</div>"

    def _headline_lines(self) -> list[str]:
        """Return the lines of the headline as HTML, with the problem in the colour of errors."""
        headline = html.escape(self.headline)
        for line in filter(None, html.escape(self.problem).split("\n")):
            headline = headline.replace(line, f'<span style="color:{ERROR_TEXT}">{line}</span>', 1)
        return headline.split("\n")
