"""One request to the ranks, from sending until every rank is done; in between it may stop and go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from workbench.cluster.pending import Output, Pending
from workbench.commands import Command, to_text
from workbench.session.follow import Follower, Progress
from workbench.session.outputs import Stream, text_of
from workbench.session.places import Stop
from workbench.session.reports import CellReport, Report
from workbench.session.results import to_report
from workbench.session.stop_reports import StopReport
from workbench.session.watch import Watch
from workbench.trace.columns import Trace

OnProgress = Callable[[Progress], None]
OnOutput = Callable[[Output], None]


def no_progress(progress: Progress) -> None:
    """Take progress that nobody looks at."""


def no_output(output: Output) -> None:
    """Take output that nobody looks at."""


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Who is told while ranks work; another one may take over when a request goes on.

    Attributes:
        on_progress: called while steps are done, and once at their end.
        on_output: called with what a cell writes and shows, as it arrives.
    """

    on_progress: OnProgress = no_progress
    on_output: OnOutput = no_output


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where the ranks were before a request.

    Attributes:
        num_rows: rows recorded, by rank.
        optimizer_steps: by rank.
    """

    num_rows: dict[int, int]
    optimizer_steps: dict[int, int]


class Work(Protocol):
    """What is asked of the ranks: what to do meanwhile, and what becomes of their results."""

    words: str
    is_command: bool

    def on_slice(self, listener: Listener) -> None:
        """Do what is to be done about 50 times a second."""

    def on_tick(self, listener: Listener, trace: Trace) -> None:
        """Do what is to be done about 10 times a second, when ``trace`` is up to date."""

    def finish(self, results: dict[int, Any], listener: Listener) -> Report:
        """Return the report of what every rank returned."""

    def fail(self, listener: Listener) -> None:
        """Tell what there is to tell when it failed."""


class CommandWork:
    """A command of the workbench.

    Args:
        command: of which the report is made.
        follower: follows its steps; None for a command without any.
    """

    is_command = True

    def __init__(self, command: Command, follower: Follower | None) -> None:
        self.command, self._follower = command, follower
        self.words = f"%fsdp {to_text(command)}"

    def on_slice(self, listener: Listener) -> None:
        """Do nothing."""

    def on_tick(self, listener: Listener, trace: Trace) -> None:
        """Tell how far it is."""
        if self._follower is not None:
            listener.on_progress(self._follower.catch_up(trace))

    def finish(self, results: dict[int, Any], listener: Listener) -> Report:
        """Return its report."""
        return to_report(self.command, results)

    def fail(self, listener: Listener) -> None:
        """Do nothing."""


class CellWork:
    """A cell.

    Args:
        pending: the request.
        ranks: that run it; the first one's output is handed on as it arrives.
    """

    words, is_command = "a cell", False

    def __init__(self, pending: Pending, ranks: Sequence[int]) -> None:
        self._pending, self._ranks = pending, ranks
        self._stream = Stream(pending, ranks[0])

    def on_slice(self, listener: Listener) -> None:
        """Hand on what was written."""
        self._stream.forward(listener.on_output)

    def on_tick(self, listener: Listener, trace: Trace) -> None:
        """Do nothing."""

    def finish(self, results: dict[int, Any], listener: Listener) -> Report:
        """Hand on the rest and return what each rank wrote."""
        remarks = self._stream.finish(listener.on_output, also_agreement=True)
        texts = {rank: text_of(self._pending.outputs(rank)) for rank in self._ranks}
        return CellReport(texts=texts, remarks=remarks)

    def fail(self, listener: Listener) -> None:
        """Hand on the rest, and how the ranks differ."""
        self._stream.finish(listener.on_output, also_agreement=False)


class Request:
    """A request that is under way. Its attributes are changed under the session's lock.

    Attributes:
        work: what was asked.
        pending: what the ranks have answered so far.
        mark: where the ranks were before it.
        watch: waits for it; set once.
        listener: who is told.
        state: whether ranks work on it, stand still inside it, or it is over.
        stop: where they stand, or stood last.
        report: the same as a report.
        ending: how it ended, or where it stopped last, in words.
        watcher: the thread that waits for it.
        thread: the same, if it is one of the background.
    """

    def __init__(self, work: Work, pending: Pending, mark: Mark) -> None:
        self.work, self.pending, self.mark = work, pending, mark
        self.watch: Watch
        self.listener = Listener()
        self.state: Literal["running", "stopped", "over"] = "running"
        self.stop: Stop | None = None
        self.report: StopReport | None = None
        self.ending = ""
        self.watcher: threading.Thread | None = None
        self.thread: threading.Thread | None = None
