from hypothesis import given
from hypothesis import strategies as st

from tests.trace.strategies import example_trace, traces
from workbench.session.cursor import back, cut
from workbench.trace.columns import Trace

TRACE = example_trace(num_ranks=2, num_units=2, steps=2)


def test_back_goes_event_by_event_and_stays_at_the_first():
    cursor, said = back(TRACE, None, 1)
    assert "1 events before the newest" in said
    further, _ = back(TRACE, cursor, 1)
    assert further < cursor
    assert back(TRACE, None, 2)[0] == further
    first, said = back(TRACE, None, 10**6)
    assert back(TRACE, first, 1)[0] == first
    assert said.startswith("rank 0 after the begin of ")


def test_back_over_nothing():
    assert back(Trace.empty(), None, 1) == (None, "nothing is recorded yet, so there is nothing to go back to")


@given(trace=traces(), count=st.integers(1, 50))
def test_what_is_shown_is_a_prefix_of_every_rank(trace, count):
    cursor, _ = back(trace, None, count)
    if cursor is None:
        return
    shown = cut(trace, cursor)
    for before, after in zip(trace.ranks, shown.ranks, strict=True):
        assert (after.rank, after.start) == (before.rank, before.start)
        assert after.end_seq <= before.end_seq
        assert (before.rows["seq"][: len(after.rows)] == after.rows["seq"]).all()
        assert (after.rows["t_ns"] <= cursor).all()


def test_the_end_of_time_shows_everything():
    assert cut(TRACE, 2**62) == TRACE
