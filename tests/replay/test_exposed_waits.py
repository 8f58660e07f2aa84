import numpy as np
import pytest
from hypothesis import given, settings

from tests.helpers.trace_strategies import Setup, simulate, traces
from tests.replay.test_step_parts import rank_of, span
from workbench.events import Edge, Kind, Phase
from workbench.replay.exposed_waits import WaitReason, exposed_waits
from workbench.replay.step_parts import Part, step_parts, times_of
from workbench.trace.columns import Trace, steps
from workbench.trace.schema import GroupInfo, Header


def waits(trace, step):
    return exposed_waits(times_of(trace, 0), step)


def one(*events):
    """Return the waits of a step of two ranks that do the same."""
    rows = span(Kind.STEP, 0, 1000, *events, phase=Phase.IDLE)
    header = Header(world_size=2, comm_groups=(GroupInfo(name="all", ranks=(0, 1)),))
    return waits(Trace(header, (rank_of(0, *rows), rank_of(1, *rows))), 0)


def waited(kind, issue, begin, end, *between, phase=Phase.FORWARD, comm_seq=0):
    """Return the rows of a collective of unit 1 that is issued, and waited for after what is ``between``."""
    first, last = ((t, kind, edge, 1, phase, comm_seq) for t, edge in ((issue, Edge.BEGIN), (end, Edge.END)))
    wait = span(Kind.WAIT, begin, end, unit=1, phase=phase, comm_seq=comm_seq)
    return [first, *(event for events in between for event in events), *wait, last]


def forward(begin, end):
    return span(Kind.FORWARD, begin, end, unit=0)


def backward(begin, end):
    return span(Kind.BACKWARD, begin, end, unit=0, phase=Phase.BACKWARD)


@pytest.mark.parametrize(
    ("reason", "events"),
    [
        (WaitReason.NOTHING, [waited(Kind.ALL_GATHER, 10, 11, 60), forward(60, 90)]),
        (WaitReason.ISSUED_LATE, [forward(5, 50), waited(Kind.ALL_GATHER, 60, 61, 100), forward(100, 130)]),
        (WaitReason.BANDWIDTH, [waited(Kind.ALL_GATHER, 10, 50, 100, forward(20, 40)), forward(100, 130)]),
        (WaitReason.AT_ONCE, [waited(Kind.REDUCE_SCATTER, 10, 11, 60, phase=Phase.BACKWARD), backward(70, 90)]),
        (WaitReason.NOTHING, [backward(5, 9), waited(Kind.REDUCE_SCATTER, 10, 11, 60, phase=Phase.BACKWARD)]),
        (WaitReason.BANDWIDTH, [waited(Kind.REDUCE_SCATTER, 10, 50, 100, backward(20, 40), phase=Phase.BACKWARD)]),
    ],
)
def test_the_reason_of_a_wait(reason, events):
    (found,) = one(*events)
    assert (found.cause, found.unit, found.calls, found.ranks) == (reason, 1, 1, (0, 1))
    assert found.in_backward == (found.kind is Kind.REDUCE_SCATTER)


def test_compute_before_an_optimizer_step_could_not_overlap():
    optimizer = span(Kind.OPTIMIZER, 50, 60, phase=Phase.OPTIMIZER)
    (found,) = one(forward(5, 50), optimizer, waited(Kind.ALL_GATHER, 61, 62, 100))
    assert found.cause is WaitReason.NOTHING


def test_the_late_rank_of_a_wait_is_named():
    first, *others = waits(simulate(Setup(num_ranks=2, steps=2, slow=1)), 1)
    assert (first.cause, first.late_rank, first.ranks) == (WaitReason.LATE_RANK, 1, (0,))
    assert first.most_ns > 190_000_000
    assert first.wait_ns == first.most_ns / 2
    assert sum(wait.wait_ns for wait in others) < 10_000_000


def test_without_prefetch_all_gathers_are_issued_late():
    def late(prefetch):
        found = waits(simulate(Setup(num_ranks=2, steps=2, prefetch=prefetch, width=16)), 1)
        return {wait.unit for wait in found if wait.cause is WaitReason.ISSUED_LATE}

    assert late(prefetch=True) < late(prefetch=False) == {0, 1, 2}


@settings(deadline=None)
@given(trace=traces())
def test_the_waits_add_up_to_those_of_the_steps(trace):
    times = times_of(trace, 0)
    parts = step_parts(trace, times)
    for step in steps(trace):
        found = exposed_waits(times, step)
        assert [wait.wait_ns for wait in found] == sorted((wait.wait_ns for wait in found), reverse=True)
        if any(step not in each.step for each in parts.values()) or any(rank.start.seq for rank in trace.ranks):
            continue  # a wait for what was issued before the record is of no collective
        total = sum(
            int((each.ns(Part.LATE) + each.ns(Part.TRANSFERS))[np.flatnonzero(each.step == step)].sum())
            for each in parts.values()
        )
        assert sum(wait.wait_ns for wait in found) * len(times) == pytest.approx(total)
