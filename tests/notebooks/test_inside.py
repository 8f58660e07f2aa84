"""The notebook about stopping inside a step: as stored, and run on two ranks."""

import re

import nbformat
import pytest

from tests.helpers.course_notebooks import INSIDE, NOTEBOOKS
from tests.helpers.stored_notebook import assert_kept_without_outputs, run_notebook
from workbench.magics import command_lines

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def lines_of(notebook) -> list[str]:
    return [line for c in notebook.cells if c.cell_type == "code" for line in c.source.splitlines()]


def words_of(path) -> set[str]:
    lines = lines_of(nbformat.read(path, as_version=4))
    return {found[1] for line in lines if (found := re.match(r"\s*(?:\w+ = )?%fsdp (\w+)", line))}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The output of each ``%fsdp`` line, in order."""
    return run_notebook(INSIDE, tmp_path_factory.mktemp("inside"))


def output_of(ran, line: str) -> str:
    return next(text for source, text in ran if source.startswith(line))


def test_it_is_kept_without_outputs():
    assert_kept_without_outputs(INSIDE)


def test_the_notebooks_together_use_every_command():
    # they need a running cluster, or are part of another command
    elsewhere = {"attach", "detach", "snapshot"}
    left = {"status", "help", "example"} | elsewhere
    assert set(command_lines.WORDS) - set().union(*map(words_of, NOTEBOOKS)) == left


def test_all_ranks_stop_at_the_breakpoint(ran):
    assert "2 ranks stopped before all-gather of blocks.2, for its forward, step 20" in output_of(ran, "%fsdp step 1")
    assert output_of(ran, "%fsdp where").count("before all-gather") == 2


def test_a_stopped_step_can_be_inspected(ran):
    table = output_of(ran, "%fsdp inspect")
    assert re.search(r"\n +rank 0 +rank 1\n  this shard +rows +0-127 of 256 +128-255 of 256\n +shape +128x64 ", table)
    assert "torch.Size([128, 64])" in output_of(ran, "%fsdp eval")
    assert "rank 1 has it as DTensor" in output_of(ran, '%%fsdp\nprint(f"rank {rank} has it')


def test_it_continues_in_small_steps_and_to_the_end(ran):
    assert "stopped before all-gather of blocks.3" in output_of(ran, "%fsdp next collective")
    assert "20 events before the newest" in output_of(ran, "%fsdp back")
    assert "1 step, loss" in output_of(ran, "%fsdp continue")
    assert "sharded training is the same as unsharded" in output_of(ran, "%fsdp verify")


def test_a_background_step_is_paused_and_aborted(ran):
    both, late = r"2 ranks stopped ", r"rank (\d) stopped .*; rank (?!\1)\d (stopped|waits|stops at the next event)"
    assert re.search(f"{both}|{late}", output_of(ran, "%fsdp pause"))  # a pause waits 0.4 s for a computing rank
    assert "The ranks are idle again" in output_of(ran, "%fsdp abort")


def test_a_policy_change_is_explained(ran):
    assert "resharded in place" in output_of(ran, "%fsdp reshard")
    assert "4 fewer all-gathers a step" in output_of(ran, "%fsdp compare")


def test_the_live_model_goes_over_to_flat_parameters(ran):
    assert re.search(
        "policy +classic: one flat parameter per unit", output_of(ran, "%fsdp reshard model --api classic")
    )
    assert "12 parameters in 1 unit, packed into 1 flat parameter" in output_of(ran, "%fsdp layout --unit blocks.2")
