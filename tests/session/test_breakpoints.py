import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import UsageError
from workbench.runtime.breakpoints import Condition
from workbench.session.breakpoints import (
    EDGES,
    EVENTS,
    FIELDS,
    SPANS,
    Breakpoints,
    check_condition,
    nearest,
    parse_event,
)

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
def test_what_a_person_writes(text, expected):
    assert parse_event(text, UNITS) == expected


@pytest.mark.parametrize(
    ("text", "units", "says"),
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
def test_what_is_not_there_says_what_is(text, units, says):
    with pytest.raises(UsageError) as caught:
        parse_event(text, units)
    assert says in str(caught.value)


@given(st.sampled_from(SPANS), st.sampled_from(("", *EDGES)), st.sampled_from(UNITS[:-1]))
def test_every_event_is_itself(event, edge, unit):
    name = f"{event}.{edge}" if edge else event
    assert parse_event(f"{name}:{unit}", UNITS) == (name, unit)


@pytest.mark.parametrize("when", ["num_bytes > 1e6", "unit == 'head' and not step % 2", "kind in ('wait', 'step')"])
def test_conditions(when):
    check_condition(when, None)


@pytest.mark.parametrize(
    ("when", "says"),
    [
        ("num_bytes >", "a Python expression such as"),
        ("print(1)", "no Call"),
        ("unit.name", "no Attribute"),
        ("num_byte > 1", "knows no 'num_byte'; it knows, nearest first: num_bytes, "),
        ("rank == 1", "write --rank R"),
        ("[x for x in unit]", "no ListComp"),
        ("unit > 3", "cannot be computed as in 'unit > 3'"),
        ("-kind", "cannot be computed"),
        ("", "a Python expression such as"),
    ],
)
def test_conditions_that_are_none(when, says):
    with pytest.raises(UsageError) as caught:
        check_condition(when, None)
    assert says in str(caught.value)


OPERANDS = st.sampled_from(
    [*FIELDS, "3", "1e6", "'head'", "(1, 'x')", "foo", "unit.name", "f(1)", "None", "{}", "x := 1"]
)
OPERATORS = st.sampled_from(
    ["+", "-", "*", "/", "%", "**", "<", "==", "in", "not in", "is", "and", "or", "if 1 else", "@"]
)


@given(st.lists(st.tuples(OPERATORS, OPERANDS), max_size=3), OPERANDS, st.sampled_from(["", "not ", "-", "~"]))
def test_a_condition_is_refused_here_if_and_only_if_a_rank_would_refuse_it(more, first, before):
    when = before + " ".join([first, *(f"{operator} {operand}" for operator, operand in more)])
    refused = []
    for check in (lambda: check_condition(when, 0), lambda: Condition.parse(when, 0)):
        try:
            with warnings.catch_warnings(action="ignore"):  # Python's own, of what is compared
                check()
        except UsageError:
            refused.append(True)
        else:
            refused.append(False)
    assert refused[0] == refused[1]


def test_a_condition_may_look_at_the_rank_where_one_rank_stops():
    check_condition("rank == 1", 1)
    for name in FIELDS:
        check_condition(f"{name} == 1", 0)


def test_they_are_numbered_and_taken_away():
    points = Breakpoints()
    first = points.add("wait", None, rank=None, when=None)
    points.add("forward", "head", rank=1, when="step > 2")
    points.set_until("step", None)
    assert [b.id for b in points] == [1, 2, 0]
    assert [str(b) for b in points][1] == "forward:head --rank 1 --when 'step > 2'"
    assert points.to_data()[0] == {"id": 1, "event": "wait", "unit": None, "rank": None, "when": None}
    assert points.to_data()[2]["once"] is True
    assert points.named(first.id) == "breakpoint 1: wait"
    assert (points.clear_until(), points.clear_until()) == (True, False)
    assert points.clear(1) == 1
    with pytest.raises(UsageError, match="there is no breakpoint 1; there are: 2"):
        points.clear(1)
    assert points.clear(None) == 1
    with pytest.raises(UsageError, match="there are: none"):
        points.clear(7)


def test_the_nearest_comes_first():
    assert nearest("scatter", EVENTS)[0] == "reduce_scatter"
