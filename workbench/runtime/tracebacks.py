"""Tracebacks of a rank's IPython: the user's frames, with the frames of libraries folded into one line.

Warnings name a line of a cell as tracebacks do.

torch's errors about sharded parameters are explained first, see :mod:`workbench.engine.explain`, and get a note, see
:mod:`workbench.runtime.error_notes`.

A model runs through dozens of frames of torch, which would fill a screen of the notebook and, rendered with their
source, take seconds of the rank's time.
"""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from workbench.base.crash import is_file_of_a_cell
from workbench.engine.explain import explain
from workbench.errors import MAX_MESSAGE, shortened
from workbench.runtime.namespace import user_namespace
from workbench.runtime.stacks import is_of_a_library, place_in_file

MAX_FRAMES = 20
"""Most frames of the user's code shown for one exception: the outermost and the innermost half of them."""

Render = Callable[..., list[str]]
"""``structured_traceback`` of IPython's ``InteractiveTB``."""

_formatted = warnings.formatwarning
"""Python's own."""


def fold(render: Render, on_error: Callable[[BaseException], object] = lambda _: None) -> Render:
    """Return a ``render`` that shows only the user's frames, and first calls ``on_error`` with the exception.

    If the exception has no user frame, show its last frame; if its causes have none either, show all frames.
    """

    def folded(
        etype: type[BaseException],
        evalue: BaseException,
        etb: TracebackType | tuple[Any, ...] | None = None,
        tb_offset: int | None = None,
        *rest: Any,  # noqa: ANN401 - passed on
        **more: Any,  # noqa: ANN401 - passed on
    ) -> list[str]:
        if isinstance(etb, tuple):  # IPython's plain mode asks so for a chained exception, which is cut already
            return render(etype, evalue, etb, tb_offset, *rest, **more)
        on_error(evalue)
        explain(evalue)
        etype, evalue = type(cut := _short(evalue)), cut
        frames = _frames(etb) if isinstance(etb, TracebackType) else []
        kept, before = _user_frames(frames), _before(evalue)
        if not kept and not any(_user_frames(_frames(each.__traceback__)) for each in before):
            return render(etype, evalue, etb, tb_offset, *rest, **more)
        kept = kept or frames[-1:]
        with _cut(before):
            lines = render(etype, evalue, _joined(kept), 0, *rest, **more)
        left_out = _left_out(frames, kept)
        notes = getattr(evalue, "__notes__", ())
        end = next(at for at in reversed(range(len(lines))) if at == 0 or lines[at] not in notes)  # its own line
        return [*lines[:end], *([left_out] if left_out else []), *lines[end:]]

    return folded


def _short(error: BaseException, known: dict[int, BaseException] | None = None) -> BaseException:
    """Return ``error``, or a stand-in with a shorter message: IPython takes a minute to render one of 10 MB."""
    known = {} if known is None else known
    if id(error) in known:
        return known[id(error)]
    known[id(error)] = error
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the user's own; IPython says so
        return error
    before = [each and _short(each, known) for each in (error.__cause__, error.__context__)]
    if len(text) <= MAX_MESSAGE and before == [error.__cause__, error.__context__]:
        return error
    kind = type(error)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__str__": lambda _: shortened(text)}
    stand_in: BaseException = type(kind.__name__, (Exception,), named)()
    known[id(error)] = stand_in
    stand_in.__cause__, stand_in.__context__ = before
    stand_in.__suppress_context__ = error.__suppress_context__
    stand_in.__notes__ = list(getattr(error, "__notes__", ()))
    return stand_in.with_traceback(error.__traceback__)


def install(on_error: Callable[[BaseException], object] = lambda _: None) -> None:
    """Have IPython, if this process runs it, fold its tracebacks and name cells in warnings from now on.

    Args:
        on_error: called with each exception before it is rendered; its frames are dropped soon after.
    """
    get_ipython = user_namespace().get("get_ipython")
    if get_ipython is not None:
        formatter = get_ipython().InteractiveTB
        # use the class's method: the process may have been a rank before
        formatter.structured_traceback = fold(partial(type(formatter).structured_traceback, formatter), on_error)
        warnings.formatwarning = format_warning


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning as Python does, with ``Cell, line 6`` instead of a cell's temporary file."""
    if not is_file_of_a_cell(filename):
        return _formatted(message, category, filename, lineno, line)
    source = linecache.getline(filename, lineno) if line is None else line
    return f"Cell, line {lineno}{_formatted(message, category, '', lineno, source).removeprefix(f':{lineno}')}"


def _frames(tb: TracebackType | None) -> list[TracebackType]:
    """Return the traceback from the first frame of the user's code on, or all of it if there is none."""
    all_of_them = walked(tb)
    first = next((place for place, each in enumerate(all_of_them) if not is_of_a_library(each.tb_frame)), 0)
    return all_of_them[first:]


def user_part(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of libraries."""
    return _joined(_user_frames(walked(tb)))


def walked(tb: TracebackType | None) -> list[TracebackType]:
    """Return the entries of a traceback, the outermost first."""
    frames = []
    while tb is not None:
        frames.append(tb)
        tb = tb.tb_next
    return frames


def _user_frames(frames: Sequence[TracebackType]) -> list[TracebackType]:
    users = [each for each in frames if not is_of_a_library(each.tb_frame)]
    half = MAX_FRAMES // 2
    return users if len(users) <= MAX_FRAMES else [*users[:half], *users[-half:]]


def _joined(frames: Sequence[TracebackType]) -> TracebackType | None:
    below = None
    for each in reversed(frames):
        below = TracebackType(below, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return below


def _left_out(frames: Sequence[TracebackType], kept: Sequence[TracebackType]) -> str:
    """Return how many frames are hidden, and where in a library the exception was raised; empty: all are shown."""
    others = [each for each in frames if all(each is not one for one in kept)]
    if not others:
        return ""
    num_libraries = sum(is_of_a_library(each.tb_frame) for each in others)
    counts = [(len(others) - num_libraries, "of your code"), (num_libraries, "of libraries")]
    hidden = " and ".join(f"{count} frame{'s' if count > 1 else ''} {whose}" for count, whose in counts if count)
    last = frames[-1]
    where = f"; raised in {place_in_file(last.tb_frame, last.tb_lineno)}" if last is not kept[-1] else ""
    return f"({hidden} not shown{where})"


def _before(error: BaseException) -> list[BaseException]:
    """Return the exceptions that led to ``error``, each once."""
    chained, waiting = [], [error]
    seen = {id(error)}
    while waiting:
        one = waiting.pop()
        for earlier in (one.__cause__, one.__context__):
            if earlier is not None and id(earlier) not in seen:
                seen.add(id(earlier))
                chained.append(earlier)
                waiting.append(earlier)
    return chained


@contextmanager
def _cut(errors: Sequence[BaseException]) -> Iterator[None]:
    """Show only the user's frames of ``errors`` within the body, as IPython renders chained exceptions itself.

    Exceptions raised and caught inside a library are shown without frames: parsing their sources takes seconds.
    """
    before = [(error, error.__traceback__) for error in errors]
    for error, tb in before:
        error.__traceback__ = _joined(_user_frames(_frames(tb)))
    try:
        yield
    finally:
        for error, tb in before:
            error.__traceback__ = tb
