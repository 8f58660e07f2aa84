"""CUDA streams of the engine; on CPU there are none and nothing here does anything.

Collectives run in c10d's own streams. What the engine adds is one stream for casting and copying the input of an
all-gather, so that a prefetch does not queue behind the compute that is to hide it, one in which gradients are copied
and reduce-scatters waited for, and one for what follows these: all-reduces, hooks, copies to the host. That one trails
to the end of backward; compute waits for the second as it goes, because its memory is used again. The host never waits
(with offloading, for the gradients it is to step with, at the end of backward).

Memory goes back to the stream it is from as soon as the host has issued its last use, and that stream waits for the use
(:meth:`Streams.was_read`, :meth:`Streams.join`). ``record_stream`` instead would keep it from being used again for as
long as the device lags behind the host, so that the peak would grow with the lag.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from workbench.engine.device_clock import name_stream


class Streams:
    """Streams of one communication context.

    Attributes:
        copy_in: for all-gather inputs; None on CPU.
        reduce: for reduce-scatters; None on CPU.
        trail: for what follows them; None on CPU.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.copy_in = torch.cuda.Stream(device, priority=-1) if is_cuda else None
        self.reduce = torch.cuda.Stream(device, priority=-1) if is_cuda else None
        self.trail = torch.cuda.Stream(device, priority=-1) if is_cuda else None
        for stream, name in ((self.copy_in, "copy-in"), (self.reduce, "reduce"), (self.trail, "trail")):
            name_stream(stream, name)

    @property
    def are_there(self) -> bool:
        """True on CUDA."""
        return self.copy_in is not None

    def gathering(self) -> AbstractContextManager[object]:
        """Within the body work goes to the copy-in stream."""
        return torch.cuda.stream(self.copy_in) if self.copy_in is not None else nullcontext()

    def reducing(self, *, after_compute: bool) -> AbstractContextManager[object]:
        """Within the body work goes to the reduce stream, which first waits for what was computed so far."""
        if self.reduce is None:
            return nullcontext()
        if after_compute:
            self.reduce.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.reduce)

    def trailing(self, *outputs: torch.Tensor) -> AbstractContextManager[object]:
        """Within the body work goes to the trailing stream, after what the present one was given so far.

        ``outputs`` are used there, and may die there.
        """
        if self.trail is None:
            return nullcontext()
        self.trail.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.trail):
            used_here(*outputs)
        return torch.cuda.stream(self.trail)

    def shards_changed(self, event: torch.cuda.Event | None) -> None:
        """Let later all-gathers see the optimizer's step: wait for ``event``, or for all that was computed so far."""
        if self.copy_in is None:
            return
        if event is not None:
            self.copy_in.wait_event(event)
        else:
            self.copy_in.wait_stream(torch.cuda.current_stream())

    def was_read(self) -> None:
        """Let the next all-gather have the memory of one that was copied out, or waited for, just now."""
        if self.copy_in is not None:
            self.copy_in.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Let compute see that full gradients were read and freed."""
        if self.reduce is not None:
            torch.cuda.current_stream().wait_stream(self.reduce)

    def join_all(self) -> None:
        """Let compute see reduced gradients as well."""
        self.join()
        if self.trail is not None:
            torch.cuda.current_stream().wait_stream(self.trail)


def used_here(*tensors: torch.Tensor) -> None:
    """Tell the CUDA allocator that tensors of another stream are used in the current one."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())
