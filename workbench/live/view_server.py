"""The server side of a dashboard: answers to the questions of one view about a trace that may grow.

The messages are those of :mod:`workbench.live.messages`; nothing here depends on a notebook or a comm.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from workbench.base.codec import encode
from workbench.live.feed import Feed
from workbench.live.fold import Fold
from workbench.live.live_trace import LiveTrace
from workbench.live.long_poll import BYTES_PER_S
from workbench.live.messages import (
    AskAt,
    AskBeside,
    AskFeed,
    AskWindow,
    Counts,
    FeedUpdate,
    Moment,
    MomentReply,
    MovedCursor,
    PeakInfo,
    ViewAnswer,
    WindowDetail,
)
from workbench.live.overview import breakpoints, health, said, slowest, status, whose
from workbench.live.packing import pack, told_holds, told_open
from workbench.live.window_detail import window
from workbench.replay import memory
from workbench.replay.clock_error import error_ns
from workbench.replay.device import ClockSource, clock_of
from workbench.replay.spans import first_ns
from workbench.replay.units import unit_name
from workbench.reports.cursor import Cursor
from workbench.reports.stop_positions import live_units
from workbench.session.snapshot import ClusterSnapshot
from workbench.trace.columns import Trace
from workbench.trace.schema import Header
from workbench.views import theme

FIRST_BYTES = 256 * 1024
"""Limit on the binary data of the first answer: what happened before the view was opened."""

_ALL_NS = 1 << 62  # later than any row
_MAX_US = float(1 << 51)  # 71 years: beyond any trace, and in nanoseconds it fits 64 bits

Looking = AskFeed | AskAt | AskBeside | AskWindow
"""Questions about the recorded trace."""


class ViewServer:
    """What one view in the browser has received, and the answers to its questions.

    Args:
        live: the trace that the view shows, shared with other clients.
        first_bytes: limit on the binary data of the first answer to ``feed``.
        least_spans: spans that an answer may have even if they exceed its limit.
    """

    def __init__(self, live: LiveTrace, first_bytes: int = FIRST_BYTES, least_spans: int = 0) -> None:
        self._live = live
        self._first_bytes, self._feed = first_bytes, Feed(least_spans)
        self._units: Sequence[object] = ()
        self._num_cuts = 0
        self._cursor: Cursor | None = None
        self._asked_at: float | None = None
        self._num_changes = self._num_news = -1
        self._newest_at = 0.0  # when the last new row was seen

    @property
    def _fold(self) -> Fold:
        return self._live.fold

    def answer(self, question: Looking, clock: Callable[[], float]) -> tuple[dict[str, Any], list[bytes]]:
        """Return the answer to a question, at the newest snapshot, as plain data and buffers.

        Args:
            question: what the view asks.
            clock: seconds, monotonic.
        """
        with self._live.lock:
            pulse = self._live.pulse or ClusterSnapshot(trace=Trace.empty())
            found, buffers = self._answer(question, pulse, clock)
        return encode(found), buffers

    def _answer(
        self, question: Looking, pulse: ClusterSnapshot, clock: Callable[[], float]
    ) -> tuple[ViewAnswer, list[bytes]]:
        trace = pulse.trace
        match question:
            case AskFeed():
                return self._news(pulse, clock)
            case AskWindow():
                return self._window(question)
            case AskAt():
                moment = self._at(trace, self._true_ns(question.t_us))
            case AskBeside():
                moment = self._fold.moments.beside(trace, question.rank, question.seq, question.by)
        return MomentReply(number=question.number, moment=moment), []

    def _window(self, question: AskWindow) -> tuple[WindowDetail, list[bytes]]:
        from_us, to_us = float(question.from_us), float(question.to_us)
        found = window(self._fold, self._true_ns(from_us), self._true_ns(to_us))
        counts, buffer = pack(found, self._fold.origin_ns)
        number = question.number
        return WindowDetail(number=number, from_us=from_us, to_us=to_us, exact=found.is_exact, counts=counts), [buffer]

    def _news(self, pulse: ClusterSnapshot, clock: Callable[[], float]) -> tuple[FeedUpdate, list[bytes]]:
        begin = clock()
        ago = None if self._asked_at is None else min(begin - self._asked_at, 1.0)
        self._asked_at = begin
        trace, header, fold = pulse.trace, pulse.trace.header, self._fold
        new = self._feed.take(fold, self._first_bytes if ago is None else int(BYTES_PER_S * ago))
        if new.restart:
            self._units, self._cursor = (), None
        counts, buffer = pack(new, fold.origin_ns)
        is_news = new.restart or counts != Counts(spans=0, memory=0, states=0, steps=0)
        are_units_new = header.units != self._units
        are_holds_new = new.restart or len(fold.cuts) != self._num_cuts
        has_moved = pulse.cursor != self._cursor
        self._units, self._num_cuts, self._cursor = header.units, len(fold.cuts), pulse.cursor
        if self._num_news != self._live.num_news:
            self._num_news, self._newest_at = self._live.num_news, begin
        change, at_step = self._live.change or (None, -1)
        change = change if at_step != self._num_changes else None
        self._num_changes = at_step
        news = FeedUpdate(
            restart=new.restart,
            another=new.is_another,
            exact=new.is_exact,
            groups=new.groups,
            tracks=new.ranks,
            open=told_open(new.open, fold.origin_ns),
            counts=counts,
            begin_us=self._fold.to_us(first_ns(trace)),
            health=health(pulse),
            breakpoints=breakpoints(pulse),
            status=replace(status(pulse, begin - self._newest_at), fault=pulse.fault),
            whose=whose(header, os.getpid()) if pulse.running else "",
            late=slowest(new.steps[-1]) if len(new.steps) else None,
            change=change,
            said=said(pulse),
            clock=_clock(trace),
            units=tuple(unit_name(header, unit.index) for unit in header.units) if are_units_new else None,
            order=tuple(unit.index for unit in live_units(header)) if are_units_new else None,
            holds=told_holds(fold.cuts, fold.origin_ns) if are_holds_new else None,
            now=fold.moments.at(trace, _ALL_NS) if is_news else None,
            peaks=tuple(self._peak(header, group[0]) for group in new.groups) if is_news else None,
            has_moved=has_moved,
            cursor=self._moved(trace, pulse.cursor) if has_moved else None,
        )
        return news, [buffer]

    def _moved(self, trace: Trace, cursor: Cursor | None) -> MovedCursor | None:
        if cursor is None:
            return None
        return MovedCursor(t_us=self._fold.to_us(cursor.t_ns), moment=self._fold.moments.at_cursor(trace, cursor))

    def _at(self, trace: Trace, t_ns: int) -> Moment | None:
        """Return all ranks at a time; at the cursor's time, each where the cursor cuts it."""
        if self._cursor is not None and self._fold.to_us(t_ns) == self._fold.to_us(self._cursor.t_ns):
            return self._fold.moments.at_cursor(trace, self._cursor)
        return self._fold.moments.at(trace, t_ns)

    def _peak(self, header: Header, rank: int) -> PeakInfo:
        found = self._fold.peak(rank)
        text = memory.describe_peak(header, found)
        return PeakInfo(num_bytes=found.num_bytes, t_us=self._fold.to_us(found.t_ns), step=found.step, text=text)

    def _true_ns(self, us: float) -> int:
        """Return the time that the view's axis shows at ``us``."""
        return self._fold.cuts.true_at(round(min(max(us, -_MAX_US), _MAX_US) * 1e3) + self._fold.origin_ns)


def _clock(trace: Trace) -> tuple[str, str]:
    """Describe the clock of the timeline and that of the memory and unit panels; empty with one host's clock."""
    clock = clock_of(trace.header)
    timeline = filter(None, (theme.clock_words(trace.header, clock), theme.error_words(error_ns(trace))))
    return " · ".join(timeline), "" if clock is ClockSource.HOST else "in host order and host time"
