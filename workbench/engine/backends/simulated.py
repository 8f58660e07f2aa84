"""A device on a virtual clock: its streams are queues that work of a known duration is added to, and nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from workbench.engine.backends.async_work import CollectiveSpan, PendingWork, WaitObserver
from workbench.engine.backends.device_clock import DeviceClock
from workbench.engine.backends.streams import StreamBackend, StreamTransport
from workbench.engine.cancellable_waits import AsyncWork


class VirtualClock:
    """The host's virtual clock, in nanoseconds; each reading takes a moment, so that no two events are at once."""

    def __init__(self) -> None:
        self.now_ns = 10**9

    def __call__(self) -> int:
        """Return the time."""
        self.now_ns += 1
        return self.now_ns

    def wait_until(self, t_ns: int) -> None:
        """Move on to a time, unless it has passed."""
        self.now_ns = max(self.now_ns, t_ns)


@dataclass(eq=False)
class SimulatedStream:
    """A queue of work.

    Attributes:
        device: its device.
        until_ns: when its work so far is done.
    """

    device: SimulatedDevice
    until_ns: int = 0

    def wait_stream(self, other: SimulatedStream) -> None:
        """Let later work begin after the work so far of another stream."""
        self.until_ns = max(self.until_ns, other.until_ns)

    def wait_event(self, event: SimulatedEvent) -> None:
        """Let later work begin after an event."""
        self.until_ns = max(self.until_ns, event.at_ns)

    def record_event(self) -> SimulatedEvent:
        """Return a new event after the work so far."""
        event = self.device.event()
        event.record(self)
        return event

    def add(self, duration_ns: int) -> None:
        """Add work, which begins when the host has issued it and the work before it is done."""
        self.until_ns = max(self.until_ns, self.device.time_ns + self.device.latency_ns) + duration_ns

    def query(self) -> bool:
        """Whether all work is done."""
        return self.device.time_ns >= self.until_ns


@dataclass(eq=False)
class SimulatedEvent:
    """A point in a stream.

    Attributes:
        device: its device.
        at_ns: when the stream passes it; -1 before it is recorded.
    """

    device: SimulatedDevice
    at_ns: int = -1

    def record(self, stream: SimulatedStream) -> None:
        """Put the event behind the work so far of a stream."""
        stream.add(0)
        self.at_ns = stream.until_ns

    def query(self) -> bool:
        """Whether the stream has passed it."""
        return self.device.time_ns >= self.at_ns

    def synchronize(self) -> None:
        """Have the host wait for it."""
        self.device.wait_until(self.at_ns)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Return the milliseconds from this event to a later one."""
        return (end.at_ns - self.at_ns) / 1e6


class SimulatedWork(dist.Work):
    """A collective in a stream of its own group: it begins after the issuing stream and the group's last collective.

    Attributes:
        until_ns: when it ends.
    """

    def __init__(self, device: SimulatedDevice, until_ns: int) -> None:
        super().__init__()
        self._device, self.until_ns = device, until_ns

    def wait(self, *_: object) -> bool:
        """Make the current stream wait."""
        stream = self._device.current_stream()
        stream.until_ns = max(stream.until_ns, self.until_ns)
        return True

    def is_completed(self) -> bool:
        """Whether the collective has ended."""
        return self._device.time_ns >= self.until_ns


class SimulatedTransport(StreamTransport):
    """The collectives of one group."""

    def __init__(self, device: SimulatedDevice, process_group: dist.ProcessGroup) -> None:
        self._device, self._process_group = device, process_group

    def pending(
        self,
        _work: AsyncWork | None,
        collective: object,
        watch: WaitObserver | None = None,
        span: CollectiveSpan | None = None,
    ) -> PendingWork:
        """Return the pending work of the group's newest collective."""
        return self.pending_class(self._device.newest(self._process_group), collective, watch, span)


class SimulatedClock(DeviceClock):
    """The device's clock; a host that asks whether the device is behind waits for it, as nothing else moves time on."""

    @property
    def is_behind(self) -> bool:
        """True if the device had not passed all marks at the last read."""
        if super().is_behind:
            self._device.synchronize()
            return True
        return False


class SimulatedDevice(StreamBackend):
    """The device of a planned rank. Its tensors are of torch's CPU, as autograd runs only on devices that exist.

    Attributes:
        host: the host's clock.
        latency_ns: time from the host's call until an idle stream begins the work.
        runs_at_once: the host waits for whatever it issues, as on a device that is the host's own processor.
    """

    latency_ns = 0
    runs_at_once = False
    averages = True
    fuses_copies = True
    c10d = "fake"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.host = VirtualClock()
        self._current = SimulatedStream(self)
        self._streams = [self._current]
        self._of_groups: dict[dist.ProcessGroup, SimulatedStream] = {}

    @property
    def time_ns(self) -> int:
        """The host's time; to read it takes none."""
        return self.host.now_ns

    def make_stream(self, *, is_urgent: bool) -> SimulatedStream:
        """Return a new stream."""
        self._streams.append(SimulatedStream(self))
        return self._streams[-1]

    def current_stream(self) -> SimulatedStream:
        """Return the current stream."""
        return self._current

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """Return a context in which ``stream`` is the current stream."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def event(self) -> SimulatedEvent:
        """Return a new event."""
        return SimulatedEvent(self)

    def used_here(self, *_tensors: torch.Tensor) -> None:
        """Do nothing: there is no allocator."""

    def reading(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return nullcontext()

    def runs(self, _process_group: dist.ProcessGroup) -> bool:
        """True: all collectives are simulated."""
        return True

    def transport(self, process_group: dist.ProcessGroup) -> SimulatedTransport:
        """Return the transport of a process group."""
        return SimulatedTransport(self, process_group)

    def stream_of(self, process_group: dist.ProcessGroup) -> SimulatedStream:
        """Return the stream in which the collectives of a process group run, one after the other."""
        if process_group not in self._of_groups:
            self._of_groups[process_group] = self.make_stream(is_urgent=True)
        return self._of_groups[process_group]

    def compute(self, duration_ns: int) -> None:
        """Issue work to the current stream."""
        self._add(self._current, duration_ns)

    def communicate(self, process_group: dist.ProcessGroup, duration_ns: int) -> None:
        """Issue a collective: it begins after what was issued to the current stream so far."""
        stream = self.stream_of(process_group)
        stream.wait_stream(self._current)
        self._add(stream, duration_ns)

    def _add(self, stream: SimulatedStream, duration_ns: int) -> None:
        stream.add(duration_ns)
        if self.runs_at_once:
            self.wait_until(stream.until_ns)

    def newest(self, process_group: dist.ProcessGroup) -> SimulatedWork:
        """Return the work of a group's newest collective."""
        return SimulatedWork(self, self.stream_of(process_group).until_ns)

    def now_ns(self) -> int:
        """Return the host's virtual time."""
        return self.host()

    def clock(self, _now_ns: object = None) -> DeviceClock:
        """Return the device's clock, in the virtual time of the host."""
        return SimulatedClock(self, self.host)

    def synchronize(self) -> None:
        """Have the host wait for all work."""
        self.wait_until(max(stream.until_ns for stream in self._streams))

    def wait_until(self, t_ns: int) -> None:
        """Have the host wait until a time."""
        self.host.wait_until(t_ns)
