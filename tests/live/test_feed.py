"""Increments add up to the whole for any division into pieces; thinned ones keep counts, peaks and ends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.held_ranks import stopped_before
from tests.helpers.live_view import FeedView
from tests.helpers.simulated_job import Setup, example_trace, simulate
from tests.helpers.trace_strategies import traces
from workbench.events import Edge, Kind, Track, UnitState
from workbench.live.live_spans import thinned
from workbench.live.packing import COLUMNS, WIDTHS, pack
from workbench.replay import memory, states, training
from workbench.replay.paused_time import without_holds
from workbench.replay.tracks import NUMBER
from workbench.trace.columns import RankTrace, Trace

TABLES = ("spans", "memory", "states", "steps")


def prefix(trace, ends):
    """Return the trace with only the first rows of each rank."""
    return Trace(
        trace.header, tuple(RankTrace(r.rank, r.rows[:n], r.start) for r, n in zip(trace.ranks, ends, strict=True))
    )


@st.composite
def growing(draw, *, whole=True):
    """Draw a trace and some of its prefixes, each longer than the one before; the last is the trace itself."""
    trace = draw(traces(whole=whole))
    parts = draw(st.lists(st.lists(st.floats(0, 1), min_size=len(trace.ranks), max_size=len(trace.ranks)), max_size=4))
    steps, ends = [], [0] * len(trace.ranks)
    for shares in parts:
        ends = [max(n, int(s * len(r.rows))) for n, s, r in zip(ends, shares, trace.ranks, strict=True)]
        steps.append(prefix(trace, ends))
    return [*steps, trace]


def add_up(prefixes, max_bytes=1 << 24):
    """Return the tables that a view has after taking the prefixes one by one."""
    feed, known = FeedView(), {}
    for trace in prefixes:
        new = feed.take(trace, max_bytes)
        for name in TABLES:
            before = [] if new.restart and name != "steps" else known.get(name, [])
            known[name] = [*before, getattr(new, name)]
    return {name: np.concatenate(parts) for name, parts in known.items()}


def by(found, *names):
    return found[np.lexsort([found[name] for name in names[::-1]])]


@settings(max_examples=40)
@given(growing())
def test_spans_add_up_to_those_of_the_whole(prefixes):
    pieces, whole = add_up(prefixes)["spans"], add_up(prefixes[-1:])["spans"]
    keys = ("track", "begin_ns", "end_ns", "kind", "unit")
    assert by(pieces, *keys).tolist() == by(whole, *keys).tolist()


@settings(max_examples=40)
@given(growing())
def test_a_tracks_spans_come_in_the_order_they_began(prefixes):
    spans = add_up(prefixes)["spans"]
    for track in np.unique(spans["track"]):
        begin = spans["begin_ns"][spans["track"] == track]
        assert (np.diff(begin) >= 0).all()


@settings(max_examples=40)
@given(growing())
def test_memory_adds_up_to_the_series_of_the_whole(prefixes):
    found = add_up(prefixes)["memory"]
    for group in np.unique(found["group"]):
        mine = found[found["group"] == group]
        rank = groups_of(prefixes)[group][0]
        expected = memory.series(prefixes[-1].rank(rank)).num_bytes
        changes = mine["num_bytes"][np.append(True, (np.diff(mine["num_bytes"], axis=0) != 0).any(axis=1))]
        wanted = expected[np.append(True, (np.diff(expected, axis=0) != 0).any(axis=1))]
        assert changes.tolist() == wanted.tolist()


def groups_of(prefixes):
    feed = FeedView()
    for trace in prefixes:
        groups = feed.take(trace).groups
    return groups


@settings(max_examples=40)
@given(growing())
def test_states_add_up_to_the_states_at_the_end(prefixes):
    found, groups = add_up(prefixes)["states"], groups_of(prefixes)
    for place, group in enumerate(groups):
        rank = prefixes[-1].rank(group[0])
        at_end = states.at(rank, rank.end_seq)
        for unit in range(len(prefixes[-1].header.units)):
            mine = found[(found["group"] == place) & (found["unit"] == unit)]
            last = UnitState(mine["state"][-1]) if len(mine) else UnitState.SHARDED
            assert last == at_end[unit]
            assert (mine["state"][1:] != mine["state"][:-1]).all()


@settings(max_examples=40)
@given(growing())
def test_steps_add_up_and_each_is_sent_once(prefixes):
    found, whole = add_up(prefixes)["steps"], add_up(prefixes[-1:])["steps"]
    assert found["step"].tolist() == whole["step"].tolist()
    np.testing.assert_array_equal(found["loss"], whole["loss"])
    assert found["step_ns"].tolist() == whole["step_ns"].tolist()
    assert found["model"].tolist() == whole["model"].tolist()


@settings(max_examples=40)
@given(growing(whole=False))
def test_a_trace_with_a_late_beginning(prefixes):
    add_up(prefixes)


def test_spans_of_a_step_are_those_that_were_recorded():
    trace = example_trace(num_ranks=2, num_units=3, steps=2)
    spans = add_up([trace])["spans"]
    rows = trace.rank(0).rows
    for kind, track in ((Kind.ALL_GATHER, 1), (Kind.REDUCE_SCATTER, 2)):
        begun = rows[(rows["kind"] == kind) & (rows["edge"] == Edge.BEGIN)]
        mine = spans[spans["track"] == track]
        assert mine["begin_ns"].tolist() == begun["t_ns"].tolist()
        assert mine["num_bytes"].tolist() == begun["num_bytes"].tolist()
    waits = spans[(spans["track"] == NUMBER[Track.WAIT]) & (spans["kind"] == Kind.WAIT)]
    assert len(waits)
    assert waits["exposed"].all()
    assert (waits["issue_ns"] <= waits["begin_ns"]).all()
    assert (waits["issue_ns"] > 0).all()


def test_unfinished_spans_are_open_and_sent_once_ended():
    trace, feed = example_trace(num_ranks=2, num_units=2, steps=1), FeedView()
    rows = trace.rank(0).rows
    first = int(np.flatnonzero((rows["kind"] == Kind.ALL_GATHER) & (rows["edge"] == Edge.BEGIN))[0])
    found = feed.take(prefix(trace, [first + 1] * 2))
    gathering = found.open[(found.open["kind"] == Kind.ALL_GATHER) & (found.open["track"] == 1)]
    assert gathering["begin_ns"].tolist() == [rows["t_ns"][first]]
    assert not (found.spans["kind"] == Kind.ALL_GATHER).any()
    found = feed.take(trace)
    assert len(found.open) == 0
    assert (found.spans["kind"] == Kind.ALL_GATHER).sum() > 0


def test_steps_are_the_training_views():
    trace = example_trace(num_ranks=3, num_units=3, steps=4)
    found, expected = add_up([trace])["steps"], training.summary(trace)
    assert found["step"].tolist() == expected.step_times.steps.tolist()
    np.testing.assert_allclose(found["loss"], expected.losses, rtol=1e-6)
    assert found["step_ns"].tolist() == expected.step_times.high.tolist()


def test_without_new_rows_nothing_is_sent():
    trace, feed = example_trace(), FeedView()
    assert feed.take(trace).restart
    again = feed.take(trace)
    assert not again.restart
    assert [len(getattr(again, name)) for name in TABLES] == [0, 0, 0, 0]


def test_an_empty_trace_sends_nothing():
    found = FeedView().take(Trace.empty())
    assert found.groups == ()
    assert [len(getattr(found, name)) for name in TABLES] == [0, 0, 0, 0]


def test_equal_ranks_share_a_group_until_they_differ():
    trace = simulate(Setup(num_ranks=4, steps=3))
    assert FeedView().take(trace).groups == ((0, 1, 2, 3),)
    odd = trace.rank(2).rows.copy()
    allocs = (odd["kind"] == Kind.ALLOC) & (odd["step"] == 2)
    odd["num_bytes"][allocs] *= 3
    feed = FeedView()
    feed.take(prefix(trace, [100] * 4))
    parts = [RankTrace(r.rank, odd if r.rank == 2 else r.rows, r.start) for r in trace.ranks]
    found = feed.take(Trace(trace.header, tuple(parts)))
    assert found.restart
    assert found.groups == ((0, 1, 3), (2,))


def test_after_lost_rows_a_view_continues():
    """The view keeps its data and receives the state after the missing rows."""
    trace, feed = example_trace(), FeedView()
    feed.take(prefix(trace, [400] * len(trace.ranks)))
    later = Trace(trace.header, tuple(r.cut(500, r.end_seq) for r in trace.ranks))
    found = feed.take(later)
    assert not found.restart
    assert found.groups == ((0, 1, 2, 3),)
    series = memory.series(later.rank(0))
    assert found.memory["num_bytes"].tolist() == series.num_bytes.tolist()
    at_end = states.at(later.rank(0), later.rank(0).end_seq)
    for unit in range(len(trace.header.units)):
        assert found.states["state"][found.states["unit"] == unit][-1] == at_end[unit]
    assert found.spans["begin_ns"].min() >= later.rank(0).rows["t_ns"][0]


@pytest.mark.parametrize("max_bytes", [2_000, 6_554])
def test_an_increment_keeps_to_its_bytes_and_loses_no_peak_nor_end(max_bytes):
    trace = simulate(Setup(num_ranks=8, num_units=4, steps=30))
    found, whole = FeedView().take(trace, max_bytes), FeedView().take(trace, 1 << 24)
    assert len(pack(found, 0)[1]) - 20 * len(found.steps) <= 1.3 * max_bytes
    assert whole.is_exact
    assert not found.is_exact
    assert len(found.memory) < len(whole.memory)
    assert found.spans["count"].sum() == whole.spans["count"].sum()
    assert found.memory["num_bytes"].sum(axis=1).max() == whole.memory["num_bytes"].sum(axis=1).max()
    assert found.memory["num_bytes"][-1].tolist() == whole.memory["num_bytes"][-1].tolist()
    for unit in range(4):
        last = [table.states["state"][table.states["unit"] == unit][-1] for table in (found, whole)]
        assert last[0] == last[1]


def test_thinning_keeps_the_time_of_each_kind():
    spans = FeedView().take(simulate(Setup(num_ranks=2, steps=20)), 1 << 24).spans
    few = thinned(spans, 100)
    assert len(few) <= 100
    for kind in np.unique(spans["kind"]):
        total = [(t["end_ns"] - t["begin_ns"])[t["kind"] == kind].sum() for t in (spans, few)]
        assert total[0] == total[1]


def test_columns_are_read_back():
    trace = example_trace(num_ranks=2, num_units=3, steps=2)
    found, origin_ns = FeedView().take(trace), int(trace.rank(0).rows["t_ns"][0])
    counts, buffer = pack(found, origin_ns)
    at, read = 0, {}
    for table, columns in COLUMNS.items():
        for name, code in columns:
            number = getattr(counts, table) * WIDTHS.get((table, name), 1)
            read[table, name] = np.frombuffer(buffer, f"<{code}", number, at)
            at += -(-number * np.dtype(code).itemsize // 8) * 8
    assert at == len(buffer)
    np.testing.assert_allclose(read["spans", "start"], (found.spans["begin_ns"] - origin_ns) / 1e3)
    assert read["states", "unit"].tolist() == found.states["unit"].tolist()
    assert read["memory", "bytes"].tolist() == found.memory["num_bytes"].ravel().astype("f4").tolist()
    assert read["steps", "step"].tolist() == [0, 1]


@settings(max_examples=25)
@given(growing(), st.integers(0, 2))
def test_a_stopped_run_is_streamed_as_it_is_shown(prefixes, number):
    """For any division into pieces, the times are those of the trace without the holds, as in the static views."""
    whole = prefixes[-1]
    counts = [int(((r.rows["kind"] == Kind.BACKWARD) & (r.rows["edge"] == Edge.BEGIN)).sum()) for r in whole.ranks]
    if min(counts, default=0) <= number:
        return
    held = stopped_before(whole, Kind.BACKWARD, number=number)
    last_ns = max(int(r.rows["t_ns"].max()) for r in held.ranks)
    first_ns = min(int(r.rows["t_ns"].min()) for r in held.ranks)
    pieces = [known_at(held, t_ns) for t_ns in np.linspace(first_ns, last_ns, 4).astype(np.int64)]
    cut = without_holds(held)[0]
    streamed, shown = add_up(pieces), add_up([cut])
    assert streamed["spans"]["end_ns"].max() == shown["spans"]["end_ns"].max()
    if groups_of(pieces) == groups_of([cut]):  # the first rows known may have decided which rank represents a group
        assert set(streamed["memory"]["t_ns"].tolist()) == set(shown["memory"]["t_ns"].tolist())


def known_at(trace, t_ns):
    return prefix(trace, [int((np.maximum.accumulate(r.rows["t_ns"]) <= t_ns).sum()) for r in trace.ranks])
