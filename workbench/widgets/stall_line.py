"""A line below a silent cell about the ranks that still run it, updated in place.

In a notebook it is a display of its own. On a terminal it is the last line, cleared before the cell writes; elsewhere
it is written once.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

from workbench.widgets.progress import in_notebook

_T = TypeVar("_T")
_STYLE = "color:var(--jp-ui-font-color2, #757575);font-family:var(--jp-ui-font-family, sans-serif);font-size:13px"


class StallLine:
    """The line of one cell, shown from the first sentence on.

    Args:
        stream: receives text outside a notebook; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._handle: Any = None
        self._shown = ""
        self._is_written = False

    def update(self, sentence: str) -> None:
        """Show ``sentence``, plain text, instead of the last one; ``""`` clears the line."""
        if sentence == self._shown:
            return
        self._shown = sentence
        if in_notebook():
            self._publish(sentence)
        elif self._stream.isatty():
            self._stream.write(f"\r{sentence}\x1b[K")
            self._stream.flush()
        elif sentence and not self._is_written:
            self._is_written = True
            self._stream.write(f"{sentence}\n")
            self._stream.flush()

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

    def _publish(self, sentence: str) -> None:
        from IPython.display import display  # noqa: PLC0415 - a script needs no IPython

        page = f'<div role="status" style="{_STYLE}">{html.escape(sentence)}</div>' if sentence else ""
        bundle = {"text/html": page, "text/plain": sentence}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)
