"""Blocks of a source file around a line: loops, and on what condition, after which error or with which lock it runs."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from textwrap import shorten
from typing import TypeVar

from workbench.trace.frames import is_of_a_library

_Block = TypeVar("_Block", tuple[int, int, int], tuple[int, int, int, str, str])

_MAX_BYTES = 1 << 20
_MAX_CONDITION = 60  # characters

_LOCK = re.compile(r"lock|mutex|semaphore", re.IGNORECASE)
"""Part of the names of context managers for which others wait."""


def loops_around(path: str, line: int) -> tuple[int, ...]:
    """Return the lines on which the loops around a line begin, the outermost first; empty if unknown.

    A loop within which a function is defined is not around the function's lines; nor is a loop around its own ``else``.
    """
    return tuple(first for first, *_ in _around(path, line, _loops(path)))


def branches_around(path: str, line: int) -> tuple[tuple[int, str, str], ...]:
    """Return line, keyword and condition of the branches that a line is in, the outermost first.

    An ``if`` has its condition, which in an ``else`` is ``"not (...)"``, and in an ``elif`` that of the ``elif`` alone;
    an ``except`` has its errors, and a ``with`` the lock that it takes: others are no branches.
    """
    return tuple((first, keyword, words) for first, _, _, keyword, words in _around(path, line, _branches(path)))


def block_words(path: str, line: int) -> str:
    """Return the loops and branches around a line as a part of a call's text: ``", loop 20, 24, if 30 `rank == 0`"``.

    A keyword is left out where it is that of the branch before. Empty without any, and for the code of a library, whose
    large files take long to parse.
    """
    if is_of_a_library(path):
        return ""
    loops = ", ".join(map(str, loops_around(path, line)))
    branches, last = [], ""
    for first, keyword, words in branches_around(path, line):
        branches.append(f", {'' if keyword == last else f'{keyword} '}{first} `{words}`")
        last = keyword
    return "".join([f", loop {loops}" if loops else "", *branches])


def _around(path: str, line: int, blocks: Iterable[_Block]) -> Iterator[_Block]:
    """Yield the blocks around a line, each with its first line, and the first and last line of what it runs."""
    return (each for each in blocks if each[1] <= line <= each[2] and not _is_cut(path, each[0], line))


def _is_cut(path: str, block: int, line: int) -> bool:
    """Return whether a function begins between a loop or branch and a line within it."""
    return any(block < begin <= line <= end for begin, end in _functions(path))


@lru_cache(maxsize=64)
def _loops(path: str) -> tuple[tuple[int, int, int], ...]:
    """Return each loop's first line, and the first and last line that it repeats, in order."""
    found = (node for node in _nodes(path) if isinstance(node, ast.For | ast.AsyncFor | ast.While))
    return tuple(sorted((node.lineno, node.lineno, node.body[-1].end_lineno or node.lineno) for node in found))


@lru_cache(maxsize=64)
def _branches(path: str) -> tuple[tuple[int, int, int, str, str], ...]:
    """Return each branch's line, the first and last line of what it runs, its keyword and when it runs, in order."""
    found = []
    for node in _nodes(path):
        match node:
            case ast.If() if not _is_guard(node.test):
                condition = _words(node.test)
                found.append((node.lineno, *_lines(node.body), "if", condition))
                if node.orelse and not isinstance(node.orelse[0], ast.If):
                    found.append((node.lineno, *_lines(node.orelse), "if", f"not ({condition})"))
            case ast.ExceptHandler():
                found.append((node.lineno, *_lines(node.body), "except", _words(node.type) if node.type else ""))
            case ast.With() | ast.AsyncWith():
                locks = [each.context_expr for each in node.items if _is_lock(each.context_expr)]
                found += [(node.lineno, *_lines(node.body), "with", _words(each)) for each in locks[:1]]
    return tuple(sorted(found))


def _is_lock(expression: ast.expr) -> bool:
    """Return whether a name in an expression is that of a lock."""
    names = (getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(expression))
    return any(map(_LOCK.search, names))


def _words(expression: ast.expr) -> str:
    return shorten(ast.unparse(expression).replace("`", "'"), _MAX_CONDITION, placeholder=" ...")


def _lines(block: list[ast.stmt]) -> tuple[int, int]:
    return block[0].lineno, block[-1].end_lineno or block[-1].lineno


def _is_guard(test: ast.expr) -> bool:
    """Return whether a condition is that of ``if __name__ == "__main__":``, which is the same on all ranks."""
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))


@lru_cache(maxsize=64)
def _functions(path: str) -> tuple[tuple[int, int], ...]:
    found = (node for node in _nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in found)


@lru_cache(maxsize=64)
def _nodes(path: str) -> tuple[ast.AST, ...]:
    text = "".join(linecache.getlines(path))
    if len(text) > _MAX_BYTES:
        return ()
    try:
        return tuple(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
