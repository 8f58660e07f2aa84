"""One backend class per kind of device; the only place in the engine that depends on the kind.

A backend allocates and frees memory, gathers, reduces, copies, waits, aborts, orders work, and owns the device's clock.
To add a kind of device, or a simulated one, subclass :class:`Backend` (or
:class:`~workbench.engine.backends.streams.StreamBackend` if the device runs asynchronously to the host) and add a line
to :mod:`workbench.base.devices`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pkgutil import resolve_name
from typing import cast

import torch
import torch.distributed as dist

from workbench.base.devices import DEVICES, HOST, OFFERED
from workbench.engine.backends.base import Backend
from workbench.engine.backends.shared import shared_memory

_chosen: dict[str, Callable[[torch.device], Backend]] = {}
"""Backend overrides of this process, by torch device type."""


@functools.cache
def kind(name: str) -> type[Backend]:
    """Return the backend class of a kind of device in :data:`~workbench.base.devices.DEVICES`."""
    return cast("type[Backend]", resolve_name(DEVICES[name].backend))


@functools.cache
def backend_of(device: torch.device) -> Backend:
    """Return the backend of a device."""
    if device.type in _chosen:
        return _chosen[device.type](device)
    return kind(device.type)(device) if device.type in DEVICES else Backend(device)


def take_for(device_type: str, make: Callable[[torch.device], Backend] | None) -> None:
    """Make this process use the backend that ``make`` returns for a torch device type; None removes the override.

    A simulated device uses this to compute on a device of another kind.
    """
    _chosen.pop(device_type, None)
    if make is not None:
        _chosen[device_type] = make
    backend_of.cache_clear()


def choose(name: str, local_rank: int) -> Backend:
    """Return the backend of the device that this process computes on as a rank.

    Args:
        name: kind of device, a key of :data:`~workbench.base.devices.DEVICES`.
        local_rank: index of the rank on its host.
    """
    device = kind(name).of_rank(local_rank)
    take_for(device.type, kind(name))
    return backend_of(device)


def counts() -> dict[str, int]:
    """Return the number of this host's devices by kind, for the kinds whose devices ranks do not share."""
    found = {name: kind(name).num_here() for name in OFFERED}
    return {name: number for name, number in found.items() if number is not None}


def device_here(device_type: str) -> torch.device:
    """Return this process's current device of a torch device type."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device_type:
        return torch.device(device_type)
    return torch.device(device_type, torch.accelerator.current_device_index())


def _accelerator() -> str:
    """Return the kind of this host's accelerator; empty if there is none or its kind is unknown."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in DEVICES else ""


def usual_kind() -> str:
    """Return the default kind of device for ranks."""
    found = _accelerator()
    return found if found and kind(found).c10d in dist.get_backend_config() else HOST


def tell_host(identity: str) -> None:
    """Set the identity of this process's host; ranks share memory only if their host identities are equal."""
    shared_memory.host = identity


def can_pin() -> bool:
    """Whether there is a device to which pinned memory can be copied asynchronously."""
    return bool(_accelerator())


def is_of_kind(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device of the same kind."""
    return tensor.device.type == device.type
