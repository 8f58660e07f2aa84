"""The rows of one rank while they are put together from the spans of another tool."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.events import Comm, Edge, Kind, Phase
from workbench.trace.columns import RankTrace
from workbench.trace.schema import NO_CATEGORY, ROW_DTYPE, GroupInfo

NO_UNIT = -1
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})(?!\d)")
_NUMBER_AT_END = re.compile(r"(\d{1,6})\D*$")


def rank_in_name(name: str) -> int | None:
    """Return the rank that the name of a file gives; None if it gives none.

    Example: ``"rank3.json" -> 3``, ``"nccl_trace_rank_12" -> 12``, ``"host_7.pt.trace.json" -> 7``.
    """
    found = _RANK_IN_NAME.search(name) or _NUMBER_AT_END.search(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, kw_only=True)
class EventRow:
    """One row, without its number; fields as those of :data:`~workbench.trace.schema.ROW_DTYPE`.

    Attributes:
        device_ns: when the device reached it; None on a host.
        stream: name of the device's stream.
    """

    t_ns: int
    kind: Kind
    edge: Edge
    unit: int = NO_UNIT
    num_bytes: int = 0
    comm: Comm | None = None
    device_ns: int | None = None
    stream: str = ""


@dataclass(frozen=True, kw_only=True)
class Period:
    """A time of one phase or one step."""

    begin_ns: int
    end_ns: int
    value: int


@dataclass(eq=False)
class RankRows:
    """Rows of one rank, in any order; those of equal times in their order.

    Attributes:
        rank: its number.
        rows: what was added.
    """

    rank: int
    rows: list[EventRow] = field(default_factory=list)

    def span(self, kind: Kind, begin_ns: int, end_ns: int | None, unit: int = NO_UNIT, **more: Any) -> None:  # noqa: ANN401
        """Add a begin and, unless ``end_ns`` is None, an end; ``more``: further fields of both."""
        self.add(kind, Edge.BEGIN, begin_ns, unit, **more)
        if end_ns is not None:
            self.add(kind, Edge.END, max(end_ns, begin_ns), unit, **more)

    def add(self, kind: Kind, edge: Edge, t_ns: int, unit: int = NO_UNIT, **more: Any) -> None:  # noqa: ANN401 - fields
        """Add one row; ``more``: its further fields."""
        self.rows.append(EventRow(t_ns=t_ns, kind=kind, edge=edge, unit=unit, **more))

    def trace(self, strings: list[str], steps: Sequence[Period], phases: Sequence[Period]) -> RankTrace:
        """Return the rows as a rank's trace; names of streams are appended to ``strings``.

        Args:
            strings: the table of the header.
            steps: the steps, ascending, without overlap.
            phases: the phases, likewise; outside of them the rank is idle.
        """
        rows = sorted(self.rows, key=lambda row: row.t_ns)
        found = np.zeros(len(rows), ROW_DTYPE)
        found["t_ns"] = [row.t_ns for row in rows]
        found["num_bytes"] = [row.num_bytes for row in rows]
        found["value"] = np.nan
        found["module"] = -1
        found["unit"] = [row.unit for row in rows]
        found["kind"] = [row.kind for row in rows]
        found["edge"] = [row.edge for row in rows]
        found["comm_group"] = [-1 if row.comm is None else row.comm.group for row in rows]
        found["comm_seq"] = [-1 if row.comm is None else row.comm.seq for row in rows]
        found["category"] = NO_CATEGORY
        found["step"] = _values_at(found["t_ns"], steps, -1)
        found["phase"] = _values_at(found["t_ns"], phases, Phase.IDLE)
        found = np.concatenate([found, _device_rows(rows, strings)])
        found["seq"] = np.arange(len(found))
        return RankTrace(self.rank, found)


def _values_at(t_ns: np.ndarray, stretches: Sequence[Period], outside: int) -> np.ndarray:
    """Return the value of the stretch at each time; both its ends belong to it, and the earlier of two that touch."""
    if not stretches:
        return np.full(len(t_ns), outside)
    begins, ends, values = (
        np.array([getattr(each, name) for each in stretches]) for name in ("begin_ns", "end_ns", "value")
    )
    place = np.searchsorted(ends, t_ns, "left")
    inside = np.minimum(place, len(ends) - 1)
    return np.where((place < len(ends)) & (t_ns >= begins[inside]), values[inside], outside)


def _device_rows(rows: Sequence[EventRow], strings: list[str]) -> np.ndarray:
    """Return a DEVICE row for every row that the device has reached."""
    timed = [(place, row) for place, row in enumerate(rows) if row.device_ns is not None]
    found = np.zeros(len(timed), ROW_DTYPE)
    places = {name: place for place, name in enumerate(strings)}
    for _, row in timed:
        if row.stream not in places:
            places[row.stream] = len(strings)
            strings.append(row.stream)
    found["t_ns"] = [row.device_ns for _, row in timed]
    found["value"] = [place for place, _ in timed]
    found["module"] = [places[row.stream] for _, row in timed]
    found["step"], found["unit"], found["comm_group"], found["comm_seq"] = -1, NO_UNIT, -1, -1
    found["kind"], found["edge"], found["category"] = Kind.DEVICE, Edge.INSTANT, NO_CATEGORY
    return found


class GroupTable:
    """The communication groups of all ranks: each has one index, by its name and ranks.

    Attributes:
        groups: the table of the header.
    """

    def __init__(self) -> None:
        self.groups: list[GroupInfo] = []
        self._index: dict[tuple[str, tuple[int, ...]], int] = {}

    def index_of(self, name: str, ranks: Iterable[int]) -> int:
        """Return the index of a group; a second one of the same name gets another name."""
        key = (name, tuple(ranks))
        if key not in self._index:
            used = {group.name for group in self.groups}
            number = next(n for n in range(1, len(used) + 2) if _numbered(name, n) not in used)
            self._index[key] = len(self.groups)
            self.groups.append(GroupInfo(name=_numbered(name, number), ranks=key[1]))
        return self._index[key]


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} ({number})"
