import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Literal

import pytest

from workbench.codec import CodecError, decode, decode_named, encode

NO_PIXELS = memoryview(b"")


class Colour(IntEnum):
    RED = 1


@dataclass(frozen=True)
class Cat:
    word: ClassVar[str] = "cat"
    lives: int


@dataclass(frozen=True)
class Dog:
    word: ClassVar[str] = "dog"
    tricks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class House:
    pet: Cat | Dog | None = None
    named: dict[str, Cat] = None
    counted: dict[int, float] = None
    colour: Colour = Colour.RED
    number: int | str = 0
    rooms: tuple[int, ...] = ()
    kind: Literal["small", "large"] = "small"
    anything: Any = None
    pixels: memoryview = NO_PIXELS


FULL = House(
    **{"pet": Dog(("sit",)), "named": {"7": Cat(9)}, "counted": {7: 0.5}, "number": "7b"},
    **{"anything": {"x": [1, None]}, "pixels": memoryview(b"\x00\xff")},
)


def sent(value):
    """Return ``value`` encoded as JSON, and its buffers."""
    buffers = []
    return json.loads(json.dumps(encode(value, buffers))), buffers


@pytest.mark.parametrize("house", [FULL, House(named={}, counted={}, number=3, pet=Cat(1))])
def test_encoding_round_trips(house):
    data, buffers = sent(house)
    assert decode(House, data, "house", buffers) == house


def test_messages_with_a_word_contain_it():
    assert encode(Dog(("sit",))) == {"word": "dog", "tricks": ["sit"]}
    assert decode_named({"dog": Dog, "cat": Cat}, {"word": "cat", "lives": 9}, "animal") == Cat(9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pet": {"word": "cow"}}, "unknown house.pet 'cow'; known: cat, dog"),
        ({"pet": {"word": "cat", "lives": True}}, "house.pet 'cat'.lives is True, expected int"),
        ({"pet": {"lives": 9}}, "unknown house.pet None"),
        ({"named": {"7": {"word": "dog", "lives": 9}}}, "house.named[7] is a 'dog', expected a 'cat'"),
        ({"counted": {"x": 0.5}}, "house.counted has the key 'x', expected an integer"),
        ({"counted": {"7": "0.5"}}, "house.counted[7] is '0.5', expected float"),
        ({"colour": 2}, "house.colour is 2, not a valid Colour"),
        ({"kind": "tiny"}, "house.kind is 'tiny', expected one of 'small', 'large'"),
        ({"number": None}, "house.number is None, expected int or str"),
        ({"number": 2**63}, "house.number is a number of 64 bits"),
        ({"rooms": [1, 2**63]}, "house.rooms[1] is a number of 64 bits"),
        ({"rooms": [1, -(2**63) - 1]}, "house.rooms[1] is a number of 64 bits"),
        ({"counted": {str(2**63): 0.5}}, "a key of house.counted is a number of 64 bits"),
        ({"pixels": 1}, "the bytes of house.pixels are missing"),
        ({"pixels": -1}, "the bytes of house.pixels are missing"),
        ({"door": 1}, "house has unknown ['door']"),
    ],
)
def test_invalid_data_is_named(changed, message):
    data, buffers = sent(FULL)
    with pytest.raises(CodecError) as caught:
        decode(House, data | changed, "house", buffers)
    assert message in str(caught.value)


def test_long_values_are_truncated():
    with pytest.raises(CodecError) as caught:
        decode(Cat, {"word": "cat", "lives": "9" * 10**6}, "cat")
    assert len(str(caught.value)) < 200


@dataclass(frozen=True)
class Box:
    size: Literal["small", "large"] | Literal[""]


@pytest.mark.parametrize("size", ["small", ""])
def test_a_text_of_one_of_two_literals_arrives(size):
    assert decode(Box, encode(Box(size)), "box") == Box(size)


def test_a_text_outside_of_two_literals_is_refused():
    with pytest.raises(CodecError, match=r"box.size is 'huge', expected one of"):
        decode(Box, {"size": "huge"}, "box")
