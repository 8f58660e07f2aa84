"""Conversion of frozen dataclasses to plain JSON data and back, driven by their fields and strict about the input.

Fields are ``bool``, ``int``, ``float``, ``str``, a ``Literal`` of texts, an ``IntEnum``, ``tuple[T, ...]`` or
``Sequence[T]``, ``dict[int, T]`` or ``dict[str, T]``, another dataclass, or a union of these. ``Any`` is JSON data
that passes through unchanged. A ``memoryview`` travels outside the data, which holds its index. The data of a dataclass
with a class attribute ``word`` include that word, which distinguishes the members of a union.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

NotFinite = Literal["nan", "inf", "-inf"]
"""Stand-ins for numbers that are not finite, which JSON cannot represent."""

_LIMIT = 2**63  # a file or a message may hold any number, and folds count in 64 bits
_PLAIN = {bool, int, float, str, NoneType}
_SHOWN = 80
"""Characters of an unexpected value that an error message shows."""


class CodecError(ValueError):
    """Data do not match a dataclass; the message names the place, the value found and the value expected."""


def sent_number(value: float | None) -> float | NotFinite | None:
    """Return ``value`` in a form that JSON can hold: its name if it is not finite."""
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def encode(value: Any, buffers: list[memoryview] | None = None) -> Any:  # noqa: ANN401 - any value that the module names
    """Return ``value`` as data that JSON can hold.

    Args:
        value: of a type that the module docstring lists.
        buffers: receives the memoryviews.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    names = _names(cast("Any", kind))
    if names is not None:
        data = {name: encode(getattr(value, name), buffers) for name in names}
        word = getattr(value, "word", None)
        return data if word is None else {"word": word, **data}
    if isinstance(value, (tuple, list)):
        return [encode(item, buffers) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item, buffers) for key, item in value.items()}
    if isinstance(value, memoryview) and buffers is not None:
        buffers.append(value)
        return len(buffers) - 1
    return int(value) if isinstance(value, IntEnum) else value


def decode(kind: Any, data: Any, where: str, buffers: Sequence[memoryview] = ()) -> Any:  # noqa: ANN401 - anything may come
    """Return ``data``, which may have passed through JSON, as a ``kind``.

    Args:
        kind: a type that the module docstring lists.
        data: result of :func:`encode`.
        where: name of the input, for messages.
        buffers: the memoryviews that :func:`encode` collected.

    Raises:
        CodecError: a field is missing, unknown or of another type, or a number does not fit into 64 bits.
        ValueError: the dataclass itself rejects a value.
    """
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind):
        return _decode_fields(cast("type[Any]", kind), data, where, buffers)
    origin, args = get_origin(kind), get_args(kind)
    if origin in {tuple, Sequence}:
        _expect(data, (list, tuple), where)
        items = (decode(args[0], item, f"{where}[{place}]", buffers) for place, item in enumerate(data))
        return tuple(data if args[0] is int and _are_whole(data) else items)
    if origin is dict:
        _expect(data, (dict,), where)
        items = (
            (_key(args[0], key, where), decode(args[1], item, f"{where}[{key}]", buffers)) for key, item in data.items()
        )
        return dict(items)
    if origin in {UnionType, Union, Literal}:
        return _decode_union((kind,) if origin is Literal else args, data, where, buffers)
    return _decode_plain(kind, data, where, buffers)


def _decode_plain(kind: Any, data: Any, where: str, buffers: Sequence[memoryview]) -> Any:  # noqa: ANN401
    if kind is memoryview:
        _expect(data, (int,), where)
        if not 0 <= data < len(buffers):
            raise CodecError(f"the bytes of {where} are missing")
        return buffers[data]
    is_enum = issubclass(kind, IntEnum)
    _expect(data, (int if is_enum else kind,), where)
    if is_enum and data not in list(kind):
        raise CodecError(f"{where} is {data}, not a valid {kind.__name__}")
    if isinstance(data, int):
        _check_size(data, where)
    return kind(data) if is_enum else data


def decode_named(
    known: Mapping[str, type],
    data: Any,  # noqa: ANN401 - anything may come
    where: str,
    *,
    key: str = "word",
    fill: bool = False,
) -> Any:  # noqa: ANN401 - one of them
    """Return ``data`` as the ``known`` dataclass that its word selects.

    Args:
        known: the dataclasses, by word.
        data: result of :func:`encode`.
        where: name of the input, for messages.
        key: key of the word in ``data``.
        fill: give a missing field its default; otherwise a missing field is an error.

    Raises:
        CodecError: the word is missing or unknown, or as for :func:`decode`.
    """
    word = data.get(key) if isinstance(data, dict) else None
    if not isinstance(word, str) or word not in known:
        raise CodecError(f"unknown {where} {word!r:.{_SHOWN}}; known: {', '.join(known)}")
    return decode(known[word], {**defaults(known[word]), **data} if fill else data, f"{where} {word!r}")


def _decode_union(args: tuple[Any, ...], data: Any, where: str, buffers: Sequence[memoryview]) -> Any:  # noqa: ANN401
    texts = tuple(text for arg in args if get_origin(arg) is Literal for text in get_args(arg))
    if data in texts:
        return data
    plain = tuple(arg for arg in args if get_origin(arg) is None and not dataclasses.is_dataclass(arg))
    structured = [arg for arg in args if arg not in plain and get_origin(arg) is not Literal]
    if structured and type(data) not in plain:
        words = {cast("Any", arg).word: cast("type", arg) for arg in structured if hasattr(arg, "word")}
        return decode_named(words, data, where) if words else decode(structured[0], data, where, buffers)
    _expect(data, plain, where, texts)
    return data if data is None else _decode_plain(type(data), data, where, buffers)


def _decode_fields(kind: type[Any], data: Any, where: str, buffers: Sequence[memoryview]) -> Any:  # noqa: ANN401
    _expect(data, (dict,), where)
    hints, word = hints_of(cast("Any", kind)), getattr(kind, "word", None)
    expected = hints.keys() | (set() if word is None else {"word"})
    if expected != data.keys():
        missing, unknown = sorted(expected - data.keys()), sorted(map(str, data.keys() - expected))
        faults = [f"lacks {missing}"] * bool(missing) + [f"has unknown {unknown}"] * bool(unknown)
        raise CodecError(f"{where} {' and '.join(faults)}")
    if word is not None and data["word"] != word:
        raise CodecError(f"{where} is a {data['word']!r:.{_SHOWN}}, expected a {word!r}")
    return kind(**{name: decode(hint, data[name], f"{where}.{name}", buffers) for name, hint in hints.items()})


@cache
def _names(kind: Any) -> tuple[str, ...] | None:  # noqa: ANN401 - any type
    """Return the names of a dataclass's fields; None if ``kind`` is not a dataclass."""
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def defaults(kind: type) -> dict[str, Any]:
    """Return the encoded defaults of a dataclass's fields."""
    fields = dataclasses.fields(cast("Any", kind))
    return {f.name: encode(f.default) for f in fields if f.default is not dataclasses.MISSING}


@cache
def hints_of(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    """Return the types of a dataclass's fields; cached, as the lookup costs more than all the rest of a decode."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _are_whole(data: Sequence[Any]) -> bool:
    """Whether all items are integers that fit 64 bits; checking each one separately is slow for long arrays."""
    return bool(data) and {*map(type, data)} == {int} and min(data) >= -_LIMIT and max(data) < _LIMIT


def _key(kind: type, key: Any, where: str) -> int | str:  # noqa: ANN401
    """Return a key of a JSON object as the original int or text."""
    if kind is str:
        return str(key)
    try:
        number = int(key)
    except ValueError:
        raise CodecError(f"{where} has the key {key!r:.{_SHOWN}}, expected an integer") from None
    _check_size(number, f"a key of {where}")
    return number


def _check_size(number: int, where: str) -> None:
    if not -_LIMIT <= number < _LIMIT:
        raise CodecError(f"{where} is a number of {number.bit_length()} bits; at most 63 and a sign fit")


def _expect(data: Any, kinds: tuple[Any, ...], where: str, texts: Sequence[str] = ()) -> None:  # noqa: ANN401
    """Raise unless ``data`` is of exactly one of ``kinds`` (a bool is no int); the error also lists ``texts``."""
    if not any(type(data) is kind for kind in kinds):
        named = [f"one of {', '.join(map(repr, texts))}"] * bool(texts)
        named += ["nothing" if kind is NoneType else kind.__name__ for kind in kinds]
        raise CodecError(f"{where} is {data!r:.{_SHOWN}}, expected {' or '.join(named)}")
