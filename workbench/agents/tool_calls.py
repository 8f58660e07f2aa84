"""The calls of tools: each runs in a thread of its own, and goes on after its client no longer waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from workbench.agents.reply_limit import limited
from workbench.base.text_formats import plural
from workbench.errors import UsageError
from workbench.reports.json_document import document
from workbench.session.outputs import text_of

MAX_OUTPUT = 10_000
"""Characters of the ranks' output that a reply has: the newest."""

MAX_CALLS = 8
"""Most calls that have not ended, or whose results nothing has waited for."""


class ToolCall:
    """One call.

    Args:
        name: of its tool.
        work: does what the call asks for, and returns its report, or a sentence, or None; gets the call.

    Attributes:
        name: likewise.
        ended: its document, once it has ended.
        notices: what else it says, a sentence each.
        standing: which ranks it waits for, in a sentence; empty: there is news of it.
        picture: the PNG of the report, or None.
    """

    def __init__(self, name: str, work: Callable[[ToolCall], object]) -> None:
        self.name, self._work = name, work
        self.ended: Future[dict[str, Any]] = Future()
        self.notices: list[str] = []
        self.standing = ""
        self.picture: bytes | None = None
        self._output = ""

    def start(self) -> None:
        """Begin, in a thread."""
        threading.Thread(target=self._run, name=f"tool: {self.name}", daemon=True).start()

    def _run(self) -> None:
        try:
            report = self._work(self)
            if isinstance(report, str):
                self.notices.append(report)
                report = None
            found = document(self.name, report, notices=self.notices)
        except BaseException as error:  # noqa: BLE001 - Interrupted too: a thread has no caller
            found = document(self.name, error=error, notices=self.notices)
        self.ended.set_result(limited(found))

    def on_output(self, output: Any) -> None:  # noqa: ANN401 - an Output of the cluster
        """Keep the end of what the ranks print."""
        self._output = (self._output + text_of([output]))[-MAX_OUTPUT:]

    def on_standing(self, sentence: str) -> None:
        """Keep the sentence on which ranks it waits for."""
        self.standing = sentence

    def take_output(self) -> str:
        """Return what the ranks have printed since the last time."""
        taken, self._output = self._output, ""
        return taken


class OpenCalls:
    """The calls whose results no client has got yet, oldest first. Of one thread."""

    def __init__(self) -> None:
        self._calls: deque[ToolCall] = deque()

    def begin(self, call: ToolCall) -> None:
        """Start a call.

        Raises:
            UsageError: too many others are open.
        """
        if len(self._calls) >= MAX_CALLS:
            raise UsageError(f"{plural(len(self._calls), 'call')} have no result yet: first wait, or abort")
        self._calls.append(call)
        call.start()

    def oldest(self) -> ToolCall:
        """Return the oldest open call.

        Raises:
            UsageError: there is none.
        """
        if not self._calls:
            raise UsageError("nothing to wait for: every call has ended and returned its result")
        return self._calls[0]

    def close(self, call: ToolCall) -> dict[str, Any]:
        """Return the document of a call, which is then no longer open if it has ended."""
        if not call.ended.done():
            still = f"{call.name} has not ended yet: wait, or abort it{f'; {call.standing}' if call.standing else ''}"
            return document(call.name, notices=[*call.notices, still, *self._others(call)])
        if call in self._calls:
            self._calls.remove(call)
        found = call.ended.result()
        return {**found, "notices": [*found["notices"], *self._others(call)]}

    def _others(self, call: ToolCall) -> list[str]:
        """Return a sentence on each other open call that has ended."""
        return [
            f"{each.name} has ended: wait returns its result"
            for each in self._calls
            if each is not call and each.ended.done()
        ]
