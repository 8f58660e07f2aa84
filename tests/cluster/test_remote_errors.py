"""The line of the user's code in an exception of a rank."""

import sys
import traceback
from types import SimpleNamespace

import pytest

from workbench.cluster.remote_errors import user_line

CELL, SCRIPT = "/tmp/ipykernel_1/2.py", "/home/me/train.py"
SHELL = SimpleNamespace(compile=SimpleNamespace(format_code_name=lambda name: "Cell" if name == CELL else None))


def raised(*files):
    """Return the exception of functions that call each other, outermost first, each at line 4 of its file."""
    inner = None
    for file in reversed(files):
        names = {"inner": inner}
        exec(compile("def f():\n\n\n    inner() if inner else 1 / 0", file, "exec"), names)
        inner = names["f"]
    try:
        inner()
    except ZeroDivisionError as error:
        return error


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ((CELL,), {"line": 4, "script": ""}),
        ((SCRIPT,), {"line": 4, "script": "train.py"}),
        ((CELL, SCRIPT, "/lib/torch.py"), {"line": 4, "script": "train.py"}),
        ((SCRIPT, CELL), {"line": 4, "script": ""}),
        (("/lib/torch.py",), {"line": None, "script": ""}),
    ],
)
def test_the_innermost_line_of_a_cell_or_the_script_counts(monkeypatch, files, found):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", SCRIPT, raising=False)  # xdist's workers have none
    error = raised(*files)
    assert len(traceback.extract_tb(error.__traceback__)) == len(files) + 1
    assert user_line(error, SHELL) == found


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ((SCRIPT, "/lib/torch.py"), {"line": 4, "script": "train.py"}),
        (("/lib/torch.py",), {"line": None, "script": ""}),
    ],
)
def test_an_error_raised_elsewhere_has_the_line_of_its_cause(monkeypatch, files, found):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", SCRIPT, raising=False)
    error, cause = raised("/lib/abort.py"), raised(*files)
    error.__cause__, cause.__cause__ = cause, error
    assert user_line(error, SHELL) == found


def test_a_syntax_error_of_a_cell_has_the_line_of_its_text():
    assert user_line(SyntaxError("no", (CELL, 7, 1, "x = =")), SHELL) == {"line": 7, "script": ""}
