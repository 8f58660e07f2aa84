"""Calls of a stack as text, as recordings have them.

``/home/me/train.py:31 in main, loop 20, 24, if 30 `rank == 0`: loss.backward()``: after the file come the line, the
function, the lines on which the loops around that line begin, those of the branches that it is in, and its text. A
branch is an ``if`` with its condition, an ``except`` with its errors, or a ``with`` that takes a lock. What a thread
does while it handles an error is a branch as well: ``after 30 `KeyError: 'x', raised in data.py:7` ``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePath

_LIBRARY = (
    *("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen"),
    *("/workbench/engine/", "/workbench/models/", "/workbench/runtime/", "/workbench/record/"),
)
"""Parts of the paths of code that is not the user's."""

_FRAME = re.compile(
    r"(?P<path>.+?):(?P<line>\d+) in (?P<function>[^\s:,]+)(?:, loop (?P<loops>\d+(?:, \d+)*))?"
    r"(?P<branches>(?:, (?:(?:if|except|with|after) )?\d+ `[^`]*`)*)"
)
_AFTER = "after "
_BRANCH = re.compile(r"(?:(if|except|with|after) )?(\d+) `([^`]*)`")


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


def error_handled(frames: Sequence[str]) -> str:
    """Return the error that a call handles, such as ``"KeyError: 'x', raised in data.py:7"``; else nothing."""
    found = (statement for call in _parsed(frames) for _, statement in _branches(call) if statement.startswith(_AFTER))
    return "".join([*found][-1:]).removeprefix(_AFTER)


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
    parting = _parting(frames, others)
    if parting is None:
        return None
    mine, theirs, _, below = parting
    if not (_is_told(mine) or mine["loops"]):
        return None
    is_past = int(mine["line"]) > int(theirs["line"]) and any(call["loops"] for call in below)
    if theirs["loops"] and _loops(theirs) <= _loops(mine):  # past it in this turn, or in an earlier one
        return None if is_past else False
    if _branch_around_loops(theirs, mine):  # it has not entered it
        return False
    return True if theirs["loops"] or (is_past and not mine["loops"]) else None


def has_passed_call(frames: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether a rank is past the call of one of the user's functions in which another one still is.

    That is told by their lines in the function in which their calls part, if there is no loop so far.

    Args:
        frames: the rank's calls of the user's code, the innermost last.
        others: those of the other rank.
    """
    parsed = _parsed(frames), _parsed(others)
    for depth, (mine, theirs) in enumerate(zip(*parsed, strict=False), 1):
        if mine["loops"] or theirs["loops"] or _function(mine) != _function(theirs):
            return False
        if mine["line"] != theirs["line"]:
            return (
                _is_told(mine)
                and _is_told(theirs)
                and int(mine["line"]) > int(theirs["line"])
                and len(parsed[1]) > depth
            )
    return False


def branch_apart(frames: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the innermost branch in which a rank is and another one is not: its place, and its statement.

    It is looked for where their calls part, in one function on two lines within the same loops, or around a loop in
    which the other rank is not. The result is None if there is none, or if a call was left by a crash, which leaves no
    branches.

    Args:
        frames: the rank's calls, the innermost last.
        others: those of the other rank.
    """
    parting = _parting(frames, others)
    if parting is None:
        return None
    mine, theirs, *_ = parting
    if not _is_told(theirs):
        return None
    if mine["loops"] != theirs["loops"]:
        return _branch_around_loops(mine, theirs)
    return _branch_of_one(mine, theirs)


def lock_held(frames: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the lock for which a rank waits and that another one took at the same place: the place, and its statement.

    A rank waits for a lock if one of its calls is on the line of the ``with``. None: there is no such lock.

    Args:
        frames: the rank's calls, the innermost last.
        others: those of the other rank.
    """
    waits = {f"{PurePath(call['path']).name}:{call['line']}" for call in _parsed(frames)}
    taken = (each for call in _parsed(others) for each in _branches(call) if _takes_lock(each))
    return next((each for each in taken if each[0] in waits), None)


def branch_past(frames: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the innermost branch of a rank that has gone on to a later call than another one in a turn of their loops.

    It is that of the later call, in which the other one is not, or one of the function that the call has called. The
    result is ``("", "")`` without any, and None for a rank of which the stacks do not tell that it has gone on.

    Args:
        frames: the rank's calls, the innermost last.
        others: those of the other rank.
    """
    parting = _parting(frames, others)
    if parting is None:
        return None
    mine, theirs, called, _ = parting
    is_earlier = int(mine["line"]) < int(theirs["line"])
    if is_earlier or not _loops(theirs) <= _loops(mine) or not (_is_told(mine) and _is_told(theirs)):
        return None
    alone = [each for each in _branches(mine) if each not in _branches(theirs)]
    found = [*alone, *(each for call in called[:1] for each in _branches(call))]
    return next((each for each in reversed(found) if not _is_beside(each)), ("", ""))


_Call = re.Match[str]


def _parting(
    frames: Sequence[str], others: Sequence[str]
) -> tuple[_Call, _Call, Sequence[_Call], Sequence[_Call]] | None:
    """Return the calls in which two stacks are in one function on two lines, and what each of these has called."""
    parsed = _parsed(frames), _parsed(others)
    first, second = _from_common(*parsed), _from_common(*reversed(parsed))
    for depth, (mine, theirs) in enumerate(zip(first, second, strict=False), 1):
        if _function(mine) != _function(theirs):
            return None
        if mine["line"] != theirs["line"]:
            return mine, theirs, first[depth:], second[depth:]
    return None


def _branches(call: _Call) -> list[tuple[str, str]]:
    """Return place and statement of the branches around a call, the outermost first."""
    name, found, keyword = PurePath(call["path"]).name, [], "if"
    for own, line, words in _BRANCH.findall(call["branches"]):
        keyword = own or keyword
        found.append((f"{name}:{line}", f"{keyword} {words}".rstrip()))
    return found


def _loops(call: _Call) -> set[int]:
    """Return the lines of the loops around a call."""
    return {int(each) for each in (call["loops"] or "").split(", ") if each}


def _branch_of_one(mine: _Call, theirs: _Call, before: float = math.inf) -> tuple[str, str] | None:
    """Return the innermost branch around one call and not around the other, if it begins before a line."""
    known = _branches(theirs)
    own = (each for each in reversed(_branches(mine)) if each not in known and not _is_beside(each))
    return next((each for each in own if int(each[0].rpartition(":")[2]) < before), None)


def _branch_around_loops(mine: _Call, theirs: _Call) -> tuple[str, str] | None:
    """Return the innermost branch around loops of one call in which the other one is not; None if there are none."""
    alone = _loops(mine) - _loops(theirs)
    if not alone or not _loops(theirs) <= _loops(mine) or not _is_told(theirs):
        return None
    return _branch_of_one(mine, theirs, before=min(alone))


def _takes_lock(branch: tuple[str, str]) -> bool:
    return branch[1].startswith("with ")


def _is_beside(branch: tuple[str, str]) -> bool:
    """Return whether a branch is none of the source: a lock that is taken, or an error that is handled."""
    return branch[1].startswith(("with ", _AFTER))


def _parsed(frames: Sequence[str]) -> list[_Call]:
    return [found for found in map(_FRAME.match, frames) if found]


def _is_told(call: _Call) -> bool:
    """Return whether the text of a call has its line, and so all loops and branches; a crash leaves none."""
    return call.end() < len(call.string)


def _from_common(calls: Sequence[_Call], others: Sequence[_Call]) -> Sequence[_Call]:
    """Return calls from the first one on whose function is among the others'."""
    known = set(map(_function, others))
    return calls[next((at for at, call in enumerate(calls) if _function(call) in known), len(calls)) :]


def _function(call: _Call) -> tuple[str, str]:
    return call["path"], call["function"]
