"""A run that was stopped is drawn as if it had not been, with a thin line at each stop."""

import numpy as np
import pytest

from tests.helpers.figure_checks import subtitle, title
from tests.helpers.held_ranks import HOLD_NS, stopped_before
from tests.helpers.trace_strategies import example_trace
from workbench.events import Kind
from workbench.trace.columns import Trace
from workbench.views import draw
from workbench.views.paused_time import HELD_NOW, MAX_MARKS, NAME

every_picture_of_time = pytest.mark.parametrize("name", ["memory", "timeline", "states"])


def marks(fig):
    return [trace for trace in fig.data if trace.name == NAME]


def held_run(count=1, hold_ns=HOLD_NS):
    trace = example_trace()
    for number in range(count):
        trace = stopped_before(trace, Kind.FORWARD, number=-1 - number, hold_ns=hold_ns)
    return trace


@every_picture_of_time
def test_the_time_ranks_were_held_is_not_on_the_axis(name):
    before, after = draw(name, example_trace()), draw(name, held_run())
    x_axis = "xaxis"
    assert before.layout[x_axis].title.text == after.layout[x_axis].title.text
    assert after.layout[x_axis].range[1] == pytest.approx(before.layout[x_axis].range[1], rel=0.1)


@every_picture_of_time
def test_a_thin_line_shows_where_and_how_long(name):
    assert not marks(draw(name, example_trace()))
    fig = draw(name, held_run())
    (mark,) = marks(fig)
    assert set(mark.text) == {"ranks held or idle for 17.9 s: cut out"}
    assert 0 < mark.x[0] < fig.layout.xaxis.range[1]
    assert "17.9 s of held or idle time cut out" in subtitle(fig)


@every_picture_of_time
def test_many_stops_have_few_lines(name):
    fig = draw(name, held_run(count=4), steps=3)
    assert "71.6 s of held or idle time cut out" in subtitle(fig)
    (mark,) = marks(fig)
    places = {x for x in mark.x if x is not None and not np.isnan(x)}
    assert len(places) == 4 <= MAX_MARKS


@every_picture_of_time
def test_ranks_that_are_held_now_have_a_line_at_the_right_edge(name):
    trace = held_run(hold_ns=1000)  # a short one, which has no line
    ends = (int(np.flatnonzero(part.kinds == Kind.GATE)[0]) + 1 for part in trace.ranks)
    fig = draw(name, Trace(trace.header, tuple(part.cut(0, end) for part, end in zip(trace.ranks, ends, strict=True))))
    (mark,) = (each for each in fig.data if each.name == HELD_NOW)
    assert mark.x[0] == pytest.approx(fig.layout.xaxis.range[1])
    assert not marks(fig)
    assert "held now at the right edge" in subtitle(fig)


@every_picture_of_time
def test_short_holds_are_not_marked(name):
    fig = draw(name, held_run(hold_ns=900_000))
    assert not marks(fig)
    assert "cut out" not in subtitle(fig)


def test_durations_exclude_the_stop():
    assert title(draw("timeline", held_run())).partition(":")[0] == "Step 2"
    assert "s, compute" not in title(draw("timeline", held_run())).replace("ms,", "").replace("µs,", "")
    assert (
        title(draw("training", held_run())).split(", ")[-1] == title(draw("training", example_trace())).split(", ")[-1]
    )
    assert "17.9 s" not in subtitle(draw("comms", held_run()))
