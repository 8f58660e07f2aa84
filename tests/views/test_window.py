import numpy as np
import pytest

from tests.trace.strategies import example_trace
from workbench.errors import UsageError
from workbench.events import Kind
from workbench.trace.columns import RankTrace, Trace
from workbench.views.window import window


def test_the_last_step_is_shown_unless_told_otherwise():
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


def test_a_step_that_is_not_there_is_named():
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
