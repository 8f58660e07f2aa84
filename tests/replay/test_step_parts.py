from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.trace_strategies import Setup, example_trace, simulate, traces
from workbench.events import Edge, Kind, Phase
from workbench.replay.arrivals import LATE
from workbench.replay.paused_time import without_holds
from workbench.replay.spans import total_ns
from workbench.replay.step_parts import (
    FEW_STEPS,
    MAX_STEPS,
    MIN_STEPS,
    PARTS,
    Comparable,
    Group,
    Part,
    StepParts,
    comparable,
    slow_rank,
    step_parts,
    times_of,
)
from workbench.trace.columns import RankTrace, Trace, steps
from workbench.trace.schema import ROW_DTYPE, GroupInfo, Header

MS = 1_000_000


def parts_of(trace, error_ns=0):
    return step_parts(trace, times_of(trace, error_ns))


def slow(trace, error_ns=0):
    found = parts_of(trace, error_ns)
    return slow_rank(found, comparable(found, min(steps(trace))).steps, error_ns)


def rank_of(rank, *events):
    """Return a rank with rows ``(t_ns, kind, edge, unit, phase, comm_seq)`` of step 0."""
    rows = np.zeros(len(events), ROW_DTYPE)
    rows["module"], rows["category"], rows["step"] = -1, 255, 0
    for place, (t_ns, kind, edge, unit, phase, comm_seq) in enumerate(events):
        group = 0 if comm_seq >= 0 else -1
        rows[place]["seq"], rows[place]["t_ns"], rows[place]["unit"] = place, t_ns, unit
        rows[place]["kind"], rows[place]["edge"], rows[place]["phase"] = kind, edge, phase
        rows[place]["comm_group"], rows[place]["comm_seq"] = group, comm_seq
    return RankTrace(rank, rows)


def span(kind, begin, end, *inner, unit=-1, phase=Phase.FORWARD, comm_seq=-1):
    first, last = ((t_ns, kind, edge, unit, phase, comm_seq) for t_ns, edge in ((begin, Edge.BEGIN), (end, Edge.END)))
    return [first, *(event for events in inner for event in events), last]


def worked_example(issue_ns):
    """Return rank 0 of the module's example, and rank 1, which issues the collective at ``issue_ns``."""
    gather = (
        (12, Kind.ALL_GATHER, Edge.BEGIN, 0, Phase.FORWARD, 5),
        (50, Kind.ALL_GATHER, Edge.END, 0, Phase.FORWARD, 5),
    )
    forward = span(Kind.FORWARD, 10, 60, [gather[0]], span(Kind.WAIT, 20, 50, unit=0, comm_seq=5), [gather[1]], unit=0)
    backward = span(Kind.BACKWARD, 70, 90, unit=0, phase=Phase.BACKWARD)
    first = rank_of(0, *span(Kind.STEP, 0, 100, forward, backward, phase=Phase.IDLE))
    issue = [(issue_ns, Kind.ALL_GATHER, Edge.BEGIN, 0, Phase.FORWARD, 5), (50, *gather[1][1:])]
    second = rank_of(1, *span(Kind.STEP, 0, 100, issue, phase=Phase.IDLE))
    return Trace(Header(world_size=2, comm_groups=(GroupInfo(name="all", ranks=(0, 1)),)), (first, second))


def test_the_example_of_the_module():
    mine = parts_of(worked_example(40))[0]
    assert {part: int(mine.ns(part)[0]) for part in PARTS if mine.ns(part)[0]} == {
        Part.BEFORE: 10,
        Part.FORWARD: 20,
        Part.LOSS: 10,
        Part.BACKWARD: 20,
        Part.TRANSFERS: 10,
        Part.LATE: 20,
        Part.OTHER: 10,
    }
    assert mine.late_ns.tolist() == [[0, 20]]
    assert mine.total_ns.tolist() == [100]


def waits_for_readers(last):
    """Return two ranks, of which rank 0 waits after its forward until ``last`` has read; without it, it is aborted."""
    forward, backward = span(Kind.FORWARD, 10, 20, unit=0), span(Kind.BACKWARD, 60, 90, unit=0)
    first = rank_of(0, *span(Kind.STEP, 0, 100, forward, span(Kind.READERS, 25, 50), backward, phase=Phase.IDLE))
    rows = first.rows.copy()
    is_end = (rows["kind"] == Kind.READERS) & (rows["edge"] == Edge.END)
    rows["value"] = np.nan
    rows["value"][is_end] = np.nan if last is None else last
    if last is None:
        rows = rows[~is_end]
        rows["seq"] = range(len(rows))
    idle = rank_of(1, *span(Kind.STEP, 0, 100, phase=Phase.IDLE))
    return Trace(Header(world_size=2), (RankTrace(0, rows), idle))


def test_a_wait_for_readers_is_for_the_last_of_them():
    mine = parts_of(waits_for_readers(1))[0]
    assert mine.late_ns.tolist() == [[0, 25]]
    parts = {part: int(mine.ns(part)[0]) for part in PARTS if mine.ns(part)[0]}
    assert parts == {Part.BEFORE: 10, Part.FORWARD: 10, Part.LATE: 25, Part.LOSS: 15, Part.BACKWARD: 30, Part.OTHER: 10}
    assert parts_of(waits_for_readers(9))[0].late_ns.tolist() == [[0, 0]]  # it is not in the trace
    assert parts_of(waits_for_readers(None))[0].late_ns.tolist() == [[0, 0]]


def test_within_the_clock_error_a_wait_is_communication():
    mine = parts_of(replace_clock(worked_example(40)), error_ns=1000)[0]
    assert (int(mine.ns(Part.LATE)[0]), int(mine.ns(Part.TRANSFERS)[0])) == (0, 30)


def replace_clock(trace):
    from workbench.trace.schema import ClockReading, HostClock

    clock = HostClock(ranks=(1,), readings=(ClockReading(t_ns=0, offset_ns=0, error_ns=1000),))
    return Trace(replace(trace.header, clocks=(clock,)), trace.ranks)


def test_a_wait_is_communication_where_a_rank_of_the_group_is_not_recorded():
    trace = worked_example(40)
    alone = Trace(trace.header, trace.ranks[:1])
    assert int(parts_of(alone)[0].ns(Part.LATE)[0]) == 0
    assert int(parts_of(alone)[0].ns(Part.TRANSFERS)[0]) == 30


@settings(deadline=None)
@given(trace=traces())
def test_the_parts_add_up_to_the_step_and_none_is_negative(trace):
    check_the_partition(trace)


def check_the_partition(trace):
    for rank, mine in parts_of(trace).items():
        assert (mine.parts_ns >= 0).all()
        assert (mine.late_ns >= 0).all()
        assert (mine.parts_ns.sum(axis=1) == mine.total_ns).all()
        assert sum(mine.group_ns(group) for group in Group).tolist() == mine.total_ns.tolist()
        assert mine.late_ns.sum(axis=1).tolist() == mine.ns(Part.LATE).tolist()
        assert mine.rank == rank


@settings(deadline=None)
@given(trace=traces(whole=True), data=st.data())
def test_holds_are_in_no_part(trace, data):
    rank = data.draw(st.sampled_from(trace.ranks))
    if not len(rank.rows):
        return
    place, length = data.draw(st.integers(1, len(rank.rows))), data.draw(st.integers(1, 10 * MS))
    held = Trace(trace.header, tuple(with_hold(r, place, length) if r is rank else r for r in trace.ranks))
    check_the_partition(held)
    check_the_partition(without_holds(held)[0])
    before, after = parts_of(trace).get(rank.rank), parts_of(held).get(rank.rank)
    if before is not None and after is not None:
        assert after.total_ns.tolist() == before.total_ns.tolist()
    if (rank.rows["step"][place - 1 : place] >= 0).all():
        assert after.is_held.any()


def with_hold(rank, place, length):
    """Return a rank that was held for ``length`` before the row at ``place``, and was later by that from then on."""
    rows = rank.rows.copy()
    rows["t_ns"][place:] += length
    like = rows[place - 1 : place].copy()
    like["kind"], like["unit"], like["comm_seq"], like["comm_group"] = Kind.GATE, -1, -1, -1
    like["num_bytes"], like["category"], like["module"] = 0, 255, -1
    like["t_ns"] = rank.rows["t_ns"][:place].max()
    begin, end = like.copy(), like.copy()
    begin["edge"], end["edge"] = Edge.BEGIN, Edge.END
    end["t_ns"] += length
    grown = np.concatenate([rows[:place], begin, end, rows[place:]])
    grown["seq"] = np.arange(len(grown))
    return RankTrace(rank.rank, grown, rank.start)


def test_the_parts_agree_with_the_spans():
    trace = example_trace(num_ranks=2, steps=3)
    for part in trace.ranks:
        mine = parts_of(trace)[part.rank]
        waited = (mine.ns(Part.LATE) + mine.ns(Part.TRANSFERS)).sum()
        assert int(waited) == total_ns(part, Kind.WAIT)
        assert int(mine.ns(Part.OPTIMIZER).sum()) == total_ns(part, Kind.OPTIMIZER)


# ---- the slow rank

WHERE = {
    "before": Part.BEFORE,
    "forward": Part.FORWARD,
    "loss": Part.LOSS,
    "backward": Part.BACKWARD,
    "optimizer": Part.OPTIMIZER,
    "after": Part.OTHER,
    "between": None,
}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("where", WHERE)
def test_a_straggler_is_named_with_the_part_in_which_it_is_slower(where, num_ranks):
    found = slow(simulate(Setup(num_ranks=num_ranks, steps=8, slow=1, slow_in=where)))
    assert (found.rank, found.part) == (1, WHERE[where])
    assert 190 * MS < found.late_ns < 210 * MS
    assert found.own_ns - found.others_ns == pytest.approx(200 * MS, rel=0.05)
    if where in {"forward", "backward"}:
        assert found.unit == 0
        assert found.unit_ns[0] - found.unit_ns[1] == pytest.approx(200 * MS, rel=0.05)


def test_a_straggler_between_copies_of_the_model_is_named():
    found = slow(simulate(Setup(num_ranks=4, copies=2, steps=8, slow=3)))
    assert (found.rank, found.part) == (3, Part.BEFORE)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_balanced_ranks_have_no_slow_one(seed, num_ranks):
    assert slow(simulate(Setup(num_ranks=num_ranks, steps=7, seed=seed))) is None


def lateness(late, step_ns=100 * MS, num_ranks=2):
    """Return the parts of ranks, of which rank r waits ``late[r][s]`` for the next one in step s."""
    num_steps = len(late[0])
    found = {}
    for rank in range(num_ranks):
        parts, waited = np.zeros((num_steps, len(PARTS)), np.int64), np.zeros((num_steps, num_ranks), np.int64)
        waited[:, (rank + 1) % num_ranks] = late[rank]
        parts[:, PARTS.index(Part.LATE)] = waited.sum(axis=1)
        parts[:, PARTS.index(Part.FORWARD)] = step_ns - waited.sum(axis=1)
        none = np.zeros(num_steps, np.int64)
        found[rank] = StepParts(
            rank=rank,
            step=np.arange(num_steps) + 1,
            total_ns=parts.sum(axis=1),
            parts_ns=parts,
            late_ns=waited,
            units_ns=np.zeros((num_steps, 2, 1), np.int64),
            before_ns=none,
            has_ended=np.ones(num_steps, np.bool_),
            is_held=np.zeros(num_steps, np.bool_),
        )
    return found


def judged(late, error_ns=0):
    found = lateness(late)
    return slow_rank(found, comparable(found, 0).steps, error_ns)


def test_the_thresholds_of_a_slow_rank():
    steady = [int(1.2 * LATE * 100) * MS] * 6
    assert judged([steady, [0] * 6]).rank == 1
    assert judged([steady[: MIN_STEPS - 1], [0] * (MIN_STEPS - 1)]) is None
    assert judged([[int(0.8 * LATE * 100) * MS] * 6, [0] * 6]) is None
    assert judged([steady, [0] * 6], error_ns=50 * MS) is None
    assert judged([steady, steady]) is None  # they wait for each other
    assert judged([[*steady[:5], 0], [0] * 6]) is None  # not in every one
    assert (
        judged([[0, 0, *steady, steady[0], 0], [0] * 10]).rank == 1
    )  # of eight, one may differ; earlier ones count not
    assert judged([[*steady, 0, 0], [0] * 8]) is None
    assert judged([[20 * MS, 90 * MS, 6 * MS, 90 * MS, 12 * MS, 30 * MS], [0] * 6]) is None  # not steadily


@pytest.mark.parametrize("num_steps", [MIN_STEPS, FEW_STEPS, MAX_STEPS])
def test_noise_that_hits_ranks_in_turns_names_none(num_steps):
    """Heavy noise: in a third of the steps, some rank is late by more than 10 % of it."""
    random = np.random.default_rng(0)
    named = 0
    for _ in range(500):
        net = random.normal(0, 10 * MS, num_steps)
        named += judged([np.maximum(net, 0).astype(np.int64), np.maximum(-net, 0).astype(np.int64)]) is not None
    assert named == 0


def test_more_steps_show_a_slow_rank_that_noise_hides_in_few():
    random = np.random.default_rng(0)
    named = {FEW_STEPS: 0, MAX_STEPS: 0}
    for _ in range(100):
        net = random.normal(20 * MS, 10 * MS, MAX_STEPS)
        for num_steps in named:
            of_rank = net[-num_steps:]
            late = [np.maximum(of_rank, 0).astype(np.int64), np.maximum(-of_rank, 0).astype(np.int64)]
            named[num_steps] += judged(late) is not None
    assert named[FEW_STEPS] < 70
    assert named[MAX_STEPS] > 80


def test_the_first_step_and_steps_with_a_hold_do_not_decide():
    trace = simulate(Setup(num_ranks=2, steps=5))
    assert comparable(parts_of(trace), 0) == Comparable(steps=(1, 2, 3, 4), num_held=0)
    place = int(np.flatnonzero(trace.ranks[1].rows["step"] == 3)[5])
    held = Trace(trace.header, (trace.ranks[0], with_hold(trace.ranks[1], place, 100 * MS)))
    assert comparable(parts_of(held), 0) == Comparable(steps=(1, 2, 4), num_held=1)


def test_a_step_that_has_not_ended_does_not_decide():
    trace = simulate(Setup(num_ranks=2, steps=5))
    cut = Trace(trace.header, (trace.ranks[0], trace.ranks[1].cut(0, trace.ranks[1].end_seq - 1)))
    assert comparable(parts_of(cut), 0).steps == (1, 2, 3)
