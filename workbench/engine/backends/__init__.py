"""One class for each kind of device: the only place that asks which kind it is.

A backend takes and gives memory, gathers, reduces and copies, waits and aborts, says what has to wait for what, and has
the device's clock. A further kind, or a simulated one, is a subclass of :class:`Backend`, or, if it goes on while the
host does, of :class:`~workbench.engine.backends.streams.StreamBackend`; and a line in :mod:`workbench.devices`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import cast

import torch
import torch.distributed as dist

from workbench.devices import DEVICES, HOST
from workbench.engine.backends import shared_memory
from workbench.engine.backends.base import Backend

_chosen: dict[str, Callable[[torch.device], Backend]] = {}
"""By torch's type of device: what this process was told to take such devices for."""


@functools.cache
def kind(name: str) -> type[Backend]:
    """Return the class of a kind of device of :data:`~workbench.devices.DEVICES`."""
    module, _, cls = DEVICES[name].backend.partition(":")
    return cast("type[Backend]", getattr(import_module(module), cls))


@functools.cache
def backend_of(device: torch.device) -> Backend:
    """Return the backend of a device."""
    if device.type in _chosen:
        return _chosen[device.type](device)
    return kind(device.type)(device) if device.type in DEVICES else Backend(device)


def take_for(device_type: str, make: Callable[[torch.device], Backend] | None) -> None:
    """Have this process take devices of one of torch's types for those that ``make`` returns; None: for what they are.

    So a simulated device computes where another kind does.
    """
    _chosen.pop(device_type, None)
    if make is not None:
        _chosen[device_type] = make
    backend_of.cache_clear()


def choose(name: str, local_rank: int) -> Backend:
    """Return the device that this process is to compute on as a rank.

    Args:
        name: of its kind, in :data:`~workbench.devices.DEVICES`.
        local_rank: the rank's number on its host.
    """
    device = kind(name).of_rank(local_rank)
    take_for(device.type, kind(name))
    return backend_of(device)


def counts() -> dict[str, int]:
    """Return how many devices this host has of each kind that ranks do not share."""
    found = {name: kind(name).num_here() for name in DEVICES}
    return {name: number for name, number in found.items() if number is not None}


def device_here(device_type: str) -> torch.device:
    """Return the device of one of torch's types that this process computes on."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        return torch.device(device_type)
    return torch.device(device_type, torch.accelerator.current_device_index())


def _accelerator() -> str:
    """Return the kind of the devices here beside the host; empty: there are none, or of no kind that is known."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in DEVICES else ""


def usual_kind() -> str:
    """Return the kind of device that ranks compute on if nobody says."""
    found = _accelerator()
    return found if found and kind(found).c10d in dist.get_backend_config() else HOST


def tell_host(identity: str) -> None:
    """Tell this process what identifies its host: it shares memory only with ranks that were told the same."""
    shared_memory.host = identity


def can_pin() -> bool:
    """Whether there is a device to which pinned memory is copied while the host goes on."""
    return bool(_accelerator())


def is_of_kind(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device of the same kind."""
    return tensor.device.type == device.type
