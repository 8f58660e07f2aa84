"""The code of cells in a script."""

import ast

import pytest

from workbench.script.cell_code import cell_code


def test_python_stays_as_it_was():
    code = 'x = 1\n\n\ndef f():\n    """% ! ?"""\n    return x  # %time\n\nf();\nprint(f"{x!r}")'
    found = cell_code(f"\n{code}\n\n")
    assert (found.text, found.comments, found.futures) == (code, (), ())


def test_a_cell_that_is_indented_as_a_whole_is_moved_to_the_left():
    assert cell_code("    x = 1\n    if x:\n        y = 2\n").text == "x = 1\nif x:\n    y = 2"


@pytest.mark.parametrize(
    ("code", "text", "comment"),
    [
        ("%matplotlib inline\nx = 1", "# %matplotlib inline\nx = 1", "%matplotlib inline"),
        ("x = 1\n!pip list", "x = 1\n# !pip list", "!pip list"),
        ("files = !ls\nx = 1", "# files = !ls\nx = 1", "files = !ls"),
        ("t = %timeit -o f()", "# t = %timeit -o f()", "t = %timeit -o f()"),
        ("x?", "# x?", "x?"),
        ("?x", "# ?x", "?x"),
        ("if rank == 0:\n    !ls\n", "if rank == 0:\n    pass  # !ls", "!ls"),
        ("%time x = f()", "x = f()  # %time", "%time x = f()"),
        ("%%time\nx = f()", "# %%time\nx = f()", "%%time"),
        ("%%capture out\nx = f()", "# %%capture out\nx = f()", "%%capture out"),
        ("%%bash\nls\n\nls -l", "# %%bash\n# ls\n#\n# ls -l", "%%bash ..."),
        ("x = 1\nawait f()", "# x = 1\n# await f()", "x = 1 ..."),
        ("%%time\n!ls\nawait f()", "# %%time\n# !ls\n# await f()", "%%time ..."),
    ],
)
def test_what_is_not_python_becomes_a_comment(code, text, comment):
    found = cell_code(code)
    assert found.text == text
    assert comment in found.comments
    ast.parse(found.text)


def test_features_of_the_future_are_taken_out():
    found = cell_code("from __future__ import (\n    annotations,\n)\nfrom __future__ import division\nx = 1")
    assert (found.text, found.futures) == ("x = 1", ("annotations", "division"))


def test_an_empty_cell_has_no_code():
    assert cell_code("\n  \n").text == ""


def test_the_names_that_a_cell_binds_and_uses():
    found = cell_code(
        "import torch.nn, os.path as path\nfrom a import b as c\n"
        "class D: inside = 1\ndef e(p):\n    global g\n    g = h(local := 1)\n"
        "for i in range(3): j = (k := i)\nwith x as (l, m): pass\n"
    )
    assert found.bound == {"torch", "path", "c", "D", "e", "g", "i", "j", "k", "l", "m"}
    assert found.imported == {"torch": ("torch", ""), "path": ("os.path", ""), "c": ("a", "b")}
    assert {"h", "x", "range"} <= found.used
    assert not {"p", "local", "inside"} & found.used
