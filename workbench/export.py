"""Export of a trace, or of the program that the ranks ran, to a file; the file's suffix selects the format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import TraceError, UsageError
from workbench.protocol.policy import ENGINES
from workbench.reports.clock_text import exactness
from workbench.reports.record_reports import ExportReport
from workbench.script.script_writer import MARK, write_script
from workbench.session.program import Program
from workbench.session.trace_selectors import file_at, some_steps
from workbench.trace.columns import Trace
from workbench.trace.file import META, save, whole
from workbench.trace.perfetto import to_perfetto
from workbench.widgets.trace_page import page

MAX_PAGE_ROWS = 2_000_000
"""Most events that a page may hold; a browser needs 100 MB for that many."""


SCRIPT = ".py"

IsOwn = Callable[[bytes, bytes], bool]
"""Returns whether a file with this begin and end was written by an earlier export."""

_LOOKED_AT = 4096  # bytes at the begin and at the end of an existing file


def export(
    trace: Trace,
    path: str | os.PathLike[str],
    steps: str = "",
    *,
    program: Program | None = None,
    engine: str = "",
) -> ExportReport:
    """Write ``trace`` to ``path``: ``.trace`` to open again, ``.json`` for Perfetto, ``.html`` as a page.

    With ``.py``, write ``program`` as a script for torchrun. The write is atomic.

    Args:
        trace: the trace.
        path: output file; its suffix selects the format. It replaces only a file of an earlier export.
        steps: steps to write, such as ``3..5`` or ``-3..`` (:mod:`workbench.session.trace_selectors`); empty: all.
        program: what the ranks of the trace have done; None: it is not known.
        engine: whose FSDP a script uses, one of :data:`~workbench.protocol.policy.ENGINES`; empty: the one that ran.

    Raises:
        UsageError: the suffix is unknown, there are no such steps, the file cannot be written, or there is no script of
            the program with this engine.
    """
    path = file_at(path)
    if engine not in ("", *ENGINES):
        raise UsageError(f"engine is {' or '.join(ENGINES)}, not {engine!r}")
    if path.suffix == SCRIPT and program is not None:
        if steps:
            raise UsageError("a script has everything that the ranks have done: leave out --steps")
        return _export_script(program, path, engine)
    if engine:
        raise UsageError(f"--engine is for a script, such as train{SCRIPT}; {path.name} is about the engine that ran")
    if path.suffix not in _WRITERS:
        formats = {suffix: what for suffix, (*_, what) in _WRITERS.items()}
        formats |= {} if program is None else {SCRIPT: "a script for torchrun"}
        known = ", ".join(f"{suffix} ({what})" for suffix, what in formats.items())
        raise UsageError(f"{path.name!r} has no known format; the name must end in one of: {known}")
    write, is_own, what = _WRITERS[path.suffix]
    spoken, part = some_steps(trace, steps) if steps else ("", trace)
    if spoken:
        what += f", {spoken}"
    with _errors_of(path):
        _check_replaceable(path, is_own)
        write(part, path)
        return ExportReport(path=path, what=what, num_bytes=path.stat().st_size)


def _export_script(program: Program, path: Path, engine: str) -> ExportReport:
    script = write_script(program, engine, path.name)
    with _errors_of(path):
        _check_replaceable(path, lambda begin, _end: MARK.encode() in begin.partition(b"\n")[0])
        _write_text(path, script.text)
        return ExportReport(path=path, what=script.start, num_bytes=path.stat().st_size, notes=script.notes)


def _check_replaceable(path: Path, is_own: IsOwn) -> None:
    """Check that ``path`` does not exist, is empty, or was written by an earlier export.

    Raises:
        UsageError: another file is there.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        begin = file.read(_LOOKED_AT)
        file.seek(max(0, path.stat().st_size - _LOOKED_AT))
        end = file.read()
    if not is_own(begin, end):
        raise UsageError(f"{path} was not written by %fsdp export and is not replaced: give another name")


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turn errors of the body, which writes ``path``, into a :class:`UsageError`."""
    try:
        yield
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


def _is_trace(begin: bytes, _end: bytes) -> bool:
    return begin.startswith(b"PK") and META.encode() in begin[:100]


def _is_perfetto(begin: bytes, end: bytes) -> bool:
    return begin.startswith(b'{"traceEvents"') and b'"otherData": {"producer": ' in end


def _is_page(begin: bytes, _end: bytes) -> bool:
    return begin.startswith(b"<!DOCTYPE html>") and MARK.encode() in begin


_WRITERS: dict[str, tuple[Callable[[Trace, Path], None], IsOwn, str]] = {
    ".trace": (save, _is_trace, "all events that are kept, to open again with %fsdp open"),
    ".json": (_write_perfetto, _is_perfetto, "for https://ui.perfetto.dev"),
    ".html": (_write_page, _is_page, "opens in any browser, without a network"),
}
