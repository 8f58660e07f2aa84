"""Headers and key frames as plain JSON data, and the join of two headers.

The codec is driven by the dataclasses of :mod:`workbench.trace.schema`: a field added there needs nothing here.
"""

from __future__ import annotations

import dataclasses
from enum import IntEnum
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from workbench.errors import TraceError
from workbench.events import Category
from workbench.trace.schema import SCHEMA_VERSION, CommGroup, Header, KeyFrame, Rows
from workbench.trace.versions import upgrade_header, upgrade_key_frame

_LIMIT = 2**63  # a file may say anything, and folds count in 64 bits

T = TypeVar("T")
Entry = TypeVar("Entry", str, CommGroup)


def header_to_dict(header: Header) -> dict[str, Any]:
    """Return ``header`` as data that JSON can hold."""
    data: dict[str, Any] = _encode(header)
    return data


def header_from_dict(data: dict[str, Any]) -> Header:
    """Inverse of :func:`header_to_dict`, also after a trip through JSON.

    Raises:
        TraceError: written by a newer schema, or a field is missing, unknown or of the wrong type.
    """
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is int and version > SCHEMA_VERSION:
        raise TraceError(
            f"the trace has schema version {version}, this workbench reads up to {SCHEMA_VERSION}: "
            "update fsdp-workbench to read it"
        )
    return _decode(Header, upgrade_header(data) if isinstance(data, dict) else data, "header")


def key_frame_to_dict(key_frame: KeyFrame) -> dict[str, Any]:
    """Return ``key_frame`` as data that JSON can hold."""
    data: dict[str, Any] = _encode(key_frame)
    return data


def key_frame_from_dict(data: dict[str, Any], version: int = SCHEMA_VERSION) -> KeyFrame:
    """Inverse of :func:`key_frame_to_dict`, also after a trip through JSON.

    Args:
        data: what it returned.
        version: of the schema it was written by.

    Raises:
        TraceError: a field is missing, unknown or of the wrong type.
    """
    key_frame = _decode(KeyFrame, upgrade_key_frame(data, version), "key_frame")
    num_categories = len(key_frame.bytes_by_category)
    if num_categories != len(Category):
        raise TraceError(f"key_frame.bytes_by_category has {num_categories} entries, expected {len(Category)}")
    return key_frame


def join(first: Header, second: Header) -> Header:
    """Return one header for rows of both: every string, group, unit and rank of either.

    Indices into ``first``'s tables stay valid; rows written against ``second`` go through :func:`translate`. Where
    both describe the same unit or rank, or the run as a whole, ``second`` is the newer and wins.
    """
    run = second if second.world_size else first
    return dataclasses.replace(
        run,
        ranks=tuple(v for _, v in sorted({r.rank: r for r in first.ranks + second.ranks}.items())),
        units=tuple(v for _, v in sorted({u.index: u for u in first.units + second.units}.items())),
        comm_groups=_union(first.comm_groups, second.comm_groups),
        strings=_union(first.strings, second.strings),
    )


def translate(rows: Rows, source: Header, target: Header) -> Rows:
    """Return ``rows`` with ``module`` and ``comm_group`` pointing into ``target``'s tables instead of ``source``'s.

    Args:
        rows: written against ``source``; never changed, and returned as they are if nothing moves.
        source: a header whose strings and groups ``target`` holds as well, maybe elsewhere.
        target: result of :func:`join`.
    """
    rows = _moved(rows, "module", source.strings, target.strings)
    return _moved(rows, "comm_group", source.comm_groups, target.comm_groups)


def _moved(rows: Rows, column: str, old: tuple[Entry, ...], new: tuple[Entry, ...]) -> Rows:
    if old == new[: len(old)]:
        return rows
    places = {entry: place for place, entry in enumerate(new)}
    # the last entry is where index -1 (none) looks
    moved = np.array([places[entry] for entry in old] + [-1])
    rows = rows.copy()
    rows[column] = moved[rows[column]]
    return rows


def _union(first: tuple[Entry, ...], second: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """``first``, then the new ones of ``second``: places in ``first`` stay."""
    known = set(first)
    return first + tuple(entry for entry in dict.fromkeys(second) if entry not in known)


def _encode(value: Any) -> Any:  # noqa: ANN401 - any value of the schema
    if dataclasses.is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    return int(value) if isinstance(value, IntEnum) else value


def _decode(kind: type[T], data: Any, where: str) -> T:  # noqa: ANN401 - anything may stand in a file
    """Return ``data`` as a ``kind``; ``where`` is its path, for messages."""
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, data, where)
    origin, args = get_origin(kind), get_args(kind)
    value: Any
    if origin is tuple:
        _expect(data, (list, tuple), where)
        value = tuple(_decode(args[0], item, f"{where}[{place}]") for place, item in enumerate(data))
    elif origin is dict:
        _expect(data, (dict,), where)
        value = {_decode_key(key, where): _decode(args[1], item, f"{where}[{key}]") for key, item in data.items()}
    elif origin is UnionType:
        _expect(data, args, where)
        value = data
    elif issubclass(kind, IntEnum):
        _expect(data, (int,), where)
        if data not in {int(member) for member in kind}:
            raise TraceError(f"{where} is {data}, which is no {kind.__name__}")
        value = kind(data)
    else:
        _expect(data, (kind,), where)
        value = data
    if isinstance(value, int) and not -_LIMIT <= value < _LIMIT:
        raise TraceError(f"{where} is a number of {value.bit_length()} bits, and 63 and a sign are what fits")
    return value  # type: ignore[no-any-return]


def _decode_fields(kind: type[T], data: Any, where: str) -> T:  # noqa: ANN401
    _expect(data, (dict,), where)
    hints = get_type_hints(kind)
    wrong = hints.keys() ^ data.keys()
    if wrong:
        missing, unknown = sorted(wrong & hints.keys()), sorted(map(str, wrong - hints.keys()))
        raise TraceError(f"{where} lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}")
    return kind(**{name: _decode(hint, data[name], f"{where}.{name}") for name, hint in hints.items()})


def _decode_key(key: Any, where: str) -> int:  # noqa: ANN401
    """Return a key of a JSON object as the int it was."""
    try:
        return int(key)
    except ValueError:
        raise TraceError(f"{where} has the key {key!r}, expected an integer") from None


def _expect(data: Any, kinds: tuple[type, ...], where: str) -> None:  # noqa: ANN401
    """Raise unless ``data`` is of exactly one of ``kinds`` (a bool is no int)."""
    if not any(type(data) is kind for kind in kinds) and not isinstance(data, IntEnum):
        raise TraceError(f"{where} is {data!r:.80}, expected {' or '.join(kind.__name__ for kind in kinds)}")
