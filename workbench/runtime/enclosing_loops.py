"""Loops of a source file around a line: whether a rank is still in its loop over batches."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache

from workbench.trace.frames import is_of_a_library

_MAX_BYTES = 1 << 20


def loops_around(path: str, line: int) -> tuple[int, ...]:
    """Return the lines on which the loops around a line begin, the outermost first; empty if unknown.

    A loop within which a function is defined is not around the function's lines; nor is a loop around its own ``else``.
    """
    return tuple(first for first, begin, end in _loops(path) if begin <= line <= end and not _is_cut(path, first, line))


def loop_words(path: str, line: int) -> str:
    """Return the loops around a line as a part of a call's text: ``", loop 20, 24"``; empty without one.

    Empty too for the code of a library, whose large files take long to parse.
    """
    if is_of_a_library(path):
        return ""
    found = ", ".join(map(str, loops_around(path, line)))
    return f", loop {found}" if found else ""


def _is_cut(path: str, loop: int, line: int) -> bool:
    """Return whether a function begins between a loop and a line within it."""
    return any(loop < begin <= line <= end for begin, end in _functions(path))


@lru_cache(maxsize=64)
def _loops(path: str) -> tuple[tuple[int, int, int], ...]:
    """Return each loop's first line, and the first and last line that it repeats, in order."""
    found = (node for node in _nodes(path) if isinstance(node, ast.For | ast.AsyncFor | ast.While))
    return tuple(sorted((node.lineno, node.lineno, node.body[-1].end_lineno or node.lineno) for node in found))


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
