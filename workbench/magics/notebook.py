"""The one workbench of a notebook, and the one place that runs its commands, from any source."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from workbench.cluster.engine_provider import OnWait, no_wait
from workbench.cluster.processes import usable_cores
from workbench.errors import UsageError
from workbench.magics.command_lines import WORDS, no_such_word, overview, parser_for
from workbench.protocol.commands import Abort, Attach, Command, Continue, Detach, Help, Open, Start, Step, Stop
from workbench.reports.results import Report, Source
from workbench.session.snapshot import Exchange
from workbench.workbench import RankSettings, Workbench

CROWDED = 4
"""Number of ranks per core above which a start warns."""

Run = Callable[[Workbench, Command], Any]
"""Runs a command on a workbench and shows its progress."""

Tell = Callable[[str], None]
"""Shows a text in addition to a result, or instead of one."""


class Notebook:
    """Owner of the workbench, which runs its commands and keeps their history. Methods may be called from any thread.

    Args:
        make: makes the workbench; takes the arguments of :class:`~workbench.workbench.Workbench`.
        in_notebook: returns whether the notebook has a variable of a name; used in messages only.

    Attributes:
        workbench: None until the first ``start`` or ``open``; its trace outlives ``stop``.
        exchange: the start, stop or open under way, during which others are refused; empty: none.
        cores: number of cores that ranks started here share.
    """

    def __init__(self, make: Callable[..., Workbench], in_notebook: Callable[[str], bool]) -> None:
        self.workbench: Workbench | None = None
        self.exchange: Exchange = ""
        self.cores = usable_cores()
        self._gives_up = False
        self._only: Workbench | None = None
        self._make, self._in_notebook = make, in_notebook
        self._lock = threading.RLock()  # held while the workbench is made
        self._exchanging = threading.Lock()  # held while its ranks are started or stopped
        self._last: list[Callable[[], None]] = []

    def do(self, command: Command, source: Source, run: Run, tell: Tell, on_wait: OnWait = no_wait) -> Any:  # noqa: ANN401 - the result of a command
        """Run ``command``, and return a report, a figure, a widget, or None.

        Args:
            command: one of :data:`~workbench.magics.command_lines.WORDS`.
            source: where the command comes from.
            run: runs the commands of the workbench.
            tell: shows additional texts.
            on_wait: called with what a start or an attach waits for.

        Raises:
            WorkbenchError: as :meth:`workbench.workbench.Workbench.do`.
        """
        self.shown().note(command, source)
        if isinstance(command, Help):
            tell(_help(command))
            return None
        if isinstance(command, Abort) and self.exchange == "start":
            self._gives_up = True
            tell("Cancelled: no ranks are started or attached")
            return None
        exchange = self._exchange_of(command, tell, on_wait)
        if exchange is not None:
            return self._alone(*exchange)
        return run(self.running() if command.waits_for_start else self.shown(), command)

    def _exchange_of(self, command: Command, tell: Tell, on_wait: OnWait) -> tuple[Exchange, Callable[[], Any]] | None:
        """Return the name and the function of a command that replaces the ranks or the shown trace; None for others."""
        match command:
            case Start():
                return "start", lambda: self._start(command, tell, on_wait)
            case Attach():
                return "start", lambda: self._attach(command, on_wait)
            case Detach():
                return "stop", lambda: self._detach(tell)
            case Stop():
                return "stop", lambda: self._stop(tell)
            case Open():
                return "open", lambda: self._open(command)
        return None

    def running(self) -> Workbench:
        """Return the workbench that was started or that shows a file.

        Raises:
            UsageError: there is none yet.
        """
        if self.workbench is None:
            raise UsageError("No ranks are running yet. Start them with %fsdp start -n 4")
        return self.workbench

    def shown(self) -> Workbench:
        """Return the workbench, even before ranks exist: views opened now show ranks that start later."""
        with self._lock:
            if self._only is None:
                self._only = self._make(in_notebook=self._in_notebook)
            return self._only

    def on_close(self, do: Callable[[], None]) -> None:
        """Register ``do`` to be called when the notebook closes, before its ranks stop."""
        self._last.append(do)

    def close(self) -> None:
        """Call the functions registered by :meth:`on_close`, and close the workbench."""
        while self._last:
            self._last.pop()()
        if self.workbench is not None:
            self.workbench.close()

    def _stop_ranks(self) -> str | None:
        return None if self.workbench is None else self.workbench.stop()

    def _alone(self, word: Exchange, do: Callable[[], Any]) -> Any:  # noqa: ANN401
        if not self._exchanging.acquire(blocking=False):
            raise UsageError("ranks are being started or stopped: wait until that is done")
        self.exchange, self._gives_up = word, False
        try:
            return do()
        finally:
            self.exchange = ""
            self._exchanging.release()

    def _start(self, command: Start, tell: Tell, on_wait: OnWait) -> Report:
        wanted: RankSettings = command.call()[1]  # type: ignore[assignment]
        workbench = self.shown()
        is_the_same = workbench.settings == wanted and not workbench.outlives
        if workbench.running and is_the_same and not workbench.losses:
            tell("The ranks are already running; nothing was changed. For fresh ones: %fsdp stop, then %fsdp start")
            return workbench.status()
        if command.num_ranks > CROWDED * self.cores and not command.engines and command.profile is None:
            tell(
                f"{command.num_ranks} ranks share {self.cores} core{'' if self.cores == 1 else 's'} here: the start "
                f"may take minutes or fail"
            )

        report = workbench.start(on_wait=self._noticing(on_wait), **wanted)
        self.workbench = workbench
        return report

    def _attach(self, command: Attach, on_wait: OnWait) -> Report:
        workbench = self.shown()
        report = workbench.join(**command.call()[1], on_wait=self._noticing(on_wait))
        self.workbench = workbench
        return report

    def _noticing(self, on_wait: OnWait) -> OnWait:
        """Return an ``on_wait`` that cancels the start after an abort."""

        def notice(sentence: str) -> None:
            if self._gives_up:
                raise KeyboardInterrupt
            on_wait(sentence)

        return notice

    def _detach(self, tell: Tell) -> None:
        self.running().detach()
        tell("Detached. The ranks keep their variables: attach again with %fsdp attach")

    def _open(self, command: Open) -> Report:
        workbench = self.shown()
        report: Report = workbench.do(command)
        self.workbench = workbench
        return report

    def _stop(self, tell: Tell) -> None:
        was_running = self.workbench is not None and self.workbench.running
        left = self._stop_ranks()
        tell("Ranks stopped. The trace is kept: views still work" if was_running else "No ranks are running")
        if left:
            tell(left)


def is_behind(workbench: Workbench, command: Command) -> bool:
    """Whether ``command`` returns at once and runs in the background."""
    if isinstance(command, Continue):
        return command.background or (workbench.is_background and not command.foreground)
    return isinstance(command, Step) and command.background


def _help(command: Help) -> str:
    topic = command.topic.strip()
    if topic and topic not in WORDS:
        raise no_such_word(topic)
    return parser_for(topic).format_help() if topic else overview()
