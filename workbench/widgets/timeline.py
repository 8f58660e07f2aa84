"""The live timeline: a canvas in the notebook on which one pans, zooms and puts a cursor, of a trace that may grow.

The browser asks for what it does not have (``want``) and is told (``more``) columns of rectangles, each once, whatever
the number of views; ``static/timeline.js`` draws them, ``static/timeline_widget.js`` keeps them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import anywidget
import numpy as np
import traitlets
from numpy.typing import NDArray

from workbench.events import Kind
from workbench.replay.alike import groups, label
from workbench.replay.device import Clock, clock_of
from workbench.replay.holds import Cuts, GrowingCuts
from workbench.replay.spans import last_ns, of_kind, spans
from workbench.replay.units import unit_name
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header
from workbench.views import theme
from workbench.widgets.busy import answer_while_busy
from workbench.widgets.modules import joined
from workbench.widgets.packing import told_holds
from workbench.widgets.spans import NO_HEADER, SPAN_DTYPE, TRACKS, RankSpans, of_device, thinned

MAX_RANKS = 8
"""Ranks drawn; of more, first one of each group that did the same."""

MAX_SPANS = 2_000_000
"""Spans kept of all tracks together (49 bytes each); beyond that the older half is forgotten, which the page says."""

COLUMNS = (
    ("start", "<f8"),
    ("end", "<f8"),
    ("bytes", "<f8"),
    ("arrowFrom", "<f8"),
    ("unit", "<i2"),
    ("kind", "u1"),
    ("exposed", "u1"),
)
"""Name and type of each column, in the order in which they follow each other in a buffer; times in microseconds."""

_OPEN_ROWS = 4096  # at the end of a rank's trace, among which what has not ended is looked for


def pack(found: NDArray[np.void], origin_ns: int) -> bytes:
    """Return spans as one buffer of :data:`COLUMNS`.

    Args:
        found: of SPAN_DTYPE.
        origin_ns: the time that is called 0 microseconds.
    """
    columns = {
        "start": (found["begin_ns"] - origin_ns) / 1e3,
        "end": (found["end_ns"] - origin_ns) / 1e3,
        "bytes": found["num_bytes"],
        "arrowFrom": np.where(found["issue_ns"] < 0, np.nan, (found["issue_ns"] - origin_ns) / 1e3),
        **{name: found[name] for name in ("unit", "kind", "exposed")},
    }
    return b"".join(np.ascontiguousarray(columns[name], code).tobytes() for name, code in COLUMNS)


def not_ended(
    rank_trace: RankTrace, offset_ns: int, cuts: Cuts | None = None, header: Header = NO_HEADER
) -> NDArray[np.void]:
    """Return what goes on at the end of a rank's trace: the innermost compute or wait, and collectives in flight.

    Each ends with the last row, on rank 0's clock. Of what is older than the last few thousand rows nothing is said.

    Args:
        rank_trace: what the rank recorded.
        offset_ns: what its clock is ahead of rank 0's.
        cuts: what is cut out of the time axis.
        header: of the trace; see :meth:`RankSpans.take`.
    """
    rows = rank_trace.rows[-_OPEN_ROWS:]
    if clock_of(header) is Clock.DEVICE:
        rows, _ = of_device(rank_trace, rows, header)
    rows = rows[rows["step"] == rows["step"][-1]] if len(rows) else rows
    rows = rows if cuts is None else cuts.on_clock(offset_ns).rows(rows)
    found = spans(rows, (kind for _, kinds in TRACKS for kind in kinds))
    parts = []
    for track, (_, kinds) in enumerate(TRACKS):
        mine = np.isin(found.kind, kinds)
        which = np.flatnonzero(mine & (found.end_seq < 0))
        begin_ns = found.begin_ns[which]
        if track == 0 and len(which):
            inside_ns = found.end_ns[which[-1] :][mine[which[-1] :]].max()  # when the last one within it ended
            which, begin_ns = which[-1:], np.maximum(begin_ns[-1:], inside_ns)
        part = np.zeros(len(which), SPAN_DTYPE)
        part["track"], part["count"], part["issue_ns"], part["exposed"] = track, 1, -1, found.kind[which] == Kind.WAIT
        part["kind"], part["unit"], part["num_bytes"] = found.kind[which], found.unit[which], found.num_bytes[which]
        part["begin_ns"], part["end_ns"] = begin_ns - offset_ns, last_ns(rows) - offset_ns
        parts.append(part)
    return np.concatenate(parts)


class Timeline(anywidget.AnyWidget):
    """The timeline of a trace; display it as often as wanted, :meth:`append` to it, ``close`` it.

    Args:
        trace: what happened so far.
        ranks: ranks to draw; None: all, at most :data:`MAX_RANKS`.

    Attributes:
        cursor_us: where the cursor is, in microseconds after the first row, time in which ranks were held left out;
            None: nowhere. All views share it.
    """

    _esm = joined("timeline_widget.js")
    cursor_us: traitlets.Float[Any, Any] = traitlets.Float(None, allow_none=True).tag(sync=True)

    def __init__(self, trace: Trace, *, ranks: Sequence[int] | None = None) -> None:
        super().__init__()
        self._lock = threading.RLock()  # the browser's requests may come in another thread
        self._only = None if ranks is None else frozenset(ranks)
        self._readers: dict[int, RankSpans] = {}  # by rank, in the order they are drawn
        self._told: list[list[NDArray[np.void]]] = []  # by track: spans, in the order they are sent
        self._forgotten: list[int] = []  # by track: how many of its first spans are not kept any more
        self._header: dict[str, Any] = {}
        self._open: list[NDArray[np.void]] = []
        self._origin_ns: int | None = None
        self._growing = GrowingCuts()
        self._take(trace)
        self.on_msg(self._answer)
        answer_while_busy(self.comm)

    def append(self, trace: Trace) -> None:
        """Show a later state of the same trace; only what is new is sent. After ``close`` nothing happens.

        Args:
            trace: with all that was there before, or at least without a gap after it.
        """
        with self._lock:
            counts = self._counts()
            before = self._header
            self._take(trace)
            if self.comm is not None:
                self._tell(counts, is_header_new=self._header != before)

    def _take(self, trace: Trace, max_spans: int | None = None) -> None:
        """Read what is new, thinned out to about ``max_spans``."""
        offsets = {info.rank: info.clock_offset_ns for info in trace.header.ranks}
        for rank in self._new_ranks(trace):
            self._readers[rank] = RankSpans()
            self._told += [[] for _ in TRACKS]
            self._forgotten += [0] * len(TRACKS)
        if self._origin_ns is None:
            starts = (int(r.rows["t_ns"].min()) - offsets.get(r.rank, 0) for r in trace.ranks if len(r.rows))
            self._origin_ns = min(starts, default=None)
        cuts = self._growing.update(trace)
        self._open = [np.empty(0, SPAN_DTYPE) for _ in self._told]
        known = {rank_trace.rank: rank_trace for rank_trace in trace.ranks}
        found = [np.empty(0, SPAN_DTYPE)]
        for place, (rank, reader) in enumerate(self._readers.items()):
            if rank in known:
                offset_ns, first_track = offsets.get(rank, 0), place * len(TRACKS)
                new = reader.take(
                    known[rank], header=trace.header, first_track=first_track, offset_ns=offset_ns, cuts=cuts
                )
                found.append(new)
                open_now = not_ended(known[rank], offset_ns, cuts, trace.header)
                self._open[first_track : first_track + len(TRACKS)] = _by_track(open_now, len(TRACKS))
        new = np.concatenate(found)
        for track, part in enumerate(_by_track(new if max_spans is None else thinned(new, max_spans), len(self._told))):
            if len(part):
                self._told[track].append(part)
        if sum(len(part) for parts in self._told for part in parts) > MAX_SPANS:
            self._forget_half()
        self._header = self._describe(trace)

    def _forget_half(self) -> None:
        """Keep what began in the later half of time, by number of spans."""
        tracks = [np.concatenate([np.empty(0, SPAN_DTYPE), *parts]) for parts in self._told]
        cut_ns = np.median(np.concatenate([found["begin_ns"] for found in tracks]))
        for track, found in enumerate(tracks):
            late = found["begin_ns"] >= cut_ns
            first = int(np.argmax(late)) if late.any() else len(found)
            self._told[track] = [found[first:].copy()]
            self._forgotten[track] += first

    def _new_ranks(self, trace: Trace) -> list[int]:
        """Ranks to draw from now on: of those that did the same one each, then the others."""
        waiting = Trace(trace.header, tuple(r for r in trace.ranks if len(r.rows) and self._is_new(r.rank)))
        room = max(MAX_RANKS - len(self._readers), 0) if self._only is None else len(waiting.ranks)
        if len(waiting.ranks) <= room:
            return [rank_trace.rank for rank_trace in waiting.ranks]
        alike = groups(waiting, _did) if room else []
        order = [*(ranks[0] for ranks in alike), *sorted(rank for ranks in alike for rank in ranks[1:])]
        return sorted(order[:room])

    def _is_new(self, rank: int) -> bool:
        return rank not in self._readers and (self._only is None or rank in self._only)

    def _describe(self, trace: Trace) -> dict[str, Any]:
        ranks = self._readers
        return {
            "tracks": [{"name": name, "rank": rank, "label": label([rank])} for rank in ranks for name, _ in TRACKS],
            "units": [unit_name(trace.header, unit) for unit in range(len(trace.header.units))],
            "clock": theme.clock_words(trace.header, clock_of(trace.header)),
            "holds": told_holds(self._growing.cuts, self._origin_ns or 0),
        }

    # -- the browser

    def _counts(self) -> list[int]:
        return [gone + sum(map(len, parts)) for gone, parts in zip(self._forgotten, self._told, strict=True)]

    def _answer(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        """Tell one page what it does not have."""
        if content.get("type") != "want":
            return
        with self._lock:
            counts = [int(count or 0) for count in content.get("counts", [])]
            self._tell(counts, is_header_new=True, page=content.get("page"))

    def _tell(self, counts: Sequence[int], *, is_header_new: bool, page: str | None = None) -> None:
        """Send what comes after the first ``counts`` spans of each track, and what goes on now."""
        message, buffers = self._more(counts)
        self.send(message | {"page": page, "header": self._header if is_header_new else None}, buffers)

    def _more(self, counts: Sequence[int]) -> tuple[dict[str, Any], list[bytes]]:
        have = [*counts, *[0] * (len(self._told) - len(counts))]
        chunks, buffers = [], []
        for track, (count, gone, parts) in enumerate(zip(have, self._forgotten, self._told, strict=False)):
            first = max(count, gone)
            found = _after(parts, first - gone)
            if len(found):
                chunks.append({"track": track, "first": first, "count": len(found)})
                buffers.append(pack(found, self._origin_ns or 0))
        more = [{"track": track, "count": len(part)} for track, part in enumerate(self._open)]
        buffers += [pack(part, self._origin_ns or 0) for part in self._open]
        return {"type": "more", "chunks": chunks, "forgotten": list(self._forgotten), "open": more}, buffers


def _by_track(found: NDArray[np.void], num_tracks: int) -> list[NDArray[np.void]]:
    order = np.argsort(found["track"], kind="stable")
    ends = np.searchsorted(found["track"][order], np.arange(1, num_tracks))
    return np.split(found[order], ends)


def _after(parts: Sequence[NDArray[np.void]], first: int) -> NDArray[np.void]:
    """What comes after the first ``first`` spans; the parts before it are not touched."""
    kept: list[NDArray[np.void]] = []
    end = sum(map(len, parts))
    for part in reversed(parts):
        if end <= first:
            break
        kept.append(part[max(first - (end - len(part)), 0) :])
        end -= len(part)
    return np.concatenate(kept[::-1]) if kept else np.empty(0, SPAN_DTYPE)


def _did(rank_trace: RankTrace) -> bytes:
    """What a rank did of what is drawn, in order, whenever it was."""
    rows = rank_trace.rows[of_kind(rank_trace.rows, (kind for _, kinds in TRACKS for kind in kinds))]
    return b"".join(rows[name].tobytes() for name in ("kind", "edge", "unit", "comm_group", "comm_seq"))
