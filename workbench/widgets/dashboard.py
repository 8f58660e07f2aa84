"""The live dashboard: one widget that shows what all ranks do while they train, and at any event before.

The browser asks, this side answers; nothing is sent unasked, so a dashboard that nobody sees costs nothing. Each
view in the browser has a name of its own, which finds its :class:`~workbench.widgets.view_server.ViewServer` here.

The messages are declared in :mod:`workbench.widgets.dashboard_messages`. With one panel alone, ``timeline``, it is what
``%fsdp timeline --canvas`` shows.

The feed keeps to a number of bytes a second and is thinned out for it. A window is asked for when the view holds still
and somebody looks closely: such answers come with what a person does and are not part of that number. One is limited
by :data:`workbench.widgets.window_detail.MOST` and :data:`workbench.widgets.window_detail.MOST_SPANS`; beyond that it
says that it is not ``exact``.

:class:`DashboardWidget` is a widget; :class:`Views` is all of it but the transport of its messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import anywidget
import traitlets

from workbench.codec import decode_named, encode
from workbench.errors import UsageError, WorkbenchError
from workbench.protocol.commands import NEXT
from workbench.session.snapshot import ClusterSnapshot
from workbench.widgets.dashboard_messages import (
    AskFeed,
    ButtonResult,
    CloseView,
    InitialState,
    Panel,
    QueryRefused,
    Question,
    RunButton,
)
from workbench.widgets.js_bundle import STATIC, joined
from workbench.widgets.long_poll import LongPoll, Send, WatchedWorkbench, crowded_out
from workbench.widgets.subshell import answer_while_busy
from workbench.widgets.view_server import ViewServer

BUTTONS: dict[str, tuple[str, dict[str, Any]]] = {
    "step": ("step", {"background": True}),
    "pause": ("pause", {}),
    "next": ("next", {"background": True}),
    "continue": ("resume", {"background": True}),
    "abort": ("abort", {}),
    "break": ("break_add", {}),
}
"""The buttons, and the method of the workbench that each one calls, with its arguments."""

ARGUED = ("next", "break")
"""The buttons whose method takes what was chosen or typed beside them, first."""

ON_BREAKPOINTS = {"break on": "break_on", "break off": "break_off", "break clear": "break_clear"}
"""What is done with a breakpoint of the list, and the method of the workbench that takes its number for it."""

QUESTIONS: dict[str, type] = {question.ask: question for question in get_args(Question)}

Tell = Callable[[dict[str, Any], list[bytes] | None], None]
"""Sends a message to the browser, with what goes beside it."""


def read_question(data: Any) -> Question:  # noqa: ANN401 - anything may come
    """Return the question that came as ``data``.

    Raises:
        ValueError: it is none, or a field is missing or of another type.
    """
    question: Question = decode_named(QUESTIONS, data, "question", key="ask", fill=True)
    return question


class Views:
    """The views of one dashboard and the answers to what they ask, whoever carries the messages.

    Args:
        workbench: what is shown; another thread may use it at the same time.
        tell: sends an answer; called from any thread.
        panels: to be shown. Without ``ranks`` there are no buttons that act on them either.
        clock: seconds, monotonic.

    Attributes:
        about: what the browser has to know from the beginning, besides ``events.js``.
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
        self._pulse: ClusterSnapshot | None = None
        self._waiting = LongPoll(workbench.pulse, self._news, clock, workbench.asked)
        words = tuple(word for word, (method, _) in BUTTONS.items() if hasattr(workbench, method))
        buttons = words if "ranks" in panels else ()
        self.about: dict[str, Any] = encode(InitialState(buttons=buttons, sizes=NEXT, panels=tuple(panels)))

    def __len__(self) -> int:
        """How many views there are."""
        return len(self._views)

    def close(self) -> None:
        """Answer nobody any more; returns when nothing is left."""
        self._waiting.close()
        with self._lock:
            self._views.clear()
            self._pulse = None

    def receive(self, data: Any) -> None:  # noqa: ANN401 - anything may come
        """Answer one message of the browser; runs in the main thread, or in a subshell's while a cell runs."""
        try:
            self._receive(read_question(data))
        except (WorkbenchError, ValueError) as error:
            sent = data if isinstance(data, dict) else {}
            view, number = sent.get("view"), sent.get("number")
            refused = QueryRefused(number=number if type(number) is int else -1, text=str(error))
            self._tell(view if isinstance(view, str) else "", encode(refused))

    def _receive(self, question: Question) -> None:
        name = question.view
        if isinstance(question, RunButton):
            self._press(name, question.word, question.argument)
            return
        with self._lock:
            if isinstance(question, CloseView):
                self._forget(name)
                return
            view = self._views.pop(name, None) or ViewServer()
            self._views[name] = view  # the newest is last
            for crowded in crowded_out(self._views):
                self._forget(crowded)
            if isinstance(question, AskFeed) and question.wait:
                self._waiting.ask(name)
                return
            if isinstance(question, AskFeed) or self._pulse is None:  # else no rank is asked
                self._pulse = self._workbench.pulse()
            answer, buffers = view.answer(question, self._pulse, self._clock)
        self._tell(name, answer, buffers)

    def _forget(self, name: str) -> None:
        self._views.pop(name, None)
        self._waiting.forget(name)

    def _news(self, name: str, pulse: ClusterSnapshot) -> Send:
        """Make the answer to a view that has waited."""
        with self._lock:
            if name not in self._views:
                return lambda: None
            self._pulse = pulse
            answer, buffers = self._views[name].answer(AskFeed(), pulse, self._clock)
        return lambda: self._tell(name, answer, buffers)

    def _tell(self, name: str, answer: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        self._send({**answer, "view": name}, buffers)

    def _press(self, view: str, word: str, argument: str) -> None:
        """Do what a button says, in a thread of its own: it may take long, and the view goes on asking.

        Raises:
            UsageError: there is no such button, or no such number of a breakpoint.
        """
        if word in self.about["buttons"]:
            name, arguments = BUTTONS[word]
            given = (argument,) if word in ARGUED and (argument or word == "break") else ()
            do = partial(getattr(self._workbench, name), *given, **arguments)
        elif word in ON_BREAKPOINTS:
            if not argument.isdecimal():  # without a number it would be all of them
                raise UsageError(f"{word} takes the number of a breakpoint, not {argument!r:.80}")
            do = partial(getattr(self._workbench, ON_BREAKPOINTS[word]), int(argument))
        else:
            known = ", ".join((*self.about["buttons"], *ON_BREAKPOINTS))
            raise UsageError(f"there is no button {word!r:.80}; the buttons: {known}")
        threading.Thread(target=self._do, args=(view, word, do), name=f"dashboard: {word}", daemon=True).start()

    def _do(self, view: str, word: str, do: Callable[[], object]) -> None:
        try:
            report = do()
            words = "" if word in BUTTONS and BUTTONS[word][1] else str(report)  # that it goes on is seen
        except WorkbenchError as error:
            words = str(error)
        except Exception as error:  # noqa: BLE001 - nobody else is there to be told of it
            words = f"{type(error).__name__}: {error}"
        self._tell(view, encode(ButtonResult(word=word, text=words.partition("\n")[0])))


class DashboardWidget(anywidget.AnyWidget):
    """The dashboard as a widget, whose messages go over its own comm.

    Args:
        workbench: what is shown; another thread may use it at the same time.
        panels: to be shown; see :class:`Views`.
        clock: seconds, monotonic.
    """

    _esm = joined("dashboard.js")
    _css = (STATIC / "dashboard.css").read_text("utf-8")
    about = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        workbench: WatchedWorkbench,
        *,
        panels: Sequence[Panel] = get_args(Panel),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._views = Views(workbench, self._tell, panels=panels, clock=clock)
        super().__init__(about=self._views.about)
        self.on_msg(self._on_message)
        answer_while_busy(self.comm)

    def close(self) -> None:
        """Take the widget away; nothing of it is left, neither here nor in the browser."""
        self._views.close()
        self.on_msg(self._on_message, remove=True)
        super().close()

    def _on_message(self, _widget: object, content: Any, _buffers: object) -> None:  # noqa: ANN401 - anything may come
        self._views.receive(content)

    def _tell(self, content: dict[str, Any], buffers: list[bytes] | None) -> None:
        if self.comm is not None:  # closed meanwhile
            self.send(content, buffers)


def dashboard(workbench: WatchedWorkbench, panels: Sequence[Panel] = get_args(Panel)) -> DashboardWidget:
    """Return a live dashboard of ``workbench``; it may be shown several times, and ``close()`` takes it away."""
    return DashboardWidget(workbench, panels=panels)
