"""The tour: as stored, as ``workbench demo`` runs it on four ranks, and the page that it writes."""

import os
import re

import nbformat
import pytest

from tests.helpers.browser import figures, open_offline
from tests.helpers.collective_counts import counts
from tests.helpers.course_notebooks import TOUR, WarmKernel, with_attempts, wrong_verdicts
from workbench.cli.demo import communication
from workbench.events import Kind
from workbench.magics import command_lines
from workbench.replay import shards, training
from workbench.trace import check, load, steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]  # the first test of a run waits for it

RANKS = 4
VIEWS = 10  # layout, training, timeline, states, memory, comms, that of explain; again comms, memory, states


@pytest.fixture(scope="module")
def cells():
    return nbformat.read(TOUR, as_version=4).cells


@pytest.fixture(scope="module")
def trace(demo_run):
    return load(demo_run.folder / "tour.trace")


def test_its_cells_are_short_and_each_section_teaches(cells):
    assert max(len(c.source.splitlines()) for c in cells if c.cell_type == "code") <= 16
    assert sum(c.cell_type == "markdown" for c in cells) >= 15
    assert cells[0].source.startswith("# ")


def test_its_lines_are_valid_commands(cells):
    lines = [line for c in cells if c.cell_type == "code" for line in c.source.splitlines()]
    used = [
        command_lines.parse_line(line.removeprefix("%fsdp "), {"n": "4"}.__getitem__).word
        for line in lines
        if line.startswith("%fsdp ")
    ]
    assert used[0] == "start"
    assert used[-2:] == ["stop", "open"], "nothing is left running, and what was kept is drawn again"
    assert {"shard", "step", "layout", "timeline", "states", "memory", "comms", "training", "verify"} <= set(used)


@pytest.mark.thorough
def test_the_demo_runs_to_its_end(demo_run):
    assert demo_run.code == 0, demo_run.stdout[-2000:] + demo_run.stderr[-4000:]
    assert "Traceback" not in demo_run.stderr


@pytest.mark.thorough
def test_nothing_is_left_running(demo_run):
    assert demo_run.survivors == ()


@pytest.mark.thorough
def test_the_summary(demo_run):
    summary = demo_run.stdout.partition("The tour ran from top to bottom")[2]
    assert re.search(rf"ranks +{RANKS} \(cpu\)", summary)
    assert re.search(r"parameters +[\d,]{6,} in \d+ tensors", summary)
    assert re.search(r"full model +[\d.]+ MiB of parameters; each rank keeps [\d.]+ [KM]iB between uses", summary)
    assert re.search(r"collectives +[\d,]+ calls, [\d,]+ B on each rank in 43 steps; .*: equal", summary)
    assert re.search(r"step time +[\d.]+ m?s", summary)
    for name in ("tour.html", "tour.trace"):
        assert str(demo_run.folder / name) in summary


@pytest.mark.thorough
def test_it_learns_more_than_the_frequencies_of_characters(demo_run):
    before, after, unigram = map(
        float,
        re.search(r"([\d.]+) -> ([\d.]+) nats per character; a unigram model has ([\d.]+)", demo_run.stdout).groups(),
    )
    assert before > unigram
    assert after < unigram - 0.4


@pytest.mark.thorough
def test_the_trace_obeys_its_rules(trace):
    assert check(trace) == []
    assert [r.rank for r in trace.ranks] == list(range(RANKS))
    assert all(r.lost == 0 for r in trace.ranks)


@pytest.mark.thorough
def test_the_trace_holds_the_training(trace):
    assert steps(trace) == list(range(43))
    summary = training.summary(trace)
    assert len(summary.losses) == 43
    assert summary.losses[39] < summary.losses[0] - 1.5


@pytest.mark.thorough
def test_shards_are_a_quarter(trace):
    total = shards.totals(shards.shards(trace.header))
    assert total.bytes_at_rest == pytest.approx(total.bytes_unsharded / RANKS, rel=0.02)


@pytest.mark.thorough
def test_the_knob_changes_the_number_of_all_gathers(trace):
    def gathers(step):
        return sum(c.calls for c in counts(trace, step) if c.kind == Kind.ALL_GATHER and c.rank == 0)

    assert [gathers(step) for step in (0, 1, 39, 40, 42)] == [8, 9, 9, 5, 5]  # the loss before left the root unsharded


@pytest.mark.thorough
def test_every_collective_matches_the_closed_form(trace):
    sent = communication(trace)
    assert sent.as_expected
    assert sent.calls == 40 * (9 + 5) - 1 + 3 * (5 + 5)


@pytest.mark.thorough
def test_each_attempt_at_its_exercises_gets_its_sentence(demo_run):
    """The exercises ask about the trace that the demo has written."""
    notebook = nbformat.read(TOUR, as_version=4)
    (reopened,) = (place for place, cell in enumerate(notebook.cells) if cell.source == "%fsdp open tour.trace")
    notebook.cells = [notebook.cells[1], *notebook.cells[reopened:]]
    kernel = WarmKernel(demo_run.folder, os.environ | {"WORKBENCH_UNATTENDED": "1"})
    try:
        assert wrong_verdicts(kernel.run(with_attempts(notebook, TOUR))) == []
    finally:
        kernel.end()


@pytest.mark.exhaustive
def test_two_ranks_fit_into_a_binder(binder_run):
    assert binder_run.code == 0, binder_run.stdout[-2000:] + binder_run.stderr[-4000:]
    assert re.search(r"ranks +2 \(cpu\)", binder_run.stdout)
    assert 0.3 * 2**30 < binder_run.peak_bytes < 1.4 * 2**30  # leaves 0.1 GiB of 1.5 for the server


@pytest.mark.exhaustive
def test_two_ranks_learn_as_well(binder_run):
    losses = re.search(r"([\d.]+) -> ([\d.]+) nats per character; a unigram model has ([\d.]+)", binder_run.stdout)
    assert float(losses[2]) < float(losses[3]) - 0.4


@pytest.mark.thorough
@pytest.mark.browser
def test_all_figures_of_its_page_are_drawn_and_nothing_is_fetched(demo_run, chromium):
    page = demo_run.folder / "tour.html"
    with open_offline(chromium, page) as opened:
        opened.page.wait_for_function(f"document.querySelectorAll('.plotly-graph-div').length >= {VIEWS}")
        drawn = figures(opened.page)
        assert len(drawn) == VIEWS
        assert all(f["width"] > 500 and f["height"] > 150 and f["marks"] > 0 for f in drawn), drawn
        assert opened.page.title() == "FSDP workbench: the tour"
        assert "held-out loss" in opened.page.inner_text("body")
        assert opened.outside == []
        assert opened.complaints == []


@pytest.mark.thorough
def test_plotly_is_in_its_page_once(demo_run):
    text = (demo_run.folder / "tour.html").read_text(encoding="utf-8")
    assert text.count("* plotly.js v") == 1
    assert len(text) < 15e6
