"""Exceptions of a rank as plain data, and the release of their frames. Runs on the engine.

``shell`` is the engine's IPython shell, which has the code of cells and renders tracebacks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, Protocol

from workbench.errors import printable, shortened


class Shell(Protocol):
    """The part of IPython's shell used here."""

    compile: Any
    InteractiveTB: Any


def report(error: BaseException, shell: Shell, rendered: str | None = None) -> dict[str, Any]:
    """Return an exception as plain data: ``ename``, ``evalue``, ``traceback`` (text), and its :func:`user_line`.

    Args:
        error: the exception.
        shell: the engine's IPython shell.
        rendered: its rendered traceback; None: as Python formats it.
    """
    text = "".join(traceback.format_exception(error)) if rendered is None else rendered
    return {
        "ename": type(error).__name__,
        "evalue": printable(shortened(str(error))),
        "traceback": printable(shortened(text) if rendered is None else text),
        **user_line(error, shell),
    }


def user_line(error: BaseException, shell: Shell) -> dict[str, Any]:
    """Return the innermost line in a cell or in the script of ``%fsdp run``, else that of a cell's syntax error.

    As plain data: ``line`` (None: in neither) and ``script``, the name of the script's file, empty for a cell. An error
    raised elsewhere, such as that of an abort, has the line of its cause.
    """
    line, script, cell_of = None, "", shell.compile.format_code_name
    file = getattr(sys.modules["__main__"], "__file__", None)
    one: BaseException | None = error
    seen: set[int] = set()  # the chain may be cyclic
    while one is not None and line is None and id(one) not in seen:
        seen.add(id(one))
        for frame, number in traceback.walk_tb(one.__traceback__):
            path = frame.f_code.co_filename
            if cell_of(path) is not None:
                line, script = number, ""
            elif path == file:
                line, script = number, os.path.basename(path)
        one = one.__cause__
    if line is None and isinstance(error, SyntaxError) and cell_of(error.filename) is not None:
        line = error.lineno
    return {"line": line, "script": script}


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore SIGINT: the code to interrupt has ended already, and SIGINT would only abort the reply."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def render(error: BaseException, shell: Shell) -> str:
    """Return the traceback of a call as IPython renders it."""
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without the frame of the call
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, below, tb_offset=0)
    return "\n".join(lines)


def let_go(error: BaseException, shell: Shell) -> None:
    """Drop the frames of a reported exception and of its causes and contexts.

    IPython keeps the traceback that it has rendered last, as ``sys`` does. So the model of a step that failed, its
    gradients and full parameters would stay alive until the next error, and be counted beside the corrected model.
    """
    shell.InteractiveTB.tb = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    chain, seen = [error], {id(error)}  # the chain may be cyclic
    while chain:
        one = chain.pop()
        for frame, _ in traceback.walk_tb(one.__traceback__):
            with contextlib.suppress(RuntimeError):  # it is still executing
                frame.clear()
            _ = frame.f_locals  # before Python 3.13 the frame keeps a copy, which reading it refreshes
        one.__traceback__ = None
        for earlier in (one.__cause__, one.__context__):
            if earlier is not None and id(earlier) not in seen:
                seen.add(id(earlier))
                chain.append(earlier)
