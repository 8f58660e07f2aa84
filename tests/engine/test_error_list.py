"""The engine's source raises errors instead of asserting, and a test quotes each error."""

import ast
import functools
from pathlib import Path

import pytest

import workbench.engine

ENGINE, HERE = Path(workbench.engine.__file__).parent, Path(__file__)
SOURCES = sorted([*ENGINE.glob("*.py"), *ENGINE.glob("classic/*.py")])
TESTS = sorted({*HERE.parent.glob("test_*.py"), *HERE.parent.glob("classic/test_*.py")} - {HERE})


def raised(path: Path) -> list[tuple[int, ast.Call]]:
    """Return line and call of every ``raise Name(...)``."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [(n.lineno, n.exc) for n in nodes if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]


def phrases(node: ast.AST) -> set[tuple[str, ...]]:
    """Return every run of three words in the plain and formatted strings below a node."""
    texts = [n.value.split() for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {tuple(words[i : i + 3]) for words in texts for i in range(len(words) - 2)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ENGINE)))
def test_the_engine_has_no_assert_statements(path):
    tree = ast.parse(path.read_text())
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)] == []
    assert "AssertionError" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@functools.cache
def quoted() -> set[tuple[str, ...]]:
    """Return every run of three words in a string of a test of the engine."""
    return set().union(*(phrases(ast.parse(path.read_text())) for path in TESTS))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ENGINE)))
def test_every_error_has_a_message_that_a_test_quotes(path):
    assert [line for line, call in raised(path) if not call.args] == []
    found = {
        f"{path.name}:{line}": ast.unparse(call)
        for line, call in raised(path)
        if phrases(call) and not phrases(call) & quoted()
    }
    assert found == {}
