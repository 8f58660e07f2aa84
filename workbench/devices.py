"""The kinds of device that ranks can compute on, a line each; the class that a line names says all else of its kind."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

AUTO = "auto"
"""The first kind of which every rank can have one of its own; if there is none, :data:`HOST`."""

HOST = "cpu"
"""Where ranks can compute in any case."""


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        backend: ``module:class``, a :class:`workbench.engine.backends.base.Backend`; it needs torch, so that a notebook
            never imports it.
        driver: a file of hosts that have such devices, which a process must not use if it was forked from one that has
            loaded torch; empty: forked ones may.
        library: through which programs use the driver; where the file is elsewhere, as on Windows' Linux, it is there.
    """

    backend: str
    driver: str = ""
    library: str = ""

    def may_be_here(self) -> bool:
        """Whether this host may have such devices; False is sure, and takes no import of torch to know."""
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
}
"""By the name that ``--device`` takes: if torch knows the kind, by what ``torch.device.type`` calls it."""

CHOICES = (AUTO, *DEVICES)
"""What ``--device`` takes."""
