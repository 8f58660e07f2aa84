"""Memory of one process that others on its host can map at an address, and that outlives it while they do."""

from __future__ import annotations

import weakref
from contextlib import ExitStack

import torch

from workbench.engine.backends.shared.shared_memory import create_memory, map_memory


def mappable(num_bytes: int) -> tuple[torch.Tensor, str]:
    """Return memory ``[num_bytes]`` and its address, valid while the tensor exists; empty: it cannot be mapped."""
    until_freed = ExitStack()
    try:
        address = create_memory(num_bytes, until_freed)
        memory = map_memory(address, num_bytes)
    except (OSError, RuntimeError):  # RuntimeError: torch cannot map it
        until_freed.close()
        return torch.empty(num_bytes, dtype=torch.uint8), ""
    weakref.finalize(memory, until_freed.close)
    return memory, address


def mapped(address: str, num_bytes: int) -> torch.Tensor:
    """Return the memory of another process of this host, ``[num_bytes]``.

    Raises:
        OSError: it is gone, or of another host.
    """
    try:
        return map_memory(address, num_bytes)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error
