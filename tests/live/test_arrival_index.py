"""The arrival time of rows, for any division of the trace into pieces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import example_trace
from workbench.live import state_at
from workbench.live.state_at import ArrivalIndex
from workbench.trace.columns import RankTrace
from workbench.trace.schema import ROW_DTYPE, KeyFrame

times = st.lists(st.integers(0, 50), min_size=1, max_size=40)


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
    monkeypatch.setattr(state_at, "_BLOCK", 4)


def rank_of(t_ns, first=0):
    rows = np.zeros(len(t_ns), ROW_DTYPE)
    rows["t_ns"], rows["seq"] = t_ns, first + np.arange(len(t_ns))
    return RankTrace(0, rows, KeyFrame(seq=first))


def expect(found, t_ns):
    running = np.maximum.accumulate(t_ns)
    assert [found.at(place) for place in range(len(t_ns))] == running.tolist()
    assert [found.count(now) for now in range(-1, 52)] == [int((running <= now).sum()) for now in range(-1, 52)]


@given(times, st.integers(0, 9))
def test_arrival_times_are_a_running_maximum(t_ns, first):
    expect(ArrivalIndex(rank_of(t_ns, first)), t_ns)


@given(times, times, st.integers(0, 9), st.data())
def test_cached_arrival_times_are_reused_and_correct(before, more, first, data):
    whole = [*before, *more]
    dropped = data.draw(st.integers(0, len(before)))
    earlier = ArrivalIndex(rank_of(before, first))
    expect(ArrivalIndex(rank_of(whole[dropped:], first + dropped), earlier), whole[dropped:])


def test_a_simulated_rank():
    rank = example_trace(num_ranks=2).rank(1)
    found, running = ArrivalIndex(rank), np.maximum.accumulate(rank.rows["t_ns"])
    for place in range(0, len(rank.rows), 7):
        assert found.at(place) == running[place]
        assert found.count(int(running[place])) == (running <= running[place]).sum()
