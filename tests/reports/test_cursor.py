from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import Setup, example_trace, setups, simulate, traces
from workbench.events import BESIDE, Edge, Kind
from workbench.replay.alignment import same_events
from workbench.reports.cursor import Cursor, back, cut
from workbench.trace.columns import RankTrace, Trace

TRACE = example_trace(num_ranks=2, num_units=2, steps=2)


def logical(rank_trace):
    """Return the logical events of a rank, in order: kind, edge, unit, step."""
    rows = rank_trace.rows[~np.isin(rank_trace.rows["kind"], BESIDE)]
    return rows[["kind", "edge", "unit", "step"]].tolist()


def moments(rank_trace):
    """Return the number of logical events up to each moment of a rank; events that arrive together share one moment."""
    known = np.maximum.accumulate(rank_trace.rows["t_ns"])[~np.isin(rank_trace.rows["kind"], BESIDE)]
    return [place + 1 for place in range(len(known)) if place + 1 == len(known) or known[place] < known[place + 1]]


def on_other_clocks(trace, draw):
    """Return rank 0's events on three ranks at different speeds, one of which began late."""
    rows = trace.rank(0).rows
    ranks = [trace.rank(0)]
    for rank in (1, 2):
        copy = rows.copy()
        copy["t_ns"] = copy["t_ns"] * draw(st.floats(0.2, 5)) + draw(st.integers(0, 10**9))
        ranks.append(RankTrace(rank, copy))
    return Trace(trace.header, tuple(ranks))


@given(setups(), st.data(), st.integers(1, 60))
def test_ranks_that_did_the_same_are_cut_at_the_same_logical_event(setup, data, count):
    trace = on_other_clocks(simulate(setup), data.draw)
    cursor, sentence = back(trace, None, count)
    assume(cursor is not None)
    shown = [logical(r) for r in cut(trace, cursor).ranks]
    whole, ends = logical(trace.rank(0)), moments(trace.rank(0))
    assert shown == [whole[: ends[max(len(ends) - 1 - count, 0)]]] * 3
    assert sentence.startswith("ranks 0-2 after ")
    further, _ = back(trace, cursor, 1)
    assert [logical(r) for r in cut(trace, further).ranks] == [whole[: ends[max(len(ends) - 2 - count, 0)]]] * 3


@given(setups(), st.data())
def test_a_truncated_trace_is_cut_at_the_same_event(setup, data):
    """The builder keeps equally many rows of each rank, which need not be the same ones."""
    trace = on_other_clocks(simulate(setup), data.draw)
    ranks = [r.cut(data.draw(st.integers(0, r.end_seq)), r.end_seq) for r in trace.ranks]
    trace = Trace(trace.header, tuple(ranks))
    for other in ranks[1:]:
        for mine, theirs in zip(*same_events(ranks[0], other), strict=True):
            assert ranks[0].start.seq + mine == other.start.seq + theirs


def test_a_rank_without_the_event_is_cut_by_time_between_those_it_shares():
    lead = TRACE.rank(0)
    rows = lead.rows.copy()
    gone = np.flatnonzero((rows["kind"] == Kind.FORWARD) & (rows["edge"] == Edge.END))[-1]
    rows = np.delete(rows, gone)
    rows["seq"] = np.arange(len(rows))
    trace = Trace(TRACE.header, (lead, RankTrace(1, rows)))
    passed = (~np.isin(lead.rows["kind"][: gone + 1], BESIDE)).sum()
    cursor, sentence = back(trace, None, sum(end > passed for end in moments(lead)))
    assert cursor.ends[0] == gone + 1
    assert "; rank 1 has no such event:" in sentence
    assert sentence.startswith("rank 0 after the end of forward")
    events = logical(lead.cut(0, gone))
    assert logical(cut(trace, cursor).rank(1)) == events


def test_back_moves_by_events_and_stays_at_the_first():
    cursor, sentence = back(TRACE, None, 1)
    assert ": 1 event before the newest" in sentence
    assert cursor.events_back == 1
    further, _ = back(TRACE, cursor, 1)
    assert further.t_ns <= cursor.t_ns
    assert back(TRACE, None, 2)[0] == further
    first, sentence = back(TRACE, None, 10**6)
    assert back(TRACE, first, 1)[0] == first
    assert sentence.startswith("ranks 0-1 after the start of ")


@given(setups(), st.integers(1, 60))
def test_a_cursor_is_a_time_as_well(setup, count):
    """A line at the cursor's time divides the lowest rank's rows, by arrival, exactly at the cursor."""
    trace = simulate(setup)
    cursor, _ = back(trace, None, count)
    assume(cursor is not None)
    lead = trace.ranks[0]
    known = np.maximum.accumulate(lead.rows["t_ns"])
    assert len(cut(trace, cursor).ranks[0].rows) == np.searchsorted(known, cursor.t_ns, side="right")


def test_back_to_an_earlier_model_is_reported():
    first, second = (simulate(Setup(num_ranks=2, num_units=2, steps=2, seed=seed)) for seed in (0, 1))
    count = len(first.header.units)
    units = [replace(u, index=u.index + count, root=u.root + count) for u in second.header.units]
    header = replace(first.header, units=(*first.header.units, *units))
    ranks = []
    for a, b in zip(first.ranks, second.ranks, strict=True):
        later = b.rows.copy()
        later["seq"] += a.end_seq
        later["t_ns"] += a.rows["t_ns"].max() - later["t_ns"].min()
        later["unit"] += np.where(later["unit"] >= 0, count, 0).astype(np.int16)
        later["step"] += np.where(later["step"] >= 0, 2, 0).astype(np.int32)
        ranks.append(RankTrace(a.rank, np.concatenate([a.rows, later])))
    trace = Trace(header, tuple(ranks))
    assert "of an earlier model" not in back(trace, None, 3)[1]
    assert ", of an earlier model: " in back(trace, None, 10**6)[1]


def test_back_without_events():
    assert back(Trace.empty(), None, 1) == (None, "cannot go back: nothing is recorded yet")


@given(trace=traces(), count=st.integers(1, 50))
def test_the_cut_is_a_prefix_of_every_rank(trace, count):
    cursor, _ = back(trace, None, count)
    if cursor is None:
        return
    shown = cut(trace, cursor)
    for before, after in zip(trace.ranks, shown.ranks, strict=True):
        assert (after.rank, after.start) == (before.rank, before.start)
        assert after.end_seq <= before.end_seq
        assert (before.rows["seq"][: len(after.rows)] == after.rows["seq"]).all()


def test_a_rank_unknown_to_the_cursor_is_not_shown():
    shown = cut(TRACE, Cursor(t_ns=0, ends={0: 2**62}))
    assert shown.rank(0) == TRACE.rank(0)
    assert not len(shown.rank(1).rows)
