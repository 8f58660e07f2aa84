"""Flush and synchronise before a hold, so that a held rank has sent its output and its device has caught up."""

from __future__ import annotations

import sys

from workbench.engine.backends.base import Backend


class FlushBeforeHold:
    """Callable for the thread that is about to be held.

    Args:
        backend: of this rank's device.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self) -> bool:
        """Flush the output and synchronise the device; return whether there is a device."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._backend.synchronize()
        return not self._backend.is_host
