"""Breakpoints, conditions and the events that ``next`` goes to, without any rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import UsageError
from workbench.events import STOPS, Edge, Kind, Phase
from workbench.runtime.breakpoints import (
    Breakpoint,
    Condition,
    Event,
    Wanted,
    next_after,
    parse_all,
    parse_event,
)


def event(kind=Kind.ALL_GATHER, edge=Edge.BEGIN, **fields):
    given_ = {"unit": 3, "unit_name": "blocks.2", "num_bytes": 4096, "phase": Phase.FORWARD, "step": 5, "ordinal": 17}
    return Event(kind=kind, edge=edge, **given_ | fields)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all_gather", (Kind.ALL_GATHER, Edge.BEGIN)),
        ("all-gather.end", (Kind.ALL_GATHER, Edge.END)),
        ("forward.begin", (Kind.FORWARD, Edge.BEGIN)),
        ("reshard", (Kind.RESHARD, Edge.INSTANT)),
    ],
)
def test_an_event_is_named_with_or_without_its_edge(text, expected):
    assert parse_event(text) == expected


@pytest.mark.parametrize("text", ["allgather", "forward.middle", "reshard.begin", ""])
def test_other_events_are_refused_and_the_known_ones_named(text):
    with pytest.raises(UsageError):
        parse_event(text)
    with pytest.raises(UsageError, match="all_gather, reduce_scatter"):
        parse_event("nothing")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("num_bytes > 1e3", True),
        ("num_bytes // 2 == 2048 and not step == 4", True),
        ("unit in ('blocks.2', 'blocks.3')", True),
        ("kind == 'all_gather' and edge == 'begin' and phase == 'forward'", True),
        ("rank == 0 or ordinal < 17", False),
        ("1 / (step - 5) > 0", False),
        ("-step < +ordinal", True),
    ],
)
def test_a_condition_is_an_expression_over_the_event(text, holds):
    assert Condition.parse(text, rank=2).holds(event()) is holds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("__import__('os')", "calls"),
        ("unit.upper() == 'X'", "calls|attributes"),
        ("unit.name", "attributes"),
        ("num_byte > 3", "'num_byte'; there are: num_bytes, unit"),
        ("2 ** 64 > step", "Pow"),
        ("[x for x in unit]", "ListComp"),
        ("unit[0] == 'b'", "Subscript"),
        ("(lambda: 1)", "Lambda"),
        ("f'{unit}' == 'x'", "JoinedStr"),
        ("step >", "is no expression"),
        ("num_bytes > 'large'", "cannot be evaluated"),
        ("unit + 1 > 0", "cannot be evaluated"),
    ],
)
def test_other_conditions_are_refused(text, said):
    with pytest.raises(UsageError, match=said):
        Condition.parse(text, rank=0)


@pytest.mark.parametrize(
    ("data", "matches"),
    [
        ({"event": "all_gather"}, True),
        ({"event": "all_gather", "unit": "blocks.2"}, True),
        ({"event": "all_gather", "unit": "blocks.*"}, True),
        ({"event": "all_gather", "unit": "(root)"}, False),
        ({"event": "all_gather.end"}, False),
        ({"event": "reduce_scatter"}, False),
        ({"event": "all_gather", "when": "num_bytes > 5000"}, False),
        ({"event": "all_gather", "when": "num_bytes > 4000"}, True),
    ],
)
def test_a_breakpoint_matches_event_edge_unit_and_condition(data, matches):
    assert Breakpoint.parse({"id": 1} | data, rank=0).matches(event()) is matches


def test_breakpoints_of_other_ranks_are_left_out_but_must_be_right_all_the_same():
    data = [{"id": 1, "event": "wait", "rank": 0}, {"id": 2, "event": "wait", "rank": 1}, {"id": 3, "event": "wait"}]
    assert [b.id for b in parse_all(data, rank=1)] == [2, 3]
    with pytest.raises(UsageError):
        parse_all([{"id": 1, "event": "wiat", "rank": 0}], rank=1)


def test_next_goes_to_the_next_of_its_kind():
    assert next_after("event", Phase.FORWARD)(event(Kind.COPY_OUT))
    collective = next_after("collective", Phase.FORWARD)
    assert collective(event(Kind.REDUCE_SCATTER))
    assert not collective(event(Kind.REDUCE_SCATTER, Edge.END))
    unit = next_after("unit", Phase.FORWARD)
    assert unit(event(Kind.BACKWARD))
    assert not unit(event(Kind.UNSHARD))
    with pytest.raises(UsageError, match="event, collective, unit, phase, not 'step'"):
        next_after("step", Phase.FORWARD)


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


def test_on_the_way_to_a_position_breakpoints_do_not_count():
    met = Breakpoint.parse({"id": "b", "event": "all_gather"}, rank=0)
    wanted = Wanted(target=(5, 18), breakpoints=(met,))
    assert wanted.stops_at(event()) == (False, None)
    assert wanted.stops_at(event(ordinal=18)) == (True, met)
    assert stops(wanted, event(Kind.WAIT, step=6, ordinal=0))
    assert not wanted.stops_waiting((5, 17))
    assert wanted.stops_waiting((5, 18))


def test_after_a_wait_the_event_that_others_stood_at_is_passed():
    once = Breakpoint.parse({"id": "b", "event": "all_gather", "once": True}, rank=0)
    wanted = Wanted(is_next=next_after("event", Phase.FORWARD), breakpoints=(once,), after=(5, 17))
    assert wanted.stops_at(event()) == (False, once)
    assert wanted.without(once).breakpoints == ()
    assert stops(wanted, event(ordinal=18))


def test_a_breakpoint_for_once_is_gone_after_it_was_met():
    once = Breakpoint.parse({"id": 1, "event": "wait", "once": True}, rank=0)
    often = Breakpoint.parse({"id": 2, "event": "wait"}, rank=0)
    wanted = Wanted(breakpoints=(once, often))
    assert wanted.without(once).breakpoints == (often,)
    assert wanted.without(often).breakpoints == (once, often)
    assert not Wanted(after=(1, 1)).is_anything


POSITIONS = st.tuples(st.integers(0, 3), st.integers(0, 9))


@given(POSITIONS, st.lists(POSITIONS, min_size=1).map(sorted))
def test_a_rank_stops_at_the_first_event_that_is_not_before_its_target(target, positions):
    wanted = Wanted(target=target)
    stopped = [p for p in positions if stops(wanted, event(step=p[0], ordinal=p[1]))]
    assert stopped == [p for p in positions if p >= target]


def test_every_event_can_be_set_a_breakpoint_on():
    for name, kind in STOPS.items():
        assert parse_event(name)[0] is kind
