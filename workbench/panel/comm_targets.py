"""The comm targets of panels and dashboards in a kernel, from ``%load_ext workbench`` to ``%unload_ext``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import comm

from workbench.live.panel_messages import DASHBOARD_TARGET, TARGET
from workbench.magics.notebook import Notebook
from workbench.panel.dashboard_comm import CommLike, DashboardComm
from workbench.panel.panel import PanelComm

MAX_COMMS = 8
"""Maximum number of comms kept per target: a page that is reloaded leaves one open. Beyond it, the oldest is closed; a
front end that still shows it opens another."""


class CommServer(Protocol):
    """Answers the messages of one comm."""

    def close(self) -> None:
        """Stop answering."""


class CommTargets:
    """Serves the comms that browsers open.

    Args:
        notebook: runs the commands.
        version: version of the Python package.
    """

    def __init__(self, notebook: Notebook, version: str) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, dict[str, tuple[Any, CommServer]]] = {TARGET: {}, DASHBOARD_TARGET: {}}
        self._serve: dict[str, Callable[[CommLike], CommServer]] = {
            TARGET: lambda opened: PanelComm(notebook, opened, version=version),
            DASHBOARD_TARGET: lambda opened: DashboardComm(notebook.shown(), opened),
        }

    def register(self) -> None:
        """Let browsers open comms."""
        for target in self._serve:
            comm.get_comm_manager().register_target(target, self._on_open)

    def unregister(self) -> None:
        """Close all comms and accept no new ones."""
        for target in self._serve:
            comm.get_comm_manager().unregister_target(target, self._on_open)
        for found in self._open.values():
            for comm_id in tuple(found):
                self._close(found, comm_id)

    def _on_open(self, opened: Any, message: dict[str, Any]) -> None:  # noqa: ANN401 - a comm
        target = message["content"]["target_name"]
        served, found = self._serve[target](opened), self._open[target]
        with self._lock:
            found[opened.comm_id] = opened, served
            crowded = list(found)[:-MAX_COMMS]
        opened.on_close(lambda _message: self._forget(found, opened.comm_id))
        for comm_id in crowded:
            self._close(found, comm_id)

    def _close(self, found: dict[str, tuple[Any, CommServer]], comm_id: str) -> None:
        opened, _ = found[comm_id]
        self._forget(found, comm_id)
        opened.close()

    def _forget(self, found: dict[str, tuple[Any, CommServer]], comm_id: str) -> None:
        with self._lock:
            _, served = found.pop(comm_id, (None, None))
        if served is not None:
            served.close()


def register(notebook: Notebook, version: str) -> None:
    """Let browsers open panels and dashboards of ``notebook`` until it is closed; no-op if they already can."""
    if TARGET in comm.get_comm_manager().targets:
        return
    targets = CommTargets(notebook, version)
    targets.register()
    notebook.on_close(targets.unregister)
