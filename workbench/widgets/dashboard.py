"""The live dashboard: one widget that shows what all ranks do while they train, and did at any earlier event.

``%fsdp timeline --canvas`` shows the same widget with the panel ``timeline`` alone. The messages are the questions and
answers of views in :mod:`workbench.live.messages`; :mod:`workbench.live.server` answers them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, get_args

import anywidget
import traitlets

from workbench.base.codec import encode
from workbench.base.text_formats import plural
from workbench.live.long_poll import WatchedWorkbench
from workbench.live.messages import Panel
from workbench.live.server import Views
from workbench.trace.columns import steps
from workbench.widgets.js_bundle import STATIC, joined
from workbench.widgets.subshell import answer_while_busy


class DashboardWidget(anywidget.AnyWidget):
    """The dashboard as a widget, with its messages on the widget's comm.

    Args:
        workbench: the workbench to show; another thread may use it at the same time.
        panels: the panels to show; see :class:`~workbench.live.server.Views`.
        clock: seconds, monotonic.
    """

    _esm = joined("dashboard.js")
    _css = (STATIC / "dashboard.css").read_text("utf-8")
    about = traitlets.Dict().tag(sync=True)
    own_id = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        workbench: WatchedWorkbench,
        *,
        panels: Sequence[Panel] = get_args(Panel),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workbench, self._name = workbench, panels[0] if len(panels) == 1 else "dashboard"
        self._views = Views(workbench, self._tell, panels=panels, clock=clock)
        own_id = uuid.uuid4().hex
        super().__init__(about=encode(self._views.initial), own_id=own_id, model_id=own_id)
        self.on_msg(self._on_message)
        answer_while_busy(self.comm)

    def __repr__(self) -> str:
        """Return what a page without a kernel and a terminal show instead of the widget."""
        trace = self._workbench.pulse().trace
        done = steps(trace)
        shown = f"{plural(len(trace.ranks), 'rank')}{f', step {done[-1]}' if done else ''}"
        return f"live {self._name}: {shown} when displayed; as a page: %fsdp export page.html"  # at most 110 letters

    def close(self) -> None:
        """Remove the widget from the kernel and from the browser."""
        self._views.close()
        self.on_msg(self._on_message, remove=True)
        super().close()

    def _on_message(self, _widget: object, content: Any, _buffers: object) -> None:  # noqa: ANN401 - any JSON may come
        self._views.receive(content)

    def _tell(self, content: dict[str, Any], buffers: list[bytes] | None) -> None:
        if self.comm is not None:  # None once closed
            self.send(content, buffers)
