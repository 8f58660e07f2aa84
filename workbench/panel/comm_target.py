"""The comm target of panels and dashboards in a kernel, from ``%load_ext workbench`` to ``%unload_ext``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import comm

from workbench.live.messages import TARGET
from workbench.panel.client import Client
from workbench.workbench import Workbench

MAX_COMMS = 16
"""Maximum number of comms kept: a page that is reloaded leaves those of its panel and dashboards open. Beyond it, the
oldest is closed; a front end that still shows it opens another."""


class CommTarget:
    """Serves the comms that browsers open.

    Args:
        workbench: runs the commands.
        version: version of the Python package.
    """

    def __init__(self, workbench: Workbench, version: str) -> None:
        self._workbench, self._version = workbench, version
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Any, Client]] = {}

    def register(self) -> None:
        """Let browsers open comms."""
        comm.get_comm_manager().register_target(TARGET, self._on_open)

    def unregister(self) -> None:
        """Close all comms and accept no new ones."""
        comm.get_comm_manager().unregister_target(TARGET, self._on_open)
        for comm_id in tuple(self._open):
            self._close(comm_id)

    def _on_open(self, opened: Any, _message: dict[str, Any]) -> None:  # noqa: ANN401 - a comm
        client = Client(self._workbench, opened, version=self._version)
        with self._lock:
            self._open[opened.comm_id] = opened, client
            crowded = list(self._open)[:-MAX_COMMS]
        opened.on_close(lambda _message: self._forget(opened.comm_id))
        for comm_id in crowded:
            self._close(comm_id)

    def _close(self, comm_id: str) -> None:
        opened, _ = self._open[comm_id]
        self._forget(comm_id)
        opened.close()

    def _forget(self, comm_id: str) -> None:
        with self._lock:
            _, client = self._open.pop(comm_id, (None, None))
        if client is not None:
            client.close()


def register(workbench: Workbench, version: str, on_close: Callable[[Callable[[], None]], object]) -> None:
    """Let browsers open panels and dashboards of ``workbench``; no-op if they already can.

    ``on_close`` registers the function that ends this.
    """
    if TARGET in comm.get_comm_manager().targets:
        return
    target = CommTarget(workbench, version)
    target.register()
    on_close(target.unregister)
