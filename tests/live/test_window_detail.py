"""The drawing of a time window matches the numbers at every moment in it."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.live_view import FeedView
from tests.helpers.long_trace import long_trace
from tests.helpers.simulated_job import Setup, simulate
from tests.helpers.trace_strategies import traces
from workbench.events import BESIDE
from workbench.live import state_at
from workbench.live.live_spans import NUM_TRACKS, RankSpans
from workbench.live.state_at import StateAt
from workbench.live.window_detail import MOST, MOST_SPANS, window
from workbench.replay import memory
from workbench.replay.paused_time import Cuts
from workbench.trace import advance
from workbench.trace.columns import Trace


@st.composite
def windows(draw):
    """Draw a trace, its groups, and a time window that may extend beyond both ends."""
    trace = draw(traces())
    times = [r.rows["t_ns"] for r in trace.ranks if len(r.rows)]
    low, high = (int(min(t.min() for t in times)), int(max(t.max() for t in times))) if times else (0, 1)
    margin = (high - low) // 4 + 1
    ends = st.integers(low - margin, high + margin)
    begin_ns, end_ns = sorted((draw(ends), draw(ends)))
    return trace, FeedView().take(trace).groups, begin_ns, end_ns


def windowed(trace, moments, groups, begin_ns, end_ns, ranks=()):
    """Return a window of a trace, read through its moments, with these groups and ranks drawn."""
    fold = SimpleNamespace(trace=trace, moments=moments, groups=tuple(groups), drawn=tuple(ranks), cuts=Cuts())
    return window(fold, begin_ns, end_ns)


def known_ns(trace, rank):
    """Return the arrival time of each row."""
    return np.maximum.accumulate(trace.rank(rank).rows["t_ns"])


def drawn_bytes(found, group, t_ns):
    """Return a group's drawn bytes at a time."""
    mine = found.memory[found.memory["group"] == group]
    return tuple(mine["num_bytes"][np.searchsorted(mine["t_ns"], t_ns, side="right") - 1].tolist())


def drawn_units(found, group, t_ns, num_units):
    """Return the drawn states of all units of a group at a time."""
    mine = found.states[found.states["group"] == group]
    at = {unit: mine[mine["unit"] == unit] for unit in range(num_units)}
    return tuple(int(u["state"][np.searchsorted(u["t_ns"], t_ns, side="right") - 1]) for u in at.values())


def numbers(state, rank):
    """Return a rank's numbers at a moment."""
    mine = next(shown for shown in state.ranks if rank in shown.ranks)
    return tuple(mine.bytes), mine.units


@settings(max_examples=60)
@given(windows())
def test_at_every_event_the_window_matches_the_numbers(drawn):
    trace, groups, begin_ns, end_ns = drawn
    kept = StateAt()
    found = windowed(trace, kept, groups, begin_ns, end_ns)
    assert found.is_exact
    num_units = len(trace.header.units)
    for place, group in enumerate(groups):
        rank, rows = group[0], trace.rank(group[0]).rows
        times = known_ns(trace, rank)
        for seq in rows["seq"][(times >= begin_ns) & (times <= end_ns)].tolist():
            state = kept.at_row(trace, rank, seq)
            mine = next(shown for shown in state.ranks if rank in shown.ranks)
            if mine.ranks[0] == rank:  # otherwise another rank represents it, which may differ by ALIKE
                drawn_there = (
                    drawn_bytes(found, place, state.t_us),
                    drawn_units(found, place, state.t_us, num_units),
                )
                assert numbers(state, rank) == drawn_there


@settings(max_examples=60)
@given(windows())
def test_a_window_is_the_fold_of_the_whole_trace_cut_to_it(drawn):
    trace, groups, begin_ns, end_ns = drawn
    found = windowed(trace, StateAt(), groups, begin_ns, end_ns)
    for place, group in enumerate(groups):
        rank_trace, times = trace.rank(group[0]), known_ns(trace, group[0])
        mine = found.memory[found.memory["group"] == place]
        assert mine["t_ns"][0] == max(begin_ns, times[0])
        before = rank_trace.rows[times <= begin_ns]
        assert mine["num_bytes"][0].tolist() == list(advance(rank_trace.start, before).bytes_by_category)
        whole = memory.series(rank_trace)
        there = np.flatnonzero((times > begin_ns) & (times <= end_ns)) + rank_trace.start.seq
        inside = np.isin(whole.seq, there)
        assert mine["num_bytes"][1:].tolist() == whole.num_bytes[inside].tolist()
        assert mine["t_ns"][1:].tolist() == times[whole.seq[inside] - rank_trace.start.seq].tolist()
        assert set(found.states["unit"][found.states["group"] == place]) >= set(range(len(trace.header.units)))


def test_key_frames_on_the_way_change_no_window(monkeypatch):
    monkeypatch.setattr(state_at, "EVERY", 32)
    trace, kept = simulate(Setup(num_ranks=2, steps=3)), StateAt()
    times, groups = known_ns(trace, 0), FeedView().take(trace).groups
    for begin, end in np.sort(np.random.default_rng(0).integers(0, len(times), (30, 2)), axis=1).tolist():
        part = int(times[begin]), int(times[end])
        for new, old in zip(tables(trace, kept, groups, part), tables(trace, StateAt(), groups, part), strict=True):
            assert new.tobytes() == old.tobytes()


def tables(trace, kept, groups, part):
    found = windowed(trace, kept, groups, *part)
    return found.memory, found.states


@pytest.mark.parametrize("rows_per_rank", [2_000, 40_000])
def test_a_large_window_sends_only_extremes_and_says_so(rows_per_rank):
    trace = long_trace(num_ranks=2, rows_per_rank=rows_per_rank)
    groups, times = FeedView().take(trace).groups, known_ns(trace, 0)
    found = windowed(trace, StateAt(), groups, int(times[0]), int(times[-1]))
    assert found.is_exact == (rows_per_rank == 2_000)
    assert len(found.memory) <= 1.1 * MOST
    assert len(found.states) <= 1.1 * MOST
    assert found.memory["num_bytes"].sum(axis=1).max() == memory.series(trace.rank(0)).num_bytes.sum(axis=1).max()
    last = windowed(trace, StateAt(), groups, int(times[-200]), int(times[-1]))
    assert last.memory["num_bytes"][-1].tolist() == found.memory["num_bytes"][-1].tolist()


def test_a_moment_without_memory_rows_still_has_a_state():
    trace = simulate(Setup(num_ranks=2, steps=2))
    rows, times = trace.rank(0).rows, known_ns(trace, 0)
    quiet = int(np.flatnonzero(np.diff(times) > 1_000)[3])
    found = windowed(trace, StateAt(), ((0, 1),), int(times[quiet]), int(times[quiet]) + 1)
    assert found.is_exact
    assert len(found.memory) == 1
    assert len(found.states) == len(trace.header.units)
    state = StateAt().at_row(trace, 0, int(rows["seq"][quiet]))
    assert tuple(found.memory["num_bytes"][0].tolist()) == tuple(state.ranks[0].bytes)


def test_unknown_ranks_are_not_sent():
    trace = simulate(Setup(num_ranks=2, steps=1))
    for shown, groups in ((Trace.empty(), ((0, 1),)), (trace, ((0, 1), (7,)))):
        found = windowed(shown, StateAt(), groups, 0, 1)
        assert not found.is_exact
        assert len(found.memory) == len(found.states) == 0


@given(windows())
def test_its_spans_are_those_of_the_whole_run_that_reach_into_it(drawn):
    trace, groups, begin_ns, end_ns = drawn
    ranks = [r.rank for r in trace.ranks if len(r.rows)]
    found = windowed(trace, StateAt(), groups, begin_ns, end_ns, ranks=ranks).spans
    whole = windowed(trace, StateAt(), groups, -(1 << 62), 1 << 62, ranks=ranks).spans
    there = whole[(whole["end_ns"] >= begin_ns) & (whole["begin_ns"] <= end_ns)]
    names = ["track", "kind", "unit", "begin_ns"]
    spans = {tuple(span) for span in found[names].tolist()}
    assert spans >= {tuple(span) for span in there[names].tolist()}


@pytest.mark.parametrize("part", [(0.0, 1.0), (0.4, 0.41), (0.4, 0.4001), (0.9, 1.1)])
def test_of_a_long_run_only_steps_that_reach_into_it_are_read(part):
    trace = long_trace(num_ranks=2, rows_per_rank=20_000)
    times = known_ns(trace, 0)
    begin_ns, end_ns = (int(times[0] + share * (times[-1] - times[0])) for share in part)
    found = windowed(trace, StateAt(), ((0, 1),), begin_ns, end_ns, ranks=(0, 1)).spans
    parts = [RankSpans().take(r) for r in trace.ranks]
    parts[1]["track"] += NUM_TRACKS
    every = np.concatenate(parts)
    there = every[(every["end_ns"] >= begin_ns) & (every["begin_ns"] <= end_ns)]
    if len(there) <= MOST_SPANS:
        assert sorted(found[["track", "begin_ns", "end_ns"]].tolist()) == sorted(
            there[["track", "begin_ns", "end_ns"]].tolist()
        )
    else:
        assert 0 < len(found) <= MOST_SPANS
    assert {0, NUM_TRACKS} <= {*found["track"].tolist()} <= set(range(2 * NUM_TRACKS))


def test_events_are_what_arrow_keys_stop_at():
    rows = simulate(Setup(num_ranks=2, steps=1)).rank(0).rows
    assert (~np.isin(rows["kind"], BESIDE)).sum() > 20  # so the test above checks many
