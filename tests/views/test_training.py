from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tests.helpers.figure_checks import subtitle, title, words
from tests.helpers.trace_strategies import example_trace
from tests.replay.test_models import make_unit
from tests.replay.test_training import logged, make_trace, of_models, row, step_rows
from workbench.events import Kind
from workbench.trace.columns import Trace
from workbench.trace.earlier_steps import EarlierSteps
from workbench.trace.schema import Header
from workbench.views.training import MAX_PANELS, MAX_POINTS, training

STEP_NS = 1_000_000


def losses(*values, loss_rank=0.0):
    rows = []
    for step, value in enumerate(values):
        begin = step * STEP_NS
        rows += step_rows(step, begin, begin + STEP_NS, logged(value + loss_rank, step=step))
    return rows


def lines(fig):
    """Return the mean lines, panel by panel."""
    return [trace for trace in fig.data if trace.customdata is not None]


def axis_titles(fig):
    return [axis.title.text for axis in fig.select_yaxes()]


def test_title_shows_first_and_last_loss_and_the_step_time():
    fig = training(make_trace(losses(4.0, 3.0, 2.0)))
    assert title(fig) == "Loss 4.000 → 2.000 in 3 steps, 1.00 ms a step (median)"
    assert axis_titles(fig) == ["loss", "step time [ms]"]
    assert list(lines(fig)[0].y) == [4.0, 3.0, 2.0]
    assert list(lines(fig)[1].y) == [1.0, 1.0, 1.0]


def test_the_band_is_drawn_only_where_ranks_differ():
    one = training(make_trace(losses(4.0, 3.0)))
    assert len(one.data) == 2
    two = training(make_trace(losses(4.0, 3.0), losses(4.0, 3.0, loss_rank=1.0)))
    band, mean = two.data[:2]
    assert (list(band.x), list(band.y), list(mean.y)) == ([0, 1, 1, 0], [5.0, 4.0, 3.0, 4.0], [4.5, 3.5])
    assert band.fill == "toself"
    assert subtitle(two).startswith("Mean over 2 ranks; the band spans the lowest to the highest rank; ")


def test_the_step_time_is_that_of_the_slowest_rank():
    fig = training(make_trace(step_rows(0, 0, STEP_NS), step_rows(0, 0, 3 * STEP_NS)))
    assert title(fig) == "1 step, no loss logged, 3.00 ms a step (median)"
    assert "the title shows the step time of the slowest rank" in subtitle(fig)


def test_without_a_loss_the_step_time_is_drawn_with_advice():
    fig = training(make_trace(step_rows(0, 0, STEP_NS)))
    assert title(fig) == "1 step, no loss logged, 1.00 ms a step (median)"
    assert axis_titles(fig) == ["step time [ms]"]
    assert "To log a loss, return a number from train_step(), or in your own loop call" in subtitle(fig)


def test_steps_of_a_loop_of_ones_own_without_a_loss_are_named_with_how_to_log_one():
    rows = losses(4.0, 3.0)
    own = [r for step in (2, 3) for r in step_rows(step, step * STEP_NS, (step + 1) * STEP_NS)]
    found = subtitle(training(make_trace(rows + own)))
    assert "No loss at steps 2-3. " in found
    assert "in your own loop call log_metric(&#34;loss&#34;, loss.item())." in found
    assert "No loss" not in subtitle(training(make_trace(rows)))


def test_the_rank_on_which_a_loss_was_first_not_finite_is_named():
    nan = math.nan
    both = make_trace(losses(4.0, 3.0, nan), losses(4.0, nan, nan))
    assert "loss is NaN or infinite at steps 1-2, first on rank 1." in subtitle(training(both))
    alike = make_trace(losses(4.0, nan), losses(4.0, nan))
    assert "loss is NaN or infinite at step 1." in subtitle(training(alike))


def test_a_loss_logged_outside_all_steps_is_drawn_too():
    fig = training(make_trace([logged(4.0)]))
    assert title(fig) == "Loss 4.000 → 4.000 in 0 steps"
    assert list(lines(fig)[0].x) == [-1]


def test_every_metric_has_its_panel_up_to_a_limit():
    rows = [row(Kind.METRIC, module=i, value=1.0, step=0) for i in range(2, 20)]
    fig = training(make_trace(losses(4.0) + rows))
    assert len(axis_titles(fig)) == MAX_PANELS
    assert axis_titles(fig)[:3] == ["loss", "step time [ms]", "metric 2"]
    assert "8 more metrics not drawn" in subtitle(fig)


def test_a_nonfinite_loss_leaves_a_gap_and_is_reported():
    fig = training(make_trace(losses(4.0, math.inf, 2.0)))
    assert list(np.isnan(lines(fig)[0].y)) == [False, True, False]
    assert "loss is NaN or infinite at step 1." in subtitle(fig)


def test_a_loss_that_ends_as_no_number_is_written_as_the_panel_does():
    assert title(training(make_trace(losses(4.0, math.nan)))).startswith("Loss 4.000 → NaN in 2 steps")


def test_the_band_has_a_gap_at_a_nonfinite_loss():
    """The band is closed on both sides of the gap: a line across it would be a band for steps without one."""
    fig = training(make_trace(losses(4.0, 3.0, math.nan, 1.0), losses(4.0, 3.0, 2.0, 1.0, loss_rank=1.0)))
    x, y = (np.array(values, np.float64) for values in (fig.data[0].x, fig.data[0].y))
    np.testing.assert_array_equal(x, [0, 1, 1, 0, np.nan, 3, 3])
    np.testing.assert_array_equal(y, [5.0, 4.0, 3.0, 4.0, np.nan, 2.0, 1.0])


def test_all_steps_without_a_finite_loss_are_named_and_many_are_counted():
    nan = math.nan
    assert "NaN or infinite at steps 1-3." in subtitle(training(make_trace(losses(4.0, nan, nan, nan))))
    scattered = make_trace(losses(*[4.0, nan] * 6))
    assert "NaN or infinite at 6 steps, first at step 1." in subtitle(training(scattered))


def test_a_long_training_is_thinned_and_keeps_its_extremes():
    values = [1.0] * 1000
    values[500] = 9.0
    fig = training(make_trace(losses(*values)))
    assert len(lines(fig)[0].x) <= MAX_POINTS
    assert max(trace.y.max() for trace in fig.data if trace.fill == "toself") == 9.0
    assert "Each point is the mean of up to 3 steps" in subtitle(fig)
    assert lines(fig)[0].mode == "lines"


def test_the_curve_is_cut_where_another_model_began():
    header = Header(strings=("loss",), units=(make_unit(0), make_unit(1)))
    fig = training(of_models((0, 66.95), (0, 60.0), (1, 5.0), (1, 4.868), header=header))
    assert title(fig).startswith("Loss 5.000 → 4.868 in 2 steps")
    assert (
        "a new model begins, or a heal has made it again; the title describes the current one, from step 2 on"
        in subtitle(fig)
    )
    loss = lines(fig)[0]
    assert list(loss.x) == [0, 1, 2, 2, 3]
    assert np.isnan(loss.y[2])
    assert [shape.x0 for shape in fig.layout.shapes] == [1.5, 1.5]  # in each panel
    same = Header(strings=("loss",), units=(make_unit(0, retired=True), make_unit(1)))
    whole = training(of_models((0, 66.95), (1, 4.868), header=same))
    assert title(whole).startswith("Loss 66.95 → 4.868 in 2 steps")
    assert not whole.layout.shapes


def test_an_empty_trace_says_what_to_run():
    assert "%fsdp step" in words(training(example_trace(steps=0)))


def test_steps_before_the_left_edge_are_drawn_and_how_many_are_known_is_said():
    trace = make_trace(losses(*np.linspace(8, 1, 64)))
    part = trace.rank(0)
    at = len(part.rows) - 30
    newest = replace(part.cut(at, part.end_seq), earlier=EarlierSteps().then(part.rows[:at], 60))
    fig = training(Trace(trace.header, (newest,)))
    assert list(lines(fig)[0].x) == [*range(0, 54, 4), *range(54, 64)]
    assert "Before step 54, one of 4 steps is known." in subtitle(fig)
    assert title(fig).startswith("Loss 8.000 → 1.000 in ")
