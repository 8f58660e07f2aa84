from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.held_ranks import aborted
from tests.helpers.simulated_job import Setup, simulate
from tests.helpers.trace_strategies import traces
from workbench.events import Edge, Kind
from workbench.replay.spans import (
    closed,
    durations_ns,
    end_aborted,
    exclusive,
    extent_ns,
    has_steps,
    last_ns,
    of_kind,
    owners,
    spans,
    zero_ns,
)
from workbench.trace.columns import Trace
from workbench.trace.schema import ROW_DTYPE


def rows_of(*entries):
    """Return rows of (kind, edge, unit, t_ns)."""
    rows = np.zeros(len(entries), ROW_DTYPE)
    rows["seq"] = np.arange(len(entries))
    rows["comm_group"] = rows["comm_seq"] = -1
    for row, (kind, edge, unit, t_ns) in zip(rows, entries, strict=True):
        row["kind"], row["edge"], row["unit"], row["t_ns"] = kind, edge, unit, t_ns
    return rows


def test_spans_nest_and_may_be_open():
    rows = rows_of(
        (Kind.FORWARD, Edge.BEGIN, 0, 10),
        (Kind.FORWARD, Edge.BEGIN, 1, 20),
        (Kind.RESHARD, Edge.INSTANT, 1, 25),
        (Kind.FORWARD, Edge.END, 1, 30),
    )
    found = spans(rows, (Kind.FORWARD,))
    assert found.unit.tolist() == [0, 1]
    assert found.begin_ns.tolist() == [10, 20]
    assert found.end_ns.tolist() == [-1, 30]
    assert found.end_seq.tolist() == [-1, 3]


def test_of_kind_picks_rows():
    rows = rows_of((Kind.STEP, Edge.BEGIN, -1, 0), (Kind.WAIT, Edge.BEGIN, 0, 1))
    assert of_kind(rows, (Kind.WAIT, Kind.GATE)).tolist() == [False, True]


def test_last_time_is_not_that_of_the_last_row():
    assert last_ns(rows_of((Kind.WAIT, Edge.END, 0, 90), (Kind.ALL_GATHER, Edge.END, 0, 50))) == 90
    assert last_ns(np.empty(0, ROW_DTYPE)) == 0


def test_time_held_at_a_gate_is_no_duration():
    rows = rows_of((Kind.GATE, Edge.BEGIN, -1, 40), (Kind.GATE, Edge.END, -1, 90), (Kind.STEP, Edge.END, -1, 100))
    begin, end = np.array([10, 50, 45, 0, 95]), np.array([100, 60, 95, 40, 99])
    assert durations_ns(rows, begin, end).tolist() == [40, 0, 5, 40, 4]


def test_a_gate_that_still_holds_reaches_to_the_last_row():
    rows = rows_of((Kind.GATE, Edge.BEGIN, -1, 40), (Kind.LOG, Edge.INSTANT, -1, 70))
    assert durations_ns(rows, np.array([30]), np.array([70])).tolist() == [10]


def test_owners_example():
    assert owners(np.array([0, 2]), np.array([8, 5]), 9).tolist() == [0, 0, 1, 1, 1, 0, 0, 0, -1]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_owners_is_the_painters_algorithm(pairs):
    pairs.sort(key=lambda pair: pair[0])
    painted = np.full(31, -1)
    for number, (begin, end) in enumerate(pairs):
        painted[begin:end] = number
    begin, end = (np.array([pair[i] for pair in pairs], np.int64) for i in (0, 1))
    assert owners(begin, end, 31).tolist() == painted.tolist()


@given(traces())
def test_every_begin_row_is_one_span(trace: Trace):
    kinds = (Kind.FORWARD, Kind.WAIT, Kind.ALL_GATHER)
    for rank in trace.ranks:
        found = spans(rank.rows, kinds)
        begins = of_kind(rank.rows, kinds) & (rank.rows["edge"] == Edge.BEGIN)
        assert found.begin_seq.tolist() == rank.rows["seq"][begins].tolist()
        ended = found.end_seq >= 0
        assert np.all(found.end_seq[ended] > found.begin_seq[ended])
        assert np.all((found.end_ns >= 0) == ended)


SPANS = tuple(kind for kind in Kind if kind.info.is_span)


@given(st.integers(1, 3), st.integers(0, 1), st.floats(0, 1), st.booleans())
def test_an_abort_leaves_no_open_spans(num_ranks, step, part, prefetch):
    setup = Setup(num_ranks=num_ranks, steps=3, num_units=3, prefetch=prefetch)
    trace = aborted(simulate(setup), step, part)
    for rank in trace.ranks:
        first_reset = int(np.flatnonzero(rank.kinds == Kind.RESET)[0])
        until = rank.rows[: first_reset + 3]
        found = end_aborted(spans(until, SPANS), until)
        assert (found.end_seq >= 0).all()
        assert found.end_ns.max() <= until["t_ns"][:first_reset].max()  # no rank is busy until the reset
        whole = end_aborted(spans(rank.rows, SPANS), rank.rows)
        assert (whole.end_seq >= 0).all()  # and no span extends into a later step
        assert (whole.end_ns >= whole.begin_ns).all()
        mine = whole.step == step
        assert not mine.any() or whole.end_ns[mine].max() <= until["t_ns"][:first_reset].max()


@given(st.floats(0, 1))
def test_work_after_an_abort_does_not_belong_to_the_aborted_span(part):
    rows = aborted(simulate(Setup(steps=3)), 1, part).ranks[0].rows
    found = closed(spans(rows, (Kind.FORWARD, Kind.BACKWARD, Kind.STEP)), rows)
    owner, begin_ns, end_ns = exclusive(found)
    for span in np.unique(owner):
        assert end_ns[owner == span].max() <= found.end_ns[span]
        assert begin_ns[owner == span].min() >= found.begin_ns[span]


def test_a_reset_within_a_step_ends_the_spans_of_its_unit():
    rows = rows_of(
        (Kind.STEP, Edge.BEGIN, -1, 0),
        (Kind.FORWARD, Edge.BEGIN, 0, 10),
        (Kind.FORWARD, Edge.BEGIN, 1, 20),
        (Kind.RESET, Edge.INSTANT, 1, 50),
        (Kind.LOG, Edge.INSTANT, -1, 60),
    )
    found = end_aborted(spans(rows, (Kind.FORWARD, Kind.STEP)), rows)
    assert found.end_seq.tolist() == [-1, -1, 3]
    assert found.end_ns.tolist() == [-1, -1, 20]


def test_a_collective_issued_before_a_step_may_be_waited_for_within_it():
    rows = rows_of((Kind.ALL_GATHER, Edge.BEGIN, 0, 0), (Kind.STEP, Edge.BEGIN, -1, 10))
    rows["step"] = -1, 0
    assert end_aborted(spans(rows, (Kind.ALL_GATHER,)), rows).end_seq.tolist() == [-1]


def test_an_aborted_hold_does_not_reach_later_steps():
    rows = rows_of((Kind.GATE, Edge.BEGIN, -1, 40), (Kind.LOG, Edge.INSTANT, -1, 50), (Kind.STEP, Edge.BEGIN, -1, 70))
    rows["step"] = 0, 0, 1
    assert durations_ns(rows, np.array([60]), np.array([70])).tolist() == [10]


def test_an_axis_of_the_whole_trace_is_0_where_its_first_step_begins():
    trace = simulate(Setup(num_ranks=2, num_units=2, steps=2))
    begins = [int(r.rows["t_ns"][r.rows["kind"] == Kind.STEP][0]) for r in trace.ranks]
    assert extent_ns(trace)[0] < zero_ns(trace) == min(begins)
    before = Trace(trace.header, tuple(replace(r, rows=r.rows[r.rows["step"] < 0]) for r in trace.ranks))
    assert not has_steps(before)
    assert zero_ns(before) == extent_ns(before)[0] > 0
    assert zero_ns(Trace.empty()) == 0
