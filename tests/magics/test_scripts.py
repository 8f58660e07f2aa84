"""``%fsdp run`` in a real IPython shell, on a fake cluster."""

import json

import pytest

from tests.helpers.fake_cluster import blocks, prints, raises, ran
from tests.helpers.waiting import wait_until
from workbench.errors import RankError, UsageError
from workbench.magics.command_lines import has_json, parse_line
from workbench.magics.parser import HelpAsked
from workbench.protocol.commands import Run, to_text


@pytest.fixture
def folder(notebook, tmp_path, monkeypatch):
    """The working folder of a notebook, with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    notebook.fake.script["run"] = prints("loss 1.5\n", then=ran())
    return tmp_path


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("run train.py", Run("train.py")),
        ("run train.py --lr 1e-3 -h --background", Run("train.py", ("--lr", "1e-3", "-h", "--background"))),
        ("run --background train.py --lr 1e-3", Run("train.py", ("--lr", "1e-3"), background=True)),
        ("run --until step.end train.py a", Run("train.py", ("a",), until="step.end")),
        ("run --until=step train.py --until x", Run("train.py", ("--until", "x"), until="step")),
        ("run -m package.train -m x", Run("package.train", ("-m", "x"), module=True)),
        ("run --background -m package.train", Run("package.train", module=True, background=True)),
        ("run train.py 'a b' '' -- x", Run("train.py", ("a b", "", "--", "x"))),
        ("run -- -odd.py --lr 1", Run("-odd.py", ("--lr", "1"))),
        ("run -m -- -odd -x", Run("-odd", ("-x",), module=True)),
        ("run {n}.py {n} {{n}}", Run("3.py", ("3", "{n}"))),
    ],
)
def test_lines_become_commands(line, command):
    assert parse_line(line, {"n": "3"}.__getitem__) == command
    assert parse_line(to_text(command)) == command


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run", "the following arguments are required: FILE"),
        ("run --background", "the following arguments are required: FILE"),
        ("run --fast train.py", "unknown flag '--fast'"),
        ("run --until dance train.py", "there is no event 'dance'"),
        ("run ''", "run needs a script, such as train.py"),
    ],
)
def test_wrong_lines_explain_the_correction(line, message):
    with pytest.raises(UsageError) as caught:
        parse_line(line)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "is_ours"), [("run --json train.py", True), ("run train.py --json", False), ("run -m a --json", False)]
)
def test_json_behind_the_script_is_the_scripts(line, is_ours):
    assert has_json(line) is is_ours
    assert parse_line(line).args == (() if is_ours else ("--json",))


def test_the_document_of_a_script(notebook, folder):
    found = json.loads(notebook.ok("%fsdp run --json train.py").out)
    assert (found["command"], found["type"], found["report"]["steps_done"]) == ("run", "RunReport", 3)
    notebook.fake.script["run"] = [blocks, raises("ValueError", "no", line=3, script="train.py"), blocks, blocks]
    error = json.loads(notebook.run("%fsdp run --json train.py").out.splitlines()[0])["error"]
    assert (error["line"], error["script"], error["ranks"]) == (3, "train.py", [1])


def test_help_is_that_of_run_only_before_the_script():
    with pytest.raises(HelpAsked, match="arguments of the script: the rest of the line"):
        parse_line("run -h train.py")


def test_ranks_get_the_full_path_and_the_result_is_a_sentence(notebook, folder):
    cell = notebook.ok("%fsdp run train.py --lr 1e-3")
    assert notebook.fake.log[-1] == ("execute", Run(str(folder / "train.py"), ("--lr", "1e-3")))
    assert "loss 1.5" in cell.out
    assert cell.shown[-1]["text/plain"] == "the script has ended: 3 steps in 2.00 s\n  models that stay  model"
    assert "%fsdp run train.py --lr 1e-3" in notebook.ok("%fsdp history").shown[-1]["text/plain"]


def test_a_script_that_is_missing_is_refused_before_ranks_are_asked(notebook, folder):
    before = len(notebook.fake.log)
    assert "there is no script trian.py in" in notebook.run("%fsdp run trian.py").out
    assert len(notebook.fake.log) == before


def test_a_script_that_fails_is_named_with_its_line(notebook, folder):
    notebook.fake.script["run"] = [blocks, raises("ValueError", "no", line=3, script="train.py"), blocks, blocks]
    error = notebook.run("%fsdp run train.py").error
    assert isinstance(error, RankError)
    assert str(error) == (
        "rank 1 raised ValueError: no (line 3 of train.py)\n"
        "the ranks are idle again and keep their variables: correct train.py and run it again"
    )


def test_in_the_background_the_next_line_tells_how_it_ended(notebook, folder):
    assert "runs in the background" in notebook.ok("%fsdp run --background train.py").shown[-1]["text/plain"]
    told = "in the background, %fsdp run --background train.py: the script has ended"
    wait_until(lambda: told in notebook.ok("%fsdp status").out)


def test_tab_completes_scripts_and_leaves_their_arguments_alone(notebook, folder):
    (folder / "notes.txt").touch()
    assert notebook.complete("%fsdp run tr") == ["train.py"]
    assert notebook.complete("%fsdp run --b") == ["--background"]
    assert "--background" not in notebook.complete("%fsdp run train.py --b")


def test_a_breakpoint_may_name_a_unit_that_a_script_will_make(notebook):
    notebook.fake.script["run"] = ran()
    added = notebook.ok("%fsdp break add all_gather:layers.0").shown[-1]["text/plain"]
    assert added.startswith("breakpoint 1: all_gather:layers.0; nothing is sharded yet")
    notebook.fake.sharded()
    assert "there is no unit 'layers.0'" in notebook.run("%fsdp break add all_gather:layers.0").out
