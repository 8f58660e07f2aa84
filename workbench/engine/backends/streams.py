"""A device that runs asynchronously to the host, in streams that wait for each other.

Collectives run in c10d's own streams. The engine adds three streams per communication context:

- copy-in casts and copies the input of an all-gather, so that a prefetch does not queue behind the compute that hides
  it;
- reduce copies gradients and waits for reduce-scatters; compute joins it during backward, because its memory is reused;
- trail runs what follows reduce-scatters (all-reduces, hooks, copies to the host); it may lag until backward ends.

The host waits only with offloading: at the end of backward, for the gradients that the optimizer needs.

Memory returns to the stream it was allocated in as soon as the host has issued its last use, and that stream waits for
the use (:meth:`DeviceStreams.was_read`, :meth:`DeviceStreams.join`). ``record_stream`` would instead block reuse for as
long as the device lags behind the host, so the memory peak would grow with the lag.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine.backends.async_work import PendingWork, Transport
from workbench.engine.backends.base import Backend
from workbench.engine.backends.device_clock import COMMUNICATION, DeviceClock, Event
from workbench.engine.backends.stream_order import Streams
from workbench.events import COMPUTE_STREAM

Stream = Any
"""A hashable object with the methods of :class:`torch.cuda.Stream`."""


class DeviceStreams(Streams):
    """Streams of one communication context.

    Attributes:
        copy_in: for all-gather inputs.
        reduce: for reduce-scatters.
        trail: for the work after reduce-scatters.
    """

    def __init__(self, device: StreamBackend) -> None:
        self._device = device
        self.copy_in = device.new_stream("copy-in", is_urgent=True)
        self.reduce = device.new_stream("reduce", is_urgent=True)
        self.trail = device.new_stream("trail", is_urgent=True)

    @property
    def are_there(self) -> bool:
        """True."""
        return True

    def gathering(self) -> AbstractContextManager[object]:
        """Return a context in which work goes to the copy-in stream."""
        return self._device.on(self.copy_in)

    def reducing(self, *, after_compute: bool) -> AbstractContextManager[object]:
        """Return a context for work on the reduce stream; with ``after_compute`` it follows earlier compute."""
        if after_compute:
            self.reduce.wait_stream(self._device.current_stream())
        return self._device.on(self.reduce)

    def trailing(self, *outputs: torch.Tensor) -> AbstractContextManager[object]:
        """Return a context in which work goes to the trail stream, after the work issued so far to the current stream.

        ``outputs`` are used there and may be freed there.
        """
        self.trail.wait_stream(self._device.current_stream())
        with self._device.on(self.trail):
            self._device.used_here(*outputs)
        return self._device.on(self.trail)

    def shards_changed(self, event: Event) -> None:
        """Make later all-gathers wait for the optimizer step: for ``event``, or for all compute issued so far."""
        if event is not None:
            self.copy_in.wait_event(event)
        else:
            self.copy_in.wait_stream(self._device.current_stream())

    def was_read(self) -> None:
        """Let the next all-gather reuse the memory of the all-gather that was just copied out or waited for."""
        self.copy_in.wait_stream(self._device.current_stream())

    def join(self) -> None:
        """Make compute wait until full gradients are read, so that it can reuse their memory."""
        self._device.current_stream().wait_stream(self.reduce)

    def join_all(self) -> None:
        """Make compute wait for the reduced gradients as well."""
        self.join()
        self._device.current_stream().wait_stream(self.trail)


def _host_waits() -> bool:
    """Whether the environment makes NCCL's ``wait()`` block the host."""
    return any(os.environ.get(name, "0") != "0" for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"))


class StreamWork(PendingWork):
    """A collective on a device's stream: the current stream waits for it, the host does not."""

    def _listen(self) -> None:
        """Do nothing: c10d's future would complete as soon as the work is enqueued."""

    def wait(self) -> None:
        """Make the current stream wait for the collective; the host does not block. Raises as the base class does."""
        with self._waiting(), self._naming_failures():
            self._work.wait()

    def abandon(self) -> None:
        """Make the current stream wait, if the collective can still be waited for."""
        if not _host_waits():
            with suppress(RuntimeError):
                self._work.wait()

    def finish(self) -> None:
        """Do nothing: :meth:`wait` made the current stream wait."""

    @property
    def lets_stream_wait(self) -> Callable[[], object] | None:
        """Function that makes the current stream wait; only c10d's, whose ``wait`` may be called repeatedly."""
        return self._work.wait if isinstance(self._work, dist.Work) and not _host_waits() else None

    @property
    def has_ended(self) -> bool:
        """True once the device has finished; work without ``is_completed`` counts as finished when issued."""
        is_completed: Callable[[], bool] | None = getattr(self._work, "is_completed", None)
        return is_completed is None or is_completed()


class StreamTransport(Transport):
    """Collectives run in order on a device's stream; no host thread waits for them."""

    host_waits = False
    pending_class = StreamWork

    def abort(self, process_group: dist.ProcessGroup) -> None:
        """Abort a process group; otherwise a kernel of it that waits for a peer would spin forever."""
        process_group.abort()


class StreamBackend(Backend, ABC):
    """A device that runs asynchronously to the host; subclasses provide its streams and events."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._names: dict[Stream, str] = {}
        self._beside: dict[int, Stream] = {}

    # ---- for subclasses to implement

    @abstractmethod
    def make_stream(self, *, is_urgent: bool) -> Stream:
        """Return a new stream that lives as long as the process."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return this thread's current stream."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which ``stream`` is this thread's current stream."""

    @abstractmethod
    def event(self) -> Event:
        """Return a new event with timing enabled."""

    @abstractmethod
    def used_here(self, *tensors: torch.Tensor) -> None:
        """Tell the allocator that the current stream uses tensors of another stream."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[object]:
        """Return a context in which this thread may query events, whatever its current device was."""

    @abstractmethod
    def runs(self, process_group: dist.ProcessGroup) -> bool:
        """Whether the collectives of ``process_group`` run in streams of the device."""

    # ---- built on these

    def new_stream(self, name: str, *, is_urgent: bool = False) -> Stream:
        """Return a new stream; ``name`` is the stream name of marks in it."""
        stream = self.make_stream(is_urgent=is_urgent)
        self._names[stream] = name
        return stream

    def record(self, event: Event) -> str:
        """Record an event in this thread's current stream; return the stream's name."""
        stream = self.current_stream()
        event.record(stream)
        return self._names.get(stream, COMPUTE_STREAM)

    def beside(self, group: int) -> AbstractContextManager[object]:
        """Return a context in which the current stream is reserved for marks of one communication group."""
        if group not in self._beside:
            self._beside[group] = self.new_stream(COMMUNICATION)
        return self.on(self._beside[group])

    def clock(self, now_ns: Callable[[], int] = time.monotonic_ns) -> DeviceClock:
        """Return a clock for the work on the device, in the time of the host's clock ``now_ns``."""
        return DeviceClock(self, now_ns)

    def streams(self) -> DeviceStreams:
        """Return streams for a communication context."""
        return DeviceStreams(self)

    def transport(self, process_group: dist.ProcessGroup) -> Transport:
        """Return the transport of a process group."""
        return StreamTransport() if self.runs(process_group) else Transport()

    def record_event(self) -> Event:
        """Return a new event recorded in the current stream."""
        return self.current_stream().record_event()

    def wait_event(self, event: Event) -> None:
        """Make the current stream wait for ``event``."""
        self.current_stream().wait_event(event)

    def wait_on_host(self, event: Event) -> None:
        """Block the host until ``event``."""
        event.synchronize()

    @contextmanager
    def within(self, stream: Stream, *tensors: torch.Tensor) -> Iterator[None]:
        """In the body, work goes to ``stream``, after the current stream's earlier work and before its later work."""
        stream.wait_stream(self.current_stream())
        with self.on(stream):
            self.used_here(*tensors)
            yield
        self.current_stream().wait_stream(stream)
