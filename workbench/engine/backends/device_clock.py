"""When a device came to what the host handed over, on the host's clock, without the host ever waiting for it.

A *mark* is an event in the stream that is current where it is made. Marks are read later, once the device has passed
them, as nanoseconds after a *reference*: an event of which the host's time is known too. Marks of a stream are in the
order they were made in, and none lies before it was made or after it was read, whatever the clocks say.

How far off a mark may be: the reference by :attr:`DeviceClock.error_ns` (microseconds); a mark by half a microsecond
more, the resolution of a CUDA event; and by what the two clocks drift apart since the reference. A new one is taken at
every step that finds the device idle, which is each one in a loop that reads its loss. In a loop that never waits for
the device a mark takes its place every :data:`REBASE_NS`, since CUDA tells elapsed time in 32-bit milliseconds; drift
is then corrected where a mark would lie before it was made or after it was read, and only there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

REBASE_NS = 2_000_000_000
"""Age at which a reference is replaced by a mark: 32-bit milliseconds then still tell 0.12 microseconds apart."""

COMMUNICATION = "communication"
"""Streams in which nothing but ends of collectives is marked."""

NO_ROW, NOBODYS = -1, -2
"""Of a :class:`StreamMark`: what it is for is not known yet; it is for nothing any more."""

_IDLE_NS = 100_000  # how long a device that seems idle is waited for
_TRIES = 8

Event = Any
"""A place in a stream: what has the methods of :class:`torch.cuda.Event`."""


class TimedDevice(Protocol):
    """What a clock needs of a device: :class:`workbench.engine.backends.streams.StreamBackend` has it."""

    def event(self) -> Event:
        """Return a new event."""

    def record(self, event: Event) -> str:
        """Let an event be where the current stream of this thread is now; returns the stream's name."""

    def beside(self, group: int) -> AbstractContextManager[object]:
        """Within the body the current stream is one that nothing else is given to, of a communication group."""

    def reading(self) -> AbstractContextManager[object]:
        """Within the body this thread may ask events, whichever device it was at before."""

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""


@dataclass
class _Reference:
    """An event that the device has passed, and when: ``t_ns`` of the host's clock."""

    event: Event
    t_ns: int


@dataclass
class StreamMark:
    """A place in a stream.

    Attributes:
        stream: its name.
        made_ns: the host's time just before it was made.
        row: a number of whoever made it, from 0 on, to know it by; or NO_ROW, NOBODYS.
        t_ns: the host's time when the device passed it; 0 until that is read.
    """

    stream: str
    made_ns: int
    event: Event
    reference: _Reference
    row: int = NO_ROW
    t_ns: int = 0


@dataclass
class _StreamMarks:
    """Marks of one stream that were not read, oldest first, and when the device passed the last one that was."""

    marks: deque[StreamMark] = field(default_factory=deque)
    last_ns: int = 0


class DeviceClock:
    """Tells when a device came to what the host handed over, on the host's clock, and never lets the host wait for it.

    Any thread may mark; one at a time may read or compare the clocks.

    Args:
        device: whose times are told.
        now_ns: the host's clock.

    Attributes:
        now_ns: the host's clock, nanoseconds.
        error_ns: how far off a reference may be.
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
        self.error_ns = width_ns  # half of it, and later comparisons may take twice as long

    def _compared(self, event: Event) -> tuple[int, _Reference]:
        """Return a reference on an idle device, and how long it took: it lies within that time, midway."""
        begin_ns = self.now_ns()
        self._device.record(event)
        event.synchronize()
        width_ns = self.now_ns() - begin_ns
        return width_ns, _Reference(event, begin_ns + width_ns // 2)

    def compare_if_idle(self) -> None:
        """Take a new reference if the device has done all it was given; else, after 0.1 ms, leave the old one."""
        if self.is_behind:
            return
        event, begin_ns = self._probing, self.now_ns()
        self._device.record(event)
        while not (is_idle := event.query()) and self.now_ns() - begin_ns < _IDLE_NS:
            pass
        width_ns = self.now_ns() - begin_ns
        if is_idle and width_ns <= 2 * self.error_ns:
            self._probing = self._device.event()  # the old reference's event may still be that of marks
            self._reference = _Reference(event, begin_ns + width_ns // 2)

    @property
    def is_behind(self) -> bool:
        """True if there are marks that the device had not passed when they were read last."""
        return any(line.marks for line in self._lines.values())

    def mark(self) -> StreamMark:
        """Return a mark in the current stream."""
        event, made_ns = self._event(), self.now_ns()
        stream = self._device.record(event)
        return self._in_line(stream, StreamMark(stream, made_ns, event, self._reference))

    def mark_end(self, wait: Callable[[], object], group: int) -> StreamMark | None:
        """Return a mark where a collective ends.

        Args:
            wait: lets the current stream wait for the collective, as ``wait()`` of c10d's work does; others call it
                again. If it raises there is no mark: it will where the engine waits.
            group: its communication group, whose collectives end in the order they were issued in.
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
        """Return the marks that the device has passed, each once, as soon as they have a row; never blocks."""
        with self._device.reading():
            for line in list(self._lines.values()):
                while line.marks and line.marks[0].event.query():
                    self._read(line.marks.popleft(), line)
        told = [mark for mark in self._passed if mark.row >= 0]
        self._passed = [mark for mark in self._passed if mark.row == NO_ROW]
        return told

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
