"""Headers and key frames as plain JSON data, and the join of two headers.

The dataclasses of :mod:`workbench.trace.schema` drive the conversion: a field added there needs no change here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, cast

import numpy as np

from workbench.base.codec import CodecError, decode, defaults, encode
from workbench.errors import TraceError
from workbench.events import Category, Param, Unit
from workbench.trace.schema import SCHEMA_VERSION, ClockReading, GroupInfo, Header, HostClock, KeyFrame, Rows

T = TypeVar("T")
Entry = TypeVar("Entry", str, GroupInfo)


def header_to_dict(header: Header) -> dict[str, Any]:
    """Return ``header`` as data that JSON can hold."""
    data: dict[str, Any] = encode(header)
    return data


def header_from_dict(data: dict[str, Any]) -> Header:
    """Return the header from the data of :func:`header_to_dict`, also after a JSON round trip.

    Raises:
        TraceError: written by another schema, or a field is missing, unknown or of the wrong type.
    """
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is int and version != SCHEMA_VERSION:
        what = "update fsdp-workbench to read it" if version > SCHEMA_VERSION else "record the trace again"
        raise TraceError(
            f"the trace has schema version {version}, and this workbench reads version {SCHEMA_VERSION}: {what}"
        )
    return _decode(Header, _completed(data), "header")


def _completed(data: Any) -> Any:  # noqa: ANN401 - a file may contain anything
    """Return a header's data with defaults for the fields that units and parameters lacked when it was written."""
    if not isinstance(data, dict) or not _are_objects(data.get("units")):
        return data
    return {**data, "units": [_completed_unit(unit) for unit in data["units"]]}


def _completed_unit(data: dict[str, Any]) -> dict[str, Any]:
    unit = {**defaults(Unit), **data}
    if _are_objects(unit.get("params")):
        unit["params"] = [{**defaults(Param), **param} for param in unit["params"]]
    if _are_objects(unit["earlier"]):
        unit["earlier"] = [_completed_unit(each) for each in unit["earlier"]]
    return unit


def _are_objects(data: Any) -> bool:  # noqa: ANN401 - a file may contain anything
    return isinstance(data, list | tuple) and all(isinstance(each, dict) for each in data)


def key_frame_to_dict(key_frame: KeyFrame) -> dict[str, Any]:
    """Return ``key_frame`` as data that JSON can hold."""
    data: dict[str, Any] = encode(key_frame)
    return data


def key_frame_from_dict(data: dict[str, Any]) -> KeyFrame:
    """Return the key frame from the data of :func:`key_frame_to_dict`, also after a JSON round trip.

    Raises:
        TraceError: a field is missing, unknown or of the wrong type.
    """
    key_frame = _decode(KeyFrame, data, "key_frame")
    num_categories = len(key_frame.bytes_by_category)
    if num_categories != len(Category):
        raise TraceError(f"key_frame.bytes_by_category has {num_categories} entries, expected {len(Category)}")
    return key_frame


def join(first: Header, second: Header) -> Header:
    """Return one header for rows of both: all strings, groups, units, ranks and clock readings of either.

    Indices into ``first``'s tables stay valid; rows written against ``second`` go through :func:`translate`. Where both
    describe the same unit or rank, or the run as a whole, ``second`` is newer and wins. A unit that either describes as
    not in use stays out of use: it cannot work without all its ranks.
    """
    run = second if second.world_size else first
    return dataclasses.replace(
        run,
        ranks=tuple(v for _, v in sorted({r.rank: r for r in first.ranks + second.ranks}.items())),
        clocks=_clocks(first.clocks, second.clocks),
        units=_units(first.units, second.units),
        comm_groups=_union(first.comm_groups, second.comm_groups),
        strings=_union(first.strings, second.strings),
    )


def translate(rows: Rows, source: Header, target: Header) -> Rows:
    """Return ``rows`` with ``module`` and ``comm_group`` pointing into ``target``'s tables instead of ``source``'s.

    Args:
        rows: written against ``source``; never changed, and returned as they are if no index changes.
        source: a header whose strings and groups are all in ``target``, maybe at other indices.
        target: result of :func:`join`.
    """
    rows = _moved(rows, "module", source.strings, target.strings)
    return _moved(rows, "comm_group", source.comm_groups, target.comm_groups)


def _moved(rows: Rows, column: str, old: tuple[Entry, ...], new: tuple[Entry, ...]) -> Rows:
    if old == new[: len(old)]:
        return rows
    places = {entry: place for place, entry in enumerate(new)}
    # the last entry is for index -1 (none)
    moved = np.array([places[entry] for entry in old] + [-1])
    rows = rows.copy()
    rows[column] = moved[rows[column]]
    return rows


def _units(first: tuple[Unit, ...], second: tuple[Unit, ...]) -> tuple[Unit, ...]:
    units = {unit.index: unit for unit in first}
    for unit in second:
        known = units.get(unit.index, unit)
        if known.in_use:
            units[unit.index] = unit
        else:
            retired, gone = known.retired or unit.retired, known.gone or unit.gone
            units[unit.index] = dataclasses.replace(unit, retired=retired, gone=gone)
    return tuple(unit for _, unit in sorted(units.items()))


def _clocks(first: tuple[HostClock, ...], second: tuple[HostClock, ...]) -> tuple[HostClock, ...]:
    """All readings of both, for each clock in the order of their times."""
    if not second:
        return first
    readings: dict[tuple[int, ...], set[ClockReading]] = {}
    for clock in first + second:
        readings.setdefault(clock.ranks, set()).update(clock.readings)
    return tuple(HostClock(ranks=ranks, readings=tuple(sorted(found))) for ranks, found in sorted(readings.items()))


def _union(first: tuple[Entry, ...], second: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """``first``, then the new entries of ``second``: indices into ``first`` stay valid."""
    known = set(first)
    return first + tuple(entry for entry in dict.fromkeys(second) if entry not in known)


def _decode(kind: type[T], data: Any, where: str) -> T:  # noqa: ANN401 - a file may contain anything
    try:
        return cast("T", decode(kind, data, where))
    except CodecError as error:
        raise TraceError(str(error)) from error
