"""What pausing, looking around and going on answer: reports as in :mod:`workbench.session.reports`."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.replay.alike import label
from workbench.session.breakpoints import Breakpoint
from workbench.session.inspected import facts_of
from workbench.session.places import Stop
from workbench.session.reports import Report
from workbench.session.threads import Thread, lines_of
from workbench.views.theme import plural


@dataclass(frozen=True, kw_only=True)
class StopReport(Report):
    """Ranks stand still inside a step; what they were asked stays under way.

    Attributes:
        stop: where they stand.
        words: what they were asked.
        reasons: the breakpoints that hold them, in words.
    """

    stop: Stop
    words: str
    reasons: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return str(self.stop)

    def facts(self) -> list[tuple[str, str]]:
        """Return why, and what can be done now."""
        why = [("because of", "; ".join(self.reasons))] if self.reasons else []
        waited = self.stop.synchronised
        device = [("device", f"synchronised on {label(waited)}: all that it was given is done")] if waited else []
        now = "%fsdp where, inspect FQN, eval EXPR, views and %%fsdp cells; then %fsdp next, continue or abort"
        return [*why, *device, ("under way", self.words), ("now", now)]


@dataclass(frozen=True, kw_only=True)
class BackgroundReport(Report):
    """Ranks work while the notebook goes on.

    Attributes:
        words: what they were asked.
    """

    words: str

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return f"{self.words} runs in the background: %fsdp pause stops inside it, %fsdp abort gives it up"


@dataclass(frozen=True, kw_only=True)
class EndReport(Report):
    """What ranks did is over, or was given up.

    Attributes:
        sentence: how it ended.
    """

    sentence: str

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return self.sentence


WHERE_COLUMNS = ("rank", "state", "step", "phase", "unit", "event", "since")


@dataclass(frozen=True, kw_only=True)
class WhereRow:
    """Where one rank is; texts are empty where nothing is known.

    Attributes:
        rank: global rank.
        state: held, waiting, running, starting, idle, no answer, gone.
        step: training step.
        phase: of the step.
        unit: name.
        event: the newest, or the one it is held before.
        since: how long it has been there.
        stacks: its Python threads, the main one first; none if nobody asked.
    """

    rank: int
    state: str
    step: str = ""
    phase: str = ""
    unit: str = ""
    event: str = ""
    since: str = ""
    stacks: tuple[Thread, ...] = ()

    def cells(self) -> tuple[str, ...]:
        """Return the texts of :data:`WHERE_COLUMNS`."""
        return (str(self.rank), self.state, self.step, self.phase, self.unit, self.event, self.since)


@dataclass(frozen=True, kw_only=True)
class WhereReport(Report):
    """Where every rank is: a table.

    Attributes:
        rows: one per rank.
    """

    rows: tuple[WhereRow, ...]

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        states: dict[str, list[int]] = {}
        for row in self.rows:
            states.setdefault(row.state, []).append(row.rank)
        if len(states) == 1:
            return f"{plural(len(self.rows), 'rank')} {next(iter(states))}"
        return "; ".join(f"{label(ranks)} {state}" for state, ranks in states.items())

    def __str__(self) -> str:
        lines = [WHERE_COLUMNS, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(text.ljust(n) for text, n in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([self.headline, *(f"  {line}" for line in table), *self._stack_lines()])

    def _stack_lines(self) -> list[str]:
        return lines_of({row.rank: row.stacks for row in self.rows})

    def _repr_html_(self) -> str:
        head = "".join(f'<th style="text-align:left">{name}</th>' for name in WHERE_COLUMNS)
        body = "".join(
            "<tr>" + "".join(f'<td style="text-align:left">{html.escape(text)}</td>' for text in row.cells()) + "</tr>"
            for row in self.rows
        )
        lines = self._stack_lines()
        stacks = f"<pre>{html.escape(chr(10).join(lines))}</pre>" if lines else ""
        return (
            f"<div><strong>{html.escape(self.headline)}</strong>"
            f'<table style="margin:4px 0 0 0"><tr>{head}</tr>{body}</table>{stacks}</div>'
        )


@dataclass(frozen=True, kw_only=True)
class BreakReport(Report):
    """The breakpoints there are.

    Attributes:
        breakpoints: in the order they were added.
        said: what was done, a sentence; empty: only looked.
    """

    breakpoints: Sequence[Breakpoint]
    said: str = ""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        there = plural(len(self.breakpoints), "breakpoint") if self.breakpoints else "no breakpoints"
        return self.said or there

    def facts(self) -> list[tuple[str, str]]:
        """Return each with its number."""
        return [("--until" if b.id == 0 else str(b.id), str(b)) for b in self.breakpoints]


@dataclass(frozen=True, kw_only=True)
class EvalReport(Report):
    """What an expression is on ranks.

    Attributes:
        expr: as it was asked.
        texts: its value as text, by rank.
    """

    expr: str
    texts: Mapping[int, str]

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        values = list(dict.fromkeys(self.texts.values()))
        if len(values) > 1:
            return f"{self.expr} differs between {label(self.texts)}"
        where = f"{len(self.texts)} ranks agree" if len(self.texts) > 1 else label(self.texts)
        return f"{self.expr} = {values[0].rstrip()}   ({where})"

    def facts(self) -> list[tuple[str, str]]:
        """Return the value of each rank, equal ones once; none if all agree."""
        groups = alike(self.texts)
        return [(label(ranks), text.rstrip()) for text, ranks in groups.items()] if len(groups) > 1 else []


@dataclass(frozen=True, kw_only=True)
class InspectReport(Report):
    """A parameter as every stopped rank has it.

    Attributes:
        fqn: its name.
        by_rank: what each rank says of it, plain data.
    """

    fqn: str
    by_rank: Mapping[int, Mapping[str, Any]]

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return f"{self.fqn} on {label(self.by_rank)}"

    def facts(self) -> list[tuple[str, str]]:
        """Return each fact with the ranks it holds for, equal ones once."""
        flat = {rank: facts_of(found) for rank, found in self.by_rank.items()}
        names = list(dict.fromkeys(name for found in flat.values() for name in found))
        lines = []
        for name in names:
            groups = alike({rank: found[name] for rank, found in flat.items() if name in found})
            is_same = len(groups) == 1
            said = [text if is_same else f"{text} on {label(ranks)}" for text, ranks in groups.items()]
            lines.append((name, "; ".join(said)))
        return lines


@dataclass(frozen=True, kw_only=True)
class BackReport(Report):
    """The cursor was moved over what was recorded; nothing was undone.

    Attributes:
        sentence: where it is now.
    """

    sentence: str

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return self.sentence

    def facts(self) -> list[tuple[str, str]]:
        """Return what that means."""
        return [("views", "show what was recorded up to there"), ("the ranks", "stay where they are")]


def alike(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks of each text."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    return groups
