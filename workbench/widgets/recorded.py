"""A whole record for a page without a kernel: the answers of :mod:`workbench.live.view_server` as lookup tables.

The page answers the dashboard's questions from these tables (``static/record/kernel.js``). For ``feed`` they hold the
first answer itself, with every span; for ``at``, ``beside`` and ``window``, per rank, the description and arrival time
of each row, and every change of bytes and of units with its row. So the descriptions of events, and the states that
follow from them, are computed only here.

:func:`tabulate` returns plain data and columns. :func:`packed` makes one blob of them, compressed with gzip: the length
of the JSON text in 4 bytes, the text, and the columns in order, little-endian, each aligned to 8 bytes from the
beginning. Arrays: ``N`` rows of a rank, ``M`` changes.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from workbench.base.codec import encode
from workbench.events import BESIDE, Category
from workbench.live.fold import Fold
from workbench.live.live_trace import LiveTrace
from workbench.live.messages import AskFeed, InitialState, Panel
from workbench.live.rank_groups import ALIKE
from workbench.live.state_at import describe, describe_with_phase, events_up_to
from workbench.live.view_server import ViewServer
from workbench.replay import memory, states
from workbench.replay.spans import Ints, of_kind
from workbench.session.snapshot import ClusterSnapshot
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header, Rows

FEED_BYTES = 3 << 20
"""Approximate limit on the first answer's bytes, except for its spans, which are complete: what a browser keeps."""

_LEVEL = 9  # of gzip: a page is written once

Say = Callable[[Header, np.void], str]

Columns = dict[str, tuple[str, NDArray[Any]]]
"""By name, a column's storage type (``f8``, ``i4`` or ``u1``) and its values."""


def packed(trace: Trace, more: Mapping[str, Any] | None = None) -> bytes:
    """Return a record as one compressed blob: the result of :func:`tabulate`.

    Args:
        trace: the record.
        more: further JSON data for the page.
    """
    about, columns = tabulate(trace)
    about |= more or {}
    parts = [np.ascontiguousarray(column, f"<{code}").tobytes() for code, column in columns.values()]
    about["columns"] = [[name, code, len(column)] for name, (code, column) in columns.items()]
    text = json.dumps(about, allow_nan=False, separators=(",", ":")).encode()
    start = len(text).to_bytes(4, "little") + text
    return gzip.compress(b"".join(part + bytes(-len(part) % 8) for part in (start, *parts)), _LEVEL, mtime=0)


def tabulate(trace: Trace) -> tuple[dict[str, Any], Columns]:
    """Return a record as JSON data and columns.

    The columns of rank ``r`` are named ``r.name``. Per row: ``known``, its arrival time, and ``hidden``, the time cut
    out of the axis up to then, both in nanoseconds, and ``step``, all three as differences from the row before
    (``known`` of the first row: from the origin); ``back``, how many rows before it the event is that describes it;
    ``event``, 1 if the row is an event; ``text`` and ``doing`` of the describing event, indices into the lists
    ``texts`` and ``doings``. Changes of bytes: ``bytes.row``, the row after which a value holds, -1 before all;
    ``bytes.value``; and per class ``bytes.ends``, where its changes end. Changes of units: ``units.row``,
    ``units.value``, ``units.ends``.
    """
    live = LiveTrace(history_rows=trace.num_rows)
    live.show(ClusterSnapshot(trace=trace, record="a record"))
    answers = ViewServer(live, FEED_BYTES, least_spans=trace.num_rows)
    feed, (data,) = answers.answer(AskFeed(), time.monotonic)
    texts, doings = dict[str, int](), dict[str, int]()
    columns: Columns = {"feed": ("u1", np.frombuffer(data, np.uint8))}
    for rank_trace in trace.ranks:
        if len(rank_trace.rows):
            found = _rows(live.fold, rank_trace, texts, doings) | _changes(rank_trace, len(trace.header.units))
            columns |= {f"{rank_trace.rank}.{name}": column for name, column in found.items()}
    about = {
        "about": encode(InitialState(buttons=(), panels=get_args(Panel))),
        "feed": {**feed, "said": ""},
        "ranks": [{"rank": r.rank, "seq": r.start.seq} for r in trace.ranks if len(r.rows)],
        "alike": ALIKE,
        "reserved": int(Category.RESERVED),
        "texts": list(texts),
        "doings": list(doings),
    }
    return about, columns


def _rows(fold: Fold, rank_trace: RankTrace, texts: dict[str, int], doings: dict[str, int]) -> Columns:
    rows, trace = rank_trace.rows, fold.trace
    known_ns = np.maximum.accumulate(rows["t_ns"])
    events = events_up_to(rows)
    of_event, of_row = np.unique(events, return_inverse=True)
    named = rows[of_event]
    texts_of = [
        texts.setdefault(text, len(texts))
        for text in _each(named, ("kind", "edge", "unit", "num_bytes"), trace, describe)
    ]
    does = [
        doings.setdefault(text, len(doings))
        for text in _each(named, ("kind", "edge", "unit", "num_bytes", "phase"), trace, describe_with_phase)
    ]
    return {
        "known": ("f8", np.diff(known_ns, prepend=fold.origin_ns)),
        "hidden": ("f8", np.diff(known_ns - fold.cuts.shown(known_ns), prepend=0)),
        "step": ("i4", np.diff(rows["step"], prepend=0)),
        "back": ("i4", np.arange(len(rows)) - events),
        "event": ("u1", ~of_kind(rows, BESIDE)),
        "text": ("i4", np.array(texts_of, np.int32)[of_row]),
        "doing": ("i4", np.array(does, np.int32)[of_row]),
    }


def _each(rows: Rows, names: tuple[str, ...], trace: Trace, say: Say) -> list[str]:
    """Return ``say`` of each row, called once per distinct combination of the fields ``names``."""
    keys = np.ascontiguousarray(rows[list(names)]).astype([(name, rows.dtype[name]) for name in names])
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    texts = [say(trace.header, row) for row in rows[first]]
    return [texts[k] for k in place.tolist()]


def _changes(rank_trace: RankTrace, num_units: int) -> Columns:
    first_seq = rank_trace.start.seq
    moved = memory.series(rank_trace)
    changed = [_where_it_changes(moved.num_bytes[:, category]) for category in range(len(Category))]
    units = states.spans(rank_trace, range(num_units))
    return {
        "bytes.row": ("i4", np.concatenate([moved.seq[places] for places in changed]) - first_seq),
        "bytes.value": ("f8", np.concatenate([moved.num_bytes[p, c] for c, p in enumerate(changed)])),
        "bytes.ends": ("i4", np.cumsum([len(places) for places in changed])),
        "units.row": ("i4", units.begin_seq - first_seq),
        "units.value": ("u1", units.state),
        "units.ends": ("i4", np.searchsorted(units.unit, np.arange(num_units), side="right")),
    }


def _where_it_changes(values: Ints) -> Ints:
    """Return the positions of the first value and of each that differs from the one before."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
