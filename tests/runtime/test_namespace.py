"""Reading a rank's variables while a cell makes new ones."""

import linecache
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from workbench.errors import UsageError
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


@pytest.fixture
def variables(monkeypatch):
    """The variables of the cells of a rank."""
    found = {"net": torch.nn.Sequential(torch.nn.Linear(1, 1)), "rate": 3.0}
    monkeypatch.setattr(namespace, "user_namespace", lambda: found)
    return found


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model", "there is no variable 'model' on this rank; define it in a %%fsdp cell"),
        ("net.0.scale", "'net.0' has no attribute 'scale'"),
        ("net.1", "'net' has no attribute '1'"),
        ("rate", "'rate' is a float, not a torch.nn.Module"),
        ("net.0.weight", "'net.0.weight' is a Parameter, not a torch.nn.Module"),
    ],
)
def test_what_is_no_module_is_said(variables, name, says):
    with pytest.raises(UsageError) as caught:
        namespace.find_module(name)
    assert str(caught.value) == says
    assert namespace.find_module("net.0") is variables["net"][0]


def test_each_variable_of_a_module_that_is_exchanged_has_the_new_one(variables):
    net, new = variables["net"], torch.nn.Linear(1, 1)
    inner = net[0]
    variables |= {"also": net, "inner": inner, "_hidden": net}
    namespace.rebind("net", new)
    assert [variables[name] for name in ("net", "also", "_hidden", "inner")] == [new, new, new, inner]
    variables["net"] = net
    namespace.rebind("net.0", new)
    assert (net[0], variables["inner"], variables["net"]) == (new, new, net)
    assert namespace.module_names() == ["also", "inner", "net"]


def test_pairs_of_objects_are_exchanged_wherever_variables_hold_them(variables):
    net, rate = variables["net"], variables["rate"]
    variables["same"] = rate
    namespace.exchange([(rate, "new"), (object(), "other")])
    assert variables == {"net": net, "rate": "new", "same": "new"}


def test_optimizers_of_a_model_hold_one_of_its_parameters(variables):
    other = torch.nn.Linear(1, 1)
    weight, bias = variables["net"].parameters()
    whole = torch.optim.SGD([*other.parameters(), weight], lr=0.1)
    second = torch.optim.SGD([{"params": list(other.parameters())}, {"params": [bias]}], lr=0.1)
    variables |= {"a": whole, "b": torch.optim.SGD(other.parameters(), lr=0.1), "c": second, "d": whole}
    assert namespace.optimizers_of(variables["net"]) == [whole, second]


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
    here, there = cell["here"], cell["there"]
    assert replace(here, frames=()) == CellLine(line=3, function="<module>", text="here, there = ask(), f()")
    assert replace(there, frames=()) == CellLine(line=2, function="f", text="return ask()")
    assert there.frames[:2] == ("cell:3 in <module>: here, there = ask(), f()", "cell:2 in f: return ask()")
    assert ask() is None
    cell["__file__"] = script = "/home/me/train.py"
    monkeypatch.setitem(linecache.cache, script, (len(CELL), None, CELL.splitlines(keepends=True), script))
    exec(compile(CELL, script, "exec"), cell)
    there = cell["there"]
    assert there.frames[1] == "/home/me/train.py:2 in f: return ask()"  # its whole path, as in recordings
    assert replace(there, frames=()) == CellLine(line=2, function="f", text="return ask()", script="train.py")
    exec("command = ask()", cell)  # as ipyparallel runs a command: in the namespace of cells, but in no cell
    assert cell["command"] is None


FAILS = """def f():
    raise ValueError
f()
"""


def test_the_line_of_an_error_is_that_of_its_cause_if_it_was_raised_elsewhere(monkeypatch):
    cell, file = {}, "/tmp/ipykernel_1/2.py"
    monkeypatch.setattr(stacks, "user_namespace", lambda: cell)
    monkeypatch.setitem(linecache.cache, file, (len(FAILS), None, FAILS.splitlines(keepends=True), file))
    with pytest.raises(ValueError, match=r"^$") as raised:
        exec(compile(FAILS, file, "exec"), cell)
    found = stacks.raised_line(raised.value)
    assert replace(found, frames=()) == CellLine(line=2, function="f", text="raise ValueError")
    assert found.frames == ("cell:3 in <module>: f()", "cell:2 in f: raise ValueError")
    abort = RuntimeError()
    assert stacks.raised_line(abort) is None
    abort.__cause__, raised.value.__cause__ = raised.value, abort
    assert stacks.raised_line(abort) == found
