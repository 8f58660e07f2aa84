import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import traces
from workbench.events import NUMBERED, Edge, Kind
from workbench.trace import partners
from workbench.trace.schema import ROW_DTYPE, Rows


def slow_partners(rows: Rows) -> list[int]:
    """Return the partners of the rows, with a stack per key."""
    partner, stacks = [-1] * len(rows), {}
    for place, row in enumerate(rows):
        key = (row["kind"], row["unit"])
        if row["kind"] in NUMBERED:
            key += (row["comm_group"], row["comm_seq"])
        stack = stacks.setdefault(key, [])
        if row["edge"] == Edge.BEGIN:
            stack.append(place)
        elif row["edge"] == Edge.END and stack:
            begin = stack.pop()
            partner[begin], partner[place] = place, begin
    return partner


@given(traces())
def test_partners_of_a_job_are_those_of_a_stack_per_key(trace):
    for rank in trace.ranks:
        assert partners(rank.rows).tolist() == slow_partners(rank.rows)


@given(
    st.lists(
        st.tuples(st.sampled_from([Kind.FORWARD, Kind.ALL_GATHER, Kind.SEND]), st.sampled_from(Edge), st.integers(0, 1))
    )
)
def test_partners_of_any_sequence_are_those_of_a_stack_per_key(ends):
    rows = np.zeros(len(ends), ROW_DTYPE)
    for row, (kind, edge, number) in zip(rows, ends, strict=True):
        row["kind"], row["edge"], row["unit"], row["comm_seq"] = kind, edge, number, number
    assert partners(rows).tolist() == slow_partners(rows)


def test_the_docstrings_example():
    rows = np.zeros(5, ROW_DTYPE)
    rows["kind"] = [Kind.FORWARD, Kind.FORWARD, Kind.FORWARD, Kind.FREE, Kind.FORWARD]
    rows["edge"] = [Edge.BEGIN, Edge.BEGIN, Edge.END, Edge.INSTANT, Edge.END]
    rows["unit"] = [0, 1, 1, 0, 0]
    assert partners(rows).tolist() == [4, 2, 1, -1, 0]
