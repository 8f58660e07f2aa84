"""CUDA: work is handed over, in streams that wait for each other.

Collectives run in c10d's own streams. What the engine adds is one stream for casting and copying the input of an
all-gather, so that a prefetch does not queue behind the compute that is to hide it, one in which gradients are copied
and reduce-scatters waited for, and one for what follows these: all-reduces, hooks, copies to the host. That one trails
to the end of backward; compute waits for the second as it goes, because its memory is used again. The host never waits
(with offloading, for the gradients it is to step with, at the end of backward).

Memory goes back to the stream it is from as soon as the host has issued its last use, and that stream waits for the use
(:meth:`CudaStreams.was_read`, :meth:`CudaStreams.join`). ``record_stream`` instead would keep it from being used again
for as long as the device lags behind the host, so that the peak would grow with the lag.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from workbench.engine.backends.base import Backend, Mark, Streams
from workbench.engine.device_clock import name_stream


class CudaStreams(Streams):
    """Streams of one communication context.

    Attributes:
        copy_in: for all-gather inputs.
        reduce: for reduce-scatters.
        trail: for what follows them.
    """

    def __init__(self, device: torch.device) -> None:
        self.copy_in = torch.cuda.Stream(device, priority=-1)
        self.reduce = torch.cuda.Stream(device, priority=-1)
        self.trail = torch.cuda.Stream(device, priority=-1)
        for stream, name in ((self.copy_in, "copy-in"), (self.reduce, "reduce"), (self.trail, "trail")):
            name_stream(stream, name)

    @property
    def are_there(self) -> bool:
        """They are."""
        return True

    def gathering(self) -> AbstractContextManager[object]:
        """Within the body work goes to the copy-in stream."""
        return torch.cuda.stream(self.copy_in)

    def reducing(self, *, after_compute: bool) -> AbstractContextManager[object]:
        """Within the body work goes to the reduce stream, which first waits for what was computed so far."""
        if after_compute:
            self.reduce.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.reduce)

    def trailing(self, *outputs: torch.Tensor) -> AbstractContextManager[object]:
        """Within the body work goes to the trailing stream, after what the present one was given so far.

        ``outputs`` are used there, and may die there.
        """
        self.trail.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.trail):
            used_here(*outputs)
        return torch.cuda.stream(self.trail)

    def shards_changed(self, event: Mark) -> None:
        """Let later all-gathers see the optimizer's step: wait for ``event``, or for all that was computed so far."""
        if event is not None:
            self.copy_in.wait_event(event)
        else:
            self.copy_in.wait_stream(torch.cuda.current_stream())

    def was_read(self) -> None:
        """Let the next all-gather have the memory of one that was copied out, or waited for, just now."""
        self.copy_in.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Let compute see that full gradients were read and freed."""
        torch.cuda.current_stream().wait_stream(self.reduce)

    def join_all(self) -> None:
        """Let compute see reduced gradients as well."""
        self.join()
        torch.cuda.current_stream().wait_stream(self.trail)


def used_here(*tensors: torch.Tensor) -> None:
    """Tell the CUDA allocator that tensors of another stream are used in the current one."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())


class Cuda(Backend):
    """A CUDA device of this process; its allocator keeps what it had."""

    averages = True
    fuses_copies = True

    def streams(self) -> CudaStreams:
        """Return streams for a communication context."""
        return CudaStreams(self.device)

    def mark(self) -> Mark:
        """Return an event in the current stream."""
        return torch.cuda.current_stream().record_event()

    def wait_for(self, mark: Mark) -> None:
        """Let the current stream wait for ``mark``."""
        torch.cuda.current_stream().wait_event(mark)

    def wait_on_host(self, mark: Mark) -> None:
        """Let the host wait for ``mark``."""
        mark.synchronize()

    @contextmanager
    def within(self, stream: Any, *tensors: torch.Tensor) -> Iterator[None]:  # noqa: ANN401 - a torch.cuda.Stream
        """Within the body work goes to ``stream``, after what the current one was given, and that goes on after it."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            used_here(*tensors)
            yield
        torch.cuda.current_stream().wait_stream(stream)
