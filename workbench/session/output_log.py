"""The newest lines that ranks printed, and how cells and commands ended, for a front end that comes back.

A cell shows its output only to a front end that is connected. This log is in the notebook's process, so a browser that
was closed, a laptop that slept and a lost connection miss nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from workbench.cluster.pending_replies import Output, PendingReplies
from workbench.reports.output_report import LineKind, OutputLine, OutputReport
from workbench.reports.per_rank_tabs import screen
from workbench.session.outputs import without_widget

MAX_LINES = 20_000
"""Lines kept of each rank."""

MAX_BYTES = 32 << 20
"""Approximate memory of all lines together, in bytes: each rank has the same part of it."""

LINE_BYTES = 250
"""Approximate memory of a line besides its text, in bytes."""

LINE_CHARS = 4_000
"""Characters kept of a line, from its begin."""


@dataclass(slots=True)
class _Line:
    """One line.

    Attributes:
        number: number among all lines, in the order of their first characters.
        kind: likewise in :class:`OutputLine`.
        raw: its text so far, with control characters.
        step: likewise.
        t_s: likewise.
        num_cut: characters after ``raw``.
    """

    number: int
    kind: LineKind
    raw: str
    step: int | None
    t_s: float
    num_cut: int = 0

    @property
    def text(self) -> str:
        return screen(self.raw) + (f"... {self.num_cut} more characters" if self.num_cut else "")

    def add(self, text: str) -> int:
        """Append a part; return the number of characters that this adds to memory."""
        before = len(self.raw)
        redrawn, has_redrawn, newest = (self.raw + text).rpartition("\r")
        if has_redrawn and newest:  # a progress bar: only its newest state is shown
            self.raw, self.num_cut = f"{screen(redrawn)}\r{newest}", 0
        else:
            self.raw += text
        self.num_cut += max(len(self.raw) - LINE_CHARS, 0)
        self.raw = self.raw[:LINE_CHARS]
        return len(self.raw) - before


class _Lines:
    """The lines of one rank, or of the notebook.

    Attributes:
        kept: the lines, the oldest first.
        num_dropped: number of lines that were dropped.
    """

    def __init__(self, max_bytes: int) -> None:
        self.kept: deque[_Line] = deque()
        self.num_dropped = 0
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._open: dict[LineKind, _Line] = {}  # without a newline so far

    def write(self, new: Callable[[], _Line], kind: LineKind, text: str) -> None:
        """Append text of one stream; ``new`` makes each line that begins."""
        for part in _lines(text):
            line = self._open.get(kind)
            if line is None:
                line = self._open[kind] = new()
                self.kept.append(line)
                self._num_bytes += LINE_BYTES
            self._num_bytes += line.add(part.removesuffix("\n"))
            if part.endswith("\n"):
                self._num_bytes += self._close(kind)
        while len(self.kept) > MAX_LINES or self._num_bytes > self._max_bytes:
            self._drop()

    def _close(self, kind: LineKind) -> int:
        line = self._open.pop(kind)
        before, line.raw = len(line.raw), screen(line.raw)
        return len(line.raw) - before

    def _drop(self) -> None:
        line = self.kept.popleft()
        self.num_dropped += 1
        self._num_bytes -= LINE_BYTES + len(line.raw)
        if self._open.get(line.kind) is line:
            del self._open[line.kind]


def _lines(text: str) -> Iterator[str]:
    r"""Yield the lines of ``text`` with their newlines; only ``\n`` ends one."""
    begin = 0
    while (end := text.find("\n", begin) + 1) > 0:
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]


class OutputLog:
    """The newest lines of each rank, and of the notebook. Thread-safe.

    Args:
        num_ranks: number of ranks.
        clock: seconds since 1970.

    Attributes:
        num_ranks: likewise.
        version: changes when something is added.
    """

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._by_rank = {rank: _Lines(MAX_BYTES // (num_ranks + 1)) for rank in (*range(num_ranks), None)}
        self._num_lines = 0
        self.num_ranks, self.version = num_ranks, 0

    def follow(self, pending: PendingReplies) -> Callable[[], None]:
        """Return a function that adds the new output of a request."""
        one_at_a_time = threading.Lock()
        seen = dict.fromkeys(pending.ranks, 0)
        steps: dict[tuple[int, str], int | None] = {}  # newest step of a stream, by rank and kind

        def take() -> None:
            with one_at_a_time:
                for rank in pending.ranks:
                    for output in pending.outputs(rank, seen[rank]):
                        seen[rank] += 1
                        self._append(rank, output, steps)

        return take

    def _append(self, rank: int, output: Output, steps: dict[tuple[int, str], int | None]) -> None:
        if output.kind in {"display", "result"}:
            self._write(rank, "display", f"{without_widget(output).data.get('text/plain', '<display>')}\n", None)
        elif output.kind == "stdout" or output.kind == "stderr":  # noqa: PLR1714 - narrows the type
            stream, begin = (rank, output.kind), 0
            for at, step in output.steps:
                self._write(rank, output.kind, output.text[begin:at], steps.get(stream))
                begin, steps[stream] = at, step
            self._write(rank, output.kind, output.text[begin:], steps.get(stream))

    def note(self, text: str, *, is_error: bool = False) -> None:
        """Add a notice of the notebook."""
        self._write(None, "error" if is_error else "notice", f"{text}\n", None)

    def write(self, rank: int, text: str) -> None:
        """Add text that a rank printed, whose end is also the end of a line."""
        self._write(rank, "stdout", text if text.endswith("\n") else f"{text}\n", None)

    def _write(self, rank: int | None, kind: LineKind, text: str, step: int | None) -> None:
        if not text:
            return
        t_s = self._clock()

        def new() -> _Line:
            self._num_lines += 1
            return _Line(self._num_lines, kind, "", step, t_s)

        with self._lock:
            self._by_rank[rank].write(new, kind, text)
            self.version += 1

    def report(self, rank: int | None = None, count: int = 0) -> OutputReport:
        """Return the newest ``count`` lines, 0: all, of ``rank`` and the notebook; None: of all ranks, equal ones once.

        A row of equal lines names the ranks that printed it lately: a rank far ahead of others may have a row alone.
        """
        count = count or sys.maxsize
        chosen = [*self._by_rank] if rank is None or not self.num_ranks else [rank, None]
        with self._lock:
            newest = [self._newest(number, 2 * count) for number in chosen]
            dropped = sum(self._by_rank[number].num_dropped for number in chosen)
            num_kept = sum(len(self._by_rank[number].kept) for number in chosen)
        rows = _merged(merge(*newest, key=lambda of_rank: of_rank[1].number))
        return OutputReport(
            lines=tuple(rows[-count:]),
            rank=rank,
            is_cut=sum(map(len, newest)) < num_kept or len(rows) > count,
            num_dropped=dropped,
        )

    def _newest(self, rank: int | None, count: int) -> list[tuple[int | None, _Line]]:
        kept = self._by_rank[rank].kept
        return [(rank, line) for line in islice(kept, max(len(kept) - count, 0), None)]


def _merged(lines: Iterator[tuple[int | None, _Line]]) -> list[OutputLine]:
    """Return lines in order, those of several ranks with the same text in the same step once.

    The lines of each rank keep their order: a line joins only rows after the rank's line before.
    """
    rows: list[tuple[list[int], _Line]] = []
    equal: dict[tuple[str, int | None, LineKind], list[int]] = defaultdict(list)  # indices of rows
    passed: dict[tuple[object, int], int] = defaultdict(int)  # how many of them are before the newest line of a rank
    last: dict[int, int] = {}
    for rank, line in lines:
        if rank is None:
            rows.append(([], line))
            continue
        key = line.text, line.step, line.kind
        same, at = equal[key], passed[key, rank]
        while at < len(same) and same[at] <= last.get(rank, -1):
            at += 1
        if at == len(same):
            same.append(len(rows))
            rows.append(([], line))
        passed[key, rank] = at + 1
        last[rank] = same[at]
        rows[same[at]][0].append(rank)
    return [
        OutputLine(ranks=tuple(sorted(ranks)), kind=line.kind, text=line.text, step=line.step, t_s=line.t_s)
        for ranks, line in rows
    ]
