"""The notebooks of the course: as stored, and run from top to bottom with their exercises solved.

A sentence that states a fact is computed in a cell, or follows an assertion: a notebook that runs is right.
"""

import os
import re
import shutil

import nbformat
import pytest

from tests.helpers.course_notebooks import (
    FOLDER,
    INSIDE,
    NOTEBOOKS,
    TOUR,
    WarmKernel,
    assert_kept_without_outputs,
    exercises,
    texts,
    with_attempts,
    wrong_verdicts,
)
from tests.helpers.own_fsdp import FSDP, NOTEBOOK, source_of
from tests.helpers.package_source import REPO
from tests.helpers.replay_recording import NUM_RANKS, NUM_STEPS, RECORDING
from workbench.cli.course_copy import solutions
from workbench.magics import command_lines
from workbench.trace import check, load, steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(500)]

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory):
    """Run a notebook from top to bottom on a number of ranks, once; return its cells with their outputs.

    Only its solutions pass. Of a run with all tests, on 2 ranks, also: each attempt gets its sentence, one after the
    other in one session.
    """
    folder = tmp_path_factory.mktemp("course")
    for recording in FOLDER.glob("*.trace"):
        shutil.copy(recording, folder)
    kernel, cells = WarmKernel(folder, os.environ | {"WORKBENCH_UNATTENDED": "1"}), {}

    def run(path, num_ranks=2):
        if (path, num_ranks) not in cells:
            notebook = nbformat.read(path, as_version=4)
            tried = None if num_ranks == 2 and not request.config.option.markexpr else {}
            done = kernel.run(with_attempts(notebook, path, tried), num_ranks)
            assert wrong_verdicts(done) == []
            cells[path, num_ranks] = [cell for cell in done.cells if cell.cell_type == "code"]
        return cells[path, num_ranks]

    try:
        kernel.warm()
        yield run
    finally:
        kernel.end()


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
    assert not re.search(r"predict\([^)]*`", code), "a widget shows a question as it is written"


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path != TOUR], ids=lambda path: path.stem)
def test_it_runs_and_only_solutions_pass(path, ran):
    assert ran(path)


FOUR = [path for path in NOTEBOOKS if path.stem[:2] in {"03", "04", "05", "11", "16"}]
"""Those whose cells depend on the number of ranks: padding, bytes of a rank, shards of unequal size, meshes, rings."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", FOUR, ids=lambda path: path.stem)
def test_it_runs_on_four_ranks(path, ran):
    assert ran(path, 4)


@each_notebook
def test_it_has_a_row_on_the_page_of_the_course(path):
    assert f"| [{path.stem}](../notebooks/{path.name}) |" in (REPO / "docs" / "course.md").read_text(encoding="utf-8")


def test_the_recording_is_small_and_obeys_the_rules_of_traces():
    assert RECORDING.stat().st_size < 200_000
    trace = load(RECORDING)
    assert (len(trace.ranks), steps(trace)) == (NUM_RANKS, list(range(NUM_STEPS)))
    assert check(trace) == []
    assert all(rank.lost == 0 for rank in trace.ranks)


# ---- the notebook about stopping inside a step, on two ranks


@pytest.fixture(scope="module")
def inside(ran):
    return ran(INSIDE)


def outputs(cells, line):
    """Return the text of each cell that begins with ``line``, in order."""
    return [texts(cell) for cell in cells if f"{cell.source}\n".startswith(line)]


def first(cells, line):
    return outputs(cells, line)[0]


def lines_of(notebook) -> list[str]:
    return [line for c in notebook.cells if c.cell_type == "code" for line in c.source.splitlines()]


def words_of(path) -> set[str]:
    lines = lines_of(nbformat.read(path, as_version=4))
    return {found[1] for line in lines if (found := re.match(r"\s*(?:\w+ = )?%fsdp (\w+)", line))}


def test_the_notebooks_together_use_every_command():
    # they need a running cluster, or are part of another command
    elsewhere = {"attach", "detach", "snapshot"}
    left = {"status", "help", "example"} | elsewhere
    assert set(command_lines.WORDS) - set().union(*map(words_of, NOTEBOOKS)) == left


def test_all_ranks_stop_at_the_breakpoint(inside):
    assert "2 ranks stopped before all-gather of blocks.2, for its forward, step 20" in first(inside, "%fsdp step 1")
    assert first(inside, "%fsdp where").count("before all-gather") == 2


def test_a_stopped_step_can_be_inspected(inside):
    table = first(inside, "%fsdp inspect")
    assert re.search(r"\n +rank 0 +rank 1\n  this shard +rows +0-127 of 256 +128-255 of 256\n +shape +128x64 ", table)
    assert "torch.Size([128, 64])" in first(inside, "%fsdp eval")
    assert "rank 1 has it as DTensor" in first(inside, '%%fsdp\nprint(f"rank {rank} has it')


def test_it_continues_in_small_steps_and_to_the_end(inside):
    assert "stopped before all-gather of blocks.3" in first(inside, "%fsdp next collective")
    assert "20 events before the newest" in first(inside, "%fsdp back")
    assert "1 step, loss" in first(inside, "%fsdp continue")
    assert "sharded training is the same as unsharded" in first(inside, "%fsdp verify")


def test_a_background_step_is_paused_and_aborted(inside):
    both, late = r"2 ranks stopped ", r"rank (\d) stopped .*; rank (?!\1)\d (stopped|waits|stops at the next event)"
    assert re.search(f"{both}|{late}", first(inside, "%fsdp pause"))  # a pause waits 0.4 s for a computing rank
    assert "The ranks are idle again" in first(inside, "%fsdp abort")


def test_a_policy_change_is_explained(inside):
    assert "resharded in place" in first(inside, "%fsdp reshard")
    assert "4 fewer all-gathers a step" in first(inside, "%fsdp compare")


def test_the_live_model_goes_over_to_flat_parameters(inside):
    assert re.search("policy +classic: one flat parameter per unit", first(inside, "%fsdp reshard model --api classic"))
    assert "12 parameters in 1 unit, packed into 1 flat parameter" in first(inside, "%fsdp layout --unit blocks.2")


# ---- the notebook in which an FSDP is written by hand, on two ranks


@pytest.fixture(scope="module")
def own(ran):
    return ran(NOTEBOOK)


def test_ten_lines_announce_what_it_does():
    lines = [line for cell in FSDP for line in source_of(cell).splitlines() if line]
    assert sum(line.endswith("  # watch") for line in lines) == 10


def test_views_draw_an_fsdp_of_one_s_own(own):
    *_, comms = outputs(own, "%fsdp comms")  # before it is that of the engine as it is stored
    assert "all-gathers 9 of 9, reduce-scatters 5 of 5: as expected" in comms
    *_, memory = outputs(own, "%fsdp memory")
    # a transport may let go of a gradient later on one rank than on the other: then the title names a rank
    assert re.search(r"memory( of rank \d)? peaks at 1.20 MiB \(backward of blocks.0\)", memory)
    *_, states = outputs(own, "%fsdp states")
    assert "at most 2 of 5 units unsharded at once" in states
    *_, layout = outputs(own, "%fsdp layout")
    assert "4 parameters in 1 unit, packed into 1 flat parameter" in layout
    (training,) = outputs(own, "%fsdp training")
    assert "in 15 steps" in training


def test_an_fsdp_of_one_s_own_stops_in_forward_and_in_backward_and_is_inspected(own):
    (step,) = outputs(own, "%fsdp step 1\n")
    found = re.search(r"2 ranks stopped before all-gather of blocks\.1, for its forward, step (\d+)", step)
    assert found
    stop, number = found[0], found[1]  # as many steps as attempts have taken
    on, end = outputs(own, "%fsdp continue")
    assert stop.replace("forward", "backward") in on
    assert "1 step, loss" in end
    (where,) = outputs(own, "%fsdp where")
    assert where.count("pre-backward  blocks.1  before all-gather") == 2
    (table,) = outputs(own, "%fsdp inspect")
    assert "0-16383 of 16384  none of 16384" in table
    assert f"about to be all-gathered (requested in forward of step {number})" in table
