"""``%fsdp compare``, from the command line to the figure."""

import pytest

from tests.helpers.trace_strategies import Setup, example_trace, simulate
from workbench.errors import UsageError
from workbench.trace import save
from workbench.views.theme import PLOTLY_MIME
from workbench.workbench import Workbench


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two traces in the working directory."""
    monkeypatch.chdir(tmp_path)
    save(example_trace(), "before.trace")
    save(simulate(Setup(reshard_after_forward=False)), "after.trace")


def test_two_files_are_compared_without_any_rank(bare, files):
    (shown,) = bare.ok("%fsdp compare before.trace after.trace").shown
    assert "3 fewer all-gathers a step (blocks.0-2)" in shown["text/plain"]
    assert "before.trace -> after.trace" in shown["text/plain"]
    assert PLOTLY_MIME in shown
    assert not bare.fakes


def test_some_steps_of_a_file_and_one_rank(bare, files):
    (shown,) = bare.ok("%fsdp compare before.trace:1 before.trace:2 --rank 3").shown
    assert shown["text/plain"].startswith("the same, event for event")
    assert "before.trace, step 1 -> before.trace, step 2" in shown["text/plain"]
    assert "rank 3" in shown["text/plain"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compare before.trace", "nothing is recorded yet"),
        ("compare", "steps ran under none"),
        ("compare before.trace nowhere.trace", "there is no file 'nowhere.trace'"),
        ("compare before.trace before.trace:7", "no step 7; its steps are: 0-2"),
        ("compare before.trace after.trace --rank 9", "no rank 9; its ranks are: 0-3"),
    ],
)
def test_a_wrong_line_lists_the_choices(bare, files, line, message):
    error = bare.run(f"%fsdp {line}").error
    assert isinstance(error, UsageError)
    assert message in str(error)


def test_python_calls_take_a_trace_object():
    trace = example_trace()
    figure = Workbench(2).compare(trace, trace)
    assert figure.layout.title.text == "the same, event for event"
