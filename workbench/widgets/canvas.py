"""The live timeline of a workbench on a canvas: all of a run, to pan and zoom, while it grows.

The browser asks, as a dashboard does: a canvas that nobody sees costs nothing. What has happened before it opens is
sent whole; of what comes then the narrowest rectangles are merged where they are too many for the wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import traitlets

from workbench.replay.holds import GrowingCuts
from workbench.reports.cursor import Cursor
from workbench.session.pulse import Pulse
from workbench.widgets.feed import continues, job
from workbench.widgets.pace import BYTES_PER_S
from workbench.widgets.timeline import COLUMNS, Timeline
from workbench.widgets.waiting import Send, Waiting, Watched, crowded_out, said

_SPAN_SIZE = sum(int(code[-1]) for _, code in COLUMNS)


class Canvas(Timeline):
    """The timeline of all of a run, to pan and zoom while it grows.

    Args:
        workbench: what is shown; another thread may use it at the same time.
        clock: seconds, monotonic.
    """

    _is_live = traitlets.Bool(True).tag(sync=True)

    def __init__(self, workbench: Watched, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._workbench, self._clock = workbench, clock
        self._pages: dict[str, dict[str, Any]] = {}  # what each page has asked last
        self._told_headers: dict[str, dict[str, Any]] = {}
        self._ends: dict[int, int] = {}
        self._run = 0  # counts the jobs that were shown
        self._cursor: Cursor | None = None
        self._taken_s = clock()
        self._job: tuple[object, ...] = ()
        pulse = workbench.pulse()
        super().__init__(pulse.trace)
        self._waiting = Waiting(workbench.pulse, self._news, clock)
        self._grow(pulse)

    def close(self) -> None:
        """Take the widget away; nothing of it is left, neither here nor in the browser."""
        self._waiting.close()
        self.on_msg(self._answer, remove=True)
        super().close()

    def _answer(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        if content.get("type") != "want":
            return
        page = str(content.get("page"))
        with self._lock:
            self._pages.pop(page, None)
            self._pages[page] = content  # the newest is last
            for name in crowded_out(self._pages):
                self._forget(name)
        if content.get("wait"):
            self._waiting.ask(page)
        else:
            self._told_headers.pop(page, None)
            self._news(page, self._workbench.pulse())()

    def _forget(self, page: str) -> None:
        self._pages.pop(page, None)
        self._told_headers.pop(page, None)
        self._waiting.forget(page)

    def _news(self, page: str, pulse: Pulse) -> Send:
        """Make the answer to a page."""
        with self._lock:
            self._grow(pulse)
            asked = self._pages.get(page, {})
            goes_on = asked.get("run") == self._run
            message, buffers = self._more([int(count or 0) for count in asked.get("counts", [])] if goes_on else [])
            header = None if goes_on and self._told_headers.get(page) == self._header else self._header
            self._told_headers[page] = self._header
            message |= {"page": page, "run": self._run, "said": said(pulse), "header": header}
        return partial(self._reply, message, buffers)

    def _reply(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        if self.comm is not None:  # closed meanwhile
            self.send(message, buffers)

    def _grow(self, pulse: Pulse) -> None:
        """Read what is new, and put the cursor where ``%fsdp back`` has moved it."""
        trace, now_s = pulse.trace, self._clock()
        if self._ends and not continues(trace, self._job, self._ends):
            self._readers, self._told, self._forgotten, self._origin_ns = {}, [], [], None
            self._growing = GrowingCuts()
            self._run += 1
            self._cursor = None
            self._take(trace)
        elif any(self._ends.get(rank_trace.rank) != rank_trace.end_seq for rank_trace in trace.ranks):
            self._take(trace, int(BYTES_PER_S * (now_s - self._taken_s)) // _SPAN_SIZE if self._ends else None)
        self._ends, self._job, self._taken_s = {r.rank: r.end_seq for r in trace.ranks}, job(trace), now_s
        if pulse.cursor != self._cursor:
            self._cursor = pulse.cursor
            self.cursor_us = None if self._cursor is None else self._us(self._cursor.t_ns)

    def _us(self, t_ns: int) -> float:
        """Where the view shows a time."""
        return (self._growing.cuts.shown_at(t_ns) - (self._origin_ns or 0)) / 1e3


def canvas(workbench: Watched) -> Canvas:
    """Return a live timeline of ``workbench``; it may be shown several times, and ``close()`` takes it away."""
    return Canvas(workbench)
