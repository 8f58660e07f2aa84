"""The kinds of device that ranks can compute on, a line each; the class that a line names says all else of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """

    backend: str
    driver: str = ""


DEVICES: Mapping[str, Device] = {
    HOST: Device("workbench.engine.backends.host:Host"),
    "cuda": Device("workbench.engine.backends.cuda:Cuda", driver="/dev/nvidiactl"),
}
"""By the name that ``--device`` takes: if torch knows the kind, by what ``torch.device.type`` calls it."""

CHOICES = (AUTO, *DEVICES)
"""What ``--device`` takes."""
