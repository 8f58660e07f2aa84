"""Grading a notebook: which checks it has, and what became of each."""

import json
import math
import signal
import socket
import subprocess
import sys
from xml.etree import ElementTree

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.helpers import json_schema
from tests.helpers.leaks import is_running
from tests.helpers.waiting import wait_until
from workbench.base import ports
from workbench.cli import grade
from workbench.cli import main as cli
from workbench.cli.grade import graded_cell, with_cells_of
from workbench.errors import UsageError

IMPORT = "from workbench.course import check, predict, same"


def notebook(*cells):
    """Return a notebook of code cells, each a source, or a source with an id or nbgrader's metadata."""
    made = []
    for cell in cells:
        source, more = cell if isinstance(cell, tuple) else (cell, {})
        made.append(new_code_cell(source))
        made[-1].metadata.update({"nbgrader": more["nbgrader"]} if "nbgrader" in more else {})
        if "id" in more:
            made[-1]["id"] = more["id"]
    return new_notebook(cells=made)


def saved(path, *cells):
    nbformat.write(notebook(*cells), path)
    return path


LONG_S = 300.0
"""For the start and the end of a kernel; a busy machine took more than a minute."""

GOOD = (IMPORT, "%pwd", "check('first', same(1, 1))")
BAD = (
    IMPORT,
    "guess = predict('g', 'How many?')\nguess.reveal(3)",
    "check('first', same(2, 1), points=2)",
    "check('second', same(1, 1), same(0.5, 0.5))",
    "print(nothing)",
    "check('third', same(1, 1))",
)


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """The report of a notebook in which one check passes, one fails and one is not reached."""
    return grade.grade(saved(tmp_path_factory.mktemp("graded") / "bad.ipynb", *BAD))


def test_each_check_passes_fails_or_is_not_reached(bad):
    assert [(check.name, check.cell, check.status, check.score, check.points) for check in bad.checks] == [
        ("first", 3, "failed", 0, 2),
        ("second", 4, "passed", 1, 1),
        ("third", 6, "not reached", 0, 1),
    ]
    assert bad.checks[0].sentences[0].startswith("the values are not those of the reference: 2, expected 1")
    assert bad.checks[2].sentences == ("not reached: cell 5 raised NameError: name 'nothing' is not defined",)
    assert (bad.score, bad.max_score, bad.passed) == (1, 4, False)


LOOPS = (
    IMPORT,
    "import time\nfirst = nothing",
    "check('first', same(first, 1))",
    "while True:\n    time.sleep(0.01)",
    "check('second', same(1, 1))",
)


def test_one_error_and_one_loop_cost_one_exercise_each(tmp_path):
    """The cells after them still run, and their checks count."""
    path = saved(tmp_path / "loops.ipynb", *LOOPS)
    found = grade.grade(path, keep_going=True, cell_timeout_s=5, timeout_s=LONG_S)
    assert [(check.name, check.status) for check in found.checks] == [("first", "not reached"), ("second", "passed")]
    assert found.checks[0].sentences[0].startswith("not reached: cell 3 raised NameError: name 'first'")
    assert not found.problem


def test_a_cell_has_a_limit_of_its_own(tmp_path):
    found = grade.grade(
        saved(tmp_path / "loops.ipynb", IMPORT, "import time", *LOOPS[3:]), cell_timeout_s=5, timeout_s=LONG_S
    )
    assert found.problem == "cell 3 was running after 5 s"


def test_nobody_predicts_in_a_graded_run(bad):
    (prediction,) = bad.predictions
    assert (prediction.predicted, prediction.measured, prediction.distance) == (None, 3, "")


def test_the_table_has_every_check_and_why_it_failed(bad):
    text = str(bad)
    assert text.splitlines()[:3] == [
        "check   points  result",
        "first   0 of 2  failed",
        "second  1 of 1  passed",
    ]
    assert "first (cell 3)\n  the values are not those of the reference: 2, expected 1" in text
    assert "1 of 3 checks passed: 1 of 4 points" in text
    assert "The notebook did not run to its end: cell 5 raised NameError" in text


# ---- the command


def test_the_command_writes_each_file_and_ends_with_0(tmp_path, capsys, monkeypatch):
    saved(tmp_path / "good.ipynb", *GOOD, "open('here', 'w')")
    before = (tmp_path / "good.ipynb").read_bytes()
    files = {flag: tmp_path / flag for flag in ("json", "junit", "gradescope")}
    flags = [text for flag, file in files.items() for text in (f"--{flag}", str(file))]
    assert cli.main(["grade", str(tmp_path / "good.ipynb"), *flags]) == 0
    assert "1 of 1 check passed: 1 of 1 points" in capsys.readouterr().out
    report = json_schema.check(json.loads(files["json"].read_text()))["report"]
    assert (report["passed"], report["checks"][0]["score"]) == (True, 1)
    assert ElementTree.parse(files["junit"]).getroot().get("failures") == "0"
    assert json.loads(files["gradescope"].read_text())["score"] == 1
    assert (tmp_path / "here").exists(), "a notebook runs in its own folder"
    assert (tmp_path / "good.ipynb").read_bytes() == before


def test_the_command_ends_with_1_if_a_check_failed(tmp_path, capsys):
    assert cli.main(["grade", str(saved(tmp_path / "bad.ipynb", IMPORT, "check('no', same(2, 1))"))]) == 1
    assert "0 of 1 check passed" in capsys.readouterr().out


def empty(path):
    path.write_text("")


def no_notebook(path):
    path.write_text('{"cells": 3}')


def without_checks(path):
    saved(path, "print('check')", "%%bash\ncheck('no')")


@pytest.mark.parametrize(
    ("makes", "why"),
    [
        (lambda path: None, "cannot read {}: No such file or directory"),
        (lambda path: path.mkdir(), "cannot read {}: Is a directory"),
        (empty, "{} is not a notebook ("),
        (no_notebook, "{} is not a notebook ("),
        (without_checks, "{} has no check, so there is nothing to grade"),
    ],
)
def test_what_cannot_be_graded_is_one_sentence_and_2(makes, why, tmp_path, capsys):
    path, found, results = tmp_path / "x.ipynb", tmp_path / "found.json", tmp_path / "results.json"
    makes(path)
    assert cli.main(["grade", str(path), "--json", str(found), "--gradescope", str(results)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(why.format(path))
    assert said.err.count("\n") == 1
    assert not said.out
    assert json.loads(found.read_text())["error"]["message"] == said.err.strip()
    assert json.loads(results.read_text()) == {"score": 0, "output": said.err.strip()}


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path, capsys, monkeypatch, bad):
    monkeypatch.setattr(grade, "grade", lambda *_args, **_options: bad)
    assert cli.main(["grade", "x.ipynb", "--junit", str(tmp_path / "no" / "x")]) == 2
    assert capsys.readouterr().err == f"cannot write {tmp_path}/no/x: No such file or directory\n"


# ---- which checks a notebook has


@pytest.mark.parametrize(
    ("source", "checks"),
    [
        ("check('a', x)\ncourse.check('b', points=0.5)", [("a", 1), ("b", 0.5)]),
        ("%time check('a', x)", []),
        ("x = 1\n%fsdp step 3\nif x:\n    check('a', counts(t, {}))", [("a", 1)]),
        ("%%fsdp\ncheck('a')", []),
        ("check(name, x)", []),
        ("check('a'", []),
    ],
)
def test_checks_are_known_from_the_source(source, checks):
    found = graded_cell(new_code_cell(source)) or ()
    assert [(check.name, check.points) for check in found] == checks


def test_the_points_of_nbgrader_are_divided_among_the_checks_of_a_cell():
    cell = new_code_cell("check('a')\ncheck('b', points=3)", metadata={"nbgrader": {"grade": True, "points": 8}})
    assert [(check.name, check.points) for check in graded_cell(cell)] == [("a", 2), ("b", 6)]


@pytest.mark.parametrize("meta", [{}, {"grade": False}, {"grade": True, "solution": True}, "no mapping"])
def test_a_cell_that_nbgrader_does_not_grade_is_none(meta):
    assert graded_cell(new_code_cell("x = 1", metadata={"nbgrader": meta})) is None
    assert graded_cell(new_markdown_cell("check('a')")) is None


def test_a_test_cell_of_nbgrader_is_a_check(tmp_path):
    graded = {"nbgrader": {"grade": True, "grade_id": "passes", "points": 2, "locked": True, "solution": False}}
    fails = {"nbgrader": {**graded["nbgrader"], "grade_id": "fails"}}
    later = {"nbgrader": {**graded["nbgrader"], "grade_id": "later"}}
    path = saved(tmp_path / "x.ipynb", ("assert True", graded), ("assert 1 == 2, 'no'", fails), ("1", later))
    found = grade.grade(path)
    assert [(check.name, check.status, check.score) for check in found.checks] == [
        ("passes", "passed", 2),
        ("fails", "failed", 0),
        ("later", "passed", 2),
    ]
    assert found.checks[1].sentences == ("AssertionError: no",)


def test_a_check_that_is_not_called_and_one_with_a_computed_name(tmp_path):
    path = saved(tmp_path / "x.ipynb", IMPORT, "if False:\n    check('a', same(1, 1))", "check('b' * 2, same(1, 1))")
    found = grade.grade(path)
    assert [(check.name, check.status) for check in found.checks] == [("a", "not reached"), ("bb", "passed")]
    assert found.checks[0].sentences == ("not reached: its cell ran without calling it",)


def test_a_check_after_one_that_failed_in_the_same_cell_is_not_reached(tmp_path):
    path = saved(tmp_path / "x.ipynb", IMPORT, "check('a', same(1, 2))\ncheck('b', same(1, 1))")
    assert [(check.name, check.status) for check in grade.grade(path).checks] == [
        ("a", "failed"),
        ("b", "not reached"),
    ]


def test_outputs_that_were_saved_do_not_count(tmp_path):
    path = saved(tmp_path / "x.ipynb", "nothing", "check('a', same(1, 1))")
    document = nbformat.read(path, as_version=4)
    record = {"version": 1, "name": "a", "points": 1, "passed": True, "findings": []}
    document.cells[1].outputs = [nbformat.v4.new_output("display_data", data={grade.CHECK_MIME: record})]
    document.cells[1].execution_count = 2
    nbformat.write(document, path)
    (check,) = grade.grade(path).checks
    assert check.status == "not reached"


ODD = f"""
from IPython.display import display
for record in (3, {{}}, {{"name": "a", "points": "x", "findings": []}}, {{"name": "a", "points": 1, "findings": [1]}},
               {{"name": "a", "points": float("nan"), "findings": []}}):
    display({{"{grade.CHECK_MIME}": record}}, raw=True)
"""


def test_a_record_that_check_did_not_make_is_ignored(tmp_path):
    found = grade.grade(saved(tmp_path / "x.ipynb", ODD, IMPORT, "check('b', same(1, 1))"))
    assert [(check.name, check.status) for check in found.checks] == [("b", "passed")]


# ---- the instructor's copy


def test_graded_cells_of_the_copy_replace_changed_ones_and_come_back(tmp_path):
    reference = saved(
        tmp_path / "reference.ipynb",
        (IMPORT, {"id": "one"}),
        ("answer = None", {"id": "two"}),
        ("check('a', same(answer, 3))", {"id": "three"}),
        ("check('b', same(answer, 3))", {"id": "four"}),
    )
    forged = f"""
from IPython.display import display
display({{"{grade.CHECK_MIME}": {{"name": "a", "passed": True, "findings": []}}}}, raw=True)
check('b', same(1, 1))
"""
    student = saved(
        tmp_path / "student.ipynb",
        (IMPORT, {"id": "one"}),
        ("answer = 4", {"id": "two"}),
        (forged, {"id": "three"}),
        "check('more', same(1, 1), points=100)",
    )
    found = grade.grade(student, against=reference)
    assert [(check.name, check.status) for check in found.checks] == [("a", "failed"), ("b", "failed")]
    assert found.max_score == 2
    saved(student, (IMPORT, {"id": "one"}), ("answer = 3", {"id": "two"}))
    assert grade.grade(student, against=reference).passed


def test_cells_are_matched_by_grade_id_then_id_then_checks():
    meta = {"nbgrader": {"grade": True, "grade_id": "g", "points": 1}}
    reference = notebook(("check('r1')", meta), ("check('r2')", {"id": "i"}), "check('r3')", "check('r4')")
    student = notebook("x = 1", ("check('r3')", {"id": "z"}), ("check('s')", {"id": "i"}), ("y = 2", meta))
    merged, checks = with_cells_of(student, reference)
    assert [cell.source for cell in merged.cells] == [
        "x = 1",
        "check('r3')",
        "check('r4')",
        "check('r2')",
        "check('r1')",
    ]
    assert {index: found[0].name for index, found in checks.items()} == {1: "r3", 2: "r4", 3: "r2", 4: "r1"}
    assert [cell.source for cell in student.cells][-1] == "y = 2", "the student's notebook is not changed"


# ---- how a run ends


ORIGINAL = (
    ("x = 0", {"nbgrader": {"grade": False, "solution": True, "grade_id": "x"}}),
    ("check('x is 1', same(x, 1))", {"nbgrader": {"grade": True, "grade_id": "x-check", "points": 3}}),
    ("check('y is 1', same(y, 1))", {"nbgrader": {"grade": True, "grade_id": "y-check", "points": 2}}),
)


@pytest.mark.parametrize(
    ("cells", "changed", "removed"),
    [
        (ORIGINAL, [], []),
        (ORIGINAL[:2], [], [("y is 1", 2)]),
        ((ORIGINAL[0], ("check('x is 1', same(1, 1))", ORIGINAL[1][1]), ORIGINAL[2]), ["x is 1"], []),
        ((ORIGINAL[0], ("print('nothing')", ORIGINAL[1][1]), ORIGINAL[2]), [], [("x is 1", 3)]),
        ((ORIGINAL[0],), [], [("x is 1", 3), ("y is 1", 2)]),
    ],
)
def test_checks_of_the_course_that_were_changed_or_removed_are_named(cells, changed, removed, tmp_path):
    other = (("check('z', same(1, 1))", {"nbgrader": {"grade": True, "grade_id": "z-check"}}),)
    for name, each in [("a", other), ("b", ORIGINAL)]:
        saved(tmp_path / f"{name}.ipynb", *each)
    found = grade.find_original(notebook(*cells), tmp_path)
    assert found == tmp_path / "b.ipynb"
    names, lacks = grade.differences(notebook(*cells), grade.read_notebook(found))
    assert (names, [(each.name, each.points) for each in lacks]) == (changed, removed)
    assert grade.find_original(notebook("check('x is 1', same(1, 1))"), tmp_path) is None


def test_a_removed_check_of_the_course_costs_its_points(tmp_path):
    (tmp_path / "course").mkdir()
    saved(tmp_path / "course" / "x.ipynb", IMPORT, *ORIGINAL)
    mine = (
        IMPORT,
        ("x = 1", ORIGINAL[0][1]),
        ("check('x is 1', same(1, 1), parts=[same(x, 2)], points=4)", ORIGINAL[1][1]),
    )
    report = grade.grade(saved(tmp_path / "x.ipynb", *mine), course=tmp_path / "course", timeout_s=LONG_S)
    assert [(each.name, each.status, each.score) for each in report.checks] == [
        ("x is 1", "failed", 0),
        ("y is 1", "not reached", 0),
    ]
    assert (report.max_score, report.changed) == (5, ("x is 1",))
    assert "To grade with the checks of the course: --against" in str(report)


def test_a_check_in_parts_gets_a_part_of_the_points():
    record = {
        "name": "b",
        "points": 4,
        "passed": False,
        "score": 1,
        "measured": {"peak": 7, "odd": "8"},
        "findings": [],
    }
    found = grade._of_record(record, grade.ExpectedCheck(name="b", points=8), 2)
    assert (found.score, found.measured, found.status) == (2, {"peak": 7}, "failed")
    for score in (4, 5, -1, "1", math.nan):
        assert grade._of_record(record | {"score": score}, grade.ExpectedCheck(name="b", points=8), 2).score == 0


def test_a_notebook_that_takes_too_long_is_ended_without_a_word_of_its_kernel(tmp_path, capfd):
    found = grade.grade(saved(tmp_path / "x.ipynb", "while True: pass", "check('late', same(1, 1))"), timeout_s=2)
    assert [(check.name, check.status) for check in found.checks] == [("late", "not reached")]
    assert found.problem == "cell 1 was running when the notebook had taken 2 s"
    assert capfd.readouterr() == ("", "")


FLOOD = """
from IPython.display import display
for _ in range(3):
    print("x" * 1000)
    display({"text/plain": "x" * 1000}, raw=True)
"""


def test_output_that_grading_does_not_need_is_not_kept(tmp_path, monkeypatch):
    path, kept = saved(tmp_path / "x.ipynb", IMPORT, f"{FLOOD}check('a', same(1, 2))\n'x'"), []
    monkeypatch.setattr(grade, "_results", lambda notebook, *_: kept.extend(notebook.cells[1].outputs) or ())
    grade.grade(path)
    assert [each.output_type for each in kept] == ["display_data", "error"]


def test_a_kernel_that_dies_is_named(tmp_path):
    path = saved(tmp_path / "x.ipynb", "import os; os._exit(1)", "check('late', same(1, 1))")
    found = grade.grade(path)
    assert found.checks[0].sentences[0].startswith("not reached: the kernel died in cell 1")


CHILD = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(1000)"],
    start_new_session=True, stdout=subprocess.PIPE)
child.stdout.read(1)
open("pid", "w").write(str(child.pid))
"""


def has_ended(file):
    """Return whether the process with the number in a file is gone; its parent may never ask for its status."""
    return is_gone(int(file.read_text()))


def is_gone(pid):
    return not psutil.pid_exists(pid) or not is_running(psutil.Process(pid))


ORPHAN = """
import os, subprocess, sys, time
program = "import os, time; os.fork() and os._exit(0); open('pid', 'w').write(str(os.getpid())); time.sleep(1000)"
subprocess.run([sys.executable, "-c", program], env={}, start_new_session=True)
while not (os.path.exists("pid") and open("pid").read()):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("code", [CHILD, ORPHAN])
def test_processes_that_a_notebook_leaves_are_ended(code, tmp_path):
    grade.grade(saved(tmp_path / "x.ipynb", IMPORT, code, "check('a', same(1, 1))"))
    assert has_ended(tmp_path / "pid")


def test_a_grading_that_is_killed_leaves_no_process(tmp_path):
    path = saved(tmp_path / "x.ipynb", CHILD, "import time; time.sleep(1000)", "check('a')")
    process = subprocess.Popen([sys.executable, "-m", "workbench.cli.main", "grade", str(path)])
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), LONG_S)
    kernel = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    wait_until(lambda: all(is_gone(each.pid) for each in kernel), LONG_S)
    wait_until(lambda: has_ended(tmp_path / "pid"), LONG_S)


@pytest.mark.parametrize("points", [None, "abc", "3", math.nan, math.inf, -1, True])
def test_points_that_are_no_number_are_named(points, tmp_path, capsys):
    meta = {"nbgrader": {"grade": True, "grade_id": "g", "points": points}}
    path, results = saved(tmp_path / "x.ipynb", ("1", meta)), tmp_path / "results.json"
    assert cli.main(["grade", str(path), "--gradescope", str(results)]) == 2
    assert f"the cell 'g' has \"points\": {points!r} in nbgrader's metadata" in capsys.readouterr().err
    assert json.loads(results.read_text())["score"] == 0


def test_ctrl_c_ends_every_process(tmp_path):
    path = saved(tmp_path / "x.ipynb", CHILD, "import time; time.sleep(1000)", "check('a')")
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench.cli.main", "grade", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), LONG_S)
    kernel = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LONG_S)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("interrupted: all processes of the notebook have ended\n")
    assert kernel
    assert all(is_gone(each.pid) for each in kernel)
    assert has_ended(tmp_path / "pid")


def test_a_kernel_that_does_not_start_is_an_error(tmp_path, monkeypatch):
    with socket.create_server((ports.LOOPBACK, 0)) as taken:
        settings = ports.of_a_kernel() | {"shell_port": taken.getsockname()[1]}
        monkeypatch.setattr(ports, "of_a_kernel", lambda: settings)
        with pytest.raises(UsageError, match="the notebook did not run: the kernel failed"):
            grade.grade(saved(tmp_path / "x.ipynb", "check('a')"))
