"""One class for each kind of device: the only place that asks which kind it is.

A backend takes and gives memory, gathers, reduces and copies, waits and aborts, says what has to wait for what, and has
the device's clock. A further kind, or a simulated one, is a subclass of :class:`Backend`, or, if it goes on while the
host does, of :class:`~workbench.engine.backends.streams.StreamBackend`; and a line in :data:`KINDS`.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from workbench.engine.backends import shared_memory
from workbench.engine.backends.base import Backend
from workbench.engine.backends.cuda import Cuda
from workbench.engine.backends.host import Host

KINDS: dict[str, type[Backend]] = {"cpu": Host, "cuda": Cuda}
"""The backend of each kind of device, by what ``torch.device.type`` calls it."""


@functools.cache
def backend_of(device: torch.device) -> Backend:
    """Return the backend of a device."""
    return KINDS.get(device.type, Backend)(device)


def device_here(kind: str) -> torch.device:
    """Return the device of a kind that this process computes on."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def usual_kind() -> str:
    """Return the kind of device that ranks compute on if nobody says."""
    return "cuda" if "nccl" in dist.get_backend_config() and torch.cuda.is_available() else "cpu"


def tell_host(identity: str) -> None:
    """Tell this process what identifies its host: it shares memory only with ranks that were told the same."""
    shared_memory.host = identity


def can_pin() -> bool:
    """Whether there is a device to which pinned memory is copied while the host goes on."""
    return torch.cuda.is_available()


def is_of_kind(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device of the same kind."""
    return tensor.device.type == device.type
