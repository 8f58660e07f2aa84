import re
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
    with_condition,
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


NO_EVENT = "there is no event {!r}; the events, nearest first: "
NEAR_ALL_GAHTER = nearest("all_gahter", EVENTS)


@pytest.mark.parametrize(
    ("text", "units", "message"),
    [
        ("all_gahter", UNITS, f"{NO_EVENT.format('all_gahter')}all_gather, {', '.join(NEAR_ALL_GAHTER[1:])}"),
        ("", UNITS, NO_EVENT.format("") + ", ".join(EVENTS)),
        ("reshard.end", UNITS, "'reshard.end': reshard has neither begin nor end: it is an instant"),
        ("forward.middle", UNITS, "'forward.middle': forward has begin and end"),
        (
            "forward:block.1",
            UNITS,
            "there is no unit 'block.1'; the units, nearest first: blocks.1, blocks.0, (root), head",
        ),
        (
            "forward:layers.*",
            UNITS,
            "there is no unit 'layers.*'; the units, nearest first: blocks.0, blocks.1, head, (root)",
        ),
        ("forward:blocks.0", [], "nothing is sharded yet, so there is no unit 'blocks.0': first %fsdp shard MODEL"),
        (
            "forward:x",
            [f"blocks.{i}" for i in range(20)],
            (
                "there is no unit 'x'; the units, nearest first: blocks.0, blocks.1, "
                "blocks.2, blocks.3, blocks.4, blocks.5, blocks.6, blocks.7, blocks.8, "
                "blocks.9, blocks.10, blocks.11, ... 8 more"
            ),
        ),
    ],
)
def test_missing_events_and_units_list_the_nearest(text, units, message):
    with pytest.raises(UsageError) as caught:
        parse_event(text, units)
    assert str(caught.value) == message


@given(st.sampled_from(SPANS), st.sampled_from(("", *EDGES)), st.sampled_from(UNITS[:-1]))
def test_every_event_is_itself_and_one_of_the_trace(event, edge, unit):
    name = f"{event}.{edge}" if edge else event
    assert parse_event(f"{name}:{unit}", UNITS) == (name, unit)
    assert split_event(name) == (Kind[event.upper()], Edge[(edge or "begin").upper()])


def test_an_instant_has_one_edge():
    assert split_event("reshard") == (Kind.RESHARD, Edge.INSTANT)


@pytest.mark.parametrize("when", ["num_bytes > 1e6", "unit == 'head' and not step % 2", "kind in ('wait', 'step')"])
def test_conditions(when):
    assert Condition.parse(when, None).text == when


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("num_bytes >", "--when takes a Python expression such as 'num_bytes > 1e6', not 'num_bytes >'"),
        ("print(1)", "--when takes names, numbers and operators only, no Call as in 'print(1)'"),
        ("unit.name", "--when takes names, numbers and operators only, no Attribute as in 'unit.name'"),
        (
            "num_byte > 1",
            (
                "--when has no name 'num_byte'; the names, nearest first: num_bytes, "
                "unit, step, grad_norm, nan, kind, edge, rank, phase, ordinal"
            ),
        ),
        ("rank == 1", "a condition on the rank would stop ranks at different events: write --rank R instead"),
        ("[x for x in unit]", "--when takes names, numbers and operators only, no ListComp as in '[x for x in unit]'"),
        ("unit > 3", "--when cannot evaluate 'unit > 3': '>' not supported between instances of 'str' and 'int'"),
        ("-kind", "--when cannot evaluate '-kind': bad operand type for unary -: 'str'"),
        (
            "unit * num_bytes * num_bytes == ''",
            (
                "--when computes with numbers only, not with strings or lists as in "
                "\"unit * num_bytes * num_bytes == ''\""
            ),
        ),
        (
            "('x' or 1) * num_bytes",
            "--when computes with numbers only, not with strings or lists as in \"('x' or 1) * num_bytes\"",
        ),
        (
            "num_bytes * [1, 2]",
            "--when computes with numbers only, not with strings or lists as in 'num_bytes * [1, 2]'",
        ),
        (
            "'%999999999d' % step",
            "--when computes with numbers only, not with strings or lists as in \"'%999999999d' % step\"",
        ),
        ("__import__('os')", "--when takes names, numbers and operators only, no Call as in \"__import__('os')\""),
        ("2 ** 64 > step", "--when takes names, numbers and operators only, no Pow as in '2 ** 64 > step'"),
        ("unit[0] == 'b'", "--when takes names, numbers and operators only, no Subscript as in \"unit[0] == 'b'\""),
        ("(lambda: 1)", "--when takes names, numbers and operators only, no Lambda as in '(lambda: 1)'"),
        (
            "f'{unit}' == 'x'",
            "--when takes names, numbers and operators only, no JoinedStr as in \"f'{unit}' == 'x'\"",
        ),
        ("", "--when takes a Python expression such as 'num_bytes > 1e6', not ''"),
    ],
)
def test_invalid_conditions(when, message):
    with pytest.raises(UsageError) as caught:
        Condition.parse(when, None)
    assert str(caught.value) == message


EVENT = {
    **{"kind": "all_gather", "edge": "begin", "phase": "forward", "unit": "blocks.2"},
    **{"num_bytes": 4096, "step": 5, "ordinal": 17, "rank": 2, "nan": 0, "grad_norm": 2.0},
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


@pytest.mark.parametrize(
    ("text", "when", "expected"),
    [
        ("nan", None, ("optimizer", "nan")),
        (" grad_norm>10", "step > 5", ("optimizer", "(step > 5) and (grad_norm>10)")),
        ("all_gather:nan", "nan", ("all_gather:nan", "nan")),
        ("forward", None, ("forward", None)),
    ],
)
def test_a_condition_on_gradients_is_one_on_the_optimizers_step(text, when, expected):
    assert with_condition(text, when) == expected


@pytest.mark.parametrize(
    ("rank", "event", "message"),
    [(None, "forward", "%fsdp break add optimizer --when 'nan > 1'"), (1, "optimizer", "leave --rank out")],
)
def test_gradients_are_compared_by_all_ranks_before_the_optimizers_step(rank, event, message):
    assert Condition.parse("nan > 1", None, "optimizer").uses_gradients
    with pytest.raises(UsageError, match=re.escape(message)):
        Condition.parse("nan > 1", rank, event)


def test_a_condition_may_use_the_rank_if_one_rank_stops():
    assert Condition.parse("rank == 1", 1).holds({"rank": 1})
    for name in FIELDS:
        assert not Condition.parse(f"{name} == 1", 0).holds({name: 2})


def test_the_nearest_comes_first():
    assert nearest("reducescater", EVENTS)[0] == "reduce_scatter"
