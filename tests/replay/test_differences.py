import math
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import Setup, example_trace, simulate, traces
from workbench.events import Category, Edge, Kind, Phase
from workbench.replay.differences import differences
from workbench.trace.columns import RankTrace, Trace
from workbench.views.compare import sentence


def holding_on(trace: Trace, unit: int, ranks: tuple[int, ...]) -> Trace:
    """Return the trace with the unsharded parameters of ``unit`` kept from forward to backward on ``ranks``."""
    return Trace(trace.header, tuple(_held(r, unit) if r.rank in ranks else r for r in trace.ranks))


def _held(rank: RankTrace, unit: int) -> RankTrace:
    rows = rank.rows
    moves = (rows["category"] == Category.UNSHARDED_PARAMS) & (rows["unit"] == unit) & (rows["step"] == 1)
    freed_and_made = np.flatnonzero(moves)[1:3]
    rows = np.delete(rows, freed_and_made)
    rows["seq"] = np.arange(len(rows))
    return RankTrace(rank.rank, rows)


def slower(trace: Trace, kind: Kind, unit: int, by_ns: int, steps: Collection[int] | None = None) -> Trace:
    """Make every span of ``kind`` of ``unit`` (in ``steps`` only) ``by_ns`` longer, and delay the rest."""
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        ends = (rows["kind"] == kind) & (rows["unit"] == unit) & (rows["edge"] == Edge.END)
        ends &= np.isin(rows["step"], [*steps]) if steps is not None else True
        rows["t_ns"] += by_ns * np.cumsum(ends)
        ranks.append(RankTrace(rank.rank, rows))
    return Trace(trace.header, tuple(ranks))


@given(traces())
def test_nothing_changed_between_a_trace_and_itself(trace):
    found = differences(trace, trace)
    assert found is None or (
        found.aligned.first_difference == -1
        and found.peak.before == found.peak.after
        and not found.collectives
        and not found.slower
        and (found.step_ns[0] == found.step_ns[1] or math.isnan(found.step_ns[0]))
    )


@given(traces(), traces())
def test_the_other_way_round_is_the_opposite(a, b):
    there, back = differences(a, b), differences(b, a)
    assert (there is None) == (back is None)
    if there is not None and back is not None and there.rank == back.rank:
        assert (there.peak.before, there.peak.after) == (back.peak.after, back.peak.before)
        assert dict(there.peak.parts) == {category: -num_bytes for category, num_bytes in back.peak.parts}
        assert {(c.unit, c.kind): c.calls for c in there.collectives if c.differs} == {
            (c.unit, c.kind): c.calls[::-1] for c in back.collectives if c.differs
        }


def test_the_peak_names_units_and_phases():
    a = example_trace()
    b = holding_on(a, 0, ranks=(2,))
    found = differences(a, b)
    assert (found.rank, found.ranks) == (2, (0, 1, 2, 3))
    assert found.peak.category is Category.UNSHARDED_PARAMS
    assert found.peak.units == ("blocks.0",)
    assert Phase.BACKWARD in found.peak.phases
    assert found.peak.parts[0][0] is found.peak.category
    assert sum(num_bytes for _, num_bytes in found.peak.parts) == found.peak.after - found.peak.before
    back = differences(b, a).peak
    assert (back.units, back.category, back.phases) == (found.peak.units, found.peak.category, found.peak.phases)


def test_bytes_after_the_first_event_have_its_phase():
    a = example_trace()
    rank = a.rank(0)
    moves = np.zeros(2, rank.rows.dtype)
    moves["kind"], moves["edge"], moves["unit"] = (Kind.ALLOC, Kind.FREE), Edge.INSTANT, -1
    moves["num_bytes"], moves["category"], moves["comm_group"] = (2**40, -(2**40)), Category.ACTIVATIONS, -1
    moves["t_ns"], moves["phase"] = rank.rows["t_ns"][0], Phase.FORWARD
    rows = np.insert(rank.rows, int(np.argmax(rank.kinds == Kind.STEP)) + 1, moves)
    rows["seq"] = np.arange(len(rows))
    peak = differences(a, Trace(a.header, (RankTrace(0, rows),))).peak
    assert (peak.category, peak.phases, peak.units) == (Category.ACTIVATIONS, (Phase.IDLE,), ())


def test_a_rank_can_be_chosen_and_one_that_both_lack_cannot_be_compared():
    a = example_trace()
    b = holding_on(a, 1, ranks=(2,))
    assert differences(a, b, rank=0).aligned.first_difference == -1
    assert differences(Trace(a.header, a.ranks[:1]), Trace(a.header, a.ranks[1:])) is None


def test_collectives_that_are_fewer_are_found_with_their_bytes():
    found = differences(simulate(Setup(num_units=4)), simulate(Setup(num_units=4, reshard_after_forward=False)))
    differ = {c.unit: c for c in found.collectives if c.differs}
    assert sorted(differ) == ["blocks.0", "blocks.1", "blocks.2"]
    assert {c.calls for c in differ.values()} == {(2.0, 1.0)}
    assert all(c.num_bytes[0] == 2 * c.num_bytes[1] for c in differ.values())
    assert found.collectives[0].differs


@pytest.mark.parametrize("unit", [0, 1])
@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD, Kind.WAIT])
def test_time_is_attributed_to_its_cause(kind, unit):
    a = example_trace()
    b = slower(a, kind, unit, 3_000_000)
    found = differences(a, b)
    most = found.slower[0]
    assert most.unit == f"blocks.{unit}"
    assert most.kind in ((Kind.ALL_GATHER, Kind.REDUCE_SCATTER) if kind is Kind.WAIT else (kind,))
    assert most.delta_ns >= 2_900_000
    assert found.step_ns[1] > found.step_ns[0]
    assert differences(b, a).slower[0].delta_ns == -most.delta_ns


def test_only_steps_that_both_have_are_compared():
    found = differences(example_trace(steps=3), example_trace(steps=2))
    assert found.num_steps == (3, 2)
    assert found.aligned.first_difference == -1


def test_causes_of_a_peak_are_of_the_two_peaks_wherever_these_are():
    a, b = simulate(Setup(num_units=4)), simulate(Setup(num_units=4, reshard_after_forward=False))
    peak = differences(a.slice(first=0, last=1), b.slice(first=1)).peak
    whole = differences(a.slice(first=1), b.slice(first=1)).peak
    assert dict(peak.parts) == dict(whole.parts)  # the optimizer state of both is there from the first step's end on
    assert abs(sum(dict(peak.parts).values()) - (peak.after - peak.before)) <= 0.1 * abs(peak.after - peak.before)


def test_bytes_from_before_are_not_attributed_to_units():
    trace = example_trace()
    found = differences(trace.slice(step=0), trace.slice(step=2)).peak
    assert found.category is Category.OPTIMIZER_STATE
    assert found.units == ()


@given(traces(whole=True), st.data())
def test_one_of_several_equal_ranks_is_compared(trace, data):
    """The rank that is chosen is the same as if each rank had been compared."""
    odd = data.draw(st.sampled_from([None, *(rank.rank for rank in trace.ranks)]))
    other = Trace(trace.header, tuple(with_more_bytes(rank) if rank.rank == odd else rank for rank in trace.ranks))
    alone = [found for rank in trace.ranks if (found := differences(trace, other, rank.rank)) is not None]
    heaviest = max(alone, key=lambda f: (abs(f.peak.after - f.peak.before), f.aligned.first_difference >= 0, -f.rank))
    assert differences(trace, other).rank == heaviest.rank


def with_more_bytes(rank):
    rows = rank.rows.copy()
    rows["num_bytes"] *= 2
    return RankTrace(rank.rank, rows, rank.start)


def with_metric(trace: Trace, step: int, factor: float) -> Trace:
    """Multiply every number that is logged in ``step``."""
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["value"][(rows["kind"] == Kind.METRIC) & (rows["step"] == step)] *= factor
        ranks.append(RankTrace(rank.rank, rows))
    return Trace(trace.header, tuple(ranks))


def test_the_first_value_that_differs_is_found():
    trace = example_trace()
    assert differences(trace, trace).first_value is None
    found = differences(trace, with_metric(trace, 1, 2.0))
    assert found.first_event is None
    assert found.first_value.name == "loss"
    assert found.first_value.steps == (1, 1)
    assert found.first_value.values[1] == 2 * found.first_value.values[0]
    assert sentence(found).endswith(
        f"loss differs from step 1 on ({found.first_value.values[0]:.4g} -> {found.first_value.values[1]:.4g})"
    )
    assert "loss" not in sentence(differences(trace, with_metric(trace, 1, 1 + 1e-5)))


def test_the_first_event_that_differs_is_found_with_both_sides():
    trace = example_trace()
    found = differences(trace, holding_on(trace, 1, (0,)), rank=0).first_event
    assert found.step == 1
    assert (found.a.kind, found.a.unit) == (found.b.kind, found.b.unit)
    assert found.a.bytes_in_use < found.b.bytes_in_use


def test_an_event_that_one_side_lacks_is_none_there():
    trace = example_trace()
    rank = trace.rank(0)
    at = int(np.flatnonzero((rank.rows["kind"] == Kind.RESHARD) & (rank.rows["step"] == 1))[0])
    rows = np.delete(rank.rows, at)
    rows["seq"] = np.arange(len(rows))
    found = differences(trace, Trace(trace.header, (RankTrace(0, rows),)), rank=0).first_event
    assert found.step == 1
    assert found.a.kind is Kind.RESHARD
    assert found.b is None
