from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import any_packed_rows, cuttings, example_trace, rows_from, traces
from tests.replay.test_models import make_unit
from workbench.events import Edge, Kind
from workbench.replay import training
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import NO_CATEGORY, ROW_DTYPE, Header

LOSS, OTHER = 0, 1
STRINGS = ("loss", "tokens/s")


def row(kind, edge=Edge.INSTANT, *, t_ns=0, step=-1, module=-1, value=math.nan):
    return (0, t_ns, 0, value, step, module, -1, -1, -1, kind, edge, 0, NO_CATEGORY)


def step_rows(step, begin_ns, end_ns, *inside):
    return [
        row(Kind.STEP, Edge.BEGIN, t_ns=begin_ns, step=step),
        *inside,
        row(Kind.STEP, Edge.END, t_ns=end_ns, step=step),
    ]


def logged(value, module=LOSS, step=-1):
    return row(Kind.METRIC, module=module, value=value, step=step)


def make_rows(rows):
    array = np.array(rows, ROW_DTYPE).reshape(-1)
    array["seq"] = np.arange(len(array))
    return array


def make_trace(*ranks):
    return Trace(Header(strings=STRINGS), tuple(RankTrace(i, make_rows(rows)) for i, rows in enumerate(ranks)))


@given(any_packed_rows(max_size=30), st.data())
def test_any_rows_in_pieces_give_the_same_state(packed, data):
    rows = rows_from(packed).copy()
    rows["kind"] = rows["kind"] % 19  # more of the kinds that matter
    rows["edge"] = rows["edge"] % 3
    rows["step"] = rows["step"] % 7
    cuts = data.draw(cuttings(len(rows)))
    pieces = reduce(training.advance, (rows[cut] for cut in cuts), training.start())
    assert pieces == training.advance(training.start(), rows)


@given(traces(), st.data())
def test_a_real_trace_in_pieces_gives_the_same_state(trace, data):
    for rank in trace.ranks:
        cuts = data.draw(cuttings(len(rank.rows)))
        pieces = reduce(training.advance, (rank.rows[cut] for cut in cuts), training.start())
        assert pieces == training.fold(rank)


def test_states_differ_where_their_content_does():
    one = training.advance(training.start(), make_rows([logged(1.0, step=0)]))
    two = training.advance(training.start(), make_rows([logged(2.0, step=0)]))
    assert one != two
    assert one != "a state"
    assert training.start() == training.start()


def forward(unit, step):
    return (0, 0, 0, math.nan, step, -1, -1, unit, -1, Kind.FORWARD, Edge.BEGIN, 1, NO_CATEGORY)


def of_models(*units_and_losses, header):
    """Return a trace with one step per (unit of the first forward, loss)."""
    rows = []
    for step, (unit, loss) in enumerate(units_and_losses):
        rows += step_rows(step, 100 * step, 100 * step + 10 * (unit + 1), forward(unit, step), logged(loss, step=step))
    return Trace(header, (RankTrace(0, make_rows(rows)),))


def test_the_summary_is_of_the_current_model():
    header = Header(strings=STRINGS, units=(make_unit(0), make_unit(1)))
    found = training.summary(of_models((0, 66.95), (0, 60.0), (1, 5.0), (1, 4.868), header=header))
    assert found.cuts == (2,)
    assert found.losses.tolist() == [5.0, 4.868]
    assert (found.num_steps, found.step_ns) == (2, 20.0)
    assert found.metrics["loss"].mean.tolist() == [66.95, 60.0, 5.0, 4.868]


def test_a_model_unsharded_and_sharded_again_continues():
    header = Header(strings=STRINGS, units=(make_unit(0, retired=True), make_unit(1)))
    found = training.summary(of_models((0, 6.0), (1, 5.0), header=header))
    assert found.cuts == ()
    assert found.losses.tolist() == [6.0, 5.0]


def test_models_by_turns_are_cut_at_each_turn():
    header = Header(strings=STRINGS, units=(make_unit(0), make_unit(1)))
    found = training.summary(of_models((0, 6.0), (1, 5.0), (0, 4.0), header=header))
    assert found.cuts == (1, 2)
    assert found.losses.tolist() == [4.0]


def test_the_loss_is_the_mean_over_ranks_of_each_step():
    summary = training.summary(
        make_trace(step_rows(0, 0, 9, logged(1.0, step=0)), step_rows(0, 0, 9, logged(4.0, step=0)))
    )
    loss = summary.metrics["loss"]
    assert loss.steps.tolist() == [0]
    assert (loss.mean[0], loss.low[0], loss.high[0], loss.num_ranks) == (2.5, 1.0, 4.0, 2)
    assert summary.losses.tolist() == [2.5]


def test_several_values_of_a_rank_in_a_step_are_averaged_first():
    micro_batches = step_rows(0, 0, 9, logged(1.0, step=0), logged(3.0, step=0))
    loss = training.summary(make_trace(micro_batches, step_rows(0, 0, 9, logged(4.0, step=0)))).metrics["loss"]
    assert (loss.mean[0], loss.low[0], loss.high[0]) == (3.0, 2.0, 4.0)


def test_a_value_logged_right_after_a_step_belongs_to_it():
    rows = [logged(9.0), *step_rows(0, 0, 9), logged(1.0), *step_rows(1, 10, 19), logged(2.0), logged(2.5)]
    loss = training.summary(make_trace(rows)).metrics["loss"]
    assert loss.steps.tolist() == [-1, 0, 1]
    assert loss.mean.tolist() == [9.0, 1.0, 2.25]


def test_ranks_may_have_different_steps():
    late = [*step_rows(0, 0, 9, logged(1.0, step=0)), *step_rows(1, 10, 19, logged(2.0, step=1))]
    loss = training.summary(make_trace(late, step_rows(1, 10, 19, logged(4.0, step=1)), [])).metrics["loss"]
    assert loss.steps.tolist() == [0, 1]
    assert loss.mean.tolist() == [1.0, 3.0]
    assert loss.low.tolist() == [1.0, 2.0]
    assert loss.num_ranks == 2


def test_nan_of_one_rank_is_seen_in_the_mean():
    loss = training.summary(make_trace([logged(math.nan, step=0)], [logged(1.0, step=0)])).metrics["loss"]
    assert math.isnan(loss.mean[0])


@pytest.mark.parametrize("first", [0, 1])
def test_whose_values_were_the_first_that_are_no_numbers_is_told(first):
    ranks = [[1.0, math.nan], [math.inf, 1.0], [], [math.nan, math.nan]]
    finite = [logged(1.0, step=step) for step in range(first)]
    trace = make_trace(*([*finite, *(logged(v, step=first + n) for n, v in enumerate(each))] for each in ranks))
    assert training.summary(trace).metrics["loss"].first_not_finite == (1, 3)


def test_the_loss_is_first_and_unknown_names_get_a_number():
    rows = [logged(5.0, OTHER, step=0), logged(1.0, step=0), logged(2.0, 7, step=0)]
    assert list(training.summary(make_trace(rows)).metrics) == ["loss", "tokens/s", "metric 7"]


def test_step_time_excludes_held_time():
    gate = [row(Kind.GATE, Edge.BEGIN, t_ns=20, step=0), row(Kind.GATE, Edge.END, t_ns=70, step=0)]
    again = [row(Kind.GATE, Edge.BEGIN, t_ns=80, step=0), row(Kind.GATE, Edge.END, t_ns=85, step=0)]
    between = [row(Kind.GATE, Edge.BEGIN, t_ns=101), row(Kind.GATE, Edge.END, t_ns=199)]
    rows = [*step_rows(0, 10, 100, *gate, *again), *between, *step_rows(1, 200, 230)]
    times = training.summary(make_trace(rows)).step_times
    assert times.mean.tolist() == [35.0, 30.0]


def test_only_the_end_right_after_its_beginning_tells_how_long_a_gate_held():
    opened, closed = row(Kind.GATE, Edge.BEGIN, t_ns=20, step=0), row(Kind.GATE, Edge.END, t_ns=70, step=0)
    for inside in ([closed], [closed, opened], [opened], [closed, closed]):
        assert training.summary(make_trace(step_rows(0, 10, 100, *inside))).step_times.mean.tolist() == [90.0]


def test_only_complete_steps_have_a_time():
    begin, end = step_rows(1, 100, 150)
    cut_off = [
        row(Kind.STEP, Edge.END, t_ns=90, step=0),
        begin,
        begin,
        end,
        row(Kind.STEP, Edge.BEGIN, t_ns=160, step=2),
    ]
    summary = training.summary(make_trace(cut_off))
    assert summary.step_times.steps.tolist() == [1]
    assert summary.step_ns == 50.0


def test_a_trace_of_nothing_has_no_numbers():
    summary = training.summary(Trace.empty())
    assert (summary.num_steps, summary.metrics, summary.losses.tolist()) == (0, {}, [])
    assert math.isnan(summary.step_ns)


def test_the_example_trains():
    summary = training.summary(example_trace(steps=5))
    assert summary.num_steps == 5
    assert summary.losses[0] > summary.losses[-1]
    assert summary.step_times.num_ranks == 4
    assert np.all(summary.step_times.low <= summary.step_times.mean)
    assert np.all(summary.step_times.mean <= summary.step_times.high)
    assert summary.step_ns == pytest.approx(np.median(summary.step_times.high))
