"""A simulated device: its streams are queues on a clock that lags behind the host that fills them.

Each piece of work takes the given time; it begins when its stream is free and the host has issued it. The device is a
backend that behaves as CUDA's does: both pass one contract (``engine/test_backends.py``,
``engine/test_device_clock.py``). The CPU computes what ranks train on the device, which only provides the times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from workbench.engine import backends
from workbench.engine.backends.async_work import PendingWork
from workbench.engine.backends.device_clock import DeviceClock
from workbench.engine.backends.simulated import SimulatedDevice, SimulatedEvent, SimulatedStream
from workbench.engine.backends.streams import StreamTransport
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


class FakeEvent(SimulatedEvent):
    """An event with the resolution and the refusals of CUDA's."""

    device: FakeDevice

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Return milliseconds of the device's clock, in 32 bits as in CUDA; raise unless both events have happened."""
        if min(self.at_ns, end.at_ns) < 0 or not (self.query() and end.query()):
            raise RuntimeError("device not ready")
        return float(np.float32((end.at_ns - self.at_ns) * self.device.rate / 1e6))


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

    def pending(self, work, *about) -> PendingWork:
        return super().pending(OnStream(work, self.device), *about)


@dataclass(frozen=True)
class ByRows:
    """The parameter that a backend copies gradients in for, split as ``fully_shard`` splits it."""

    layout: ShardLayout

    def copy_in_pairs(self, grads, slots, first_rank):
        """Yield the destinations of its only gradient."""
        (grad,) = grads
        return self.layout.copy_in_pairs(grad, slots, first_rank)


class FakeDevice(SimulatedDevice):
    """Attributes: now_ns: the host's clock; rate: of the device's clock; events: number of events made."""

    is_host = True  # its data is in the host's memory
    averages = fuses_copies = False
    c10d = "gloo"
    latency_ns = LATENCY_NS

    def __init__(self, now_ns: Callable[[], int] | None = None, rate: float = 1.0) -> None:
        super().__init__(torch.device("cpu"))
        self.now_ns = HostClock() if now_ns is None else now_ns
        self.rate = rate
        self.events = 0
        self.compute = self.current

    # ---- the backend

    @property
    def time_ns(self) -> int:
        return self.now_ns()

    def event(self) -> FakeEvent:
        self.events += 1
        return FakeEvent(self)

    def transport(self, _process_group) -> FakeTransport:
        return FakeTransport(self)

    def clock(self) -> DeviceClock:
        return DeviceClock(self, self.now_ns)

    # ---- the tests' control of the device

    @property
    def current(self) -> SimulatedStream:
        return self.current_stream()

    def give(self, duration_ns: int) -> None:
        """Add work of the given duration to the current stream."""
        self.current.add(duration_ns)

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
