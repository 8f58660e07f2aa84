"""What a rank does before it says that it stands: what it printed is on its way, what its device was given is done."""

from __future__ import annotations

import sys

from workbench.engine.backends.base import Backend


class FlushBeforeHold:
    """Called in the thread that is about to be held.

    Args:
        backend: of this rank's device.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self) -> bool:
        """Write out what was printed, and tell whether there was a device to wait for."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._backend.synchronize()
        return not self._backend.is_host
