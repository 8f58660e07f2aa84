"""Marks of events: from the first to the last one of a step, of kinds and a unit, or of the waits for a collective."""

import numpy as np
import pytest

from tests.helpers.trace_strategies import Setup, simulate
from workbench.events import Edge, Kind
from workbench.replay.collectives import table
from workbench.replay.event_marks import EventMark, mark_in_step, mark_of_wait

TRACE = simulate(Setup(num_ranks=2, steps=3))
PART = TRACE.rank(1)


def rows_of(mark):
    return PART.rows[mark.first_seq - PART.start.seq : mark.last_seq + 1 - PART.start.seq]


@pytest.mark.parametrize("step", [0, 2])
def test_a_step_is_marked_from_its_begin_to_its_end(step):
    mark = mark_in_step(PART, step)
    rows = rows_of(mark)
    assert (mark.rank, mark.unit) == (1, -1)
    assert (rows["kind"][0], rows["edge"][0], rows["edge"][-1]) == (Kind.STEP, Edge.BEGIN, Edge.END)
    assert set(rows["step"].tolist()) == {step}


def test_events_of_a_kind_and_a_unit_are_marked():
    mark = mark_in_step(PART, 1, (Kind.FORWARD,), unit=2)
    rows = rows_of(mark)
    for row, edge in ((rows[0], Edge.BEGIN), (rows[-1], Edge.END)):
        assert (row["kind"], row["unit"], row["edge"], row["step"]) == (Kind.FORWARD, 2, edge, 1)
    assert mark.unit == 2
    assert mark_in_step(PART, 1, (Kind.GATE,)) is None


def test_the_wait_for_a_collective_is_marked():
    issued = table(PART)
    place = int(np.argmax(issued.wait_ns))
    mark = mark_of_wait(PART, int(issued.seq[place]))
    assert mark.times_ns(PART.rows) == (issued.wait_begin_ns[place], issued.wait_end_ns[place])
    assert mark.unit == issued.unit[place]
    assert mark.first_seq > issued.seq[place]


def test_only_events_among_the_rows_have_times():
    mark = EventMark(rank=1, first_seq=int(PART.rows["seq"][5]), last_seq=int(PART.rows["seq"][8]))
    assert mark.times_ns(PART.rows[7:]) == (PART.rows["t_ns"][7], PART.rows["t_ns"][8])
    assert mark.times_ns(PART.rows[20:]) is None
