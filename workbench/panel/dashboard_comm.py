"""A dashboard over a comm that the browser opens: the same one as the widget, with no widget in between.

The messages are those of :mod:`workbench.widgets.dashboard`, buffers included, and one more: ``{"ask": "about"}`` is
answered by ``{"kind": "about", "about": ...}``, which is what the widget has as its trait ``about``. So a front end has
the whole dashboard if it gives ``showDashboard({model, el})`` of ``static/dashboard.js`` a ``model`` whose
``get("about")`` is that, whose ``send`` sends over the comm, and whose ``msg:custom`` are the messages that come. A
page that is reloaded opens another comm; nothing of the last one has to be kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from workbench.widgets.dashboard import Views
from workbench.widgets.long_poll import WatchedWorkbench
from workbench.widgets.subshell import answer_while_busy


class CommLike(Protocol):
    """What of a comm is needed here."""

    def send(self, data: dict[str, Any], *, buffers: list[bytes] | None = None) -> None:
        """Send a message to the browser."""

    def on_msg(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Call ``callback`` with every message of the browser."""

    def on_close(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Call ``callback`` when the browser has closed it."""

    def close(self) -> None:
        """Close it."""


class DashboardComm:
    """One comm with one dashboard.

    Args:
        workbench: what is shown.
        comm: just opened by the browser.
    """

    def __init__(self, workbench: WatchedWorkbench, comm: CommLike) -> None:
        self._comm = comm
        self._views = Views(workbench, self._tell)
        self._is_closed = False
        answer_while_busy(comm)
        comm.on_msg(self._receive)

    def close(self) -> None:
        """Answer no more; returns when nothing is left."""
        self._is_closed = True
        self._views.close()

    def _receive(self, message: dict[str, Any]) -> None:
        content = message["content"]["data"]
        if isinstance(content, dict) and content.get("ask") == "about":
            self._tell({"kind": "about", "about": self._views.about}, None)
        else:
            self._views.receive(content)

    def _tell(self, content: dict[str, Any], buffers: list[bytes] | None) -> None:
        if not self._is_closed:
            self._comm.send(content, buffers=buffers)
