"""The notebook in which an FSDP is written by hand: its views, stops and inspection, on two ranks."""

import re

import pytest

from tests.helpers.own_fsdp import FSDP, NOTEBOOK, source_of
from tests.helpers.stored_notebook import run_notebook

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The output of each code cell, in order, with its source."""
    return run_notebook(NOTEBOOK, tmp_path_factory.mktemp("own_fsdp"))


def outputs_of(ran, line):
    return [text for source, text in ran if source.startswith(line)]


def test_ten_lines_announce_what_it_does():
    lines = [line for cell in FSDP for line in source_of(cell).splitlines() if line]
    assert sum(line.endswith("  # watch") for line in lines) == 10


@pytest.mark.thorough
def test_views_draw_it(ran):
    *_, comms = outputs_of(ran, "%fsdp comms")  # before it is that of the engine as it is stored
    assert "all-gathers 9 of 9, reduce-scatters 5 of 5: as expected" in comms
    *_, memory = outputs_of(ran, "%fsdp memory")
    # a transport may let go of a gradient later on one rank than on the other: then the title names a rank
    assert re.search(r"memory( of rank \d)? peaks at 1.20 MiB \(backward of blocks.0\)", memory)
    *_, states = outputs_of(ran, "%fsdp states")
    assert "at most 2 of 5 units unsharded at once" in states
    *_, layout = outputs_of(ran, "%fsdp layout")
    assert "4 parameters in 1 unit, packed into 1 flat parameter" in layout
    (training,) = outputs_of(ran, "%fsdp training")
    assert "in 20 steps" in training


@pytest.mark.thorough
def test_it_stops_in_forward_and_in_backward_and_is_inspected(ran):
    stop = "2 ranks stopped before all-gather of blocks.1, for its forward, step 25"
    (step,) = (text for source, text in ran if source == "%fsdp step 1")
    assert stop in step
    on, end = outputs_of(ran, "%fsdp continue")
    assert stop.replace("forward", "backward") in on
    assert "1 step, loss" in end
    (where,) = outputs_of(ran, "%fsdp where")
    assert where.count("pre-backward  blocks.1  before all-gather") == 2
    (table,) = outputs_of(ran, "%fsdp inspect")
    assert "0-16383 of 16384  none of 16384" in table
    assert "about to be all-gathered (requested in forward of step 25)" in table
