"""Four real ranks that stop, inspect, continue or abort compute the same as undisturbed ones.

Gradients are accumulated over two micro-batches, and two units are prefetched.
"""

import itertools

import pytest

from tests.helpers.notebook_model import CELL, fresh_cell
from tests.helpers.waiting import wait_until
from workbench import Workbench
from workbench.replay import memory, states, training
from workbench.reports.pause_reports import StopReport
from workbench.trace import check, load
from workbench.trace.keyframe import advance

pytestmark = [pytest.mark.exhaustive, pytest.mark.cluster]

STEPS = 4
FRESH = fresh_cell(
    optimizer="lr=1e-2, fused=True",
    synced="contextlib.nullcontext(model.set_requires_gradient_sync(micro == 1))",
    clip="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
)
WEIGHTS = (
    "print([p.full_tensor().double().sum().item() for p in model.parameters()], opt.state_dict()['state'][0]['step'])"
)
STOPS = {
    "forward": ["forward:blocks.0", "forward.end:blocks.2", "wait"],
    "backward": ["backward:blocks.1", "reduce_scatter:blocks.2", "reshard:blocks.0"],
    "optimizer": ["optimizer"],
}


@pytest.fixture(scope="module")
def wb():
    """Four ranks with the model's classes."""
    with Workbench(4, device="cpu") as bench:
        bench.run_cell(CELL)
        yield bench


def fresh(wb):
    """Make the same model, optimizer and data again, whatever the previous test left."""
    if wb._session.request is not None:
        wb.abort()
    wb.break_clear()
    wb.run_cell(FRESH)
    wb.shard("model", wrap=["Block"], prefetch=2)


@pytest.fixture(scope="module")
def undisturbed(wb):
    """Losses of the steps and final parameters."""
    fresh(wb)
    return wb.step(STEPS).losses, wb.run_cell(WEIGHTS).texts


def assert_all_at_one_event(report, num_ranks=4):
    assert isinstance(report, StopReport), report
    assert report.stop.held == tuple(range(num_ranks))
    assert len({p.held.place for p in report.stop.positions.values()}) == 1


@pytest.mark.parametrize("phase", STOPS)
def test_steps_stopped_repeatedly_compute_the_same(wb, undisturbed, phase):
    fresh(wb)
    first = wb.step(1)
    for event in STOPS[phase]:
        wb.break_add(event)
    report = wb.step(STEPS - 1)
    num_stops, looks = 0, []
    while isinstance(report, StopReport):
        assert_all_at_one_event(report)
        num_stops += 1
        if num_stops <= 8:
            looks.append(wb.inspect("blocks.2.mlp.0.weight").by_rank[0].full.state.words)
            assert len(set(wb.evaluate("count").texts.values())) == 1
            what = ("event", "collective", "unit", "phase")[num_stops % 4]
            report = wb.next(what)
        else:
            wb.break_clear()
            report = wb.resume()
    assert num_stops > 2
    if phase == "forward":
        assert "all-gather in flight" in looks
    wb.break_clear()
    assert (first.losses + report.losses, wb.run_cell(WEIGHTS).texts) == undisturbed
    assert check(wb.trace) == []


@pytest.mark.parametrize("event", [events[0] for events in STOPS.values()])
def test_an_aborted_step_can_be_repeated(wb, undisturbed, event):
    fresh(wb)
    first = wb.step(2)
    assert_all_at_one_event(wb.step(1, until=event))
    if event != "optimizer":  # the next event is its end: all ranks have taken the step
        assert_all_at_one_event(wb.next())
    assert "idle again" in wb.abort().headline
    wait_until(lambda: {row.state for row in wb.where().ranks} == {"idle"})
    wb.run_cell("opt.zero_grad()")
    again = wb.step(STEPS - 2)
    assert (first.losses + again.losses, wb.run_cell(WEIGHTS).texts) == undisturbed
    assert check(wb.trace) == []


def test_folds_over_what_was_drained_live_equal_folds_over_the_saved_trace(wb, tmp_path):
    """For every piece of a recorded run as it arrived: replay(a + b) == continue(replay(a), b)."""
    fresh(wb)
    ends = [{rank.rank: rank.end_seq for rank in wb.trace.ranks}]

    def note(_progress=None):
        ends.append({rank.rank: rank.end_seq for rank in wb.trace.ranks})

    wb.break_add("backward:blocks.1")
    report = wb.step(STEPS, on_progress=note)
    for num_stops in range(10):
        assert isinstance(report, StopReport)
        note()
        report = wb.next("collective", on_progress=note) if num_stops < 6 else wb.resume(on_progress=note)
    wb.break_clear()
    wb.resume(on_progress=note)
    note()
    wb.export(tmp_path / "run.trace")
    saved = load(tmp_path / "run.trace")
    assert saved == wb._session.trace  # at that time: garbage collection may record freed memory at any moment
    assert check(saved) == []
    for rank in saved.ranks:
        live = {"key": rank.start, "states": states.start(rank.start), "memory": memory.start(rank.start)}
        live["training"] = training.start()
        places = sorted({end[rank.rank] - rank.start.seq for end in ends} | {0, len(rank.rows)})
        assert len(places) > 6
        for begin, end in itertools.pairwise(places):
            rows = rank.rows[begin:end]
            live["key"] = advance(live["key"], rows)
            live["states"] = states.advance(live["states"], rows)
            live["memory"] = memory.advance(live["memory"], rows)
            live["training"] = training.advance(live["training"], rows)
        assert live["key"] == advance(rank.start, rank.rows)
        assert live["states"] == states.advance(states.start(rank.start), rank.rows) == states.at(rank, rank.end_seq)
        assert live["memory"] == memory.advance(memory.start(rank.start), rank.rows)
        assert live["training"] == training.fold(rank)
