from dataclasses import replace

import pytest

from tests.helpers.trace_strategies import example_trace
from workbench.events import Edge, Kind, Phase
from workbench.protocol.rank_messages import EventInfo, Hold, Position, StepPosition
from workbench.reports.event_text import event_words, unit_names
from workbench.reports.pause_reports import row_of
from workbench.reports.stop_positions import (
    StopGroup,
    describe,
    live_units,
    param_names,
    state_of,
)

UNITS = {0: "blocks.0", 1: ""}


def held(ordinal=3, kind=Kind.ALL_GATHER, edge=Edge.BEGIN, unit=0, step=2, **more):
    return Hold(place=StepPosition(step, ordinal), kind=kind, edge=edge, unit=unit, since_ns=1, **more)


def position(hold=None, **more):
    return Position(held=hold, place=hold.place if hold else StepPosition(2, 3), doing="step", **more)


@pytest.mark.parametrize(
    ("kind", "edge", "unit", "words"),
    [
        (Kind.ALL_GATHER, Edge.BEGIN, "blocks.0", "all-gather of blocks.0"),
        (Kind.ALL_GATHER, Edge.END, "", "the end of all-gather of (root)"),
        (Kind.OPTIMIZER, Edge.BEGIN, None, "optimizer"),
        (Kind.STEP, Edge.END, "x", "the end of step"),
        (Kind.RESET, Edge.INSTANT, "blocks.0", "step aborted in blocks.0"),
    ],
)
def test_events_in_words(kind, edge, unit, words):
    assert event_words(kind, edge, unit) == words


def test_where_a_hold_is():
    assert describe(held(), UNITS) == "before all-gather of blocks.0, step 2"
    assert describe(held(kind=Kind.OPTIMIZER, unit=-1, step=-1), UNITS) == "before optimizer"
    assert describe(held(kind=Kind.WAIT, unit=1), UNITS) == "while waiting for (root), step 2"


@pytest.mark.parametrize(
    ("kind", "phase", "words"),
    [
        (Kind.ALL_GATHER, Phase.FORWARD, "before all-gather of blocks.0, for its forward, step 2"),
        (Kind.ALL_GATHER, Phase.PRE_BACKWARD, "before all-gather of blocks.0, for its backward, step 2"),
        (Kind.RESHARD, Phase.FORWARD, "before reshard of blocks.0, in the forward, step 2"),
        (Kind.REDUCE_SCATTER, Phase.POST_BACKWARD, "before reduce-scatter of blocks.0, in the backward, step 2"),
        (Kind.WAIT, Phase.BACKWARD, "while waiting for blocks.0, in the backward, step 2"),
        (Kind.ALL_REDUCE, Phase.OPTIMIZER, "before all-reduce of blocks.0, in the optimizer, step 2"),
        (Kind.FORWARD, Phase.FORWARD, "before forward of blocks.0, step 2"),
        (Kind.BACKWARD, Phase.PRE_BACKWARD, "before backward of blocks.0, step 2"),
    ],
)
def test_an_event_that_may_occur_twice_in_a_step_has_its_phase(kind, phase, words):
    assert describe(held(kind=kind, phase=phase), UNITS) == words


def test_states():
    assert state_of(position(held())) == "held"
    assert state_of(position(waiting=True)) == "waiting"
    assert state_of(position()) == "running"
    assert state_of(Position()) == "idle"
    assert state_of(Position(place=StepPosition(4, 0))) == "running"


def test_a_stop_in_a_sentence():
    everywhere = StopGroup(positions={rank: position(held()) for rank in range(4)}, units=UNITS)
    assert str(everywhere) == "4 ranks stopped before all-gather of blocks.0, step 2"
    one = StopGroup(positions={0: position(waiting=True), 1: position(held(breakpoint=3))}, units=UNITS)
    assert str(one) == "rank 1 stopped before all-gather of blocks.0, step 2; rank 0 waits"
    assert (one.held, one.breakpoints) == ((1,), (3,))
    late = StopGroup(positions={0: position(held()), 1: position(), 2: position()}, units=UNITS)
    assert str(late).endswith("; ranks 1-2 stop at the next event")
    assert (late.is_late, everywhere.is_late, one.is_late) == (True, False, False)
    assert late.renewed({1: position(held()), 7: position(held())}).held == (0, 1)
    silent = StopGroup(positions={0: position(held()), 1: Position(rank=1)}, units=UNITS)
    assert not silent.is_late
    assert str(silent.renewed({1: position(held())})).startswith("2 ranks stopped")
    older = StopGroup(positions={0: position(held()), 1: position(now_ns=2)})
    assert older.renewed({1: position(held(), now_ns=1)}).held == (0,)
    assert str(StopGroup(positions={})) == "no rank is stopped"


def test_a_rank_in_a_wait_is_at_the_others_stop():
    stop = StopGroup(positions={0: position(held(kind=Kind.WAIT)), 1: position(held(kind=Kind.RESHARD))}, units=UNITS)
    assert str(stop) == "2 ranks stopped before reshard of blocks.0, step 2"


def test_the_end_of_a_wait_is_described_as_the_wait():
    stop = StopGroup(positions={0: position(held(kind=Kind.WAIT, edge=Edge.END))}, units=UNITS)
    assert str(stop) == "rank 0 stopped while waiting for blocks.0, just before the wait ends, step 2"


def test_a_line_of_the_table():
    header = example_trace(num_ranks=1, num_units=2).header
    name, names = header.units[0].name, unit_names(header)
    stopped = row_of(1, position(held(phase=Phase.POST_BACKWARD), now_ns=3_000_001), names)
    assert stopped.cells() == ("1", "held", "2", "post-backward", name or "(root)", "before all-gather", "3.00 ms")
    for edge, text in ((Edge.BEGIN, "in a wait"), (Edge.END, "at the end of a wait")):
        waits = position(held(kind=Kind.WAIT, edge=edge))
        assert row_of(1, waits, names).event == text
    works = position(newest=EventInfo(kind=Kind.FORWARD, edge=Edge.BEGIN, phase=Phase.FORWARD), now_ns=1000)
    assert row_of(0, works, names).cells() == ("0", "running", "2", "forward", "", "start of forward", "1.00 µs")
    assert row_of(0, Position(), names).cells() == ("0", "idle", "", "", "", "", "")
    over = Position(newest=EventInfo(kind=Kind.RESHARD, edge=Edge.INSTANT, phase=Phase.IDLE), now_ns=27_000_000_000)
    assert row_of(0, over, names).cells() == ("0", "idle", "", "", "", "", "")


def test_a_parameter_of_a_model_that_was_built_again_has_one_name():
    header = example_trace().header
    again = tuple(replace(unit, index=unit.index + len(header.units)) for unit in header.units)
    assert param_names(replace(header, units=(*header.units, *again))) == param_names(header)
    assert len(set(param_names(header))) == len(param_names(header)) > 20


def test_units_in_use_are_listed_from_the_top_of_the_model():
    header = example_trace().header
    root = next(unit.index for unit in header.units if not unit.name)
    header = replace(header, units=tuple(replace(unit, root=root, retired=unit.index == 0) for unit in header.units))
    assert [unit.name for unit in live_units(header)] == ["", "blocks.1", "blocks.2"]
