"""CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from workbench.engine._torch import abort_process_groups
from workbench.engine.backends.device_clock import Event
from workbench.engine.backends.streams import Stream, StreamBackend


class Cuda(StreamBackend):
    """A CUDA device of this process; its allocator keeps what it had."""

    averages = True
    fuses_copies = True
    c10d = "nccl"

    @classmethod
    def of_rank(cls, local_rank: int) -> torch.device:
        """Return the device of that number."""
        return torch.device("cuda", local_rank)

    @classmethod
    def num_here(cls) -> int:
        """Return how many this process may see."""
        return torch.cuda.device_count()

    def make_stream(self, *, is_urgent: bool) -> Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self.device, priority=-1 if is_urgent else 0)

    def current_stream(self) -> Stream:
        """Return the stream that this thread gives work to."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Within the body this thread gives work to ``stream``."""
        return torch.cuda.stream(stream)

    def event(self) -> Event:
        """Return a new event that keeps its time."""
        return torch.cuda.Event(enable_timing=True)

    def used_here(self, *tensors: torch.Tensor) -> None:
        """Tell the allocator that tensors of another stream are used in the current one."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.current_stream())

    def reading(self) -> AbstractContextManager[object]:
        """Within the body this thread is at the device: else asking would make a context on another one."""
        return torch.cuda.device(self.device)

    def runs(self, process_group: dist.ProcessGroup) -> bool:
        """NCCL's do."""
        return bool(dist.get_backend(process_group) == "nccl")

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        torch.cuda.synchronize(self.device)

    def make_current(self) -> None:
        """Let this process compute here."""
        torch.cuda.set_device(self.device)

    def destroy_process_groups(self) -> None:
        """Leave c10d; NCCL would else wait for its kernels, and they for a peer that has left."""
        abort_process_groups()
