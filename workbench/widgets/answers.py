"""What the dashboard in the browser is told: the answers to the questions of one view, of a trace that may grow.

The messages are those of :mod:`workbench.widgets.dashboard`; nothing here knows of a notebook or of who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workbench.replay.device import Clock, clock_of
from workbench.replay.units import model_order, unit_name
from workbench.reports.cursor import Cursor
from workbench.session.pulse import Pulse
from workbench.trace.columns import Trace
from workbench.trace.schema import Header
from workbench.views import theme
from workbench.widgets.feed import HISTORY_ROWS, Feed
from workbench.widgets.moments import Moments
from workbench.widgets.pace import BYTES_PER_S
from workbench.widgets.packing import COLUMNS, pack, told_holds
from workbench.widgets.peaks import Peaks
from workbench.widgets.spans import TRACKS
from workbench.widgets.waiting import health, said
from workbench.widgets.window import window

FIRST_BYTES = 256 * 1024
"""Binary data of the first answer: what happened before the view was opened."""

_ALL_NS = 1 << 62  # later than anything


class Answers:
    """What one view in the browser knows, and the answers to what it asks.

    Args:
        first_bytes: of binary data that the first answer to ``feed`` may have.
        history_rows: of each rank that it tells of.
    """

    def __init__(self, first_bytes: int = FIRST_BYTES, history_rows: int = HISTORY_ROWS) -> None:
        self._first_bytes, self._history_rows = first_bytes, history_rows
        self._feed, self._moments, self._peaks = Feed(history_rows), Moments(), Peaks()
        self._origin_ns = 0
        self._units: Sequence[object] = ()
        self._num_cuts = 0
        self._cursor: Cursor | None = None
        self._record = ""
        self._asked_at: float | None = None

    def answer(
        self, content: dict[str, Any], pulse: Pulse, clock: Callable[[], float]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return the answer to a message as plain data and buffers."""
        if content["ask"] == "feed":
            return self._news(pulse, clock)
        trace = pulse.trace
        if content["ask"] == "window":
            return self._window(trace, content)
        if content["ask"] == "at":
            moment = self._at(trace, self._true_ns(content["t_us"]))
        else:
            rank, seq, by = (int(content[key]) for key in ("rank", "seq", "by"))
            moment = self._moments.beside(trace, rank, seq, by)
        return {"kind": "moment", "number": content.get("number"), "moment": self._shown(moment)}, []

    def _window(self, trace: Trace, content: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        begin_ns, end_ns = (self._true_ns(content[key]) for key in ("from_us", "to_us"))
        found = window(trace, self._moments, self._feed.groups, begin_ns, end_ns, self._feed.cuts)
        about, buffer = pack(found, self._origin_ns)
        asked = {key: content[key] for key in ("number", "from_us", "to_us")}
        return {"kind": "window", **asked, "exact": found.is_exact, "counts": about["counts"]}, [buffer]

    def _news(self, pulse: Pulse, clock: Callable[[], float]) -> tuple[dict[str, Any], list[bytes]]:
        begin = clock()
        ago = None if self._asked_at is None else min(begin - self._asked_at, 1.0)
        self._asked_at = begin
        if pulse.record != self._record:  # it may be of the same job, with other rows
            self._record, self._feed = pulse.record, Feed(self._history_rows)
        trace = pulse.trace
        new = self._feed.take(trace, self._first_bytes if ago is None else int(BYTES_PER_S * ago))
        if new.restart:
            self._origin_ns, self._units, self._cursor = _origin_ns(trace), (), None
            self._moments, self._peaks = Moments(), Peaks()
        about, buffer = pack(new, self._origin_ns)
        answer = {"kind": "feed", **about, "health": health(pulse), "said": said(pulse)}
        answer["clock"] = _clock(trace.header)
        if trace.header.units != self._units:
            self._units = trace.header.units
            answer["units"] = [unit_name(trace.header, unit.index) for unit in trace.header.units]
            answer["order"] = _order(trace.header)
        if new.restart or len(self._feed.cuts) != self._num_cuts:
            self._num_cuts = len(self._feed.cuts)
            answer["holds"] = told_holds(self._feed.cuts, self._origin_ns)
        if new.restart or any(about["counts"].values()):
            answer["now"] = self._shown(self._moments.at(trace, _ALL_NS))
            answer["peaks"] = [self._shown(self._peaks.of(trace, group[0])) for group in new.groups]
        if pulse.cursor != self._cursor:
            self._cursor = pulse.cursor
            answer["cursor"] = self._moved(trace, pulse.cursor)
        return answer, [buffer]

    def _moved(self, trace: Trace, cursor: Cursor | None) -> dict[str, Any] | None:
        if cursor is None:
            return None
        moment = self._moments.at_cursor(trace, cursor)
        return {"t_us": self._us(cursor.t_ns), "moment": self._shown(moment)}

    def _at(self, trace: Trace, t_ns: int) -> dict[str, Any] | None:
        """All ranks at a time; at that of the cursor, where the cursor cuts each of them."""
        if self._cursor is not None and self._us(t_ns) == self._us(self._cursor.t_ns):
            return self._moments.at_cursor(trace, self._cursor)
        return self._moments.at(trace, t_ns)

    def _shown(self, found: dict[str, Any] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        rest = {key: value for key, value in found.items() if key != "t_ns"}
        return {**rest, "t_us": self._us(found["t_ns"])}

    def _us(self, t_ns: int) -> float:
        """Where the view shows a time."""
        return (self._feed.cuts.shown_at(t_ns) - self._origin_ns) / 1e3

    def _true_ns(self, us: object) -> int:
        """The time that the view shows there."""
        return self._feed.cuts.true_at(round(float(str(us)) * 1e3) + self._origin_ns)


def about_view(buttons: Sequence[str]) -> dict[str, Any]:
    """What the browser has to know from the beginning, besides ``events.js``."""
    return {
        "buttons": list(buttons),
        "columns": {table: [list(column) for column in columns] for table, columns in COLUMNS.items()},
        "tracks": [name for name, _ in TRACKS],
    }


def _order(header: Header) -> list[int]:
    """The units that were not undone, from the top."""
    return [unit for unit in model_order(header) if not header.units[unit].retired]


def _clock(header: Header) -> list[str]:
    """Whose times the timeline has, and whose the panels of memory and units; nothing where a host computes."""
    clock = clock_of(header)
    return ["", ""] if clock is Clock.HOST else [theme.clock_words(header, clock), "in the host's order, at its times"]


def _origin_ns(trace: Trace) -> int:
    return min((int(r.rows["t_ns"][0]) for r in trace.ranks if len(r.rows)), default=0)
