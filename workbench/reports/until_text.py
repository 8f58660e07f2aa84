"""The events that occurred when ``step --until EVENT`` never stopped, the most similar first. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from workbench.events import STOPS, Edge, Kind, unit_words
from workbench.protocol.breakpoints import nearest
from workbench.replay.spans import of_kind
from workbench.reports.event_text import unit_names
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header, Rows

MAX_CAME = 6
"""Maximum number of events listed."""


def came(trace: Trace, since: Mapping[int, int], event: str) -> list[str]:
    """Return the events of a request, named as for breakpoints, those most similar to ``event`` first.

    Args:
        trace: the trace.
        since: by rank, number of the first row of the request.
        event: the event that did not occur, such as ``all_gather:blocks.9``, ``forward.end:*`` or ``offload``.
    """
    edge = Edge.END if event.partition(":")[0].endswith(".end") else Edge.BEGIN
    found = {
        name
        for rank in trace.ranks
        for name in _names(_since(rank, since.get(rank.rank, 0)), trace.header, edge, with_unit=":" in event)
    }
    return nearest(event, sorted(found))[:MAX_CAME]


def _since(rank: RankTrace, seq: int) -> Rows:
    return rank.rows[max(seq - rank.start.seq, 0) :]


def _names(rows: Rows, header: Header, edge: Edge, *, with_unit: bool) -> set[str]:
    units = {index: unit_words(name) for index, name in unit_names(header).items()}
    rows = rows[of_kind(rows, STOPS.values()) & np.isin(rows["edge"], (edge, Edge.INSTANT))]
    distinct = set(zip(*(rows[name].tolist() for name in ("kind", "edge", "unit")), strict=True))
    return {
        Kind(kind).key + (".end" if at == Edge.END else "") + (f":{units[unit]}" if with_unit and unit in units else "")
        for kind, at, unit in distinct
    }
