"""Style rules that the linters do not check."""

import ast
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.helpers.package_source import Source, imports, sources

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef

SAME_THING = {
    "errors.py": {".", "engine"},
    "memory.py": {"replay", "views"},
    "paused_time.py": {"replay", "views"},
    "process.py": {"replay", "views"},
    "states.py": {"replay", "views"},
    "tracks.py": {"replay", "views"},
    "training.py": {"replay", "views"},
}
"""Files with the same name in several folders, and the folders: they treat the same subject."""


def without_docstring(source: Source) -> list[str]:
    """Return a file's dotted public names without docstring; ``""`` is the file. Names within functions are private."""
    found = [] if source.text.strip() == "" or ast.get_docstring(source.tree) else [""]

    def look(node: ast.Module | ast.ClassDef, prefix: str) -> None:
        for child in node.body:
            if not isinstance(child, Documented) or child.name.startswith("_"):
                continue
            if ast.get_docstring(child) is None and not is_overload(child):
                found.append(prefix + child.name)
            if isinstance(child, ast.ClassDef):
                look(child, f"{prefix}{child.name}.")

    look(source.tree, "")
    return found


def is_overload(node: Documented) -> bool:
    return any(isinstance(name, ast.Name) and name.id == "overload" for name in node.decorator_list)


def prints(source: Source) -> list[int]:
    """Return the lines on which a file calls ``print``."""
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def test_public_names_are_documented():
    assert {str(source.path): names for source in sources() if (names := without_docstring(source))} == {}


def test_docstrings_do_not_refer_to_module_docstrings():
    elsewhere = re.compile(r"see (the )?module docstring", re.IGNORECASE)
    assert [str(source.path) for source in sources() if elsewhere.search(source.text)] == []


def test_no_file_and_no_class_has_the_name_of_another():
    folders: dict[str, set[str]] = {}
    for source in sources():
        folders.setdefault(source.path.name, set()).add(str(source.path.parent))
    del folders["__init__.py"]
    assert {name: found for name, found in folders.items() if len(found) > 1} == SAME_THING
    classes = Counter(
        node.name for source in sources() for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, number in classes.items() if number > 1] == []


def test_nothing_is_printed():
    assert {str(source.path): lines for source in sources() if (lines := prints(source))} == {}


def test_no_import_cycle():
    known = {source.module for source in sources()}
    graph = {source.module: imports(source) & known for source in sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_the_measures_measure():
    text = "class A:\n    def b(self): ...\n    def _c(self): ...\ndef d():\n    '''Yes.'''\n    def e(): ...\n"
    assert without_docstring(Source("x.py", "x", text)) == ["", "A", "A.b"]
    assert prints(Source("x.py", "x", "a = 1\nprint(a)\nb.print()\n")) == [2]
