"""A dashboard over a comm that the browser opens: the same as the widget's, without a widget.

The messages are those of :mod:`workbench.widgets.dashboard`, buffers included, and one more: the answer to
``{"ask": "about"}`` is ``{"kind": "about", "about": ...}``, with the value of the widget's trait ``about``. A front end
shows the dashboard by calling ``showDashboard({model, el})`` of ``static/dashboard.js`` with a ``model`` whose
``get("about")`` returns that value, whose ``send`` sends over the comm, and whose ``msg:custom`` events are the
messages received. A page that is reloaded opens another comm; no state of the last one is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from workbench.live.long_poll import WatchedWorkbench
from workbench.widgets.dashboard import Views
from workbench.widgets.subshell import answer_while_busy


class CommLike(Protocol):
    """The part of a comm that is needed here."""

    def send(self, data: dict[str, Any], *, buffers: list[bytes] | None = None) -> None:
        """Send a message to the browser."""

    def on_msg(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Call ``callback`` with every message from the browser."""

    def on_close(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Call ``callback`` when the browser has closed the comm."""

    def close(self) -> None:
        """Close the comm."""


class DashboardComm:
    """One comm with one dashboard.

    Args:
        workbench: the workbench to show.
        comm: just opened by the browser.
    """

    def __init__(self, workbench: WatchedWorkbench, comm: CommLike) -> None:
        self._comm = comm
        self._views = Views(workbench, self._tell)
        self._is_closed = False
        answer_while_busy(comm)
        comm.on_msg(self._receive)

    def close(self) -> None:
        """Stop answering; return when all waiting threads have ended."""
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
