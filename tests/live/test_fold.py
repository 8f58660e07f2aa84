"""The fold of a trace in pieces is what the replay functions say of the whole, and goes on after rows are missing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.held_ranks import aborted, stopped_before
from tests.helpers.simulated_job import Setup, example_trace, simulate
from tests.helpers.trace_strategies import traces
from tests.live.test_feed import growing, known_at, prefix
from workbench.events import Edge, Kind
from workbench.live.fold import Fold
from workbench.live.live_spans import RankSpans
from workbench.live.rank_groups import RankGroups
from workbench.replay import memory, states, training
from workbench.replay.paused_time import GrowingCuts, cuts
from workbench.replay.spans import extent_ns, zero_ns
from workbench.trace import advance
from workbench.trace.columns import Trace


def folded(prefixes):
    """The fold of the last of some traces, each a later state of the one before."""
    fold = Fold(history_rows=prefixes[-1].num_rows)
    for trace in prefixes:
        fold.update(trace)
        for rank_trace in trace.ranks:
            fold.rank(rank_trace.rank)
    return fold


def check(fold, trace):
    """It knows what the replay functions say of the whole."""
    for rank_trace in trace.ranks:
        now, rank = fold.rank(rank_trace.rank), rank_trace.rank
        assert now.memory == memory.advance(memory.start(rank_trace.start), rank_trace.rows)
        assert now.units == states.at(rank_trace, rank_trace.end_seq)
        assert fold.frame(rank) == advance(rank_trace.start, rank_trace.rows)
        if len(rank_trace.rows):
            top = memory.peak(rank_trace)
            assert (fold.peak(rank).num_bytes, fold.peak(rank).t_ns) == (top.num_bytes, top.t_ns)
            assert memory.describe_peak(trace.header, fold.peak(rank)) == memory.describe_peak(trace.header, top)
    for rank in fold.drawn:
        ended, _ = fold.spans(rank, 0)
        once = RankSpans().take(trace.rank(rank), cuts=fold.cuts)
        for track in np.unique(once["track"]):
            assert ended[ended["track"] == track].tolist() == once[once["track"] == track].tolist()
        assert len(ended) == len(once)


def check_steps(fold, trace):
    expected = training.summary(trace)
    newest = fold.steps.progress(trace.header.strings)
    assert newest.step == max(training.fold(r).last_step for r in trace.ranks)
    common = [step for step in expected.step_times.steps if step not in unfinished(trace)]
    found = fold.steps.following(0)
    assert found["step"].tolist() == common[: len(found)]
    assert len(common) - len(found) <= 1, "the last one waits for its loss"
    if not any((r.kinds == Kind.GATE).any() for r in trace.ranks):
        by_step = dict(zip(expected.step_times.steps.tolist(), expected.step_times.high.tolist(), strict=True))
        assert found["step_ns"].tolist() == [by_step[step] for step in found["step"]]
        assert newest.step_ns == (by_step[common[-1]] if common else None)
    losses = expected.metrics.get(training.LOSS)
    if losses is not None:
        assert (newest.loss, newest.loss_step) == (pytest.approx(losses.mean[-1]), losses.steps[-1])


def unfinished(trace):
    ended = [set(training.fold(r).steps["step"].tolist()) for r in trace.ranks]
    return set.union(*ended) - set.intersection(*ended) if ended else set()


@settings(max_examples=60)
@given(growing())
def test_a_fold_in_pieces_equals_replay_of_the_whole(prefixes):
    fold, trace = folded(prefixes), prefixes[-1]
    check(fold, trace)
    check_steps(fold, trace)


@settings(max_examples=40)
@given(growing(whole=False))
def test_so_is_that_of_a_trace_that_begins_late_and_ends_early(prefixes):
    check(folded(prefixes), prefixes[-1])


def test_every_split_of_a_small_trace_gives_the_same():
    trace = simulate(Setup(num_ranks=2, num_units=2, steps=2))
    groups = RankGroups()
    groups.update(trace)
    for end in range(len(trace.rank(0).rows) + 1):
        fold = folded([prefix(trace, [end, end]), trace])
        check(fold, trace)
        check_steps(fold, trace)
        assert fold.groups == groups.groups
        assert fold.origin_ns == zero_ns(trace)


def stops(trace):
    return min(int(((r.rows["kind"] == Kind.BACKWARD) & (r.rows["edge"] == Edge.BEGIN)).sum()) for r in trace.ranks)


@settings(max_examples=30)
@given(traces(whole=True), st.integers(0, 3), st.data())
def test_cut_time_and_aborted_steps_are_those_of_the_whole(trace, number, data):
    if trace.ranks and stops(trace) > number:
        trace = stopped_before(trace, Kind.BACKWARD, number=number)
    if all((r.rows["step"] == 1).any() for r in trace.ranks):
        trace = aborted(trace, 0, data.draw(st.floats(0, 1)))
    ends = [int(data.draw(st.floats(0, 1)) * len(r.rows)) for r in trace.ranks]
    fold = folded([prefix(trace, ends), trace])
    check(fold, trace)
    if not any(len(r.rows) for r in trace.ranks):
        return
    first_ns, last_ns = extent_ns(trace)
    half = known_at(trace, (first_ns + last_ns) // 2)  # what all ranks had recorded at half time
    assert folded([half, trace]).cuts.joined().lengths_ns.sum() >= cuts(trace).lengths_ns.sum()
    growing_cuts = GrowingCuts()
    growing_cuts.update(half)
    assert growing_cuts.update(trace).joined().lengths_ns.sum() == cuts(trace).lengths_ns.sum()


# ---- rows that are missing


LONG = simulate(Setup(num_ranks=2, num_units=3, steps=6))


def without(trace, rank, first, last):
    """The trace as it is collected after a rank overwrote some rows: it begins behind them."""
    return Trace(trace.header, tuple(r.cut(last, r.end_seq) if r.rank == rank else r for r in trace.ranks))


@settings(max_examples=60)
@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1))
def test_after_a_gap_the_fold_continues_and_keeps_its_peak(seen, lost, later):
    rows = LONG.rank(1).end_seq
    end = int(seen * rows)
    begin = end + int(lost * (rows - end))
    until = begin + int(later * (rows - begin))
    fold = Fold(history_rows=rows)
    fold.update(prefix(LONG, [end, end]))
    known = fold.rank(1).memory
    epoch = fold.epoch
    gone = without(LONG, 1, end, begin)
    for trace in (without(prefix(LONG, [until, until]), 1, end, begin), gone):
        fold.update(trace)
        rank_trace = trace.rank(1)
        now = fold.rank(1)
        after = memory.advance(memory.start(rank_trace.start), rank_trace.rows)
        assert now.memory.bytes_by_category == after.bytes_by_category
        assert now.memory.peak_bytes == max(known.peak_bytes, after.peak_bytes)
        assert now.units == states.at(rank_trace, rank_trace.end_seq)
        assert memory.describe_peak(trace.header, fold.peak(1))
    if (LONG.rank(0).rows["step"][:end] >= 0).any():
        assert fold.epoch == epoch, "the same trace: a view keeps what it has"
    assert fold.groups == ((0, 1),), "ranks that lack rows do not count as different"
    steps = fold.steps.following(0)
    assert (np.diff(steps["step"]) > 0).all()
    assert (steps["exposed"] <= 1).all()
    sure = training.summary(gone).step_times
    assert set(sure.steps.tolist()) >= set(steps["step"][steps["step"] > LONG.rank(1).rows["step"][begin - 1]].tolist())


def test_a_peak_from_before_a_gap_keeps_its_description():
    trace = example_trace(num_ranks=2, steps=4)
    rank_trace = trace.rank(0)
    top = memory.peak(rank_trace)
    fold = Fold()
    fold.update(prefix(trace, [top.seq + 5] * 2))
    before = fold.peak(0)
    assert before.num_bytes == top.num_bytes
    fold.update(Trace(trace.header, tuple(r.cut(r.end_seq - 20, r.end_seq) for r in trace.ranks)))
    assert fold.peak(0) == before


def test_other_ranks_and_another_file_restart_the_fold():
    trace, fold = example_trace(num_ranks=2, steps=2), Fold()
    fold.update(trace)
    first = fold.epoch
    fold.update(trace)
    assert fold.epoch == first
    fold.update(trace.slice(first=1), "part.trace")
    assert fold.epoch == first + 1
    assert fold.steps.following(0)["step"].tolist() == [1]


def test_each_row_is_read_once(monkeypatch):
    """However many clients ask for the state of a rank."""
    read, whole = [], memory.advance

    def counted(state, rows):
        read.append(len(rows))
        return whole(state, rows)

    monkeypatch.setattr(memory, "advance", counted)
    trace, fold = example_trace(num_ranks=2, steps=2), Fold()
    for end in (100, 200, len(trace.rank(0).rows)):
        fold.update(prefix(trace, [end, end]))
        for _ in range(3):
            fold.frame(0)
    assert sum(read) == len(trace.rank(0).rows)
