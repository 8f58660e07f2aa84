"""A line below a silent cell about the ranks that still run it, updated in place.

In a notebook it is a display of its own. On a terminal it is the last line, cleared before the cell writes; elsewhere
it is written once.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TypeVar

from workbench.widgets.progress import InPlaceDisplay, in_notebook

_T = TypeVar("_T")
_STYLE = "color:var(--jp-ui-font-color2, #757575);font-family:var(--jp-ui-font-family, sans-serif);font-size:13px"


class StallLine(InPlaceDisplay):
    """The line of one cell, shown from the first sentence on."""

    _is_written = False

    def update(self, sentence: str) -> None:
        """Show ``sentence``, plain text, instead of the last one; ``""`` clears the line."""
        if sentence == self._shown:
            return
        self._shown = sentence
        page = f'<div role="status" style="{_STYLE}">{html.escape(sentence)}</div>' if sentence else ""
        self._publish(page, sentence)
        if sentence and not (self._is_written or in_notebook() or self._stream.isatty()):
            self._is_written = True
            self._write(f"{sentence}\n")

    def before(self, emit: Callable[[_T], None]) -> Callable[[_T], None]:
        """Return ``emit`` wrapped to clear the line first, where it shares the stream with the cell's outputs."""

        def give_way(output: _T) -> None:
            if self._shown and not in_notebook():
                self.update("")
            emit(output)

        return give_way

    def close(self) -> None:
        """Clear the line."""
        self.update("")
