"""``workbench course``: the notebooks in a folder of the reader, whose own changes stay."""

import json
import re
import sys

import pytest

from workbench.cli import main as cli
from workbench.cli.course_copy import NBGRADER_CONFIG, copy_course, for_nbgrader, with_solution
from workbench.errors import UsageError


@pytest.fixture
def source(tmp_path):
    """A folder with two notebooks, a picture, and what Jupyter and Python keep beside them."""
    folder = tmp_path / "source"
    for name in ("01_a.ipynb", "00_b.ipynb", "images/tour.png", ".ipynb_checkpoints/01_a.ipynb", "__pycache__/a.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} as shipped")
    return folder


def test_the_notebooks_and_their_pictures_are_copied(source, tmp_path):
    folder = tmp_path / "a" / "course"
    copied = copy_course(source, folder)
    assert copied.new == ("00_b.ipynb", "01_a.ipynb", "images/tour.png")
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")} == {*copied.new}
    assert copied.first == folder / "00_b.ipynb"
    assert str(copied) == f"3 files copied to {folder}"


def test_what_the_reader_changed_stays_and_is_named_in_one_sentence(source, tmp_path):
    folder = tmp_path / "course"
    copy_course(source, folder)
    (folder / "01_a.ipynb").write_text("worked on")
    (folder / "00_b.ipynb").unlink()
    (folder / "00_a.ipynb").write_text("my own")
    copied = copy_course(source, folder)
    assert (copied.new, copied.kept) == (("00_b.ipynb",), ("01_a.ipynb",))
    assert (folder / "01_a.ipynb").read_text() == "worked on"
    assert copied.first == folder / "00_b.ipynb"
    assert str(copied).startswith(
        f"1 file copied to {folder}; not replaced, as they differ from this version: 01_a.ipynb."
    )
    assert "\n" not in str(copied)


SOLVED = {
    "mean": ("%%fsdp\ndef mean(x):\n    return x", "%%fsdp\ndef mean(x):\n    return x / n"),
    "script": ("%%writefile train.py\nwrong", "%%writefile train.py\nright"),
}


@pytest.fixture
def exercises(tmp_path):
    """A folder with a notebook of two exercises and their solutions."""
    folder = tmp_path / "exercises"
    (folder / "solutions").mkdir(parents=True)
    cells = [
        {"cell_type": "code", "metadata": {"nbgrader": {"solution": True, "grade_id": name}}, "source": [start]}
        for name, (start, _) in SOLVED.items()
    ]
    (folder / "03_a.ipynb").write_text(json.dumps({"cells": cells}))
    code = (f"# %% {name}\n# {solution}\n" for name, (_, solution) in SOLVED.items())
    (folder / "solutions" / "03_a.py").write_text("\n".join(code))
    return folder


def sources(folder):
    return ["".join(cell["source"]) for cell in json.loads((folder / "03_a.ipynb").read_text())["cells"]]


def test_students_get_no_solutions_and_teachers_do(exercises, tmp_path):
    copied = copy_course(exercises, tmp_path / "students")
    assert (copied.new, sources(tmp_path / "students")) == (("03_a.ipynb",), [start for start, _ in SOLVED.values()])
    copy_course(exercises, tmp_path / "teachers", with_solution)
    assert sources(tmp_path / "teachers") == [solution for _, solution in SOLVED.values()]


def test_an_assignment_keeps_its_starting_points(exercises, tmp_path):
    folder = tmp_path / "source" / "lab"
    assert str(copy_course(exercises, folder, for_nbgrader)) == f"1 file copied to {folder}"
    region = re.compile("### BEGIN SOLUTION\n.*### END SOLUTION", re.DOTALL)  # nbgrader's ClearSolutions
    mean, script = sources(folder)
    assert mean.startswith("%%fsdp\n")
    assert mean.count("%%") == 1
    assert region.sub("# YOUR CODE HERE", mean) == f"{SOLVED['mean'][0]}\n\n# YOUR CODE HERE"
    assert region.sub("# YOUR CODE HERE", script) == f"{SOLVED['script'][0]}\n\n# YOUR CODE HERE"
    names = {"n": 4}
    exec(mean.removeprefix("%%fsdp"), names)
    assert names["mean"](8) == 2, "in the instructor's copy, the solution counts"


def test_nbgrader_is_configured_in_the_folder_of_its_course_unless_it_is_already(exercises, tmp_path):
    config = tmp_path / NBGRADER_CONFIG
    for content, advice in ((None, ""), ("c.Exchange.root = 'x'", "add to "), ("c.ClearSolutions.code_stub = 1", "")):
        if content is not None:
            config.write_text(content)
        assert advice in copy_course(exercises, tmp_path / "source" / "lab", for_nbgrader).advice
        assert content in (None, config.read_text())
    with pytest.raises(UsageError, match=r"not in .*elsewhere: workbench course source/lab --nbgrader"):
        copy_course(exercises, tmp_path / "elsewhere", for_nbgrader)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("other", ["--nbgrader", "--pages"])
def test_solutions_an_assignment_and_pages_exclude_each_other(other, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["course", "x", "--solutions", other])
    assert f"argument {other}: not allowed with argument --solutions" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_a_sentence(source, tmp_path):
    (tmp_path / "course").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot copy the notebooks to .*course/inside: Not a directory"):
        copy_course(source, tmp_path / "course" / "inside")


def test_the_command_copies_and_opens_the_first_notebook(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(cli.os, "execv", lambda program, argv: started.append(argv) or sys.exit(0))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["course", "--no-browser"])
    folder = tmp_path / "fsdp-course"
    first = min(folder.glob("*.ipynb"))
    assert started == [cli.lab_command(first, ["--no-browser"])]
    assert f"--ServerApp.root_dir={folder}" in started[0]
    assert f"copied to {folder}" in capsys.readouterr().err
    assert {path.name for path in folder.glob("*.ipynb")} == {
        path.name for path in cli.find_tour().parent.glob("*.ipynb")
    }
    assert cli.main(["course", str(tmp_path / "other"), "--copy-only"]) == 0
    assert len(started) == 1
    assert (tmp_path / "other" / first.name).exists()
