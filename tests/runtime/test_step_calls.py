"""Calls of a script's functions that are repeated: what is passed, and by which names they are found."""

import functools
import sys

import pytest

from workbench.errors import UsageError
from workbench.runtime import namespace, step_calls

SCRIPT = """
import functools
from dataclasses import dataclass
from functools import partial

def plain(model, batch, *, clip=1.0): stepped(model, batch, clip)
def placed(model, /, *batch, **options): stepped(model, batch, options)
def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs): return function("m", *args, **kwargs)
    return call
@logged
def decorated(model, batch): stepped(model, batch)
@of_library
def wrapped(model, batch): stepped(model, batch)
def without(): stepped()
def never(batch): stepped(batch)
def rebinding(rows, scale=1):
    rows = len(rows)
    stepped(rows)

class Trainer:
    def __init__(self): self.model = "m"
    def fit(self, loader):
        for batch in loader: self.step(batch)
    def step(self, batch): stepped(self.model, batch)
    @staticmethod
    def static(batch): stepped(batch)

@dataclass(frozen=True)
class Step:
    model: str
    def __call__(self, batch): stepped(self.model, batch)

trainer, train_step, bound = Trainer(), Step("m"), partial(plain, "m", clip=2.0)

plain("m", "b", clip=0.5)
placed("m", "b", "c", lr=3)
decorated("b")
wrapped("m", batch="b")
without()
trainer.fit(["a", "b"])
Trainer.static("s")
train_step("b")
bound("c")
rebinding("rows")
"""


def of_library(function):
    return functools.lru_cache(function)


@pytest.fixture
def script(monkeypatch):
    """Run the script; return the arguments of its steps."""
    calls, steps = {}, []

    def stepped(*args):
        steps.append(args)
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == "train.py" and frame.f_code.co_name != "<module>":
                calls[frame.f_code] = step_calls.call_of(frame)
            frame = frame.f_back

    own = {"stepped": stepped, "of_library": of_library, "__name__": "train"}
    for module in (namespace, step_calls):
        monkeypatch.setattr(module, "user_namespace", lambda: own)
    exec(compile(SCRIPT, "train.py", "exec"), own)
    step_calls.keep_calls(calls)
    steps.clear()
    return steps


@pytest.mark.parametrize(
    ("name", "passed", "step"),
    [
        ("plain", ("model", "batch", "clip"), ("m", "c", 2.0)),  # as the partial did, which came last
        ("bound", ("batch", "clip"), ("m", "c", 2.0)),
        ("placed", ("model", "*batch", "**options"), ("m", ("b", "c"), {"lr": 3})),
        ("decorated", ("*args",), ("m", "b")),
        ("without", (), ()),
        ("trainer.step", ("batch",), ("m", "b")),
        ("Trainer.step", ("self", "batch"), ("m", "b")),
        ("Trainer.static", ("batch",), ("s",)),
        ("train_step", ("batch",), ("m", "b")),
    ],
)
def test_a_call_is_repeated_with_the_arguments_of_the_last(script, name, passed, step):
    repeat, names = step_calls.repeated_call(name)
    repeat()
    assert names == passed
    assert script == [step]


def test_what_a_library_wraps_gets_the_arguments_of_the_function_inside(script):
    _, names = step_calls.repeated_call("wrapped")
    assert names == ("model", "batch")


def test_a_call_whose_argument_is_another_value_by_then_is_refused(script):
    repeat, _ = step_calls.repeated_call("rebinding")
    refusal = (
        r"the last call of rebinding\(\) cannot be repeated, as it rebinds its argument rows \(TypeError: .*\): give"
    )
    with pytest.raises(UsageError, match=refusal):
        repeat()
    repeat, _ = step_calls.repeated_call("plain")
    namespace.user_namespace()["stepped"] = None
    with pytest.raises(TypeError):
        repeat()


@pytest.mark.parametrize("name", ["never", "stepped", "Trainer", "functools"])
def test_what_was_not_called_is_not_repeated(script, name):
    assert step_calls.repeated_call(name) is None


def test_the_variables_that_step_are_named_the_innermost_first(script):
    assert step_calls.step_names() == (
        "plain",
        "bound",
        "placed",
        "decorated",
        "wrapped",
        "without",
        "train_step",
        "rebinding",
    )
