import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import cuttings, example_trace, traces
from workbench.events import Edge, Kind, UnitState
from workbench.replay import states
from workbench.replay.spans import last_ns
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, KeyFrame


def states_by_hand(rank: RankTrace, unit: int) -> list[UnitState]:
    """Return the state of one unit before the first row and after each row."""
    params = rank.start.unit_states.get(unit, UnitState.SHARDED)
    reducing = rank.start.reducing.get(unit, 0)
    found = [UnitState.REDUCING if reducing else params]
    for row in rank.rows:
        if row["unit"] == unit:
            match Kind(row["kind"]), Edge(row["edge"]):
                case Kind.ALL_GATHER, Edge.BEGIN:
                    params = UnitState.ALL_GATHER_IN_FLIGHT
                case Kind.UNSHARD, Edge.END:
                    params = UnitState.UNSHARDED
                case Kind.RESHARD, Edge.INSTANT:
                    params = UnitState.SHARDED
                case Kind.REDUCE_SCATTER | Kind.ALL_REDUCE, edge:
                    reducing += 1 if edge == Edge.BEGIN else -1
        found.append(UnitState.REDUCING if reducing else params)
    return found


@given(st.data())
def test_prefix_law(data):
    for rank in data.draw(traces()).ranks:
        whole = pieces = states.start(rank.start)
        for cut in data.draw(cuttings(len(rank.rows))):
            pieces = states.advance(pieces, rank.rows[cut])
        assert pieces == states.advance(whole, rank.rows)


@given(traces())
def test_the_state_at_every_row_equals_the_fold(trace: Trace):
    for rank in trace.ranks:
        for unit in range(len(trace.header.units)):
            by_hand = states_by_hand(rank, unit)
            step = max(1, len(by_hand) // 20)
            for place in range(0, len(by_hand), step):
                assert states.at(rank, rank.start.seq - 1 + place)[unit] == by_hand[place]


@given(traces())
def test_spans_equal_the_fold(trace: Trace):
    for rank in trace.ranks:
        found = states.spans(rank, units=range(len(trace.header.units)))
        for unit in range(len(trace.header.units)):
            by_hand, mine = states_by_hand(rank, unit), found.unit == unit
            changes = [i for i in range(len(by_hand)) if i == 0 or by_hand[i] != by_hand[i - 1]]
            assert found.state[mine].tolist() == [by_hand[i] for i in changes]
            assert found.begin_seq[mine].tolist() == [rank.start.seq - 1 + i for i in changes]


@given(traces())
def test_spans_of_a_unit_follow_each_other_without_a_gap(trace: Trace):
    for rank in trace.ranks:
        found = states.spans(rank)
        assert (found.end_ns >= found.begin_ns).all()
        follows = found.unit[1:] == found.unit[:-1]
        assert (found.begin_ns[1:] == found.end_ns[:-1])[follows].all()
        assert (found.end_ns[:-1][~follows] == last_ns(rank.rows)).all()
        assert (found.state[1:] != found.state[:-1])[follows].all()


def test_a_reduction_in_flight_wins():
    now = states.start(KeyFrame(unit_states={2: UnitState.UNSHARDED}, reducing={2: 1, 5: 1, 6: 0}))
    assert now[2] == now[5] == UnitState.REDUCING
    assert now[6] == now[7] == UnitState.SHARDED
    assert now.units_in(UnitState.UNSHARDED) == (2,)
    assert now.units_in(UnitState.REDUCING) == (2, 5)


def test_at_the_end_of_a_step_everything_is_sharded_again():
    rank = example_trace().ranks[0]
    assert states.at(rank, rank.end_seq) == states.States({}, {})


def test_requested_units_exist_without_rows():
    found = states.spans(example_trace(num_units=2).ranks[0].cut(0, 3), units=(0, 1, 9))
    assert found.unit.tolist() == [0, 1, 9]
    assert found.state.tolist() == [UnitState.SHARDED] * 3


ANY_CHANGE = st.sampled_from(
    [
        (Kind.ALL_GATHER, Edge.BEGIN),
        (Kind.UNSHARD, Edge.END),
        (Kind.RESHARD, Edge.INSTANT),
        (Kind.REDUCE_SCATTER, Edge.BEGIN),
        (Kind.REDUCE_SCATTER, Edge.END),
        (Kind.RESET, Edge.INSTANT),
    ]
)


@given(st.lists(st.tuples(ANY_CHANGE, st.integers(0, 2)), max_size=20))
def test_spans_follow_the_fold_through_resets_and_any_other_order(events):
    rows = np.zeros(len(events), ROW_DTYPE)
    rows["seq"] = rows["t_ns"] = np.arange(len(events))
    rows["kind"], rows["edge"] = [kind for (kind, _), _ in events], [edge for (_, edge), _ in events]
    rows["unit"] = [unit for _, unit in events]
    rank = RankTrace(0, rows, KeyFrame(unit_states={0: UnitState.UNSHARDED}, reducing={1: 1}))
    found = states.spans(rank, units=range(3))
    for unit in range(3):
        mine = found.unit == unit
        for seq in range(-1, len(rows)):
            newest = np.flatnonzero(found.begin_seq[mine] <= seq)[-1]
            assert found.state[mine][newest] == states.at(rank, seq)[unit]
