"""The notebooks of the course: as stored, and run from top to bottom with their exercises solved.

A sentence that states a fact is computed in a cell, or follows an assertion: a notebook that runs is right.
"""

import os
import shutil

import nbformat
import pytest

from tests.helpers.course_notebooks import (
    FOLDER,
    INSIDE,
    NOTEBOOKS,
    WarmKernel,
    assert_only_solutions_pass,
    exercises,
    solved,
    with_attempts,
    wrong_verdicts,
)
from tests.helpers.package_source import REPO
from tests.helpers.replay_recording import NUM_RANKS, NUM_STEPS, RECORDING
from tests.helpers.stored_notebook import assert_kept_without_outputs
from workbench.cli.course_copy import solutions
from workbench.trace import check, load, steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(500)]

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def kernel(request, tmp_path_factory):
    """A kernel in a folder with the recordings of the notebooks, whose ranks are as many as the parameter says."""
    folder = tmp_path_factory.mktemp("course")
    for recording in FOLDER.glob("*.trace"):
        shutil.copy(recording, folder)
    own = {"WORKBENCH_RANKS": str(request.param), "WORKBENCH_UNATTENDED": "1"}
    warm = WarmKernel(folder, os.environ | own)
    try:
        warm.warm(request.param)
        yield warm
    finally:
        warm.end()


@each_notebook
def test_it_is_kept_without_outputs(path):
    assert_kept_without_outputs(path)


@each_notebook
def test_it_has_exercises_with_a_check_and_a_solution(path):
    notebook = nbformat.read(path, as_version=4)
    found = exercises(notebook)
    assert found
    assert {each.grade_id for each in found} == solutions(path).keys()
    for each in found:
        graded = notebook.cells[each.check].metadata.nbgrader
        assert (graded.locked, graded.points >= 1, graded.solution) == (True, True, False)
        assert "check(" in notebook.cells[each.check].source
    tagged = [place for place, cell in enumerate(notebook.cells) if "tags" in cell.metadata]
    assert tagged == [each.check for each in found]  # after a check that fails, the rest of the notebook still runs
    assert all(notebook.cells[place].metadata.tags == ["raises-exception"] for place in tagged)


@each_notebook
def test_it_asks_for_a_prediction(path):
    code = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    assert code.count("predict(") >= 1
    assert code.count("predict(") == code.count(".reveal(")


def _marks(path, num_ranks):
    if num_ranks == 2:
        return pytest.mark.thorough if path == INSIDE else ()  # test_inside.py runs it on 2 ranks
    return pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("kernel", "path"),
    [
        pytest.param(num_ranks, path, id=f"{num_ranks} ranks-{path.stem}", marks=_marks(path, num_ranks))
        for num_ranks in (2, 4)
        for path in NOTEBOOKS
    ],
    indirect=["kernel"],
)
def test_it_runs_and_only_solutions_pass(path, kernel, request):
    """Of a run with all tests, on 2 ranks, also: each attempt gets its sentence, one after the other in one session."""
    notebook, is_whole_run = nbformat.read(path, as_version=4), not request.config.option.markexpr
    if is_whole_run and request.node.callspec.params["kernel"] == 2:
        assert wrong_verdicts(kernel.run(with_attempts(notebook, path))) == []
    else:
        assert_only_solutions_pass(kernel.run(solved(notebook, solutions(path))))


@each_notebook
def test_it_has_a_row_on_the_page_of_the_course(path):
    assert f"| [{path.stem}](../notebooks/{path.name}) |" in (REPO / "docs" / "course.md").read_text(encoding="utf-8")


def test_the_recording_is_small_and_obeys_the_rules_of_traces():
    assert RECORDING.stat().st_size < 200_000
    trace = load(RECORDING)
    assert (len(trace.ranks), steps(trace)) == (NUM_RANKS, list(range(NUM_STEPS)))
    assert check(trace) == []
    assert all(rank.lost == 0 for rank in trace.ranks)
