"""The kinds of device that ranks can compute on, with the backend class of each."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

AUTO = "auto"
"""The first kind with enough devices to give each rank its own; else :data:`HOST`."""

HOST = "cpu"
"""The kind that is always available."""

SIMULATED = "simulated"
"""The kind of a planned rank, whose tensors have no data."""


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        backend: ``module:class``, a :class:`workbench.engine.backends.base.Backend`; a notebook never imports it, as it
            needs torch.
        driver: a file that exists on hosts with such devices. A process forked from one that has loaded torch must not
            use them; if empty, it may.
        library: library through which programs use the driver; present also where the file is elsewhere, as on WSL.
        is_offered: whether ``--device`` takes it.
    """

    backend: str
    driver: str = ""
    library: str = ""
    is_offered: bool = True

    def may_be_here(self) -> bool:
        """Whether this host may have such devices; False is certain. Does not import torch."""
        if not self.driver or Path(self.driver).exists():
            return True
        try:
            ctypes.CDLL(self.library)
        except OSError:
            return False
        return True


DEVICES: Mapping[str, Device] = {
    HOST: Device("workbench.engine.backends.cpu:Cpu"),
    "cuda": Device("workbench.engine.backends.cuda:Cuda", driver="/dev/nvidiactl", library="libcuda.so.1"),
    SIMULATED: Device("workbench.engine.backends.simulated:SimulatedDevice", is_offered=False),
}
"""By the name that ``--device`` takes, which is ``torch.device.type`` if torch knows the kind."""

OFFERED = tuple(name for name, device in DEVICES.items() if device.is_offered)
"""The kinds that ranks can be started on."""

CHOICES = (AUTO, *OFFERED)
"""Values of ``--device``."""
