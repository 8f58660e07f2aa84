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
    """Return the error that a thread handles: the frame that handles it, and a text for that call. None: no error.

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
    _, found, inner = str(error).partition("Original Traceback (most recent call last):")
    if found and inner.strip():
        return inner.strip().splitlines()[-1]
    return f"{type(error).__name__}: {error}".removesuffix(": ")
