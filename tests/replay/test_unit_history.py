import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.trace_strategies import example_trace, traces
from workbench.events import Edge, Kind, Phase, UnitState
from workbench.replay import states
from workbench.replay.unit_history import UnitCause, histories, history
from workbench.trace.columns import RankTrace

ROOT = 3


def at(rank, kind, edge, unit, *, step=1, which=0):
    """Return the ``seq`` of a rank's row."""
    rows = rank.rows
    is_one = (rows["kind"] == kind) & (rows["edge"] == edge) & (rows["unit"] == unit) & (rows["step"] == step)
    return int(rows["seq"][np.flatnonzero(is_one)[which]])


def causes(rank, unit, seq=None):
    return [event.cause for event in history(rank, unit, seq).events]


@pytest.fixture(scope="module")
def freed():
    return example_trace(num_ranks=2).ranks[0]


@pytest.fixture(scope="module")
def kept():
    return example_trace(num_ranks=2, reshard_after_forward=False).ranks[0]


def test_the_chain_of_a_unit_in_a_step(freed):
    forward, backward = at(freed, Kind.FORWARD, Edge.BEGIN, 1), at(freed, Kind.BACKWARD, Edge.BEGIN, 1)
    assert causes(freed, 1, forward) == [UnitCause.AHEAD_IN_FORWARD, UnitCause.IN_FORWARD]
    assert history(freed, 1, forward).events[0].by_unit == 0
    assert causes(freed, 1, backward) == [UnitCause.AHEAD_IN_BACKWARD, UnitCause.IN_BACKWARD]
    assert history(freed, 1, backward).events[0].by_unit == 2
    assert causes(freed, 1, at(freed, Kind.RESHARD, Edge.INSTANT, 1))[-1] is UnitCause.FREED_AFTER_FORWARD
    assert causes(freed, 1)[-1] is UnitCause.FREED_AFTER_BACKWARD
    assert history(freed, 1).events[-1].step == 2


def test_a_unit_that_is_not_freed_after_forward_is_kept(kept):
    loss = at(kept, Kind.FORWARD, Edge.END, ROOT)
    found = history(kept, 1, loss)
    assert found.state == UnitState.UNSHARDED
    assert [event.cause for event in found.events] == [UnitCause.AHEAD_IN_FORWARD, UnitCause.KEPT_AFTER_FORWARD]
    assert causes(kept, ROOT, at(kept, Kind.BACKWARD, Edge.BEGIN, 1)) == [
        UnitCause.FOR_FORWARD,
        UnitCause.KEPT_AFTER_FORWARD,
        UnitCause.IN_BACKWARD,
    ]


def test_a_gathered_unit_that_has_not_run(freed):
    issued = at(freed, Kind.ALL_GATHER, Edge.BEGIN, 1)
    assert causes(freed, 1, issued) == [UnitCause.AHEAD_IN_FORWARD, UnitCause.IN_FLIGHT]
    assert history(freed, 1, issued).state == UnitState.ALL_GATHER_IN_FLIGHT
    cut = freed.cut(0, issued + 1)  # as while ranks are stopped there: what comes next is unknown
    assert causes(cut, 1) == [UnitCause.AHEAD_IN_FORWARD, UnitCause.IN_FLIGHT]
    assert history(cut, 1).events[0].by_unit == 0
    cut = freed.cut(0, at(freed, Kind.ALL_GATHER, Edge.BEGIN, 0, which=1) + 1)  # in backward
    assert history(cut, 0).events[0].cause is UnitCause.AHEAD_IN_BACKWARD
    assert history(cut, 0).events[0].by_unit == 1
    usable = at(freed, Kind.UNSHARD, Edge.END, 1)
    assert causes(freed, 1, usable) == [UnitCause.AHEAD_IN_FORWARD, UnitCause.BEFORE_FORWARD]


def test_before_anything_happened(freed):
    assert causes(freed, 1, 0) == [UnitCause.NEVER]
    begun = freed.cut(at(freed, Kind.FORWARD, Edge.BEGIN, 1), freed.end_seq)
    assert causes(begun, 1, begun.start.seq) == [UnitCause.BEFORE, UnitCause.IN_FORWARD]


def changed(rank, of, **columns):
    rows = rank.rows.copy()
    for name, value in columns.items():
        rows[name][(rows["kind"] == of) & (rows["unit"] == 1) & (rows["step"] == 2)] = value
    return RankTrace(rank.rank, rows, rank.start)


def test_calls_outside_forward_and_backward(freed):
    by_hand = changed(freed, Kind.UNSHARD, phase=Phase.IDLE)
    assert causes(by_hand, 1)[0] is UnitCause.BY_HAND
    later = changed(freed, Kind.RESHARD, step=-1)
    assert causes(later, 1)[-1] is UnitCause.FREED_BY_HAND
    assert causes(changed(freed, Kind.RESHARD, kind=Kind.RESET), 1)[-1] is UnitCause.ABORTED


@settings(deadline=None)
@given(trace=traces(), data=st.data())
def test_the_state_is_that_of_the_states(trace, data):
    for rank in trace.ranks:
        if not len(rank.rows):
            continue
        seq = data.draw(st.integers(rank.start.seq, rank.end_seq - 1))
        units = tuple(unit.index for unit in trace.header.units)
        expected = states.at(rank, seq).params
        for unit, found in histories(rank, units, seq).items():
            now = expected.get(unit, UnitState.SHARDED)
            is_requested = found.state == UnitState.ALL_GATHER_IN_FLIGHT  # from its request on, also on one rank
            assert found.state == now or (is_requested and now == UnitState.SHARDED)
            assert found.events
