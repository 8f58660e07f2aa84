"""A device that work is handed over to, in streams that wait for each other.

Collectives run in c10d's own streams. What the engine adds is one stream for casting and copying the input of an
all-gather, so that a prefetch does not queue behind the compute that is to hide it, one in which gradients are copied
and reduce-scatters waited for, and one for what follows these: all-reduces, hooks, copies to the host. That one trails
to the end of backward; compute waits for the second as it goes, because its memory is used again. The host never waits
(with offloading, for the gradients it is to step with, at the end of backward).

Memory goes back to the stream it is from as soon as the host has issued its last use, and that stream waits for the use
(:meth:`DeviceStreams.was_read`, :meth:`DeviceStreams.join`). ``record_stream`` instead would keep it from being used
again for as long as the device lags behind the host, so that the peak would grow with the lag.
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

from workbench.engine.backends.async_work import PendingWork, Transport, WaitObserver
from workbench.engine.backends.base import Backend, Streams
from workbench.engine.backends.device_clock import COMMUNICATION, DeviceClock, Event
from workbench.engine.cancellable_waits import AsyncWork
from workbench.events import COMPUTE_STREAM

Stream = Any
"""What has the methods of :class:`torch.cuda.Stream`, and can be a key."""


class DeviceStreams(Streams):
    """Streams of one communication context.

    Attributes:
        copy_in: for all-gather inputs.
        reduce: for reduce-scatters.
        trail: for what follows them.
    """

    def __init__(self, device: StreamBackend) -> None:
        self._device = device
        self.copy_in = device.new_stream("copy-in", is_urgent=True)
        self.reduce = device.new_stream("reduce", is_urgent=True)
        self.trail = device.new_stream("trail", is_urgent=True)

    @property
    def are_there(self) -> bool:
        """They are."""
        return True

    def gathering(self) -> AbstractContextManager[object]:
        """Within the body work goes to the copy-in stream."""
        return self._device.on(self.copy_in)

    def reducing(self, *, after_compute: bool) -> AbstractContextManager[object]:
        """Within the body work goes to the reduce stream, which first waits for what was computed so far."""
        if after_compute:
            self.reduce.wait_stream(self._device.current_stream())
        return self._device.on(self.reduce)

    def trailing(self, *outputs: torch.Tensor) -> AbstractContextManager[object]:
        """Within the body work goes to the trailing stream, after what the present one was given so far.

        ``outputs`` are used there, and may die there.
        """
        self.trail.wait_stream(self._device.current_stream())
        with self._device.on(self.trail):
            self._device.used_here(*outputs)
        return self._device.on(self.trail)

    def shards_changed(self, event: Event) -> None:
        """Let later all-gathers see the optimizer's step: wait for ``event``, or for all that was computed so far."""
        if event is not None:
            self.copy_in.wait_event(event)
        else:
            self.copy_in.wait_stream(self._device.current_stream())

    def was_read(self) -> None:
        """Let the next all-gather have the memory of one that was copied out, or waited for, just now."""
        self.copy_in.wait_stream(self._device.current_stream())

    def join(self) -> None:
        """Let compute see that full gradients were read and freed."""
        self._device.current_stream().wait_stream(self.reduce)

    def join_all(self) -> None:
        """Let compute see reduced gradients as well."""
        self.join()
        self._device.current_stream().wait_stream(self.trail)


def _host_waits() -> bool:
    """Whether the user has NCCL's ``wait()`` block the host."""
    return any(os.environ.get(name, "0") != "0" for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"))


class StreamWork(PendingWork):
    """Work in order on a device's stream: only the stream waits for it."""

    def _listen(self) -> None:
        """Nothing on the host: c10d's future would complete when the work is enqueued."""

    def _wait_in_slices(self) -> None:
        """Let the current stream wait for it; the host goes on."""
        super().finish()

    def abandon(self) -> None:
        """Let the current stream wait, if the collective can still be waited for."""
        if not _host_waits():
            with suppress(RuntimeError):
                self._work.wait()

    def finish(self) -> None:
        """Nothing: the current stream waits since :meth:`block`."""

    @property
    def lets_stream_wait(self) -> Callable[[], object] | None:
        """What lets the current stream wait, for others to call; c10d's own may be called again and again."""
        return self._work.wait if isinstance(self._work, dist.Work) and not _host_waits() else None

    @property
    def has_ended(self) -> bool:
        """True once the device is done; work that cannot tell has ended when it was issued."""
        is_completed: Callable[[], bool] | None = getattr(self._work, "is_completed", None)
        return is_completed is None or is_completed()


class StreamTransport(Transport):
    """Collectives run in order on a device's stream; no host thread may wait for them."""

    host_waits = False

    def pending(self, work: AsyncWork | None, collective: object, watch: WaitObserver | None = None) -> PendingWork:
        """Return the way to let streams wait for what an async collective returned."""
        return StreamWork(work, collective, watch)

    def abort(self, process_group: dist.ProcessGroup) -> None:
        """Leave a process group for good; a kernel of it that waits for a peer would else spin for ever."""
        process_group.abort()


class StreamBackend(Backend, ABC):
    """A device that goes on while the host does; a kind of device says how its streams and events are made."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._names: dict[Stream, str] = {}
        self._beside: dict[int, Stream] = {}

    # ---- what a kind of device says

    @abstractmethod
    def make_stream(self, *, is_urgent: bool) -> Stream:
        """Return a new stream, that lives as long as the process."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream that this thread gives work to."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Within the body this thread gives work to ``stream``."""

    @abstractmethod
    def event(self) -> Event:
        """Return a new event that keeps its time."""

    @abstractmethod
    def used_here(self, *tensors: torch.Tensor) -> None:
        """Tell the allocator that tensors of another stream are used in the current one."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[object]:
        """Within the body this thread may ask events, whichever device it was at before."""

    @abstractmethod
    def runs(self, process_group: dist.ProcessGroup) -> bool:
        """Whether collectives of ``process_group`` run in streams of the device."""

    # ---- what follows from that

    def new_stream(self, name: str, *, is_urgent: bool = False) -> Stream:
        """Return a new stream; marks in it say its name."""
        stream = self.make_stream(is_urgent=is_urgent)
        self._names[stream] = name
        return stream

    def record(self, event: Event) -> str:
        """Let an event be where the current stream of this thread is now; returns the stream's name."""
        stream = self.current_stream()
        event.record(stream)
        return self._names.get(stream, COMPUTE_STREAM)

    def beside(self, group: int) -> AbstractContextManager[object]:
        """Within the body the current stream is one that nothing else is given to, of a communication group."""
        if group not in self._beside:
            self._beside[group] = self.new_stream(COMMUNICATION)
        return self.on(self._beside[group])

    def clock(self, now_ns: Callable[[], int] = time.monotonic_ns) -> DeviceClock:
        """Return what tells when the device came to what it was given, on the host's clock ``now_ns``."""
        return DeviceClock(self, now_ns)

    def streams(self) -> DeviceStreams:
        """Return streams for a communication context."""
        return DeviceStreams(self)

    def transport(self, process_group: dist.ProcessGroup) -> Transport:
        """Return how the collectives of a process group end."""
        return StreamTransport() if self.runs(process_group) else Transport()

    def record_event(self) -> Event:
        """Return an event in the current stream."""
        return self.current_stream().record_event()

    def wait_event(self, event: Event) -> None:
        """Let the current stream wait for ``event``."""
        self.current_stream().wait_event(event)

    def wait_on_host(self, event: Event) -> None:
        """Let the host wait for ``event``."""
        event.synchronize()

    @contextmanager
    def within(self, stream: Stream, *tensors: torch.Tensor) -> Iterator[None]:
        """Within the body work goes to ``stream``, after what the current one was given, and that goes on after it."""
        stream.wait_stream(self.current_stream())
        with self.on(stream):
            self.used_here(*tensors)
            yield
        self.current_stream().wait_stream(stream)
