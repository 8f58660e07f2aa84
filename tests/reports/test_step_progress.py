import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import example_trace, traces
from workbench.events import Edge, Kind
from workbench.replay import training
from workbench.reports.step_progress import TOKENS, Follower, Progress
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, Header


def prefix(trace, share):
    """Return the first ``share`` of every rank's rows."""
    return Trace(trace.header, tuple(r.cut(r.start.seq, r.start.seq + int(len(r.rows) * share)) for r in trace.ranks))


def follow(begin, *rest):
    follower = Follower(begin, num_ranks=begin.header.world_size or 1, total=9)
    return [follower.catch_up(trace) for trace in rest]


def test_at_the_end_it_matches_the_training_fold():
    trace = example_trace(num_ranks=2, steps=3)
    (end,) = follow(prefix(trace, 0), trace)
    whole = training.summary(trace)
    assert end == Progress(
        done=3,
        total=9,
        step=2,
        loss=pytest.approx(whole.losses[-1]),
        loss_step=2,
        step_ns=whole.step_times.high[-1],
    )


def test_the_newest_loss_may_be_of_an_older_step_than_the_one_that_has_begun():
    trace = example_trace(num_ranks=2, steps=3)
    begun = tuple(r.cut(0, trace.slice(step=2).rank(r.rank).start.seq + 1) for r in trace.ranks)
    (found,) = follow(prefix(trace, 0), Trace(trace.header, begun))
    assert (found.step, found.loss_step, found.loss) == (2, 1, training.summary(trace).losses[1])


def test_a_late_state_is_ignored():
    trace = example_trace(num_ranks=2, steps=3)
    begin, half = prefix(trace, 0), prefix(trace, 0.5)
    assert follow(begin, trace, half, trace) == follow(begin, trace) * 3


@given(trace=traces(whole=True), shares=st.lists(st.floats(0, 1), max_size=4).map(sorted))
def test_the_end_does_not_depend_on_the_polls(trace, shares):
    looks = [prefix(trace, share) for share in shares]
    assert follow(prefix(trace, 0), *looks, trace)[-1] == follow(prefix(trace, 0), trace)[-1]
    done = [progress.done for progress in follow(prefix(trace, 0), *looks, trace)]
    assert done == sorted(done)


def test_earlier_steps_do_not_count():
    trace = example_trace(num_ranks=2, steps=3)
    first = Trace(trace.header, tuple(r.cut(0, trace.slice(step=0).rank(r.rank).end_seq) for r in trace.ranks))
    (end,) = follow(first, trace)
    assert (end.done, end.step) == (2, 2)
    (nothing,) = follow(trace, trace)
    assert nothing == Progress(done=0, total=9)


def test_without_events_there_is_no_progress():
    assert follow(Trace.empty(), Trace.empty()) == [Progress(done=0, total=9)]


def test_tokens_of_all_ranks_per_second():
    """Step 0 takes 1 s on rank 0 and 2 s on rank 1; each logs 300 tokens."""
    ranks = []
    for rank in range(2):
        rows = np.zeros(3, ROW_DTYPE)
        rows["seq"], rows["unit"], rows["module"], rows["value"] = range(3), -1, [-1, 1, -1], [np.nan, 300, np.nan]
        rows["kind"], rows["edge"] = [Kind.STEP, Kind.METRIC, Kind.STEP], [Edge.BEGIN, Edge.INSTANT, Edge.END]
        rows["t_ns"] = [0, 1, (rank + 1) * 10**9]
        ranks.append(RankTrace(rank, rows))
    trace = Trace(Header(world_size=2, strings=("loss", TOKENS)), tuple(ranks))
    (end,) = follow(prefix(trace, 0), trace)
    assert (end.tokens_per_s, end.step_ns, end.loss) == (300.0, 2e9, None)


def test_a_nonfinite_token_rate_is_none():
    rows = np.zeros(3, ROW_DTYPE)
    rows["seq"], rows["unit"], rows["module"], rows["value"] = range(3), -1, [-1, 0, -1], [np.nan, np.inf, np.nan]
    rows["kind"], rows["edge"] = [Kind.STEP, Kind.METRIC, Kind.STEP], [Edge.BEGIN, Edge.INSTANT, Edge.END]
    rows["t_ns"] = [0, 1, 10**9]
    trace = Trace(Header(world_size=1, strings=(TOKENS,)), (RankTrace(0, rows),))
    (end,) = follow(prefix(trace, 0), trace)
    assert (end.done, end.tokens_per_s) == (1, None)


def test_rows_that_were_lost_are_skipped():
    trace = example_trace(num_ranks=2, steps=3)
    late = trace.slice(first=2)
    (end,) = follow(prefix(trace, 0), late)
    assert (end.done, end.step) == (1, 2)
