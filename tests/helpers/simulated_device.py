"""A simulated device: its streams are queues on a clock that lags behind the host that fills them.

Each piece of work takes the given time; it begins when its stream is free and the host has issued it. The device is a
backend that behaves as CUDA's does: both pass one contract (``engine/test_backends.py``,
``engine/test_device_clock.py``). The CPU computes what ranks train on the device, which only provides the times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from workbench.engine import backends
from workbench.engine.backends.async_work import PendingWork
from workbench.engine.backends.device_clock import DeviceClock
from workbench.engine.backends.streams import StreamBackend, StreamTransport
from workbench.engine.shard_layout import ShardLayout

LATENCY_NS = 3_000  # from the host's call until an idle device starts the work
COLLECTIVE_NS = 1_000_000


@dataclass
class HostClock:
    """A clock that stands still until it is moved, or until the host waits for the device."""

    ns: int = 10**9
    tick_ns: int = 500  # per reading

    def __call__(self) -> int:
        self.ns += self.tick_ns
        return self.ns


@dataclass(eq=False)
class FakeStream:
    """Attributes: until_ns: when the stream finishes its work so far."""

    device: FakeDevice
    until_ns: int = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.until_ns = max(self.until_ns, other.until_ns)

    def wait_event(self, event: FakeEvent) -> None:
        self.until_ns = max(self.until_ns, event.at_ns)

    def record_event(self) -> FakeEvent:
        event = self.device.event()
        event.record(self)
        return event

    def give(self, duration_ns: int) -> None:
        """Add work of the given duration."""
        self.until_ns = max(self.until_ns, self.device.now_ns() + LATENCY_NS) + duration_ns

    def query(self) -> bool:
        return self.device.now_ns() >= self.until_ns


@dataclass(eq=False)
class FakeEvent:
    """Attributes: at_ns: when the device passes the event; -1 before it is recorded."""

    device: FakeDevice
    at_ns: int = -1

    def record(self, stream: FakeStream) -> None:
        stream.give(0)
        self.at_ns = stream.until_ns

    def query(self) -> bool:
        return self.device.now_ns() >= self.at_ns

    def synchronize(self) -> None:
        self.device.wait_until(self.at_ns)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        """Return milliseconds of the device's clock, in 32 bits as in CUDA; raise unless both events have happened."""
        if min(self.at_ns, end_event.at_ns) < 0 or not (self.query() and end_event.query()):
            raise RuntimeError("device not ready")
        return float(np.float32((end_event.at_ns - self.at_ns) * self.device.rate / 1e6))


class OnStream(dist.Work):
    """A collective that begins at the time of the issuing stream; a stream that waits for it continues at its end."""

    def __init__(self, work: dist.Work, device: FakeDevice) -> None:
        super().__init__()
        self.work, self.device = work, device
        self.until_ns = max(device.current.until_ns, device.now_ns()) + COLLECTIVE_NS

    def wait(self, *_: object) -> bool:
        self.work.wait()  # the tensors are on the CPU: they must be complete
        self.device.current.until_ns = max(self.device.current.until_ns, self.until_ns)
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed()


class FakeTransport(StreamTransport):
    """Collectives that run in streams of a fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def pending(self, work, collective, watch=None) -> PendingWork:
        return super().pending(OnStream(work, self.device), collective, watch)


@dataclass(frozen=True)
class ByRows:
    """The parameter that a backend copies gradients in for, split as ``fully_shard`` splits it."""

    layout: ShardLayout

    def copy_in_pairs(self, grads, slots, first_rank):
        """Yield the destinations of its only gradient."""
        (grad,) = grads
        return self.layout.copy_in_pairs(grad, slots, first_rank)


class FakeDevice(StreamBackend):
    """Attributes: now_ns: the host's clock; rate: of the device's clock; events: number of events made."""

    is_host = True  # its data is in the host's memory

    def __init__(self, now_ns: Callable[[], int] | None = None, rate: float = 1.0) -> None:
        super().__init__(torch.device("cpu"))
        self.now_ns = HostClock() if now_ns is None else now_ns
        self.rate = rate
        self.events = 0
        self.compute = self.current = FakeStream(self)
        self.all_streams = [self.compute]

    # ---- the backend

    def make_stream(self, *, is_urgent: bool) -> FakeStream:
        self.all_streams.append(FakeStream(self))
        return self.all_streams[-1]

    def current_stream(self) -> FakeStream:
        return self.current

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self)

    def used_here(self, *_tensors: torch.Tensor) -> None:
        pass

    def reading(self):
        return nullcontext()

    def runs(self, _process_group) -> bool:
        return True

    def transport(self, _process_group) -> FakeTransport:
        return FakeTransport(self)

    def clock(self) -> DeviceClock:
        return super().clock(self.now_ns)

    def synchronize(self) -> None:
        self.wait_until(max(stream.until_ns for stream in self.all_streams))

    # ---- the tests' control of the device

    def give(self, duration_ns: int) -> None:
        """Add work of the given duration to the current stream."""
        self.current.give(duration_ns)

    def wait_until(self, t_ns: int) -> None:
        if isinstance(self.now_ns, HostClock):
            self.now_ns.ns = max(self.now_ns.ns, t_ns)
        while self.now_ns() < t_ns:
            pass


@contextmanager
def computing_on(backend: backends.Backend) -> Iterator[None]:
    """Within the body, make the engine use ``backend`` for the CPU."""
    backends.take_for("cpu", lambda _device: backend)
    try:
        yield
    finally:
        backends.take_for("cpu", None)
