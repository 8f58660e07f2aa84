"""One request to the ranks, from sending until every rank is done; in between it may stop and go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from workbench.cluster.deferred_interrupts import CountInterrupts
from workbench.cluster.pending_replies import Output, PendingReplies
from workbench.codec import decode
from workbench.errors import RankDied
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.commands import Command, Step, to_text
from workbench.reports.pause_results import StopReport
from workbench.reports.results import SAYS, CellReport, Report
from workbench.reports.step_progress import Follower, Progress
from workbench.reports.stop_positions import StopGroup
from workbench.session.outputs import OnOutput, Stream, text_of
from workbench.session.stall_notice import OnStanding, StallNotice, no_standing
from workbench.session.waiter import RequestWaiter
from workbench.trace.columns import Trace

OnProgress = Callable[[Progress], None]


def no_progress(progress: Progress) -> None:
    """Take progress that nobody looks at."""


def no_output(output: Output) -> None:
    """Take output that nobody looks at."""


@dataclass(frozen=True, kw_only=True)
class RequestListener:
    """Who is told while ranks work; another one may take over when a request goes on.

    Attributes:
        on_progress: called while steps are done, and once at their end.
        on_output: called with what a cell writes and shows, as it arrives.
        on_standing: called with who still works and where, once nothing else is heard for a while.
    """

    on_progress: OnProgress = no_progress
    on_output: OnOutput = no_output
    on_standing: OnStanding = no_standing


@dataclass(frozen=True, kw_only=True)
class TraceMark:
    """Where the ranks were before a request.

    Attributes:
        num_rows: rows recorded, by rank.
        optimizer_steps: by rank.
        commands: begun, by rank.
        gradient_bytes: of sharded gradients, by rank.
    """

    num_rows: dict[int, int]
    optimizer_steps: dict[int, int]
    commands: dict[int, int] = field(default_factory=dict)
    gradient_bytes: dict[int, int] = field(default_factory=dict)


class RankTask(Protocol):
    """What is asked of the ranks: what to do meanwhile, and what becomes of their results.

    Attributes:
        words: how a person calls it.
        is_command: whether it is a command; else a cell.
        until: where it is to stop once, and has not stopped yet; None: nowhere.
    """

    words: str
    is_command: bool
    until: Breakpoint | None

    def progress(self, trace: Trace) -> Progress | None:
        """Return how far it is by ``trace``; from any thread. None: it has no steps."""

    def on_slice(self, listener: RequestListener) -> None:
        """Do what is to be done about 50 times a second."""

    def on_tick(self, listener: RequestListener, trace: Trace) -> None:
        """Do what is to be done about 10 times a second, when ``trace`` is up to date."""

    def num_outputs(self) -> int:
        """Return how much the ranks have written and shown, in pieces."""

    def stand(self, listener: RequestListener) -> None:
        """Tell what there is to tell when they stopped."""

    def finish(self, results: dict[int, Any], listener: RequestListener) -> Report:
        """Return the report of what every rank returned."""

    def fail(self, listener: RequestListener) -> None:
        """Tell what there is to tell when it failed."""


class _OutputTask:
    """Work whose output is shown: of one rank as it arrives, of the others as far as it differs.

    Args:
        pending: the request.
    """

    until: Breakpoint | None = None

    def __init__(self, pending: PendingReplies) -> None:
        self._stream = Stream(pending, pending.ranks[0])

    def on_slice(self, listener: RequestListener) -> None:
        """Hand on what was written."""
        self._stream.forward(listener.on_output)

    def num_outputs(self) -> int:
        """Return how much the ranks have written and shown, in pieces."""
        return self._stream.num_outputs()

    def stand(self, listener: RequestListener) -> None:
        """Hand on what was written so far, and how the ranks differ."""
        self._stream.pause(listener.on_output)

    def fail(self, listener: RequestListener) -> None:
        """Hand on the rest, and how the ranks differ."""
        self._stream.finish(listener.on_output, also_agreement=False)


class CommandTask(_OutputTask):
    """A command of the workbench.

    Args:
        command: of which the report is made.
        pending: the request.
        before: what was recorded before it, after which its steps are followed.
    """

    is_command = True

    def __init__(self, command: Command, pending: PendingReplies, before: Trace) -> None:
        super().__init__(pending)
        self.command = command
        self._follower: Follower | None = None
        if isinstance(command, Step):
            self._follower = Follower(before, num_ranks=len(pending.ranks), total=command.count)
            self.until = command.stop
        self.words = f"%fsdp {to_text(command)}"

    def progress(self, trace: Trace) -> Progress | None:
        """Return how far its steps are; None: it has none."""
        return None if self._follower is None else self._follower.catch_up(trace)

    def on_tick(self, listener: RequestListener, trace: Trace) -> None:
        """Tell how far it is."""
        progress = self.progress(trace)
        if progress is not None:
            listener.on_progress(progress)

    def finish(self, results: dict[int, Any], listener: RequestListener) -> Report:
        """Hand on the rest of the output and return its report."""
        self._stream.finish(listener.on_output, also_agreement=True)
        answers = [decode(self.command.reply, results[rank], f"answer of rank {rank}") for rank in sorted(results)]
        return SAYS[type(self.command)](answers)


class CellTask(_OutputTask):
    """A cell.

    Args:
        pending: the request; the output of the first rank is handed on as it arrives.
    """

    words, is_command = "a cell", False

    def __init__(self, pending: PendingReplies) -> None:
        super().__init__(pending)
        self._pending = pending

    def progress(self, trace: Trace) -> Progress | None:
        """Return nothing: a cell is not followed."""

    def on_tick(self, listener: RequestListener, trace: Trace) -> None:
        """Do nothing."""

    def finish(self, results: dict[int, Any], listener: RequestListener) -> Report:
        """Hand on the rest and return what each rank wrote."""
        remarks = self._stream.finish(listener.on_output, also_agreement=True)
        texts = {rank: text_of(self._pending.outputs(rank)) for rank in self._pending.ranks}
        return CellReport(texts=texts, remarks=remarks)


class Request:
    """A request that is under way. Its attributes are changed under the session's lock.

    Attributes:
        work: what was asked.
        pending: what the ranks have answered so far.
        mark: where the ranks were before it.
        watch: waits for it; set once.
        standing: when to say who works on it; set whenever somebody begins to wait for it.
        listener: who is told.
        state: whether ranks work on it, stand still inside it, or it is over.
        stop: where they stand, or stood last.
        report: the same as a report.
        worked: who worked on it and where, the last time that this was said.
        ending: how it ended, or where it stopped last, in words.
        failed: whether that is an error.
        watcher: the thread that waits for it.
        thread: the same, if it is one of the background.
        is_background: whether it was begun or let go in the background, where it goes on after a stop.
        interrupts: counts each Ctrl-C from when it is sent or let go until it stands or is over.
    """

    def __init__(self, work: RankTask, pending: PendingReplies, mark: TraceMark) -> None:
        self.work, self.pending, self.mark = work, pending, mark
        self.watch: RequestWaiter
        self.standing: StallNotice
        self.listener = RequestListener()
        self.state: Literal["running", "stopped", "over"] = "running"
        self.stop: StopGroup | None = None
        self.report: StopReport | None = None
        self.worked = ""
        self.ending = ""
        self.failed = False
        self.watcher: threading.Thread | None = None
        self.thread: threading.Thread | None = None
        self.is_background = False
        self.interrupts = CountInterrupts()

    @property
    def dead(self) -> tuple[int, ...]:
        """The ranks whose processes are gone."""
        return tuple(rank for rank in self.pending.ranks if isinstance(self.pending.error(rank), RankDied))
