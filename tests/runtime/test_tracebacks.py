"""IPython's traceback of an exception in a rank's cell."""

import linecache
import re
import sys
import types

import pytest
import torch
from IPython.core.ultratb import AutoFormattedTB

from workbench.errors import MAX_MESSAGE
from workbench.runtime import stacks, tracebacks

CELL = """import torch
def forward(x):
    return torch.nn.functional.linear(x, torch.zeros(3, 5))
def deeper(n):
    return forward(torch.zeros(4)) if n == 0 else deeper(n - 1)
def again():
    try:
        forward(torch.zeros(4))
    except RuntimeError as error:
        raise ValueError("my own words") from error
def through_a_module():
    class Failing(torch.nn.Module):
        def forward(self, x):
            return forward(x)
    torch.nn.Sequential(torch.nn.Sequential(Failing()))(torch.zeros(4))
def caught_by_a_library():
    torch.nn.Sequential()._checked()
def runs(library):
    library(through_a_module)
def in_a_library():
    torch.nn.Sequential(torch.nn.Linear(5, 3))(torch.zeros(4))
def huge():
    try:
        raise KeyError("x" * 10_000_000)
    except KeyError as error:
        raise ValueError("y" * 10_000_000) from error
"""


LIBRARY = """
def _checked(self):
    try:
        self.get_submodule("missing")
    except AttributeError as error:
        raise ValueError("the library caught this") from error
"""
LATER = """
def run(users):
    try:
        users()
    except RuntimeError as error:
        failed = error
    _reports(failed)

def _reports(failed):
    raise ValueError("given up") from failed
"""


@pytest.fixture
def rendered(monkeypatch):
    """Returns IPython's traceback of a call in a cell, rendered in a mode without colours."""
    cell = {"__name__": "__main__"}
    file = "/tmp/ipykernel_1/1.py"
    monkeypatch.setitem(linecache.cache, file, (len(CELL), None, CELL.splitlines(keepends=True), file))
    monkeypatch.setattr(stacks, "user_namespace", lambda: cell)
    exec(compile(CELL, file, "exec"), cell)

    def call(name, *args, mode="Context", depth=0):
        formatter = AutoFormattedTB(mode=mode, theme_name="nocolor")
        cell["get_ipython"] = lambda: types.SimpleNamespace(InteractiveTB=formatter)
        monkeypatch.setattr(tracebacks, "user_namespace", lambda: cell)
        tracebacks.install()
        tracebacks.install()  # a process may become a rank twice
        with pytest.raises(Exception) as caught:  # noqa: PT011 - any exception
            cell[name](*args)
        error = caught.value
        before = error.__traceback__, error.__cause__ and error.__cause__.__traceback__
        below = error.__traceback__
        for _ in range(2 * depth):  # without the frames of the test and of the cell
            below = below.tb_next
        text = "\n".join(formatter.structured_traceback(type(error), error, below))
        assert (error.__traceback__, error.__cause__ and error.__cause__.__traceback__) == before
        return text

    return call


@pytest.mark.parametrize("mode", ["Context", "Plain"])
def test_frames_of_libraries_between_those_of_the_user_are_counted(rendered, mode):
    text = rendered("through_a_module", mode=mode)
    assert "torch.nn.functional.linear(x" in text
    assert "_call_impl" not in text
    assert re.search(r"^\(\d+ frames of libraries not shown\)$", text, re.M)  # a frame of the cell raised


def test_the_frame_of_a_library_that_raised_is_named(rendered):
    text = rendered("in_a_library")
    assert re.search(
        r"frames of libraries not shown; raised in torch/nn/modules/linear.py:\d+ in forward\)$", text, re.M
    )


def test_a_deep_recursion_is_cut_to_its_ends(rendered):
    limit = sys.getrecursionlimit()
    text = rendered("deeper", limit // 2)
    assert text.count("deeper(n - 1)") < 2 * tracebacks.MAX_FRAMES * 5
    assert "frames of your code" in text
    assert len(text.splitlines()) < 20 * tracebacks.MAX_FRAMES


def test_causes_of_an_exception_are_folded_too(rendered):
    text = rendered("again")
    assert "The above exception was the direct cause" in text
    assert text.index("RuntimeError") < text.index("my own words")


def test_a_huge_message_is_cut_before_it_is_rendered(rendered):
    text = rendered("huge")
    assert len(text) < 4 * MAX_MESSAGE
    assert text.count("characters left out") == 2  # its cause has one too
    assert "KeyError" in text
    assert "ValueError" in text


@pytest.mark.parametrize("mode", ["Context", "Plain"])
def test_a_cause_that_a_library_raised_and_caught_has_no_frames(rendered, monkeypatch, mode):
    library = {"__name__": "torch.nn.modules.container"}
    exec(LIBRARY, library)
    monkeypatch.setattr(torch.nn.Sequential, "_checked", library["_checked"], raising=False)
    cause, _, text = rendered("caught_by_a_library", mode=mode).partition("direct cause")
    assert "AttributeError" in cause
    assert "get_submodule" not in cause
    assert "the library caught this" in text


@pytest.mark.parametrize("mode", ["Context", "Plain"])
def test_an_error_made_outside_of_the_users_code_shows_the_users_frames_of_its_cause(rendered, monkeypatch, mode):
    """Such as that of an abort, which a rank raises after the script has ended."""
    library = {"__name__": "workbench.runtime.made_up"}
    exec(LATER, library)
    cause, _, text = rendered("runs", library["run"], mode=mode, depth=1).partition("direct cause")
    assert "torch.nn.functional.linear(x" in cause
    assert "_call_impl" not in cause
    assert "given up" in text
    assert "_reports" in text
    assert re.search(r"^\(\d+ frames? of libraries not shown\)$", text, re.M)


def test_a_traceback_without_frames_of_the_user_is_shown_whole():
    formatter = AutoFormattedTB(mode="Context", theme_name="nocolor")
    plain = formatter.structured_traceback
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(5, 3)(torch.zeros(4))
    error = caught.value
    below = error.__traceback__.tb_next
    assert tracebacks.fold(plain)(type(error), error, below, 0) == plain(type(error), error, below, 0)


def test_a_warning_names_the_line_of_a_cell(monkeypatch):
    file = "/tmp/ipykernel_1/1.py"
    monkeypatch.setitem(linecache.cache, file, (9, None, ["f(x)\n"], file))
    assert tracebacks.format_warning("careful", UserWarning, file, 1) == "Cell, line 1: UserWarning: careful\n  f(x)\n"
    elsewhere = ("careful", UserWarning, "/a.py", 3, "g(x)")
    assert tracebacks.format_warning(*elsewhere) == "/a.py:3: UserWarning: careful\n  g(x)\n"
