"""What a rank does before it says that it stands: what it printed is on its way, what its device was given is done."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch


class Quiet:
    """Called in the thread that is about to be held.

    Args:
        device: this rank's.
        synchronise: waits until a device has done what it was given; never called for the CPU.
    """

    def __init__(
        self, device: torch.device, synchronise: Callable[[torch.device], None] = torch.accelerator.synchronize
    ) -> None:
        self._device, self._synchronise = device, synchronise

    def __call__(self) -> bool:
        """Write out what was printed, and tell whether there was a device to wait for."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if self._device.type == "cpu":
            return False
        self._synchronise(self._device)
        return True
