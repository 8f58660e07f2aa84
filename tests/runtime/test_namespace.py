"""Reading a rank's variables while a cell makes new ones."""

import linecache
from concurrent.futures import ThreadPoolExecutor

import torch

from workbench.protocol.rank_messages import CellLine
from workbench.runtime import namespace, rank, stacks


class ConcurrentNamespace:
    """Adds a variable whenever its class is read, as a cell in another thread may."""

    def __init__(self, variables):
        self._variables = variables

    @property
    def __class__(self):
        self._variables[f"new_{len(self._variables)}"] = self
        return ConcurrentNamespace


def test_names_can_be_asked_for_while_a_cell_makes_new_ones(monkeypatch):
    variables = {"model": torch.nn.Linear(1, 1)}
    variables |= {"a": ConcurrentNamespace(variables), "b": ConcurrentNamespace(variables)}
    monkeypatch.setattr(namespace, "user_namespace", lambda: variables)
    assert namespace.module_names() == ["model"]
    assert len(variables) > 3
    monkeypatch.setattr(rank, "user_namespace", lambda: variables, raising=False)
    assert namespace.optimizers_of(variables["model"]) == []


CELL = """def f():
    return ask()
here, there = ask(), f()
"""


def test_the_line_of_the_main_thread_is_that_of_the_innermost_code_of_a_cell(monkeypatch):
    def ask():
        with ThreadPoolExecutor(1) as other:
            return other.submit(stacks.user_line).result()

    cell = {"ask": ask}
    monkeypatch.setattr(stacks, "user_namespace", lambda: cell)
    file = "/tmp/ipykernel_1/1.py"
    monkeypatch.setitem(linecache.cache, file, (len(CELL), None, CELL.splitlines(keepends=True), file))
    exec(compile(CELL, file, "exec"), cell)
    assert cell["here"] == CellLine(line=3, function="<module>", text="here, there = ask(), f()")
    assert cell["there"] == CellLine(line=2, function="f", text="return ask()")
    assert ask() is None
    exec("command = ask()", cell)  # as ipyparallel runs a command: in the namespace of cells, but in no cell
    assert cell["command"] is None
