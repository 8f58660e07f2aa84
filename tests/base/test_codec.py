import json
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Literal

import pytest

from workbench.base import codec
from workbench.base.codec import CodecError, NotFinite, decode, decode_named, encode, sent_number

TOO_LARGE = "is a number of 64 bits; at most 63 and a sign fit"
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
        ({"pet": {"lives": 9}}, "unknown house.pet None; known: cat, dog"),
        ({"named": {"7": {"word": "dog", "lives": 9}}}, "house.named[7] is a 'dog', expected a 'cat'"),
        ({"counted": {"x": 0.5}}, "house.counted has the key 'x', expected an integer"),
        ({"counted": {"7": "0.5"}}, "house.counted[7] is '0.5', expected float"),
        ({"colour": 2}, "house.colour is 2, not a valid Colour"),
        ({"kind": "tiny"}, "house.kind is 'tiny', expected one of 'small', 'large'"),
        ({"number": None}, "house.number is None, expected int or str"),
        ({"number": 2**63}, f"house.number {TOO_LARGE}"),
        ({"rooms": [True]}, "house.rooms[0] is True, expected int"),
        ({"rooms": [1, 2**63]}, f"house.rooms[1] {TOO_LARGE}"),
        ({"rooms": [1, -(2**63) - 1]}, f"house.rooms[1] {TOO_LARGE}"),
        ({"counted": {str(2**63): 0.5}}, f"a key of house.counted {TOO_LARGE}"),
        ({"pixels": 1}, "the bytes of house.pixels are missing"),
        ({"pixels": -1}, "the bytes of house.pixels are missing"),
        ({"door": 1}, "house has unknown ['door']"),
        ([], "house is [], expected dict"),
        ({"rooms": {}}, "house.rooms is {}, expected list or tuple"),
        ({"named": []}, "house.named is [], expected dict"),
        ({"pixels": "0"}, "house.pixels is '0', expected int"),
        ({"pet": 3}, "unknown house.pet None; known: cat, dog"),
        ({"colour": "1"}, "house.colour is '1', expected int"),
    ],
)
def test_invalid_data_is_named(changed, message):
    data, buffers = sent(FULL)
    with pytest.raises(CodecError) as caught:
        decode(House, data | changed if changed else changed, "house", buffers)
    assert str(caught.value) == message


def test_all_fields_that_are_missing_or_unknown_are_named():
    with pytest.raises(CodecError, match=r"^cat lacks \['lives'\] and has unknown \['claws', 'tail'\]$"):
        decode(Cat, {"word": "cat", "tail": 1, "claws": 2}, "cat")
    with pytest.raises(CodecError, match=r"^cat lacks \['word'\]$"):
        decode(Cat, {"lives": 1}, "cat")


def test_numbers_of_64_bits_are_taken_at_both_ends():
    least, most = -(2**63), 2**63 - 1
    house = House(named={}, counted={least: 0.5, most: 1.5}, number=least, rooms=(least, most))
    data, buffers = sent(house)
    assert decode(House, data, "house", buffers) == house
    assert decode(House, data | {"number": most}, "house", buffers).number == most


def test_long_values_are_truncated():
    with pytest.raises(CodecError) as caught:
        decode(Cat, {"word": "cat", "lives": "9" * 10**6}, "cat")
    assert str(caught.value) == f"cat.lives is '{'9' * 79}, expected int"


def test_what_json_cannot_represent_has_a_name():
    assert [sent_number(value) for value in (math.nan, math.inf, -math.inf)] == ["nan", "inf", "-inf"]
    assert [sent_number(value) for value in (None, 0.0, -1.5)] == [None, 0.0, -1.5]


def test_missing_fields_have_their_defaults_only_where_that_is_wanted():
    known = {"dog": Dog}
    assert decode_named(known, {"word": "dog"}, "animal", fill=True) == Dog()
    assert decode_named(known, {"word": "dog", "tricks": ["sit"]}, "animal", fill=True) == Dog(("sit",))
    with pytest.raises(CodecError, match=r"^animal 'dog' lacks \['tricks'\]$"):
        decode_named(known, {"word": "dog"}, "animal")


def test_the_word_may_be_under_another_key():
    known = {"small": Box}
    assert decode_named(known, {"size": "small"}, "box", key="size") == Box("small")
    with pytest.raises(CodecError, match=r"^unknown box None; known: small$"):
        decode_named(known, {"word": "small"}, "box", key="size")


def test_members_of_enums_and_lists_are_plain_in_what_is_sent():
    assert type(encode(Colour.RED)) is int
    assert encode([Colour.RED, (Cat(1),)]) == [1, [{"word": "cat", "lives": 1}]]
    assert encode({7: Cat(2)}) == {"7": {"word": "cat", "lives": 2}}


@dataclass(frozen=True)
class Box:
    size: Literal["small", "large"] | Literal[""]


@pytest.mark.parametrize("size", ["small", ""])
def test_a_text_of_one_of_two_literals_arrives(size):
    assert decode(Box, encode(Box(size)), "box") == Box(size)


def test_a_value_outside_of_a_union_is_refused_with_all_that_may_come():
    with pytest.raises(CodecError, match=r"^box.size is 'huge', expected one of 'small', 'large', ''$"):
        decode(Box, {"size": "huge"}, "box")
    with pytest.raises(CodecError, match=r"^loss is 'lots', expected one of 'nan', 'inf', '-inf' or float or nothing$"):
        decode(float | NotFinite | None, "lots", "loss")


def test_whole_numbers_are_checked_together(monkeypatch):
    monkeypatch.setattr(codec, "_decode_plain", None)  # one by one takes long
    ends = (-(2**63), 2**63 - 1)
    assert decode(tuple[int, ...], ends, "counts") == ends
