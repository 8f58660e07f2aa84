"""Marked events in pictures: an outline and a button for each; a button shows its outline and zooms to it."""

import numpy as np
import pytest

from tests.helpers.trace_strategies import Setup, simulate
from workbench.events import Kind
from workbench.replay.event_marks import EventMark, mark_in_step
from workbench.views import draw
from workbench.views.mark_buttons import marked

TRACE = simulate(Setup(num_ranks=2, steps=3))
EVIL = "rank 1: <b onclick='x'>&amp; \"{unit}\""
FORWARD = {EVIL: mark_in_step(TRACE.rank(1), 1, (Kind.FORWARD,), unit=1)}
STEP = {"rank 1": mark_in_step(TRACE.rank(1), 1)}


def outlines(fig):
    return [shape for shape in fig.layout.shapes if shape.visible is False]


def zoomed(fig):
    """Return the time range that the button of the only mark shows."""
    (shown,) = fig.layout.updatemenus[0].buttons[1].args
    return shown["xaxis.range"]


def begin_and_end(rank, kind, unit):
    rows = TRACE.rank(rank).rows
    mine = rows["t_ns"][(rows["kind"] == kind) & (rows["unit"] == unit) & (rows["step"] == 1)]
    steps = [each.rows["t_ns"][each.rows["step"] == 1].min() for each in TRACE.ranks]
    return [(t - min(steps)) / 1e6 for t in (mine.min(), mine.max())]


@pytest.mark.parametrize(
    ("view", "options", "yref"),
    [("timeline", {}, "y"), ("memory", {"rank": 1}, "y domain"), ("states", {"rank": 1, "unit": "blocks.1"}, "y")],
)
def test_a_button_outlines_the_events_and_zooms_to_them(view, options, yref):
    fig = draw(view, TRACE, step=1, **options, marks=FORWARD)
    plain = draw(view, TRACE, step=1, **options)
    (outline,) = outlines(fig)
    assert [outline.x0, outline.x1] == pytest.approx(begin_and_end(1, Kind.FORWARD, 1), abs=1e-6)
    assert outline.yref == yref
    whole, one = fig.layout.updatemenus[0].buttons
    assert (whole.label, one.label, one.method) == ("whole", "1", "relayout")
    place = list(fig.layout.shapes).index(outline)
    (shown,), (hidden,) = one.args, whole.args
    assert shown[f"shapes[{place}].visible"] is True
    assert hidden[f"shapes[{place}].visible"] is False
    around = 1.5 * (outline.x1 - outline.x0)
    assert zoomed(fig) == pytest.approx([max(outline.x0 - around, 0), outline.x1 + around])
    assert hidden["xaxis.range"] == pytest.approx(tuple(plain.layout.xaxis.range))
    assert fig.layout.height - fig.layout.margin.t == plain.layout.height - plain.layout.margin.t  # the plot's stays


def test_the_outline_is_around_the_ranks_block():
    figs = [draw("timeline", TRACE, step=1, marks={"": mark_in_step(TRACE.rank(rank), 1)}) for rank in (0, 1)]
    assert zoomed(figs[1]) == [0, figs[1].layout.xaxis.range[1]]  # the mark is all there is
    (first,), (second,) = map(outlines, figs)
    assert first.y0 < first.y1 < second.y0 < second.y1


def test_a_moment_is_wide_enough_to_be_seen():
    rows = TRACE.rank(0).rows
    seq = int(np.median(rows["seq"][rows["step"] == 1]))
    fig = draw("memory", TRACE, step=1, rank=0, marks={"peak": EventMark(rank=0, first_seq=seq, last_seq=seq)})
    (outline,) = outlines(fig)
    whole = fig.layout.xaxis.range[1]
    assert outline.x1 - outline.x0 == pytest.approx(0.004 * whole)
    assert zoomed(fig) == pytest.approx([outline.x0 - 0.02 * whole, outline.x1 + 0.02 * whole])


def test_sentences_are_plain_text_outside_and_escaped_inside():
    fig = draw("timeline", TRACE, step=1, marks={**FORWARD, **STEP})
    assert marked(fig) == {EVIL: 1, "rank 1": 2}
    assert "<b onclick" not in fig.to_json()


def test_events_that_the_picture_does_not_show_have_no_button():
    for view, options in (("timeline", {"rank": 0}), ("memory", {"rank": 0}), ("states", {"rank": 0})):
        assert marked(draw(view, TRACE, step=1, **options, marks=STEP)) == {}
        assert marked(draw(view, TRACE, step=2, **options, marks=FORWARD)) == {}
    assert draw("states", TRACE, step=1, rank=1, marks=STEP) == draw("states", TRACE, step=1, rank=1)  # of no unit
