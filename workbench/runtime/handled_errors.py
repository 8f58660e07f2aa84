"""The error that a thread handles while it runs something else: in an ``except``, or the ``__exit__`` of a ``with``."""

from __future__ import annotations

import sys
from textwrap import shorten
from traceback import walk_tb
from types import FrameType
from typing import Any

from workbench.trace.frames import is_of_a_library

_MAX_ERROR = 100  # characters


def handled_error(thread: int) -> tuple[FrameType, str] | None:
    """Return the frame in which a thread handles an error, and a text for that call; None if it handles none.

    The text is ``", after 31 `KeyError: 'x', raised in data.py:7`"``: the line of the frame through which the error
    came, and the user's innermost line that raised it. An error without a line of the user is left out.

    Args:
        thread: identifier of the thread.
    """
    known: Any = sys._current_exceptions().get(thread)
    error: BaseException | None = known[1] if isinstance(known, tuple) else known  # before Python 3.12 a tuple
    if error is None or error.__traceback__ is None:
        return None
    calls = [*walk_tb(error.__traceback__)]
    own = [(frame, line) for frame, line in calls if not is_of_a_library(frame.f_code.co_filename)]
    if not own:
        return None
    frame, line = own[-1]
    text = shorten(_words(error), _MAX_ERROR, placeholder=" ...")
    text = text.replace("`", "'")
    place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"
    first, came = calls[0]
    return first, f", after {came} `{text}, raised in {place}`"


def _words(error: BaseException) -> str:
    """Return an error as text: of one that came from a worker of a loader, what the worker raised."""
    return error_of_worker(str(error))[1] or f"{type(error).__name__}: {error}".removesuffix(": ")


def error_of_worker(text: str) -> tuple[str, str]:
    """Return an error's text before the traceback of another process in it, and that traceback's last line, if any."""
    before, _, inner = text.partition("Original Traceback (most recent call last):")
    lines = inner.strip().splitlines()
    return (before, lines[-1]) if lines else (text, "")
