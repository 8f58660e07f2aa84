"""Calls of a stack as text, as recordings have them: ``/home/me/train.py:31 in main, loop 20, 24: loss.backward()``.

After the file come the line, the function, the lines on which the loops around that line begin, and the line's text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

_LIBRARY = (
    *("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen"),
    *("/workbench/engine/", "/workbench/models/", "/workbench/runtime/", "/workbench/record/"),
)
"""Parts of the paths of code that is not the user's."""

_FRAME = re.compile(r"(?P<path>.+?):(?P<line>\d+) in (?P<function>[^\s:,]+)(?:, loop (?P<loops>\d+(?:, \d+)*))?")


def is_of_a_library(frame: str) -> bool:
    """Return whether a call, or a file, is of code that is not the user's."""
    return any(part in frame for part in _LIBRARY)


def short_place(frame: str) -> str:
    """Return file and line of a call: ``"/home/me/train.py:31 in main: f()"`` -> ``"train.py:31"``."""
    return PurePath(frame.partition(" in ")[0]).name


def has_left_loop(frames: Sequence[str], others: Sequence[str]) -> bool | None:
    """Return whether a rank has left a loop in which another one still is; None if their stacks do not tell.

    Where their calls part, in one function on two lines, the loops around these lines are compared.

    Args:
        frames: the rank's calls, the innermost last.
        others: those of the other rank.
    """
    for mine, theirs in zip(map(_FRAME.match, frames), map(_FRAME.match, others), strict=False):
        if mine is None or theirs is None or mine.group("path", "function") != theirs.group("path", "function"):
            return None
        if mine["line"] != theirs["line"]:
            ours, own = ((each["loops"] or "").split(", ") for each in (theirs, mine))
            return not set(ours) <= set(own) if theirs["loops"] else None
    return None
