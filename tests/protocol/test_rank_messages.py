"""Every request and every reply arrives as it was sent, and nothing else is accepted."""

import dataclasses
import json
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.command_strategies import commands
from workbench.base.codec import CodecError, decode, encode
from workbench.events import Edge, Kind, Phase, UnitState
from workbench.protocol.commands import ON_RANKS, Continue, Evaluate, Next, Reshard, Shard
from workbench.protocol.rank_messages import REQUESTS, Frame, Position, StepPosition, read_request
from workbench.protocol.starting import Boot, Connect

JSON = st.recursive(st.none() | st.booleans() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=2))
PLAIN = {
    **{words: st.sampled_from(words) for words in (Kind, Edge, Phase, UnitState)},
    **{bool: st.booleans(), str: st.text(max_size=9), NoneType: st.none(), None: st.none()},
    **{
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        Any: JSON,
        memoryview: st.binary(max_size=9).map(memoryview),
    },
}

CHECKED = {word: commands(word) for word in (Next, Shard, Reshard, Evaluate)}  # commands that refuse some values


def of(kind, within=()):
    """Return a strategy of the values of a type that a message may hold; none of a type is within one of it."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in CHECKED:
        return CHECKED[kind]
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        within = (*within, kind)
        return st.builds(kind, **{field.name: of(hints[field.name], within) for field in dataclasses.fields(kind)})
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.just(()) if args[0] in within else st.lists(of(args[0], within), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(of(args[0], within), of(args[1], within), max_size=2)
    return st.one_of([of(arg, within) for arg in args]) if args else PLAIN[kind]


@given(st.one_of([of(cls) for cls in REQUESTS.values()]))
def test_a_request_arrives(request):
    assert read_request(json.loads(json.dumps(encode(request)))) == request


STARTING = {cls.word: cls for cls in (Boot, Connect)}


@pytest.mark.parametrize("word", [*REQUESTS, *ON_RANKS, *STARTING])
def test_its_reply_arrives(word):
    kind = (REQUESTS | ON_RANKS | STARTING)[word].reply

    @given(of(kind))
    def arrives(reply):
        buffers = []
        data = json.loads(json.dumps(encode(reply, buffers)))
        assert decode(kind, data, "reply", buffers) == reply

    arrives()


@given(st.one_of([of(cls) for cls in STARTING.values()]))
def test_how_a_rank_is_started_arrives(request):
    assert decode(type(request), json.loads(json.dumps(encode(request))), request.word) == request


def test_a_command_that_is_a_request_is_sent_unchanged():
    assert read_request({"word": "next", "what": "unit"}) == Next(what="unit")
    sent = {"word": "continue", "foreground": True, "background": False}
    assert read_request(sent) == Continue(foreground=True)
    with pytest.raises(ValueError, match="next takes one of event, collective, unit, phase, not 'month'"):
        read_request({"word": "next", "what": "month"})


@pytest.mark.parametrize("data", [None, [], "where", {"op": "where"}, {"word": ["where"]}, {"word": "x" * 10**6}])
def test_an_invalid_request_is_refused_briefly(data):
    with pytest.raises(CodecError, match="unknown request") as caught:
        read_request(data)
    assert len(str(caught.value)) < 400


def test_later_places_are_greater():
    assert max(StepPosition(1, 9), StepPosition(2, 0)) == StepPosition(2, 0)
    assert Position().place < StepPosition(0, 0)


def test_a_frame_of_a_library_has_no_number():
    assert decode(Frame, encode(Frame(text="x")), "frame").number is None
