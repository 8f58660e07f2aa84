"""A table of texts, for a terminal and for a notebook. Pure."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH = 120
"""Characters of a line in a terminal; wider tables are split into parts one below the other."""

_CELL = "padding:2px 8px;white-space:nowrap"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of texts under a head; the first columns hold row labels.

    Attributes:
        head: a text per column.
        rows: texts, as many as in ``head``.
        num_labels: number of label columns.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_labels: int = 1

    def lines(self) -> list[str]:
        """Return the table as aligned text; columns beyond :data:`WIDTH` follow below, with the labels repeated."""
        every = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        return [
            "  ".join(texts[place].ljust(widths[place]) for place in places).rstrip()
            for places in self._parts(widths)
            for texts in every
        ]

    def _parts(self, widths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the column indices of each part of the table."""
        labels = list(range(self.num_labels))
        used = sum(widths[: self.num_labels]) + 2 * self.num_labels
        part, room = list(labels), WIDTH - used
        for place in range(self.num_labels, len(widths)):
            if len(part) > self.num_labels and room < widths[place]:
                yield part
                part, room = list(labels), WIDTH - used
            part.append(place)
            room -= widths[place] + 2
        yield part

    def html(self) -> str:
        """Return the table as HTML, with all texts escaped; a wide table scrolls."""
        head = "".join(f'<th style="text-align:left;{_CELL}">{html.escape(text)}</th>' for text in self.head)
        body = "".join(f"<tr>{self._html_row(row)}</tr>" for row in self.rows)
        return f'<div style="overflow-x:auto"><table style="margin:4px 0 0 0"><tr>{head}</tr>{body}</table></div>'

    def _html_row(self, row: Sequence[str]) -> str:
        muted = "color:var(--jp-ui-font-color2, #757575);"
        return "".join(
            f'<td style="text-align:left;{muted if place < self.num_labels else ""}{_CELL}">{html.escape(text)}</td>'
            for place, text in enumerate(row)
        )
