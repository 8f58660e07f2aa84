"""Progress of a running command or cell as one display that is updated in place.

Plain HTML with inline styles and no script, so that it also renders in a saved notebook and on an exported page.
Outside a notebook it is one line of text, updated in place on a terminal and written once elsewhere.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from typing import Any, Literal, TextIO, TypeVar

from workbench.base.text_formats import ERROR_TEXT, format_duration, format_long, format_loss, plural
from workbench.reports.step_progress import Progress

State = Literal["running", "done", "failed"]

_T = TypeVar("_T")
_LINE_STYLE = "color:var(--jp-ui-font-color2, #757575);font-family:var(--jp-ui-font-family, sans-serif);font-size:13px"

_COLOURS: dict[State, str] = {
    "running": "var(--jp-brand-color1, #1976d2)",
    "done": "var(--jp-success-color1, #388e3c)",
    "failed": "var(--jp-error-color1, #d32f2f)",
}


def facts(progress: Progress, state: State = "running") -> list[str]:
    """Return the known facts, one short phrase each: ``["12 of 40 steps", "loss 2.313", "last step 312 ms"]``."""
    found = [f"{progress.done:,} of {plural(progress.total, 'step')}"]
    if progress.loss is not None:
        found.append(f"loss {format_loss(progress.loss)}")
    if progress.step_ns is not None:
        found.append(f"last step {format_duration(progress.step_ns)}")
    if progress.tokens_per_s is not None:
        found.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    if state == "running" and progress.left_ns is not None:
        found.append(f"{format_long(progress.left_ns)} to go")
    return found


def to_text(progress: Progress, state: State = "running", note: str = "") -> str:
    """Return one line without a line break: a bar of 20 characters, the facts, and ``note``."""
    filled = 20 * progress.done // max(progress.total, 1)
    return "  ".join([f"[{'#' * filled}{'.' * (20 - filled)}]", *facts(progress, state), *([note] if note else [])])


def to_html(progress: Progress, state: State = "running", note: str = "") -> str:
    """Return the bar as an HTML fragment; ``note`` is plain text, escaped here."""
    percent = 100 * progress.done / max(progress.total, 1)
    words = " &nbsp;·&nbsp; ".join(html.escape(fact) for fact in facts(progress, state))
    colour = ERROR_TEXT if state == "failed" else _COLOURS[state]
    after = f' &nbsp;·&nbsp; <span style="color:{colour}">{html.escape(note)}</span>' if note else ""
    return (
        '<div style="max-width:46em;font-family:var(--jp-ui-font-family, sans-serif);font-size:13px">'
        f'<div role="progressbar" aria-valuemin="0" aria-valuemax="{progress.total}" aria-valuenow="{progress.done}" '
        'style="height:8px;border-radius:4px;overflow:hidden;background:rgba(128,128,128,0.25)">'
        f'<div style="height:8px;width:{percent:.1f}%;background:{_COLOURS[state]}"></div></div>'
        f'<div style="margin-top:4px;font-variant-numeric:tabular-nums">{words}{after}</div></div>'
    )


class InPlaceDisplay:
    """One display that is updated in place: in a notebook an output of its own, on a terminal its last line.

    Args:
        stream: receives text outside a notebook; standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._handle: Any = None
        self._shown = ""

    def _publish(self, page: str, text: str) -> None:
        """Show ``page`` in a notebook, ``text`` on a terminal, and nothing elsewhere."""
        if not in_notebook():
            if self._stream.isatty():
                self._write(f"\r{text}\x1b[K")
            return
        from IPython.display import display  # noqa: PLC0415 - a script needs no IPython

        bundle = {"text/html": page, "text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class ProgressDisplay(InPlaceDisplay):
    """One bar, shown at the first :meth:`update` and updated until :meth:`close`; elsewhere written once.

    Args:
        total: number of steps requested.
        stream: receives text outside a notebook; standard output by default.
    """

    def __init__(self, total: int, *, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._latest = Progress(done=0, total=total)
        self._note = ""

    def update(self, progress: Progress) -> None:
        """Show ``progress``; send nothing if the display would not change."""
        self._latest = progress
        self._show("running", self._note)

    def remark(self, note: str) -> None:
        """Show ``note`` next to the bar until the next one; ``""``: none."""
        self._note = note
        self._show("running", note)

    def pause(self, note: str) -> None:
        """Show in ``note`` where the command is paused; :meth:`update` resumes."""
        if not self._shown:
            return
        self._show("running", note)
        if not in_notebook():
            self._write("\n")

    def close(self, error: str = "") -> None:
        """Show the end: done, or failed with the first line of ``error``; no-op on an error before the first update."""
        if error and not self._shown:
            return  # it failed before anything was shown
        note = error.strip().partition("\n")[0]
        state: State = "failed" if error else "done"
        self._show(state, note)
        if not in_notebook():
            self._write("\n" if self._stream.isatty() else f"{to_text(self._latest, state, note)}\n")

    def _show(self, state: State, note: str) -> None:
        text = to_text(self._latest, state, note)
        page = to_html(self._latest, state, note) if in_notebook() else text
        if page != self._shown:
            self._shown = page
            self._publish(page, text)


class StallLine(InPlaceDisplay):
    """A line below a silent cell about the ranks that still run it, from the first sentence on.

    On a terminal it is cleared before the cell writes; elsewhere it is written once.
    """

    _is_written = False

    def update(self, sentence: str) -> None:
        """Show ``sentence``, plain text, instead of the last one; ``""`` clears the line."""
        if sentence == self._shown:
            return
        self._shown = sentence
        page = f'<div role="status" style="{_LINE_STYLE}">{html.escape(sentence)}</div>' if sentence else ""
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


def in_notebook() -> bool:
    """Return whether outputs can be updated: in an IPython shell inside a kernel, as in a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
