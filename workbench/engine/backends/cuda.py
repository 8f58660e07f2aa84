"""The backend for CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from workbench.engine._torch import abort_process_groups
from workbench.engine.backends.device_clock import Event
from workbench.engine.backends.streams import Stream, StreamBackend


class Cuda(StreamBackend):
    """A CUDA device of this process; its allocator caches freed memory."""

    averages = True
    fuses_copies = True
    c10d = "nccl"

    @classmethod
    def of_rank(cls, local_rank: int) -> torch.device:
        """Return the device with index ``local_rank``."""
        return torch.device("cuda", local_rank)

    @classmethod
    def num_here(cls) -> int:
        """Return the number of devices visible to this process."""
        return torch.cuda.device_count()

    def make_stream(self, *, is_urgent: bool) -> Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self.device, priority=-1 if is_urgent else 0)

    def current_stream(self) -> Stream:
        """Return this thread's current stream."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which ``stream`` is this thread's current stream."""
        return torch.cuda.stream(stream)

    def event(self) -> Event:
        """Return a new event with timing enabled."""
        return torch.cuda.Event(enable_timing=True)

    def used_here(self, *tensors: torch.Tensor) -> None:
        """Tell the allocator that the current stream uses tensors of another stream."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.current_stream())

    def reading(self) -> AbstractContextManager[object]:
        """Return a context with this device current; otherwise a query would create a context on another device."""
        return torch.cuda.device(self.device)

    def runs(self, process_group: dist.ProcessGroup) -> bool:
        """Whether ``process_group`` uses NCCL."""
        return bool(dist.get_backend(process_group) == "nccl")

    def synchronize(self) -> None:
        """Block until the device has finished all work."""
        torch.cuda.synchronize(self.device)

    def make_current(self) -> None:
        """Make this the current device of the process."""
        torch.cuda.set_device(self.device)

    def destroy_process_groups(self) -> None:
        """Abort all process groups; destroying them would wait for kernels that wait for a peer that has left."""
        abort_process_groups()
