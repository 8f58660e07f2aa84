"""One request to the ranks, from sending until every rank is done; it may stop and continue in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from workbench.base.codec import decode
from workbench.base.fault import Fault
from workbench.cluster.deferred_interrupts import CountInterrupts
from workbench.cluster.pending_replies import Output, PendingReplies
from workbench.errors import RankDied
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.commands import Command, Run, Step, to_text
from workbench.reports.output_report import CellReport
from workbench.reports.pause_reports import StopReport
from workbench.reports.report import Report
from workbench.reports.report_makers import REPORT_MAKERS
from workbench.reports.step_progress import Follower, Progress
from workbench.reports.stop_positions import StopGroup
from workbench.session.outputs import OnOutput, Stream, text_of
from workbench.session.program import CompletedCommand, Entry, Omission, cell_on
from workbench.session.stall_notice import OnStanding, StallNotice, no_standing
from workbench.session.waiter import RequestWaiter
from workbench.trace.columns import Trace

TITLE_CHARS = 60
"""Characters of a cell's first line in its title."""

OnProgress = Callable[[Progress], None]


def no_progress(progress: Progress) -> None:
    """Ignore progress."""


def no_output(output: Output) -> None:
    """Ignore output."""


@dataclass(frozen=True, kw_only=True)
class RequestListener:
    """Callbacks while ranks run; they may be replaced when a request continues.

    Attributes:
        on_progress: called during steps, and once at their end.
        on_output: called with each output as it arrives.
        on_standing: called with the ranks that still run and their positions, after a while without other news.
    """

    on_progress: OnProgress = no_progress
    on_output: OnOutput = no_output
    on_standing: OnStanding = no_standing


@dataclass(frozen=True, kw_only=True)
class TraceMark:
    """State of the ranks before a request.

    Attributes:
        num_rows: rows recorded, by rank.
        optimizer_steps: optimizer steps done, by rank.
        commands: commands begun, by rank.
        gradient_bytes: bytes of sharded gradients, by rank.
    """

    num_rows: dict[int, int]
    optimizer_steps: dict[int, int]
    commands: dict[int, int] = field(default_factory=dict)
    gradient_bytes: dict[int, int] = field(default_factory=dict)


class RankTask(Protocol):
    """The work of a request: what to do while the ranks run, and the report of their results.

    Attributes:
        words: name for people.
        title: the same, of a cell with its first line.
        code: of a cell; empty: it is a command.
        until: where it is still to stop once; None: nowhere.
    """

    words: str
    title: str
    code: str
    until: Breakpoint | None

    @property
    def command(self) -> Command | None:
        """The command; None: a cell."""

    @property
    def is_command(self) -> bool:
        """Whether it is a command; else a cell."""

    def progress(self, trace: Trace) -> Progress | None:
        """Return the progress according to ``trace``; None without steps. Thread-safe."""

    def on_slice(self, listener: RequestListener) -> None:
        """Do the work of every poll, about 50 times a second."""

    def on_tick(self, listener: RequestListener, trace: Trace) -> None:
        """Do the work of every tick, about 10 times a second, after a drain into ``trace``."""

    def num_outputs(self) -> int:
        """Return the number of outputs of the ranks so far."""

    def stand(self, listener: RequestListener) -> None:
        """Report to ``listener`` when the ranks have stopped."""

    def finish(self, results: dict[int, Any], listener: RequestListener) -> Report:
        """Return the report of the results of all ranks."""

    def completed(self, results: dict[int, Any], num_ranks: int) -> Entry:
        """Return the entry of the program for the results of all of its ranks; there are ``num_ranks`` in all."""

    def fail(self, listener: RequestListener) -> None:
        """Report to ``listener`` when the request has failed."""


class _OutputTask:
    """Work whose output is shown: that of one rank as it arrives, that of the others where it differs.

    Args:
        pending: the request.
    """

    command: Command | None = None
    code = ""
    until: Breakpoint | None = None

    def __init__(self, pending: PendingReplies) -> None:
        self._stream = Stream(pending, pending.ranks[0])

    @property
    def is_command(self) -> bool:
        """Whether it is a command; else a cell."""
        return self.command is not None

    def on_slice(self, listener: RequestListener) -> None:
        """Forward new output."""
        self._stream.forward(listener.on_output)

    def num_outputs(self) -> int:
        """Return the number of outputs of the ranks so far."""
        return self._stream.num_outputs()

    def stand(self, listener: RequestListener) -> None:
        """Forward the output so far, and the differences of the ranks."""
        self._stream.pause(listener.on_output)

    def fail(self, listener: RequestListener) -> None:
        """Forward the rest of the output, and the differences of the ranks."""
        self._stream.finish(listener.on_output, also_agreement=False)


class CommandTask(_OutputTask):
    """A command of the workbench.

    Args:
        command: the command.
        pending: the request.
        before: the trace before it; its steps are followed from there on.
    """

    def __init__(self, command: Command, pending: PendingReplies, before: Trace) -> None:
        super().__init__(pending)
        self.command: Command = command
        self._follower: Follower | None = None
        if isinstance(command, Step):
            self._follower = Follower(before, num_ranks=len(pending.ranks), total=command.count)
        if isinstance(command, (Step, Run)):
            self.until = command.stop
        self.words = self.title = f"%fsdp {to_text(command)}"

    def progress(self, trace: Trace) -> Progress | None:
        """Return the progress of its steps; None without steps."""
        return None if self._follower is None else self._follower.catch_up(trace)

    def on_tick(self, listener: RequestListener, trace: Trace) -> None:
        """Report the progress."""
        progress = self.progress(trace)
        if progress is not None:
            listener.on_progress(progress)

    def finish(self, results: dict[int, Any], listener: RequestListener) -> Report:
        """Forward the rest of the output and return the report."""
        self._stream.finish(listener.on_output, also_agreement=True)
        return REPORT_MAKERS[type(self.command)]([self._answer(rank, results) for rank in sorted(results)])

    def completed(self, results: dict[int, Any], num_ranks: int) -> Entry:
        """Return the command with the first rank's reply; of a script only its name, as it is a script already."""
        if isinstance(self.command, Run):
            return Omission(what=f"{self.words}, a script of its own")
        return CompletedCommand(command=self.command, reply=self._answer(min(results), results))

    def _answer(self, rank: int, results: dict[int, Any]) -> Any:  # noqa: ANN401 - of the command's type
        return decode(self.command.reply, results[rank], f"answer of rank {rank}")


class CellTask(_OutputTask):
    """A cell.

    Args:
        code: its code.
        pending: the request; the output of its first rank is forwarded as it arrives.
    """

    words = "a cell"

    def __init__(self, code: str, pending: PendingReplies) -> None:
        super().__init__(pending)
        self.code, self._pending = code, pending
        first = next(iter(code.strip().splitlines()), "")
        self.title = f"the cell {first if len(first) <= TITLE_CHARS else first[: TITLE_CHARS - 1] + '…'!r}"

    def completed(self, results: dict[int, Any], num_ranks: int) -> Entry:
        """Return the cell, if all ranks ran it."""
        return cell_on(self.code, self._pending.ranks, num_ranks)

    def progress(self, trace: Trace) -> Progress | None:
        """Return None: a cell has no progress."""

    def on_tick(self, listener: RequestListener, trace: Trace) -> None:
        """Do nothing."""

    def finish(self, results: dict[int, Any], listener: RequestListener) -> Report:
        """Forward the rest of the output and return a report of what each rank wrote."""
        remarks = self._stream.finish(listener.on_output, also_agreement=True)
        texts = {rank: text_of(self._pending.outputs(rank)) for rank in self._pending.ranks}
        return CellReport(texts=texts, remarks=remarks)


class Request:
    """A request under way. Its attributes are changed under the session's lock.

    Attributes:
        work: its work.
        pending: the replies of the ranks.
        mark: state of the ranks before it.
        watch: waits for it; set once.
        standing: times the notices of running ranks; new for each wait.
        listener: its callbacks.
        state: whether ranks run, are stopped inside it, or are done.
        stop: its current or last stop.
        report: the report of that stop.
        worked: the last notice of running ranks.
        cause: why its ranks are waiting, or were when they were stopped; None if unknown, or if they do not wait.
        ending: how it ended, or where it last stopped, in words.
        failed: whether ``ending`` is an error.
        watcher: the thread that waits for it.
        thread: the same, if it is a background thread.
        is_background: whether it was started or continued in the background, where it also continues after a stop.
        log_output: adds its new output to the log of the session; set once.
        interrupts: counts each Ctrl-C from when it is sent or continued until it is stopped or done, and the ranks have
            recovered.
    """

    def __init__(self, work: RankTask, pending: PendingReplies, mark: TraceMark) -> None:
        self.work, self.pending, self.mark = work, pending, mark
        self.watch: RequestWaiter
        self.standing: StallNotice
        self.log_output: Callable[[], None]
        self.listener = RequestListener()
        self.state: Literal["running", "stopped", "over"] = "running"
        self.stop: StopGroup | None = None
        self.report: StopReport | None = None
        self.worked = ""
        self.cause: Fault | None = None
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
