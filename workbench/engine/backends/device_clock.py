"""Times at which a device reached given points of its streams, on the host's clock, without blocking the host.

A *mark* is an event recorded in the current stream. Once the device has passed it, its time is read in nanoseconds
after a *reference*: an event whose host time is known too. The marks of a stream stay in the order they were made in,
and no mark's time is before it was made or after it was read, whatever the clocks say.

Error of a mark: :attr:`DeviceClock.error_ns` of the reference (microseconds), plus half a microsecond for the
resolution of a CUDA event, plus the drift between the two clocks since the reference. Every step that finds the device
idle takes a new reference; that is every step of a loop that reads its loss. In a loop that never waits for the device,
a mark becomes the reference every :data:`REBASE_NS`, because CUDA reports elapsed time in 32-bit milliseconds. Drift is
then corrected only where a mark's time would be before it was made or after it was read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

REBASE_NS = 2_000_000_000
"""Age at which a mark replaces the reference; up to it, 32-bit milliseconds resolve 0.12 microseconds."""

COMMUNICATION = "communication"
"""Name of the streams that hold only the end marks of collectives."""

NO_ROW, NOBODYS = -1, -2
"""Values of :attr:`StreamMark.row`: the mark has no row yet; the mark is no longer needed."""

_IDLE_NS = 100_000  # how long to wait for a device that seems idle
_TRIES = 8

Event = Any
"""A point in a stream; has the methods of :class:`torch.cuda.Event`."""


class TimedDevice(Protocol):
    """The part of :class:`workbench.engine.backends.streams.StreamBackend` that a clock needs."""

    def event(self) -> Event:
        """Return a new event."""

    def record(self, event: Event) -> str:
        """Record an event in this thread's current stream; return the stream's name."""

    def beside(self, group: int) -> AbstractContextManager[object]:
        """Return a context in which the current stream is reserved for marks of one communication group."""

    def reading(self) -> AbstractContextManager[object]:
        """Return a context in which this thread may query events, whatever its current device was."""

    def synchronize(self) -> None:
        """Block until the device has finished all work."""


@dataclass
class _Reference:
    """An event that the device has passed, and its time ``t_ns`` on the host's clock."""

    event: Event
    t_ns: int


@dataclass
class StreamMark:
    """A timed point in a stream.

    Attributes:
        stream: name of the stream.
        made_ns: host time just before the mark was made.
        row: the maker's index for the mark, from 0 on; or NO_ROW, NOBODYS.
        t_ns: host time at which the device passed the mark; 0 until read.
    """

    stream: str
    made_ns: int
    event: Event
    reference: _Reference
    row: int = NO_ROW
    t_ns: int = 0


@dataclass
class _StreamMarks:
    """The unread marks of one stream, oldest first, and the time of the last mark read."""

    marks: deque[StreamMark] = field(default_factory=deque)
    last_ns: int = 0


class DeviceClock:
    """Timestamps, on the host's clock, of the moments at which a device passes marks; marking never blocks the host.

    Any thread may mark; only one thread at a time may read or compare the clocks.

    Args:
        device: the device to time.
        now_ns: the host's clock.

    Attributes:
        now_ns: the host's clock, nanoseconds.
        error_ns: maximum error of a reference.
    """

    def __init__(self, device: TimedDevice, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.now_ns = now_ns
        self._device = device
        self._lines: dict[str | int, _StreamMarks] = {}
        self._passed: list[StreamMark] = []
        self._free: list[Event] = []
        self._probing = device.event()
        device.synchronize()
        tries = [self._compared(device.event()) for _ in range(_TRIES)]
        width_ns, self._reference = min(tries, key=lambda found: found[0])
        self.error_ns = width_ns  # the error is half the width, but later comparisons may take twice as long

    def _compared(self, event: Event) -> tuple[int, _Reference]:
        """Return (width, reference) on an idle device: the comparison's duration, and a reference at its midpoint."""
        begin_ns = self.now_ns()
        self._device.record(event)
        event.synchronize()
        width_ns = self.now_ns() - begin_ns
        return width_ns, _Reference(event, begin_ns + width_ns // 2)

    def compare_if_idle(self) -> None:
        """Take a new reference if the device is idle; otherwise, after at most 0.1 ms, keep the old one."""
        if self.is_behind:
            return
        event, begin_ns = self._probing, self.now_ns()
        self._device.record(event)
        while not (is_idle := event.query()) and self.now_ns() - begin_ns < _IDLE_NS:
            pass
        width_ns = self.now_ns() - begin_ns
        if is_idle and width_ns <= 2 * self.error_ns:
            self._probing = self._device.event()  # marks may still use the old reference's event
            self._reference = _Reference(event, begin_ns + width_ns // 2)

    @property
    def is_behind(self) -> bool:
        """True if the device had not passed all marks at the last read."""
        return any(line.marks for line in self._lines.values())

    def mark(self) -> StreamMark:
        """Make and return a mark in the current stream."""
        event, made_ns = self._event(), self.now_ns()
        stream = self._device.record(event)
        return self._in_line(stream, StreamMark(stream, made_ns, event, self._reference))

    def mark_end(self, wait: Callable[[], object], group: int) -> StreamMark | None:
        """Make and return a mark at the end of a collective.

        Args:
            wait: makes the current stream wait for the collective, like ``wait()`` of c10d's work; it is called again
                elsewhere. If it raises, return None; it will raise again where the engine waits.
            group: the communication group, whose collectives end in the order they were issued in.
        """
        with self._device.beside(group):
            try:
                wait()
            except RuntimeError:
                return None
            event, made_ns = self._event(), self.now_ns()
            return self._in_line(group, StreamMark(self._device.record(event), made_ns, event, self._reference))

    def _event(self) -> Event:
        try:
            return self._free.pop()
        except IndexError:
            return self._device.event()

    def _in_line(self, stream: str | int, mark: StreamMark) -> StreamMark:
        self._lines.setdefault(stream, _StreamMarks()).marks.append(mark)
        return mark

    def read(self) -> list[StreamMark]:
        """Return the marks that the device has passed and that have a row, each once; never blocks."""
        with self._device.reading():
            for line in list(self._lines.values()):
                while line.marks and line.marks[0].event.query():
                    self._read(line.marks.popleft(), line)
        ready = [mark for mark in self._passed if mark.row >= 0]
        self._passed = [mark for mark in self._passed if mark.row == NO_ROW]
        return ready

    def _read(self, mark: StreamMark, line: _StreamMarks) -> None:
        reference = mark.reference
        after_ns = round(reference.event.elapsed_time(mark.event) * 1e6)
        reference.t_ns += max(mark.made_ns - reference.t_ns - after_ns, 0)
        mark.t_ns = line.last_ns = min(max(reference.t_ns + after_ns, line.last_ns), self.now_ns())
        self._passed.append(mark)
        if after_ns >= REBASE_NS and reference is self._reference:
            self._reference = _Reference(mark.event, mark.t_ns)
        else:
            self._free.append(mark.event)
