"""A cell's code as code of a script: IPython's own syntax becomes comments."""

from __future__ import annotations

import ast
import re
import symtable
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_RUNS_ITS_CODE = {"time", "capture"}
"""Magics whose code IPython runs like that of the cell."""

_CELL_MAGIC = re.compile(r"%%(\w+)")
_LINE_MAGIC = re.compile(r"%(\w+)\s+(.*)")
_ASSIGNED = re.compile(r"[\w\s,.\[\]]+=\s*[!%]")


@dataclass(frozen=True, kw_only=True)
class CellCode:
    """The code of a cell in a script.

    Attributes:
        text: the code, without empty lines around it and without imports from ``__future__``; may be empty.
        futures: the names that it imports from ``__future__``.
        comments: lines of IPython that are comments in ``text``.
        bound: names that it binds in the module.
        imported: for each name that only an import binds, what it imports: ``("torch.distributed", "")`` is the module,
            ``("torch", "nn")`` an attribute.
        used: names that it looks up in the module.
    """

    text: str
    futures: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()
    bound: frozenset[str] = frozenset()
    imported: Mapping[str, tuple[str, str]]
    used: frozenset[str] = frozenset()


def cell_code(code: str) -> CellCode:
    """Return a cell's code for a script.

    Lines that start or assign a magic or a shell command, and questions such as ``model?``, become comments. A cell
    that is not Python even so, for example one with an ``await`` outside of functions, becomes one comment.
    """
    lines = textwrap.dedent(code).strip("\n").rstrip().split("\n")
    comments: dict[int, str] = {}  # by index of the line
    magic = _CELL_MAGIC.match(lines[0])
    if magic is not None:
        if magic[1] not in _RUNS_ITS_CODE:
            return _all_comment(lines)
        comments[-1] = lines.pop(0)
    while (fault := _fault(lines)) is not None:
        line = lines[fault].strip() if fault < len(lines) else ""
        if fault in comments or not _is_ipython(line):
            return _all_comment(code.strip("\n").split("\n"))
        comments[fault] = line
        lines[fault] = _without_magic(lines[fault])
    text = "\n".join(lines)
    tree = ast.parse(text)
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    gone = {place for node in futures for place in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    first = [] if magic is None else [f"# {magic.string}"]
    kept = first + [line for place, line in enumerate(lines, 1) if place not in gone]
    table = symtable.symtable(text, "cell", "exec")
    assigned = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_namespace()}
    return CellCode(
        text="\n".join(kept).strip("\n"),
        futures=tuple(alias.name for node in futures for alias in node.names),
        comments=tuple(comments.values()),
        bound=frozenset(_bound(table)),
        imported={name: source for name, source in _imported(tree) if name not in assigned},
        used=frozenset(_used(table)),
    )


def _all_comment(lines: Sequence[str]) -> CellCode:
    text = "\n".join(f"# {line}".rstrip() for line in lines)
    return CellCode(text=text, comments=(f"{lines[0].strip()} ...",), imported={})


def _fault(lines: Sequence[str]) -> int | None:
    """Return the index of the first line that is not Python; None if all are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            compile("\n".join(lines), "<cell>", "exec", dont_inherit=True)
        except SyntaxError as error:
            return (error.lineno or 1) - 1
    return None


def _is_ipython(line: str) -> bool:
    return line.startswith(("%", "!", "?")) or line.endswith("?") or _ASSIGNED.match(line) is not None


def _without_magic(line: str) -> str:
    """Return a line of IPython as a comment, or the code that its magic runs; a block keeps a statement."""
    code = line.lstrip()
    indent = line[: len(line) - len(code)]
    magic = _LINE_MAGIC.match(code)
    if magic is not None and magic[1] in _RUNS_ITS_CODE - {"capture"}:
        return f"{indent}{magic[2]}  # %{magic[1]}"
    return f"{indent}{'pass  ' if indent else ''}# {code}"


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _bound(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a module binds, also those that its functions declare global."""
    for symbol in table.get_symbols():
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
            yield symbol.get_name()
    for inner in _tables(table):
        for symbol in inner.get_symbols():
            if symbol.is_declared_global() and (symbol.is_assigned() or symbol.is_imported()):
                yield symbol.get_name()


def _used(table: symtable.SymbolTable) -> Iterator[str]:
    for inner in _tables(table):
        for symbol in inner.get_symbols():
            if symbol.is_referenced() and (inner is table or symbol.is_global()):
                yield symbol.get_name()


def _imported(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, (alias.name, "")) if alias.asname else (top, (top, ""))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, (node.module or "", alias.name)
