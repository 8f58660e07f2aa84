"""A device without a device: streams are queues on a clock of their own, that lags behind the host that fills them.

What it is given takes as long as it is told, and begins when its stream is free and the host has come to it. It behaves
as CUDA does where a :class:`~workbench.engine.device_clock.DeviceClock` asks it, and both pass one contract
(``engine/test_device_clock.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from workbench.engine.device_clock import COMMUNICATION
from workbench.events import COMPUTE_STREAM

LATENCY_NS = 3_000  # from the host's call until an idle device comes to it


@dataclass
class HostClock:
    """A clock that stands still until it is moved, or the device is waited for."""

    ns: int = 10**9
    tick_ns: int = 500  # that each look at it takes

    def __call__(self) -> int:
        self.ns += self.tick_ns
        return self.ns


@dataclass(eq=False)
class FakeStream:
    """Attributes: until_ns: when it will have done what it was given so far."""

    device: FakeDevice
    name: str
    until_ns: int = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.until_ns = max(self.until_ns, other.until_ns)

    def wait_event(self, event: FakeEvent) -> None:
        self.until_ns = max(self.until_ns, event.at_ns)

    def record_event(self) -> FakeEvent:
        event = self.device.event()
        with self.device.on(self):
            self.device.record(event)
        return event

    def query(self) -> bool:
        return self.device.now_ns() >= self.until_ns


@dataclass(eq=False)
class FakeEvent:
    """Attributes: at_ns: when the device passes it; -1 before it was recorded."""

    device: FakeDevice
    at_ns: int = -1

    def query(self) -> bool:
        return self.device.now_ns() >= self.at_ns

    def synchronize(self) -> None:
        self.device.wait_until(self.at_ns)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        """Milliseconds as CUDA has them: 32 bits, of the device's clock; it refuses what has not happened yet."""
        if min(self.at_ns, end_event.at_ns) < 0 or not (self.query() and end_event.query()):
            raise RuntimeError("device not ready")
        return float(np.float32((end_event.at_ns - self.at_ns) * self.device.rate / 1e6))


@dataclass(eq=False)
class FakeDevice:
    """Attributes: now_ns: the host's clock; rate: of the device's clock; events: how many were made."""

    now_ns: Callable[[], int] = field(default_factory=HostClock)
    rate: float = 1.0
    events: int = 0

    def __post_init__(self) -> None:
        self.compute = self.current = FakeStream(self, COMPUTE_STREAM)
        self.streams = {COMPUTE_STREAM: self.compute}

    # ---- what a clock needs of it

    def event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self)

    def record(self, event: FakeEvent) -> str:
        self.give(0)
        event.at_ns = self.current.until_ns
        return self.current.name

    def beside(self, group: int):
        return self.on(self.stream(f"{COMMUNICATION} {group}", COMMUNICATION))

    def reading(self):
        return nullcontext()

    def synchronize(self) -> None:
        self.wait_until(max(stream.until_ns for stream in self.streams.values()))

    # ---- what is done with it

    def stream(self, key: str, name: str = "") -> FakeStream:
        return self.streams.setdefault(key, FakeStream(self, name or key))

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def give(self, duration_ns: int) -> None:
        """Give the current stream something to do that takes so long."""
        self.current.until_ns = max(self.current.until_ns, self.now_ns() + LATENCY_NS) + duration_ns

    def wait_until(self, t_ns: int) -> None:
        if isinstance(self.now_ns, HostClock):
            self.now_ns.ns = max(self.now_ns.ns, t_ns)
        while self.now_ns() < t_ns:
            pass
