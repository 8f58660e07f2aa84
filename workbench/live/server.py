"""The views of dashboards: what each has received, and the answers to their questions.

The browser asks and the kernel only answers, so a dashboard that is out of sight costs nothing. Each view in the
browser has a name of its own, which selects its :class:`~workbench.live.view_server.ViewServer` here. All views of a
workbench share one :class:`~workbench.live.live_trace.LiveTrace`.

The feed is thinned out to fit a number of bytes per second. While it holds still, a view also asks for the exact window
in view; these answers do not count towards that number. A window is limited by
:data:`workbench.live.window_detail.MOST` and :data:`workbench.live.window_detail.MOST_SPANS`; beyond these it is not
``exact``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

from workbench.base.codec import encode
from workbench.errors import UsageError, WorkbenchError
from workbench.live.live_trace import MAX_AGE_S, live_trace_of
from workbench.live.long_poll import LongPoll, Send, WatchedWorkbench
from workbench.live.messages import (
    VIEW_QUESTIONS,
    AskFeed,
    ButtonResult,
    CloseView,
    InitialState,
    Panel,
    RunButton,
    ViewQuestion,
    read_question,
    refusal,
)
from workbench.live.view_server import ViewServer
from workbench.protocol.commands import NEXT
from workbench.protocol.fault_kinds import KINDS, RANDOM

BUTTONS: dict[str, tuple[str, dict[str, Any]]] = {
    "step": ("step", {"background": True}),
    "pause": ("pause", {}),
    "next": ("next", {"background": True}),
    "continue": ("resume", {"background": True}),
    "abort": ("abort", {}),
    "break": ("break_add", {}),
    "fault": ("fault", {}),
}
"""By button, the workbench method that it calls and the method's keyword arguments."""

ARGUED = ("next", "break", "fault")
"""Buttons whose method takes the value chosen or typed next to them as its first argument."""

FAULTS = (RANDOM, *KINDS)
"""What ``fault`` can be pressed for, in the order of the list."""

ON_BREAKPOINTS = {"break on": "break_on", "break off": "break_off", "break clear": "break_clear"}
"""By action on a breakpoint of the list, the workbench method that takes its number."""

MAX_VIEWS = 8
"""Maximum number of views kept per widget; beyond it, the view with the oldest question is dropped."""

Tell = Callable[[dict[str, Any], list[bytes] | None], None]
"""Sends a message and its buffers to the browser."""


class Views:
    """The views of one dashboard and the answers to their questions, independent of the transport.

    Args:
        workbench: the workbench to show; another thread may use it at the same time.
        tell: sends an answer; called from any thread.
        panels: the panels to show. Without ``ranks`` there are no buttons either.
        clock: seconds, monotonic.

    Attributes:
        initial: what the browser needs from the beginning, in addition to ``events.js``.
        live: the workbench's trace, shared with other clients.
        waiting: the questions that are answered when there is something new.
    """

    def __init__(
        self,
        workbench: WatchedWorkbench,
        tell: Tell,
        *,
        panels: Sequence[Panel] = get_args(Panel),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workbench, self._clock, self._send = workbench, clock, tell
        self._lock = threading.RLock()
        self._views: dict[str, ViewServer] = {}
        self.live = live_trace_of(workbench)
        self.waiting = LongPoll(partial(self.live.poll, workbench, MAX_AGE_S), clock, workbench.activity)
        words = tuple(word for word, (method, _) in BUTTONS.items() if hasattr(workbench, method))
        buttons = words if "ranks" in panels else ()
        self.initial = InitialState(buttons=buttons, sizes=NEXT, faults=FAULTS, panels=tuple(panels))

    def __len__(self) -> int:
        """Return the number of views."""
        return len(self._views)

    def close(self) -> None:
        """Stop answering; return when all waiting threads have ended."""
        self.waiting.close()
        with self._lock:
            self._views.clear()

    def receive(self, data: Any) -> None:  # noqa: ANN401 - any JSON may come
        """Answer one message of the browser; runs in the main thread, or in a subshell's thread while a cell runs."""
        try:
            self.ask(read_question(data, VIEW_QUESTIONS))
        except (WorkbenchError, ValueError) as error:
            refused = refusal(data, error)
            self._tell(refused.view, encode(refused))

    def ask(self, question: ViewQuestion) -> None:
        """Answer a question, at once or later.

        Raises:
            WorkbenchError: it cannot be answered.
        """
        name = question.view
        if isinstance(question, RunButton):
            self._press(name, question.button, question.argument)
            return
        with self._lock:
            if isinstance(question, CloseView):
                self._forget(name)
                return
            view = self._views.pop(name, None) or ViewServer(self.live)
            self._views[name] = view  # the latest to ask is last
            for crowded in list(self._views)[:-MAX_VIEWS]:
                self._forget(crowded)
            if isinstance(question, AskFeed) and question.wait:
                self.waiting.ask(name, partial(self._news, name))
                return
            if isinstance(question, AskFeed) or self.live.pulse is None:  # the others use the last snapshot
                self.live.poll(self._workbench)
            answer, buffers = view.answer(question, self._clock)
        self._tell(name, answer, buffers)

    def _forget(self, name: str) -> None:
        self._views.pop(name, None)
        self.waiting.forget(name)

    def _news(self, name: str) -> Send:
        """Make the answer to a waiting view; return the function that sends it."""
        with self._lock:
            if name not in self._views:
                return lambda: None
            answer, buffers = self._views[name].answer(AskFeed(), self._clock)
        return lambda: self._tell(name, answer, buffers)

    def _tell(self, name: str, answer: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        self._send({**answer, "view": name}, buffers)

    def _press(self, view: str, word: str, argument: str) -> None:
        """Run the command of a button in a thread of its own: it may take long, and the view keeps asking.

        Raises:
            UsageError: there is no such button, or the argument is not the number of a breakpoint.
        """
        if word in self.initial.buttons:
            name, arguments = BUTTONS[word]
            given = (argument,) if word in ARGUED and (argument or word == "break") else ()
            do = partial(getattr(self._workbench, name), *given, **arguments)
        elif word in ON_BREAKPOINTS:
            if not argument.isdecimal():  # without a number the method acts on all of them
                raise UsageError(f"{word} takes the number of a breakpoint, not {argument!r:.80}")
            do = partial(getattr(self._workbench, ON_BREAKPOINTS[word]), int(argument))
        else:
            known = ", ".join((*self.initial.buttons, *ON_BREAKPOINTS))
            raise UsageError(f"there is no button {word!r:.80}; the buttons: {known}")
        threading.Thread(target=self._do, args=(view, word, do), name=f"dashboard: {word}", daemon=True).start()

    def _do(self, view: str, word: str, do: Callable[[], object]) -> None:
        try:
            report = do()
            words = "" if word in BUTTONS and BUTTONS[word][1] else str(report)  # the view shows the progress itself
        except WorkbenchError as error:
            words = str(error)
        except Exception as error:  # noqa: BLE001 - a thread has no caller to raise to
            words = f"{type(error).__name__}: {error}"
        self._tell(view, encode(ButtonResult(button=word, text=words.partition("\n")[0])))
