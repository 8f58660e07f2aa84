import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import any_key_frames, any_packed_rows, cuttings, rows_from, traces
from workbench.events import Category, Edge, Kind, UnitState
from workbench.trace import advance
from workbench.trace.schema import ROW_DTYPE, KeyFrame, Rows


def slow_advance(start: KeyFrame, rows: Rows) -> KeyFrame:
    """Return the same fold, row by row."""
    live, states, reducing = list(start.bytes_by_category), dict(start.unit_states), dict(start.reducing)
    seq = start.seq
    for row in rows:
        seq, kind, edge, unit = int(row["seq"]) + 1, row["kind"], row["edge"], int(row["unit"])
        if kind in (Kind.ALLOC, Kind.FREE):
            live[row["category"]] += int(row["num_bytes"])
        elif kind == Kind.ALL_GATHER and edge == Edge.BEGIN:
            states[unit] = UnitState.ALL_GATHER_IN_FLIGHT
        elif kind == Kind.UNSHARD and edge == Edge.END:
            states[unit] = UnitState.UNSHARDED
        elif kind == Kind.RESHARD:
            states[unit] = UnitState.SHARDED
        elif kind == Kind.RESET:
            states[unit] = UnitState.SHARDED
            reducing[unit] = 0
        elif kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
            reducing[unit] = reducing.get(unit, 0) + (1 if edge == Edge.BEGIN else -1)
    states = {u: s for u, s in states.items() if s != UnitState.SHARDED}
    reducing = {u: n for u, n in reducing.items() if n}
    return KeyFrame(seq=seq, bytes_by_category=tuple(live), unit_states=states, reducing=reducing)


@given(traces())
def test_the_fold_equals_a_row_by_row_fold(trace):
    for rank in trace.ranks:
        assert advance(rank.start, rank.rows) == slow_advance(rank.start, rank.rows)


@given(traces(), st.data())
def test_the_fold_continues_at_every_split(trace, data):
    for rank in trace.ranks:
        state = rank.start
        for part in data.draw(cuttings(len(rank.rows))):
            state = advance(state, rank.rows[part])
        assert state == advance(rank.start, rank.rows)


@given(any_key_frames())
def test_without_rows_only_default_entries_are_dropped(start):
    after = advance(start, np.empty(0, ROW_DTYPE))
    assert (after.seq, after.bytes_by_category) == (start.seq, start.bytes_by_category)
    assert all(start.unit_states[u] == s != UnitState.SHARDED for u, s in after.unit_states.items())
    assert all(start.reducing[u] == n != 0 for u, n in after.reducing.items())


@given(any_packed_rows())
def test_the_fold_takes_rows_of_any_content(packed):
    start = KeyFrame()
    assert len(advance(start, rows_from(packed)).bytes_by_category) == len(Category)


def test_a_reduction_without_a_unit_reduces_nobodys_gradients():
    rows = np.zeros(1, ROW_DTYPE)
    rows["kind"], rows["unit"] = Kind.ALL_REDUCE, -1
    assert advance(KeyFrame(), rows).reducing == {}


RESETTING = st.lists(
    st.tuples(
        st.sampled_from(
            [
                (Kind.ALL_GATHER, Edge.BEGIN),
                (Kind.UNSHARD, Edge.END),
                (Kind.REDUCE_SCATTER, Edge.BEGIN),
                (Kind.REDUCE_SCATTER, Edge.END),
                (Kind.RESET, Edge.INSTANT),
            ]
        ),
        st.integers(0, 2),
    ),
    max_size=20,
)


@given(RESETTING, st.integers(0, 20))
def test_a_reset_ends_collectives_in_flight_at_every_split(events, split):
    rows = np.zeros(len(events), ROW_DTYPE)
    rows["seq"] = np.arange(len(events))
    rows["kind"] = [kind for (kind, _), _ in events]
    rows["edge"] = [edge for (_, edge), _ in events]
    rows["unit"] = [unit for _, unit in events]
    whole = advance(KeyFrame(), rows)
    assert whole == slow_advance(KeyFrame(), rows)
    assert advance(advance(KeyFrame(), rows[:split]), rows[split:]) == whole
