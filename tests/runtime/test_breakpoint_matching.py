"""Breakpoints, conditions and the events that ``next`` stops at, without any ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import UsageError
from workbench.events import Edge, Kind, Phase
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.rank_messages import StepPosition
from workbench.runtime.breakpoint_matching import ArmedBreakpoint, PendingEvent, StopTargets, arm, next_after


def event(kind=Kind.ALL_GATHER, edge=Edge.BEGIN, **fields):
    given_ = {
        "unit": 3,
        "unit_name": "blocks.2",
        "num_bytes": 4096,
        "phase": Phase.FORWARD,
        "place": StepPosition(5, 17),
    }
    return PendingEvent(kind=kind, edge=edge, **given_ | fields)


def armed(event, **fields):
    return ArmedBreakpoint.of(Breakpoint(id=1, event=event, **fields), 0)


@pytest.mark.parametrize(
    ("data", "matches"),
    [
        ({"event": "all_gather"}, True),
        ({"event": "all_gather", "unit": "blocks.2"}, True),
        ({"event": "all_gather", "unit": "blocks.*"}, True),
        ({"event": "all_gather", "unit": "blocks.[2]"}, True),
        ({"event": "all_gather", "unit": "(root)"}, False),
        ({"event": "all_gather.end"}, False),
        ({"event": "reduce_scatter"}, False),
        ({"event": "all_gather", "when": "num_bytes > 5000"}, False),
        ({"event": "all_gather", "when": "num_bytes > 4000"}, True),
    ],
)
def test_a_breakpoint_matches_event_edge_unit_and_condition(data, matches):
    assert armed(**data).matches(event()) is matches


def test_breakpoints_of_other_ranks_are_left_out_but_must_be_right_all_the_same():
    those = [Breakpoint(id=i, event="wait", rank=rank) for i, rank in ((1, 0), (2, 1), (3, None))]
    assert [found.breakpoint.id for found in arm(those, rank=1)] == [2, 3]
    for wrong in (Breakpoint(id=1, event="wiat", rank=0), Breakpoint(id=1, event="wait", rank=0, when="f()")):
        with pytest.raises(UsageError):
            arm([wrong], rank=1)


def test_a_disabled_breakpoint_stops_no_rank():
    those = [Breakpoint(id=1, event="wait"), Breakpoint(id=2, event="wait", is_on=False)]
    assert [found.breakpoint.id for found in arm(those, rank=0)] == [1]


def test_a_condition_sees_the_event_and_the_rank():
    those = (
        "kind == 'all_gather' and edge == 'begin' and phase == 'forward' and unit == 'blocks.2' and num_bytes == 4096"
    )
    assert ArmedBreakpoint.of(Breakpoint(id=1, event="all_gather", rank=2, when=f"{those} and rank == 2"), 2).matches(
        event()
    )
    assert ArmedBreakpoint.of(Breakpoint(id=1, event="all_gather", when="(step, ordinal) == (5, 17)"), 2).matches(
        event()
    )


def test_next_stops_at_the_next_of_its_kind():
    assert next_after("event", Phase.FORWARD)(event(Kind.COPY_OUT))
    collective = next_after("collective", Phase.FORWARD)
    assert collective(event(Kind.REDUCE_SCATTER))
    assert not collective(event(Kind.REDUCE_SCATTER, Edge.END))
    unit = next_after("unit", Phase.FORWARD)
    assert unit(event(Kind.BACKWARD))
    assert not unit(event(Kind.UNSHARD))


@pytest.mark.parametrize(
    ("now", "then", "stops"),
    [
        (Phase.FORWARD, Phase.FORWARD, False),
        (Phase.FORWARD, Phase.IDLE, False),
        (Phase.FORWARD, Phase.PRE_BACKWARD, True),
        (Phase.POST_BACKWARD, Phase.PRE_BACKWARD, False),
        (Phase.BACKWARD, Phase.OPTIMIZER, True),
        (Phase.OPTIMIZER, Phase.FORWARD, True),
        (Phase.IDLE, Phase.FORWARD, True),
    ],
)
def test_phases_are_forward_backward_and_optimizer(now, then, stops):
    assert next_after("phase", now)(event(phase=then)) is stops


def stops(wanted, event_):
    return wanted.stops_at(event_)[0]


def test_on_the_way_to_a_place_breakpoints_do_not_count():
    met = armed("all_gather")
    wanted = StopTargets(target=StepPosition(5, 18), breakpoints=(met,))
    assert wanted.stops_at(event()) == (False, None)
    assert wanted.stops_at(event(place=StepPosition(5, 18))) == (True, met)
    assert stops(wanted, event(Kind.WAIT, place=StepPosition(6, 0)))
    assert not wanted.stops_waiting(StepPosition(5, 17))
    assert wanted.stops_waiting(StepPosition(5, 18))


def test_after_a_wait_the_others_stop_event_is_passed():
    once = armed("all_gather", once=True)
    wanted = StopTargets(is_next=next_after("event", Phase.FORWARD), breakpoints=(once,), after=StepPosition(5, 17))
    assert wanted.stops_at(event()) == (False, once)
    assert wanted.without(once).breakpoints == ()
    assert stops(wanted, event(place=StepPosition(5, 18)))


def test_a_breakpoint_for_once_is_gone_after_it_was_met():
    once = armed("wait", once=True)
    often = armed("wait")
    wanted = StopTargets(breakpoints=(once, often))
    assert wanted.without(once).breakpoints == (often,)
    assert wanted.without(often).breakpoints == (once, often)
    assert not StopTargets(after=StepPosition(1, 1)).is_anything


def test_a_breakpoint_for_once_goes_with_its_steps_and_not_before():
    once, often, other = armed("wait", once=True), armed("wait"), armed("forward")
    wanted = StopTargets(pause=True, breakpoints=(once, often))
    assert wanted.with_breakpoints((other,)) == StopTargets(pause=True, breakpoints=(once, other))
    assert wanted.lasting() == StopTargets(breakpoints=(often,))


def test_only_kinds_of_breakpoints_are_looked_at_unless_something_else_is_wanted():
    waits = armed("wait")
    only = StopTargets(breakpoints=(waits,))
    assert only.is_anything
    assert [only.may_stop_at(kind) for kind in (Kind.WAIT, Kind.FORWARD)] == [True, False]
    for wanted in ({"pause": True}, {"target": StepPosition(0, 0)}, {"is_next": next_after("event", Phase.IDLE)}):
        found = only.but(**wanted)
        assert found == StopTargets(breakpoints=(waits,), **wanted)
        assert StopTargets(**wanted).is_anything
        assert StopTargets(**wanted).may_stop_at(Kind.FORWARD)
    assert only.but() == only
    assert not StopTargets().is_anything


def test_a_pause_stops_at_any_event_before_a_target_and_after_a_wait():
    wanted = StopTargets(pause=True, target=StepPosition(9, 9), after=StepPosition(9, 9))
    assert wanted.stops_at(event()) == (True, None)
    assert wanted.stops_waiting(StepPosition(0, 0))
    assert StopTargets().stops_at(event()) == (False, None)
    assert not StopTargets(is_next=next_after("unit", Phase.IDLE)).stops_at(event())[0]


PLACES = st.builds(StepPosition, st.integers(0, 3), st.integers(0, 9))


@given(PLACES, st.lists(PLACES, min_size=1).map(sorted))
def test_a_rank_stops_at_the_first_event_that_is_not_before_its_target(target, places):
    wanted = StopTargets(target=target)
    stopped = [p for p in places if stops(wanted, event(place=p))]
    assert stopped == [p for p in places if p >= target]
