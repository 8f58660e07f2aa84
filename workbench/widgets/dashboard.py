"""The live dashboard: one widget that shows what all ranks do while they train, and at any event before.

The browser asks, this side answers; nothing is sent unasked, so a dashboard that nobody sees costs nothing. Each
view in the browser has a name of its own, by which its :class:`~workbench.widgets.feed.Feed` is kept here.

Messages from the browser hold ``view`` and ``ask``: ``feed`` (what is new; with ``wait`` as soon as there is
something), ``at`` (all ranks at ``t_us``), ``beside`` (all ranks ``by`` events after row ``seq`` of ``rank``),
``window`` (every change of memory and units from ``from_us`` to ``to_us``), ``do`` (the button ``word``), ``bye``. An
answer to ``feed`` has ``holds`` (where time in which ranks were held is cut out of the axis, and how much) if there are
new ones, and a ``cursor`` if ``%fsdp back`` has moved it since the last one: where it is now, None: at the newest
event.

The feed keeps to a number of bytes a second and is thinned out for it. A window is asked for when the view holds still
and somebody looks closely: such answers come with what a person does and are not part of that number. One is limited
by :data:`workbench.widgets.window.MOST`; beyond that it says that it is not ``exact``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anywidget
import traitlets

from workbench.errors import WorkbenchError
from workbench.replay.device import Clock, clock_of
from workbench.replay.units import model_order, unit_name
from workbench.reports.cursor import Cursor
from workbench.session.pulse import Pulse
from workbench.trace.columns import Trace
from workbench.trace.schema import Header
from workbench.views import theme
from workbench.widgets.busy import answer_while_busy
from workbench.widgets.feed import Feed
from workbench.widgets.modules import STATIC, joined
from workbench.widgets.moments import Moments
from workbench.widgets.pace import BYTES_PER_S
from workbench.widgets.packing import COLUMNS, pack, told_holds
from workbench.widgets.peaks import Peaks
from workbench.widgets.spans import TRACKS
from workbench.widgets.waiting import Send, Waiting, Watched, crowded_out, health, said
from workbench.widgets.window import window

FIRST_BYTES = 256 * 1024
"""Binary data of the first answer: what happened before the view was opened."""

BUTTONS: dict[str, tuple[str, dict[str, Any]]] = {
    "pause": ("pause", {}),
    "next": ("next", {"background": True}),
    "continue": ("resume", {"background": True}),
    "abort": ("abort", {}),
}
"""The buttons, and the method of the workbench that each one calls, with its arguments."""

_ALL_NS = 1 << 62  # later than anything


class Dashboard(anywidget.AnyWidget):
    """See the module docstring.

    Args:
        workbench: what is shown; another thread may use it at the same time.
        clock: seconds, monotonic.
    """

    _esm = joined("dashboard.js")
    _css = (STATIC / "dashboard.css").read_text("utf-8")
    about = traitlets.Dict().tag(sync=True)

    def __init__(self, workbench: Watched, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._workbench, self._clock = workbench, clock
        self._lock = threading.RLock()
        self._views: dict[str, _View] = {}
        self._pulse: Pulse | None = None
        self._waiting = Waiting(workbench.pulse, self._news, clock)
        super().__init__(about=_about([word for word, (method, _) in BUTTONS.items() if hasattr(workbench, method)]))
        self.on_msg(self._on_message)
        answer_while_busy(self)

    def close(self) -> None:
        """Take the widget away; nothing of it is left, neither here nor in the browser."""
        self._waiting.close()
        with self._lock:
            self._views.clear()
            self._pulse = None
        self.on_msg(self._on_message, remove=True)
        super().close()

    def _on_message(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        """Answer one message of the browser; runs in the main thread, or in a subshell's while a cell runs."""
        name, ask = str(content.get("view", "")), content.get("ask")
        if ask == "do":
            self._press(name, str(content.get("word", "")))
            return
        with self._lock:
            if ask == "bye":
                self._forget(name)
                return
            view = self._views.pop(name, None) or _View()
            self._views[name] = view  # the newest is last
            for crowded in crowded_out(self._views):
                self._forget(crowded)
            if ask == "feed" and content.get("wait"):
                self._waiting.ask(name)
                return
            if ask == "feed" or self._pulse is None:  # the cursor looks at what is known: no rank is asked
                self._pulse = self._workbench.pulse()
            answer, buffers = view.answer(content, self._pulse, self._clock)
        self._tell(name, answer, buffers)

    def _forget(self, name: str) -> None:
        self._views.pop(name, None)
        self._waiting.forget(name)

    def _news(self, name: str, pulse: Pulse) -> Send:
        """Make the answer to a view that has waited."""
        with self._lock:
            if name not in self._views:
                return lambda: None
            self._pulse = pulse
            answer, buffers = self._views[name].answer({"ask": "feed"}, pulse, self._clock)
        return lambda: self._tell(name, answer, buffers)

    def _tell(self, name: str, answer: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        if self.comm is not None:  # closed meanwhile
            self.send({"view": name, **answer}, buffers)

    def _press(self, view: str, word: str) -> None:
        """Do what a button says, in a thread of its own: it may take long, and the view goes on asking."""
        if word not in BUTTONS:
            return
        name, arguments = BUTTONS[word]
        do = partial(getattr(self._workbench, name), **arguments)
        threading.Thread(target=self._do, args=(view, word, do), name=f"dashboard: {word}", daemon=True).start()

    def _do(self, view: str, word: str, do: Callable[[], object]) -> None:
        try:
            report = do()
            words = "" if BUTTONS[word][1] else str(report)  # that it goes on is seen
        except WorkbenchError as error:
            words = str(error)
        self._tell(view, {"kind": "said", "word": word, "text": words.partition("\n")[0]})


class _View:
    """What one view in the browser knows, and the answers to what it asks."""

    def __init__(self) -> None:
        self._feed, self._moments, self._peaks = Feed(), Moments(), Peaks()
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
            self._record, self._feed = pulse.record, Feed()
        trace = pulse.trace
        new = self._feed.take(trace, FIRST_BYTES if ago is None else int(BYTES_PER_S * ago))
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


def dashboard(workbench: Watched) -> Dashboard:
    """Return a live dashboard of ``workbench``; it may be shown several times, and ``close()`` takes it away."""
    return Dashboard(workbench)


def _order(header: Header) -> list[int]:
    """The units that were not undone, from the top."""
    return [unit for unit in model_order(header) if not header.units[unit].retired]


def _clock(header: Header) -> list[str]:
    """Whose times the timeline has, and whose the panels of memory and units; nothing where a host computes."""
    clock = clock_of(header)
    return ["", ""] if clock is Clock.HOST else [theme.clock_words(header, clock), "in the host's order, at its times"]


def _origin_ns(trace: Trace) -> int:
    return min((int(r.rows["t_ns"][0]) for r in trace.ranks if len(r.rows)), default=0)


def _about(buttons: Sequence[str]) -> dict[str, Any]:
    """What the browser has to know from the beginning, besides ``events.js``."""
    return {
        "buttons": list(buttons),
        "columns": {table: [list(column) for column in columns] for table, columns in COLUMNS.items()},
        "tracks": [name for name, _ in TRACKS],
    }
