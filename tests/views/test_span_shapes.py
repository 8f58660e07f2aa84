import numpy as np
import plotly.graph_objects as go
from hypothesis import given
from hypothesis import strategies as st

from workbench.views.span_shapes import (
    MAX_RECTANGLES,
    SCREEN_PIXELS,
    add_bars,
    for_screen,
    joined,
    rectangles,
    time_axis,
)


def make(*entries):
    """Return rectangles of (lane, colour, begin, width, unit)."""
    lane, colour, begin, width, unit = (np.array(column, np.int64) for column in zip(*entries, strict=True))
    return rectangles(lane, colour, begin, begin + width, unit)


entries = st.tuples(
    st.integers(0, 3), st.integers(0, 2), st.integers(0, 10**6), st.integers(1, 10**5), st.integers(-1, 5)
)


@given(st.lists(entries, min_size=1, max_size=200), st.integers(20, 60))
def test_no_more_than_the_limit_and_no_time_is_lost(some, limit):
    found = make(*some)
    shown = for_screen(found, limit)
    assert len(shown) <= limit
    assert shown.count.sum() == len(found)
    assert shown.duration_ns.sum() == found.duration_ns.sum()
    for lane in range(4):
        for colour in range(3):
            before, after = (
                (some.end_ns - some.begin_ns)[(some.lane == lane) & (some.colour == colour)].sum()
                for some in (found, shown)
            )
            assert before == after


@given(st.lists(entries, min_size=1, max_size=50))
def test_a_span_of_a_pixel_is_unchanged(some):
    found = make(*some)
    pixel = (found.end_ns.max() - found.begin_ns.min()) / SCREEN_PIXELS
    wide = found[found.end_ns - found.begin_ns >= pixel]
    shown = for_screen(found)
    kept = {(*edges,) for edges in zip(shown.lane, shown.begin_ns, shown.end_ns, strict=True)}
    assert {(*edges,) for edges in zip(wide.lane, wide.begin_ns, wide.end_ns, strict=True)} <= kept


def test_half_a_million_become_few():
    here = np.arange(500_000)
    found = rectangles(here % 4, here % 3, 10 * here, 10 * here + 9, here % 7)
    assert 500 < len(for_screen(found)) <= MAX_RECTANGLES


def test_neighbours_in_a_pixel_are_merged_with_common_properties():
    shown = for_screen(
        make((0, 1, 0, 3, 5), (0, 1, 6, 3, 5), (0, 2, 9, 3, 5), (1, 1, 0, 3, 6), (1, 1, 5, 3, 7), (9, 9, 0, 10**6, 0))
    )
    assert shown.lane.tolist() == [0, 0, 1, 9]
    assert shown.count.tolist() == [2, 1, 2, 1]
    assert shown.unit.tolist() == [5, 5, -1, 0]
    assert shown.end_ns.tolist() == [6, 12, 6, 10**6]


def test_more_lanes_than_the_limit_end_in_one_rectangle_each():
    found = make(*((lane, 0, begin, 1, 0) for lane in range(30) for begin in range(5)))
    assert len(for_screen(found, limit=10)) == 30


def test_no_spans_stay_no_spans():
    nothing = make((0, 0, 0, 1, 0))[np.array([], np.int64)]
    assert len(for_screen(nothing)) == len(joined([nothing, nothing])) == 0


def test_a_bar_has_its_begin_and_width():
    fig, axis = go.Figure(), time_axis((1_000_000, 9_000_000))
    found = make((0, 7, 2_000_000, 3_000_000, 0), (1, 8, 1_000_000, 500_000, 0))
    add_bars(fig, found, {7: ("seven", "#111111")}, np.array([0.5, 1.5]), np.array([0.8, 0.4]), ["a", "b"], axis)
    (bar,) = fig.data
    assert (list(bar.base), list(bar.x), list(bar.y), list(bar.width)) == ([1], [3], [0.5], [0.8])
    assert (bar.name, list(bar.hovertext), axis.unit) == ("seven", ["a"], "ms")
