from itertools import pairwise

import plotly.graph_objects as go

from tests.helpers.trace_strategies import example_trace
from workbench.events import Kind
from workbench.replay.spans import extent_ns
from workbench.views import theme
from workbench.views.phases import MAX_PIECES, add_phases, phases_within
from workbench.views.span_shapes import time_axis


def strip(trace):
    fig = go.Figure()
    add_phases(fig, trace.rank(0).rows, time_axis(extent_ns(trace)))
    return fig.layout.shapes


def test_a_step_is_forward_backward_and_optimizer():
    shapes = strip(example_trace().slice(step=1))
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)
    assert [shape.line.color for shape in shapes] == [theme.KIND_COLOURS[kind] for kind in kinds]
    assert [shape.label.text for shape in shapes][:2] == ["forward", "backward"]
    assert all(before.x1 <= after.x0 for before, after in pairwise(shapes))


def test_pieces_have_a_label_where_it_fits():
    trace = example_trace().slice(step=1)
    fig = go.Figure()
    axis = time_axis(extent_ns(trace))
    add_phases(fig, trace.rank(0).rows, axis)
    fig.update_xaxes(range=axis.layout["range"])
    texts = {width: [s["label"]["text"] for s in phases_within(fig, width)] for width in (20, 100_000)}
    assert texts == {20: ["", "", ""], 100_000: ["forward", "backward", "optimizer"]}


def test_the_strip_begins_where_the_axis_does():
    trace = example_trace().slice(step=1)
    rows, (begin_ns, _) = trace.rank(0).rows, extent_ns(trace)
    forward = rows[rows["kind"] == Kind.FORWARD]["t_ns"]
    shape = strip(trace)[0]
    assert (shape.x0, shape.x1) == tuple((t - begin_ns) / 1e6 for t in (forward[0], forward[-1]))


def test_each_phase_is_in_the_legend_once():
    shapes = strip(example_trace(steps=3).slice(first=1, last=2))
    shown = [shape.name for shape in shapes if shape.showlegend]
    assert shown == ["forward", "backward", "optimizer"]


def test_two_steps_have_two_strips():
    assert len(strip(example_trace(steps=3).slice(first=1, last=2))) == 6


def test_a_flicker_is_not_drawn():
    assert len(strip(example_trace(steps=MAX_PIECES // 3))) == MAX_PIECES // 3 * 3
    assert not strip(example_trace(steps=MAX_PIECES // 3 + 1))
