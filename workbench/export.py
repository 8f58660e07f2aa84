"""Export of a trace to a file; the file's suffix selects the format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from workbench.errors import TraceError, UsageError
from workbench.reports.clock_text import exactness
from workbench.reports.results import ExportReport
from workbench.session.trace_selectors import file_at, some_steps
from workbench.trace.columns import Trace
from workbench.trace.file import save, whole
from workbench.trace.perfetto import to_perfetto
from workbench.widgets.trace_page import page

MAX_PAGE_ROWS = 2_000_000
"""Most events that a page may hold; a browser needs 100 MB for that many."""


def export(trace: Trace, path: str | os.PathLike[str], steps: str = "") -> ExportReport:
    """Write ``trace`` to ``path``: ``.trace`` to open again, ``.json`` for Perfetto, ``.html`` as a page.

    The write is atomic.

    Args:
        trace: the trace.
        path: output file; its suffix selects the format.
        steps: steps to write, such as ``3..5`` or ``-3..`` (:mod:`workbench.session.trace_selectors`); empty: all.

    Raises:
        UsageError: the suffix is unknown, there are no such steps, or the file cannot be written.
    """
    path = file_at(path)
    if path.suffix not in _WRITERS:
        known = ", ".join(f"{suffix} ({what})" for suffix, (_, what) in _WRITERS.items())
        raise UsageError(f"{path.name!r} has no known format; the name must end in one of: {known}")
    write, what = _WRITERS[path.suffix]
    spoken, part = some_steps(trace, steps) if steps else ("", trace)
    if spoken:
        what += f", {spoken}"
    try:
        write(part, path)
        return ExportReport(path=path, what=what, num_bytes=path.stat().st_size)
    except OSError as error:
        why = error.strerror if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(f"cannot write {path}: {why}") from error
    except TraceError as error:
        raise UsageError(f"cannot write {path}: {error}") from error


def _write_perfetto(trace: Trace, path: Path) -> None:
    _write_text(path, json.dumps(to_perfetto(trace, exactness(trace))))


def _write_page(trace: Trace, path: Path) -> None:
    if trace.num_rows > MAX_PAGE_ROWS:
        raise UsageError(
            f"cannot write {path}: the trace has {trace.num_rows:,} events, but a page holds at most "
            f"{MAX_PAGE_ROWS:,}: write fewer steps, such as %fsdp export {path.name} --steps=-20.."
        )
    _write_text(path, page(trace, path.stem))


def _write_text(path: Path, text: str) -> None:
    with whole(path) as file:
        file.write(text.encode())


_WRITERS: dict[str, tuple[Callable[[Trace, Path], None], str]] = {
    ".trace": (save, "all events, to open again with %fsdp open"),
    ".json": (_write_perfetto, "for https://ui.perfetto.dev"),
    ".html": (_write_page, "opens in any browser, without a network"),
}
