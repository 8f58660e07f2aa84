from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import Setup, example_trace, simulate
from workbench.replay.arrivals import LATE, TOO_CLOSE, UNTOLD, last_to_come, waits_least
from workbench.replay.collectives import Collectives, table
from workbench.trace.columns import Trace
from workbench.trace.schema import ClockReading, GroupInfo, Header, HostClock


def issued(*issue_ns):
    """Return the collectives that a rank issued in group 0, in sequence."""
    none = np.full(len(issue_ns), -1)
    columns = dict.fromkeys(Collectives.__dataclass_fields__, none)
    here = {"comm_group": np.zeros(len(issue_ns), np.int64), "comm_seq": np.arange(len(issue_ns))}
    return Collectives(**(columns | here | {"issue_ns": np.array(issue_ns)}))


def header_of(num_ranks, *clocks):
    reading = (ClockReading(t_ns=0, offset_ns=0, error_ns=1),)
    hosts = tuple(HostClock(ranks=ranks, readings=reading) for ranks in clocks)
    group = GroupInfo(name="all", ranks=tuple(range(num_ranks)))
    return Header(world_size=num_ranks, comm_groups=(group,), clocks=hosts)


def arrivals(header, found, error_ns=0):
    """Return ``(rank, after_ns)`` of each collective, the same for all ranks."""
    results = last_to_come(header, found, error_ns)
    pairs = {tuple(zip(last.rank.tolist(), last.after_ns.tolist(), strict=True)) for last in results.values()}
    (result,) = pairs
    return list(result)


def test_on_one_clock_the_last_rank_is_always_named():
    found = {0: issued(10, 20, 33), 1: issued(11, 25, 31), 2: issued(2, 26, 30)}
    assert arrivals(header_of(3), found, error_ns=100) == [(1, 1), (2, 1), (0, 2)]


def test_on_several_clocks_no_rank_is_named_within_the_error():
    header = header_of(3, (2,))
    found = {0: issued(10, 20, 900), 1: issued(11, 990, 30), 2: issued(200, 950, 901)}
    assert arrivals(header, found, error_ns=50) == [(2, 189), (TOO_CLOSE, 0), (TOO_CLOSE, 0)]
    assert arrivals(header, found, error_ns=30) == [(2, 189), (1, 40), (TOO_CLOSE, 0)]
    assert arrivals(header, found, error_ns=0) == [(2, 189), (1, 40), (2, 1)]


def test_with_unknown_participants_no_rank_is_named():
    assert arrivals(header_of(3), {0: issued(1), 1: issued(2)}) == [(UNTOLD, 0)]
    assert arrivals(header_of(1), {0: issued(1)}) == [(UNTOLD, 0)]
    alone = replace(issued(1), comm_group=np.array([-1]))
    assert arrivals(header_of(2), {0: alone, 1: alone}) == [(UNTOLD, 0)]
    assert last_to_come(Header(), {}, 0) == {}


@given(st.data())
def test_no_rank_is_named_that_the_clock_error_may_have_made_late(data):
    """For any clock errors within the limit, the named rank really came last."""
    num_ranks = data.draw(st.integers(2, 6))
    clock_of = [0, *(data.draw(st.integers(0, 2)) for _ in range(num_ranks - 1))]
    error_ns = data.draw(st.integers(0, 60))
    off_ns = [data.draw(st.integers(0, error_ns)) for _ in range(3)]  # so any two differ by at most error_ns
    true_ns = [data.draw(st.integers(0, 100)) for _ in range(num_ranks)]
    clocks = [tuple(rank for rank in range(num_ranks) if clock_of[rank] == clock) for clock in (1, 2)]
    header = header_of(num_ranks, *filter(None, clocks))
    found = {rank: issued(true_ns[rank] + off_ns[clock_of[rank]]) for rank in range(num_ranks)}
    ((rank, _),) = arrivals(header, found, error_ns)
    assert rank == TOO_CLOSE or true_ns[rank] == max(true_ns)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_late_rank_arrives_last(copies):
    trace = simulate(Setup(num_ranks=4, copies=copies, late=3, steps=1))
    found = {rank.rank: table(rank) for rank in trace.ranks}
    last = last_to_come(trace.header, found, 0)
    for rank, each in last.items():
        for group, named in zip(found[rank].comm_group, each.rank, strict=True):
            ranks = trace.header.comm_groups[group].ranks
            assert named in ranks
            assert named == 3 or 3 not in ranks


def test_a_trace_without_collectives_names_no_rank():
    alone = example_trace(num_ranks=1)
    assert all(rank == UNTOLD for each in _all(alone) for rank in each.rank.tolist())


def _all(trace: Trace):
    return last_to_come(trace.header, {rank.rank: table(rank) for rank in trace.ranks}, 0).values()


def test_who_waits_least_is_waited_for_if_the_others_wait_much_longer():
    whole_ns = 1000
    assert waits_least({}, whole_ns) is None
    assert waits_least({3: 50}, whole_ns) is None
    assert waits_least({0: 300, 2: 20, 1: 20, 3: 200}, whole_ns) == (1, 280)
    limit = int(LATE * whole_ns)
    assert waits_least({0: limit + 7, 1: 7}, whole_ns) is None
    assert waits_least({0: limit + 8, 1: 7}, whole_ns) == (1, limit + 1)
