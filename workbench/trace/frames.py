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


def is_in_loop(frames: Sequence[str]) -> bool:
    """Return whether a call of a stack is within a loop."""
    return any(found["loops"] for found in map(_FRAME.match, frames) if found)


def with_lines(frames: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return calls with their loops and lines, of which those that a crash left have none, from another stack.

    Args:
        frames: the calls.
        known: a stack that the same thread had a while before.
    """
    text_of = {found.group("path", "line", "function"): found.string for found in map(_FRAME.match, known) if found}
    parsed = ((each, _FRAME.fullmatch(each)) for each in frames)
    return tuple(
        each if found is None else text_of.get(found.group("path", "line", "function"), each) for each, found in parsed
    )


def has_left_loop(frames: Sequence[str], others: Sequence[str]) -> bool | None:
    """Return whether a rank has left a loop in which another one still is; None if their stacks do not tell.

    Where their calls part, in one function on two lines, the loops around these lines are compared; if there are none,
    the rank that is on the later line has left the loops of what the other's line calls. What called the first function
    that both are in may differ: a traceback begins where its error was caught. Calls that a crash left do not tell, as
    their loops are unknown.

    Args:
        frames: the rank's calls, the innermost last.
        others: those of the other rank.
    """
    parsed = [[found for found in map(_FRAME.match, each) if found] for each in (frames, others)]
    first, second = _from_common(*parsed), _from_common(*reversed(parsed))
    for depth, (mine, theirs) in enumerate(zip(first, second, strict=False), 1):
        if _function(mine) != _function(theirs):
            return None
        if mine["line"] != theirs["line"]:
            if mine.end() == len(mine.string) and not mine["loops"]:
                return None
            ours, own = ((each["loops"] or "").split(", ") for each in (theirs, mine))
            if theirs["loops"]:
                return not set(ours) <= set(own)
            is_past = not mine["loops"] and int(mine["line"]) > int(theirs["line"])
            return True if is_past and any(call["loops"] for call in second[depth:]) else None
    return None


def has_passed_call(frames: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether a rank is past the call of one of the user's functions in which another one still is.

    That is told by their lines in the function in which their calls part, if there is no loop so far.

    Args:
        frames: the rank's calls of the user's code, the innermost last.
        others: those of the other rank.
    """
    parsed = [[found for found in map(_FRAME.match, each) if found] for each in (frames, others)]
    for depth, (mine, theirs) in enumerate(zip(*parsed, strict=False), 1):
        if mine["loops"] or theirs["loops"] or _function(mine) != _function(theirs):
            return False
        if mine["line"] != theirs["line"]:
            knows_loops = all(found.end() < len(found.string) for found in (mine, theirs))
            return knows_loops and int(mine["line"]) > int(theirs["line"]) and len(parsed[1]) > depth
    return False


def _from_common(calls: Sequence[re.Match[str]], others: Sequence[re.Match[str]]) -> Sequence[re.Match[str]]:
    """Return calls from the first one on whose function is among the others'."""
    known = set(map(_function, others))
    return calls[next((at for at, call in enumerate(calls) if _function(call) in known), len(calls)) :]


def _function(call: re.Match[str]) -> tuple[str, str]:
    return call["path"], call["function"]
