"""An assignment made of a notebook of the course: released, graded and given back by nbgrader itself."""

import html
import os
import re
import subprocess
import sys

import nbformat
import pytest

from tests.helpers.course_notebooks import FOLDER
from tests.helpers.tools import NBGRADER
from workbench.cli import main as cli
from workbench.cli.course_copy import changed, solutions, with_solution
from workbench.course.predictions import UNATTENDED

NAME = "00_replay"
STUDENTS = ("solved", "empty")
pytestmark = [pytest.mark.cluster, pytest.mark.needs("nbgrader")]


def answers(notebook):
    """Return the sources of the cells in which students answer, by ``grade_id``."""
    of_cells = [(cell.metadata.get("nbgrader", {}), cell.source) for cell in notebook.cells]
    return {meta["grade_id"]: source for meta, source in of_cells if meta.get("solution")}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course in which two students have got their feedback: one has solved everything, the other nothing."""
    root = tmp_path_factory.mktemp("course")
    assert cli.main(["course", str(root / "source" / "lab"), "--nbgrader", "--copy-only"]) == 0
    data = os.pathsep.join([f"{sys.prefix}/share/jupyter", os.environ.get("JUPYTER_PATH", "")])
    path = os.pathsep.join([str(NBGRADER.parent), os.environ["PATH"]])
    environment = os.environ | {UNATTENDED: "1", "PATH": path, "JUPYTER_PATH": data}

    def nbgrader(command):
        line = [NBGRADER, command, "lab", "--notebook", NAME]
        done = subprocess.run(line, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr

    nbgrader("generate_assignment")
    for student in STUDENTS:
        folder = root / "submitted" / student / "lab"
        folder.mkdir(parents=True)
        text = (root / "release" / "lab" / f"{NAME}.ipynb").read_text("utf-8")
        if student == "solved":
            text = changed(text, solutions(FOLDER / f"{NAME}.ipynb"), with_solution)
        (folder / f"{NAME}.ipynb").write_text(text, "utf-8")
    nbgrader("autograde")
    nbgrader("generate_feedback")
    return root


def test_the_release_has_the_starting_points_and_no_solution(course):
    folders = FOLDER, course / "release" / "lab"
    stored, released = (answers(nbformat.read(each / f"{NAME}.ipynb", as_version=4)) for each in folders)
    assert released == {name: f"{start}\n\n# YOUR CODE HERE" for name, start in stored.items()}


@pytest.mark.parametrize(("student", "points"), [("solved", 2), ("empty", 0)])
def test_feedback_has_the_points_and_names_no_answer(course, student, points):
    page = (course / "feedback" / student / "lab" / f"{NAME}.html").read_text("utf-8")
    assert re.search(rf"Score: {points}\.0 / 2\.0", page)
    text = html.unescape(re.sub("<[^>]+>", "", page))
    stored = answers(nbformat.read(FOLDER / f"{NAME}.ipynb", as_version=4))
    for name, solution in solutions(FOLDER / f"{NAME}.ipynb").items():
        for line in set(solution.splitlines()) - set(stored[name].splitlines()):
            assert (line in text) == (student == "solved"), line
    assert "; the answer: " not in text
    assert ("which is not what a rank issued" in text) == (student == "empty")
