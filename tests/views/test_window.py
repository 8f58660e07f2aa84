import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.figure_checks import subtitle, title
from tests.helpers.trace_strategies import example_trace, setups, simulate
from workbench.base.text_formats import format_duration, time_unit
from workbench.errors import UsageError
from workbench.events import Kind
from workbench.trace.columns import RankTrace, Trace
from workbench.views import draw
from workbench.views.window import window

VIEWS_OF_TIME = ("timeline", "memory", "states")


def test_the_last_step_is_shown_by_default():
    trace = example_trace(steps=4)
    assert str(window(trace, None, 1)) == "Step 3"
    assert str(window(trace, None, 2)) == "Steps 2-3"
    assert str(window(trace, 1, 1)) == "Step 1"
    assert str(window(trace, 1, 5)) == "Steps 0-1"


def test_without_any_step_the_whole_trace_is_shown():
    trace = example_trace(steps=0)
    found = window(trace, None, 1)
    assert str(found) == "Before the first step"
    assert found.cut(trace.rank(0)) == trace.rank(0)
    assert found.has_ended(trace.rank(0))


def test_a_step_with_nothing_but_bookkeeping_is_not_the_last_one():
    trace = example_trace(steps=3)
    freed = int(np.flatnonzero((trace.rank(0).rows["step"] == 2) & (trace.rank(0).rows["kind"] == Kind.FREE))[0])
    begun = Trace(trace.header, (trace.rank(0).cut(0, freed + 1),))
    assert str(window(begun, None, 1)) == "Step 1"
    only_bookkeeping = Trace(trace.header, (begun.rank(0).cut(freed - 2, freed + 1),))
    assert str(window(only_bookkeeping, None, 1)) == "Step 2"
    rows = trace.rank(0).cut(0, freed + 1).rows.copy()
    rows["kind"][-1] = Kind.COPY_OUT
    copied = Trace(trace.header, (RankTrace(0, rows, trace.rank(0).start),))
    assert str(window(copied, None, 1)) == "Step 2", "a copy is drawn, so the live timeline has it"


def test_cut_and_stateless_hold_the_rows_of_the_steps():
    trace = example_trace(steps=3)
    found, rank = window(trace, 1, 1), trace.rank(2)
    assert found.cut(rank) == trace.slice(step=1).rank(2)
    assert found.stateless(rank).rows.tobytes() == found.cut(rank).rows.tobytes()
    assert found.stateless(rank).start.seq == found.cut(rank).start.seq
    begin, end = found.places(rank)
    assert found.has_ended(found.cut(rank))
    assert not found.has_ended(rank.cut(rank.start.seq + begin, rank.start.seq + end - 1))


def test_a_rank_without_rows_in_the_window_has_none():
    trace = example_trace(steps=2)
    short = Trace(trace.header, (trace.rank(0), trace.slice(step=0).rank(1)))
    assert len(window(short, None, 1).cut(short.rank(1)).rows) == 0


def test_a_missing_step_is_named():
    with pytest.raises(UsageError, match="no step 9; its steps are: 0-2"):
        window(example_trace(steps=3), 9, 1)
    with pytest.raises(UsageError, match="no step 0; its steps are: none yet"):
        window(Trace.empty(), 0, 1)
    with pytest.raises(UsageError, match="at least one step must be shown, got steps=0"):
        window(example_trace(), None, 0)


def test_an_empty_trace_has_an_empty_window():
    assert str(window(Trace.empty(), None, 3)) == "Before the first step"
    no_rows = RankTrace(0, example_trace().rank(0).rows[:0])
    assert str(window(Trace(example_trace().header, (no_rows,)), None, 1)) == "Before the first step"


def places(fig):
    """Return all positions on a figure's time axis, in its unit: of bars, lines, strips and marks."""
    found = []
    for trace in fig.data:
        begins = np.array(trace.base if trace.type == "bar" else [], float)
        widths = np.array([x for x in trace.x if x is not None], float)
        found += [*begins, *(begins + widths)] if trace.type == "bar" else [*widths[~np.isnan(widths)]]
    return [*found, *(x for shape in fig.layout.shapes if shape.xref == "x" for x in (shape.x0, shape.x1))]


def duration_ns(trace, shown, only):
    """Return the time of the window's only step on its slowest rank, or on rank ``only``; 0 for several steps."""
    drawn = [shown.stateless(each).rows for each in trace.ranks if only in (None, each.rank)]
    times = [rows["t_ns"][rows["kind"] == Kind.STEP] for rows in drawn]
    return max(int(end - begin) for begin, end in times) if shown.first == shown.last else 0


@pytest.mark.thorough
@given(setups(), st.integers(0, 3), st.integers(1, 2))
def test_pictures_of_the_same_steps_have_one_zero_one_end_and_no_time_beyond(setup, rank, steps):
    trace = simulate(setup)
    shown = window(trace, None, steps)
    rows = [shown.stateless(each).rows["t_ns"] for each in trace.ranks]
    begin_ns = min(t.min() for t in rows)
    end_ns = max(begin_ns + 1, *(t.max() for t in rows))
    ns = time_unit(end_ns - begin_ns)[0]
    for name in VIEWS_OF_TIME:
        for only in (None, rank % setup.num_ranks):
            fig = draw(name, trace, steps=steps, rank=only)
            if fig.data:  # otherwise there is nothing to draw
                assert {axis.range for axis in fig.select_xaxes()} == {(0, (end_ns - begin_ns) / ns)}, name
                assert min(places(fig)) >= 0, name
                assert max(places(fig)) <= (end_ns - begin_ns) / ns * (1 + 1e-9), name
                if name == "timeline":
                    duration = format_duration(duration_ns(trace, shown, only) or end_ns - begin_ns)
                    assert title(fig).startswith(f"{shown}: {duration}, compute waits for ")


def test_the_same_event_has_the_same_place_in_every_picture_of_a_rank_that_begins_late():
    trace = example_trace()
    rows = trace.rank(3).rows.copy()
    rows["t_ns"] += 40_000
    late = RankTrace(3, rows)
    trace = Trace(trace.header, (*trace.ranks[:3], late))
    step = late.rows[late.rows["step"] == 2]
    zero_ns = min(r.rows["t_ns"][r.rows["step"] == 2].min() for r in trace.ranks)
    backward = step[(step["kind"] == Kind.BACKWARD) & (step["edge"] == 0)]["t_ns"][0]
    where = pytest.approx((backward - zero_ns) / 1e6)
    for name in ("memory", "states"):
        strip = [shape.x0 for shape in draw(name, trace, rank=3).layout.shapes if shape.label.text == "backward"]
        assert strip == [where], name
    drawn = next(t for t in draw("timeline", trace, rank=3).data if t.name == "backward")
    assert min(drawn.base) == where


def test_idle_time_between_steps_is_cut_out_of_every_picture():
    trace = example_trace()
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["t_ns"][np.flatnonzero(rows["step"] == 2)[0] :] += 90 * 10**9
        ranks.append(RankTrace(rank.rank, rows))
    trace = Trace(trace.header, tuple(ranks))
    for name in VIEWS_OF_TIME:
        fig = draw(name, trace, steps=2)
        assert "90.0 s of held or idle time cut out" in subtitle(fig).replace("<br>", " "), name
        assert "ms" in [*fig.select_xaxes()][-1].title.text
        assert any(
            t.text and "ranks held or idle for 90.0 s: cut out" in t.text for t in fig.data if t.type == "scatter"
        )
        assert "cut out" not in draw(name, trace).layout.title.subtitle.text
