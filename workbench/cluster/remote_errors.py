"""What a rank tells of an exception, as plain data, and how it lets go of it. Runs on the engine.

``shell`` is the engine's IPython, which knows the code of cells and how to show a traceback.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator
from typing import Any, Protocol


class Shell(Protocol):
    """What of IPython's shell is needed here."""

    compile: Any
    InteractiveTB: Any


def report(error: BaseException, shell: Shell, rendered: str | None = None) -> dict[str, Any]:
    """Return an exception as plain data: ``ename``, ``evalue``, ``traceback`` (text), ``line`` (int or None).

    Args:
        error: what was raised.
        shell: the engine's IPython.
        rendered: its traceback; None: as Python writes it.
    """
    return {
        "ename": type(error).__name__,
        "evalue": str(error),
        "traceback": "".join(traceback.format_exception(error)) if rendered is None else rendered,
        "line": cell_line(error, shell),
    }


def cell_line(error: BaseException, shell: Shell) -> int | None:
    """Return the line of the innermost frame that belongs to a cell, else that of a cell's syntax error."""
    line, cell_of = None, shell.compile.format_code_name
    for frame, number in traceback.walk_tb(error.__traceback__):
        if cell_of(frame.f_code.co_filename) is not None:
            line = number
    if line is None and isinstance(error, SyntaxError) and cell_of(error.filename) is not None:
        line = error.lineno
    return line


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore interrupts: what they are for has ended already, and what they would end is the answer."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def render(error: BaseException, shell: Shell) -> str:
    """Return the traceback of a call as IPython shows it."""
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the frame of the call
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, below, tb_offset=0)
    return "\n".join(lines)


def let_go(error: BaseException) -> None:
    """Empty the frames of an exception that was reported, and of those before it.

    What rendered them keeps them: gradients and full parameters would live on until the next error, and longer.
    """
    chain, seen = [error], {id(error)}  # an exception may be among those before itself
    while chain:
        one = chain.pop()
        for frame, _ in traceback.walk_tb(one.__traceback__):
            with contextlib.suppress(RuntimeError):  # it is still executing
                frame.clear()
            _ = frame.f_locals  # before Python 3.13 a copy that the frame keeps: to look at it is to renew it
        for earlier in (one.__cause__, one.__context__):
            if earlier is not None and id(earlier) not in seen:
                seen.add(id(earlier))
                chain.append(earlier)
