import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import UsageError
from workbench.events import STOPS, Edge, Kind
from workbench.protocol.breakpoints import (
    EDGES,
    EVENTS,
    FIELDS,
    Condition,
    nearest,
    parse_event,
    split_event,
)

SPANS = tuple(name for name, kind in STOPS.items() if kind.info.is_span)
UNITS = ["blocks.0", "blocks.1", "head", ""]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all_gather", ("all_gather", None)),
        ("all-gather:blocks.1", ("all_gather", "blocks.1")),
        ("backward.end:*", ("backward.end", "*")),
        ("reshard:(root)", ("reshard", "(root)")),
        ("forward.begin:blocks.?", ("forward.begin", "blocks.?")),
    ],
)
def test_typed_events(text, expected):
    assert parse_event(text, UNITS) == expected


@pytest.mark.parametrize(
    ("text", "units", "message"),
    [
        ("all_gahter", UNITS, "there is no event 'all_gahter'; the events, nearest first: all_gather, "),
        ("", UNITS, "there is no event ''"),
        ("reshard.end", UNITS, "reshard has neither begin nor end"),
        ("forward.middle", UNITS, "forward has begin and end"),
        ("forward:block.1", UNITS, "there is no unit 'block.1'; the units, nearest first: blocks.1, blocks.0, "),
        ("forward:layers.*", UNITS, "there is no unit 'layers.*'"),
        ("forward:blocks.0", [], "nothing is sharded yet"),
        ("forward:x", [f"blocks.{i}" for i in range(20)], "... 8 more"),
    ],
)
def test_missing_events_and_units_list_the_nearest(text, units, message):
    with pytest.raises(UsageError) as caught:
        parse_event(text, units)
    assert message in str(caught.value)


@given(st.sampled_from(SPANS), st.sampled_from(("", *EDGES)), st.sampled_from(UNITS[:-1]))
def test_every_event_is_itself_and_one_of_the_trace(event, edge, unit):
    name = f"{event}.{edge}" if edge else event
    assert parse_event(f"{name}:{unit}", UNITS) == (name, unit)
    assert split_event(name) == (Kind[event.upper()], Edge[(edge or "begin").upper()])


def test_an_instant_has_one_edge():
    assert split_event("reshard") == (Kind.RESHARD, Edge.INSTANT)


@pytest.mark.parametrize("when", ["num_bytes > 1e6", "unit == 'head' and not step % 2", "kind in ('wait', 'step')"])
def test_conditions(when):
    Condition.parse(when, None)


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("num_bytes >", "a Python expression such as"),
        ("print(1)", "no Call"),
        ("unit.name", "no Attribute"),
        ("num_byte > 1", "has no name 'num_byte'; the names, nearest first: num_bytes, "),
        ("rank == 1", "write --rank R"),
        ("[x for x in unit]", "no ListComp"),
        ("unit > 3", "cannot evaluate 'unit > 3'"),
        ("-kind", "cannot evaluate"),
        ("unit * num_bytes * num_bytes == ''", "computes with numbers only"),
        ("('x' or 1) * num_bytes", "computes with numbers only"),
        ("num_bytes * [1, 2]", "computes with numbers only"),
        ("'%999999999d' % step", "computes with numbers only"),
        ("__import__('os')", "no Call"),
        ("2 ** 64 > step", "no Pow"),
        ("unit[0] == 'b'", "no Subscript"),
        ("(lambda: 1)", "no Lambda"),
        ("f'{unit}' == 'x'", "no JoinedStr"),
        ("", "a Python expression such as"),
    ],
)
def test_invalid_conditions(when, message):
    with pytest.raises(UsageError) as caught:
        Condition.parse(when, None)
    assert message in str(caught.value)


EVENT = {
    **{"kind": "all_gather", "edge": "begin", "phase": "forward", "unit": "blocks.2"},
    **{"num_bytes": 4096, "step": 5, "ordinal": 17, "rank": 2},
}


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ("num_bytes > 1e3", True),
        ("num_bytes // 2 == 2048 and not step == 4", True),
        ("unit in ('blocks.2', 'blocks.3')", True),
        ("kind == 'all_gather' and edge == 'begin' and phase == 'forward'", True),
        ("rank == 0 or ordinal < 17", False),
        ("1 / (step - 5) > 0", False),
        ("step > 4 and unit > 3", False),
        ("unit < num_bytes / rank", False),
        ("-step < +ordinal", True),
    ],
)
def test_a_condition_holds_or_not(when, holds):
    assert Condition.parse(when, 2).holds(EVENT) is holds


OPERANDS = st.sampled_from(
    [*FIELDS, "3", "1e6", "'head'", "(1, 'x')", "foo", "unit.name", "f(1)", "None", "{}", "x := 1"]
)
OPERATORS = st.sampled_from(
    ["+", "-", "*", "/", "%", "**", "<", "==", "in", "not in", "is", "and", "or", "if 1 else", "@"]
)


@given(st.lists(st.tuples(OPERATORS, OPERANDS), max_size=3), OPERANDS, st.sampled_from(["", "not ", "-", "~"]))
def test_an_accepted_condition_can_be_evaluated_at_every_event(more, first, before):
    when = before + " ".join([first, *(f"{operator} {operand}" for operator, operand in more)])
    with warnings.catch_warnings(action="ignore"):  # Python's own, about the comparison
        try:
            condition = Condition.parse(when, 0)
        except UsageError:
            return
        assert condition.holds(EVENT) in {True, False}


def test_a_condition_may_use_the_rank_if_one_rank_stops():
    Condition.parse("rank == 1", 1)
    for name in FIELDS:
        Condition.parse(f"{name} == 1", 0)


def test_the_nearest_comes_first():
    assert nearest("reducescater", EVENTS)[0] == "reduce_scatter"
