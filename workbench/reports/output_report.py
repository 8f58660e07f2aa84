"""What the ranks printed, as the reports of ``output`` and of a cell."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from workbench.base.text_formats import plural
from workbench.replay.grouping import label
from workbench.reports.report import Report

_AS_PRINTED = "white-space:pre-wrap;font-family:var(--jp-code-font-family, monospace)"

LineKind = Literal["stdout", "stderr", "display", "notice", "error"]


@dataclass(frozen=True, kw_only=True)
class OutputLine:
    """A line that ranks printed, or a notice of the notebook.

    Attributes:
        ranks: the ranks that printed it; empty: the notebook notes how a cell or command ended or stopped.
        kind: stream; ``display``: a line of the text of a display; ``notice`` and ``error``: of the notebook.
        text: as a terminal shows it, without colours.
        step: the training step in which it was printed; None: outside any, or unknown.
        t_s: when the first of the ranks printed it, in seconds since 1970.
    """

    ranks: tuple[int, ...]
    kind: LineKind
    text: str
    step: int | None
    t_s: float


@dataclass(frozen=True, kw_only=True)
class OutputReport(Report):
    """The newest lines that ranks printed.

    Attributes:
        lines: the oldest first.
        rank: the rank that printed them; None: any.
        is_cut: whether there are older lines.
        num_dropped: number of older lines that are not kept any more, of all ranks.
    """

    lines: tuple[OutputLine, ...]
    rank: int | None = None
    is_cut: bool = False
    num_dropped: int = 0

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        whose = "all ranks" if self.rank is None else f"rank {self.rank}"
        if not self.lines:
            return f"no output of {whose}"
        dropped = f"; {plural(self.num_dropped, 'older line')} not kept" if self.num_dropped else ""
        return f"{'the newest ' if self.is_cut else ''}{plural(len(self.lines), 'line')} of {whose}{dropped}"

    def facts(self) -> list[tuple[str, str]]:
        """Return each line after its time, ranks and step."""
        return [(_origin(line), line.text) for line in self.lines]

    def _repr_html_(self) -> str:
        return self.as_html(lambda text: f'<span style="{_AS_PRINTED}">{html.escape(text)}</span>')


@dataclass(frozen=True, kw_only=True)
class CellReport(Report):
    """A cell ran on ranks.

    Attributes:
        texts: output of each rank as plain text, by rank.
        remarks: whether and how the ranks' output differs; ``""`` if there was none.
    """

    texts: Mapping[int, str]
    remarks: str = ""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return f"ran on {label(self.texts)}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the output of each rank."""
        return [(f"rank {rank}", text.strip()) for rank, text in self.texts.items() if text.strip()]


def _origin(line: OutputLine) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(line.t_s))
    return " ".join([moment, label(line.ranks) if line.ranks else "---", *_step(line)])


def _step(line: OutputLine) -> list[str]:
    return [] if line.step is None else [f"step {line.step}"]
