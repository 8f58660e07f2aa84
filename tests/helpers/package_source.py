"""The package as syntax trees, for the tests of style and of layers."""

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGE = REPO / "workbench"


@dataclass(frozen=True)
class Source:
    """One Python file of the package.

    Attributes:
        path: relative to the package, such as ``trace/file.py``.
        module: its dotted name, such as ``workbench.trace.file``.
        text: its content.
    """

    path: Path
    module: str
    text: str = field(repr=False)

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)

    @property
    def part(self) -> str:
        """The first level below the package: ``trace`` for ``trace/file.py``, ``errors.py`` for ``errors.py``."""
        return self.path.parts[0]


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the package, by path."""
    return tuple(_source(path) for path in sorted(PACKAGE.rglob("*.py")))


def _source(path: Path) -> Source:
    relative = path.relative_to(PACKAGE)
    names = ("workbench", *relative.with_suffix("").parts)
    return Source(relative, ".".join(names).removesuffix(".__init__"), path.read_text(encoding="utf-8"))


def imports(source: Source) -> set[str]:
    """Dotted names of the modules that a file imports anywhere: at its top, in a function, for types only."""
    known = {other.module for other in sources()}
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source.path}:{node.lineno}: write imports in full"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = full & known
            found |= modules | ({node.module} if len(modules) < len(full) else set())
    return found
