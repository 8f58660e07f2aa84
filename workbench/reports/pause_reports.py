"""The reports of the commands for pausing, inspecting and resuming."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from workbench.base.fault import Fault
from workbench.base.text_formats import format_duration, plural
from workbench.events import Edge, Kind, Phase, unit_words
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.inspect_reply import InspectReply
from workbench.protocol.rank_messages import Hold, Position, Thread
from workbench.replay.grouping import by_value, label
from workbench.reports.event_text import event_words
from workbench.reports.fault_report import cause_facts, cause_html, cause_lines
from workbench.reports.inspect_table import table_of, unit_of
from workbench.reports.report import Report
from workbench.reports.stop_positions import State, StopGroup, is_in_wait, state_of
from workbench.reports.tables import Table
from workbench.reports.threads import lines_of


@dataclass(frozen=True, kw_only=True)
class StopReport(Report):
    """Ranks are stopped inside a step; their request stays under way.

    Attributes:
        stop: where they are stopped.
        request: the request, as text.
        reasons: the breakpoints that hold them, and the values that these met, as text.
        cause: why they were waiting when they were stopped; None if they were not, or if the reason is unknown.
    """

    computed = (*Report.computed, "ranks")
    internal = ("stop",)

    stop: StopGroup
    request: str
    reasons: tuple[str, ...] = ()
    cause: Fault | None = None

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return str(self.stop)

    @property
    def ranks(self) -> tuple[WhereRow, ...]:
        """The position of each rank that has not finished the request."""
        return tuple(row_of(rank, at, self.stop.units) for rank, at in sorted(self.stop.positions.items()))

    def facts(self) -> list[tuple[str, str]]:
        """Return the reasons, and what the user can do now."""
        why = [("stopped by", "; ".join(self.reasons))] if self.reasons else []
        waited = self.stop.synchronised
        device = [("device", f"synchronised on {label(waited)}: all enqueued work is done")] if waited else []
        found = [*cause_facts(self.cause), *why, *device, ("under way", self.request)]
        look = "%fsdp where, inspect FQN, eval EXPR, views and %%fsdp cells"
        if self.cause is not None and not self.cause.may_pass:
            return [*found, ("now", f"%fsdp abort, as continue would only wait again; before it, {look}")]
        return [*found, ("now", f"{look}; then %fsdp next, continue or abort")]


@dataclass(frozen=True, kw_only=True)
class BackgroundReport(Report):
    """Ranks work in the background.

    Attributes:
        request: the request, as text.
    """

    request: str

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return f"{self.request} runs in the background: %fsdp pause stops inside it, %fsdp abort aborts it"


@dataclass(frozen=True, kw_only=True)
class EndReport(Report):
    """The ranks' request has ended or was aborted.

    Attributes:
        sentence: how it ended.
    """

    internal = ("sentence",)

    sentence: str

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return self.sentence


WHERE_COLUMNS = ("rank", "state", "step", "phase", "unit", "event", "since")


@dataclass(frozen=True, kw_only=True)
class WhereRow:
    """The position of one rank.

    Attributes:
        rank: global rank.
        state: what it is doing.
        step: training step; None: outside.
        phase: of the step; None: unknown.
        unit: name of the unit; None: none.
        kind: kind of the newest event, or of the one it is held before; None: unknown.
        event: that event as text; empty: unknown; of a rank that is gone, how it was lost.
        breakpoint: number of the breakpoint that holds it, 0 for ``step --until``; None: no breakpoint does.
        for_ns: how long it has been there, in nanoseconds; None: unknown.
        inside: of a held rank that runs a cell or an expression, where in it; empty: it runs neither.
        stacks: its Python threads, the main one first; empty if not requested.
    """

    rank: int
    state: State
    step: int | None = None
    phase: Phase | None = None
    unit: str | None = None
    kind: Kind | None = None
    event: str = ""
    breakpoint: int | None = None
    for_ns: int | None = None
    inside: str = ""
    stacks: tuple[Thread, ...] = ()

    @property
    def state_words(self) -> str:
        """Its state, and where it is in a cell that runs inside the stop."""
        return f"{self.state}, {self.inside}" if self.inside else self.state

    def cells(self) -> tuple[str, ...]:
        """Return the texts of :data:`WHERE_COLUMNS`."""
        step = "" if self.step is None else str(self.step)
        since = "" if self.for_ns is None else format_duration(self.for_ns)
        phase = "" if self.phase is None else self.phase.words
        return (str(self.rank), self.state, step, phase, self.unit or "", self.event, since)


def row_of(
    rank: int,
    position: Position,
    units: Mapping[int, str],
    stacks: tuple[Thread, ...] = (),
    state: State | None = None,
    inside: str = "",
) -> WhereRow:
    """Return one row of the table.

    Args:
        rank: the rank.
        position: its position.
        units: names of units by index.
        stacks: its Python threads.
        state: what it is doing; None: taken from the position.
        inside: where it is in a cell or an expression that runs inside the stop; empty: it runs neither.
    """
    state = state or state_of(position)
    held, step = position.held, position.place.step
    row = WhereRow(rank=rank, state=state, step=step if step >= 0 else None, inside=inside, stacks=stacks)
    event = held or position.newest  # the next event of a held rank, the newest one of others
    if event is None or state == "idle":  # its newest event belongs to a finished step
        return row
    if held is not None:
        what = _held_at(held)
    else:
        what = f"{'start of ' if event.edge is Edge.BEGIN else ''}{event_words(event.kind, event.edge, None)}"
    unit = units.get(event.unit)
    return replace(
        row,
        phase=event.phase,
        unit=None if unit is None else unit_words(unit),
        kind=event.kind,
        event=what,
        breakpoint=None if held is None else held.breakpoint,
        for_ns=max(position.now_ns - event.since_ns, 0),
    )


def _held_at(hold: Hold) -> str:
    """Return the event before which a rank is held, without its unit: ``"before all-gather"``, ``"in a wait"``."""
    synchronised = ", device synchronised" if hold.synchronised else ""
    if hold.kind is Kind.WAIT:
        return f"{'in a wait' if is_in_wait(hold) else 'at the end of a wait'}{synchronised}"
    return f"before {event_words(hold.kind, hold.edge, None)}{synchronised}"


@dataclass(frozen=True, kw_only=True)
class WhereReport(Report):
    """Where every rank is: a table.

    Attributes:
        ranks: one row per rank.
        obstacle: why no step is possible any more, and what to do; empty if unknown.
        cause: how ranks that run issued different collectives; None: they did not.
    """

    ranks: tuple[WhereRow, ...]
    obstacle: str = ""
    cause: Fault | None = None

    @property
    def headline(self) -> str:
        """The result in one sentence: why ranks that run do not continue, or else what they do."""
        states = self._states() if self.cause is None or not self._runs() else self.cause.verdict
        return "; ".join(filter(None, [states, self.obstacle]))

    def _runs(self) -> bool:
        return any(row.state in ("running", "waiting") for row in self.ranks)

    def _cause_lines(self) -> list[str]:
        return cause_lines(self.cause, self._states() if self._runs() else None)

    def _states(self) -> str:
        states = by_value((row.rank, row.state_words) for row in self.ranks)
        if len(states) == 1:
            return f"{plural(len(self.ranks), 'rank')} {next(iter(states))}"
        return "; ".join(f"{label(ranks)} {state}" for state, ranks in states.items())

    def __str__(self) -> str:
        lines = (f"  {line}" for line in [*self._cause_lines(), *self._table().lines()])
        return "\n".join([self.headline, *lines, *self._stack_lines()])

    def _table(self) -> Table:
        return Table(head=WHERE_COLUMNS, rows=[row.cells() for row in self.ranks])

    def _stack_lines(self) -> list[str]:
        return lines_of({row.rank: row.stacks for row in self.ranks})

    def _repr_html_(self) -> str:
        lines = self._stack_lines()
        stacks = f'<pre style="overflow-x:auto">{html.escape(chr(10).join(lines))}</pre>' if lines else ""
        cause = cause_html(self._cause_lines())
        return f"<div><strong>{html.escape(self.headline)}</strong>{cause}{self._table().html()}{stacks}</div>"


@dataclass(frozen=True, kw_only=True)
class BreakReport(Report):
    """All breakpoints.

    Attributes:
        breakpoints: in the order they were added.
        change: a sentence on what was changed; empty if nothing was.
    """

    breakpoints: Sequence[Breakpoint]
    change: str = ""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        there = plural(len(self.breakpoints), "breakpoint") if self.breakpoints else "no breakpoints"
        return self.change or there

    def facts(self) -> list[tuple[str, str]]:
        """Return each breakpoint with its number, and whether it is off; not the only one that was just added."""
        if len(self.breakpoints) == 1 and self.change.startswith(f"breakpoint {self.breakpoints[0].id}: "):
            return []
        return [
            ("--until" if b.id == 0 else str(b.id), str(b) if b.is_on else f"{b} (off: %fsdp break on {b.id})")
            for b in self.breakpoints
        ]


@dataclass(frozen=True, kw_only=True)
class EvalReport(Report):
    """The value of an expression on ranks.

    Attributes:
        expr: the expression.
        texts: its value as text, by rank.
        not_queried: ranks that are not held in the gate and were not queried.
    """

    expr: str
    texts: Mapping[int, str]
    not_queried: Sequence[int] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        values = list(dict.fromkeys(self.texts.values()))
        if len(values) > 1:
            return f"{self.expr} differs between {label(self.texts)}"
        where = f"{len(self.texts)} ranks agree" if len(self.texts) > 1 else label(self.texts)
        return f"{self.expr} = {values[0].rstrip()}   ({where})"

    def facts(self) -> list[tuple[str, str]]:
        """Return the value of each rank, equal values once; none if all agree."""
        groups = by_value(sorted(self.texts.items()))
        values = [(label(ranks), text.rstrip()) for text, ranks in groups.items()] if len(groups) > 1 else []
        return [*values, *_left_out(self.not_queried)]


@dataclass(frozen=True, kw_only=True)
class InspectReport(Report):
    """A parameter as every rank has it, between steps or inside a stopped one.

    Attributes:
        fqn: its name.
        by_rank: the reply of each rank.
        not_queried: ranks that are not held in the gate and were not queried.
    """

    fqn: str
    by_rank: Mapping[int, InspectReply]
    not_queried: Sequence[int] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return f"{self.fqn} on {label(self.by_rank)}"

    def facts(self) -> list[tuple[str, str]]:
        """Return its unit, and why its full parameter is in memory or not, equal texts once."""
        units = by_value((rank, unit_of(found)) for rank, found in sorted(self.by_rank.items()))
        whys = by_value((rank, found.full.why) for rank, found in sorted(self.by_rank.items()))
        values = [("unit", _with_ranks(units)), ("full parameter", _with_ranks(whys)), *_left_out(self.not_queried)]
        return [(name, text) for name, text in values if text]

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  {line}" for line in table_of(self.by_rank).lines())])

    def _repr_html_(self) -> str:
        return f"<div>{super()._repr_html_()}{table_of(self.by_rank).html()}</div>"


@dataclass(frozen=True, kw_only=True)
class BackReport(Report):
    """The cursor over the trace was moved; nothing was undone.

    Attributes:
        sentence: its new position.
        events_back: events of the lowest rank between it and the newest; 0: it is at the newest.
        t_ns: its time on the lowest rank; None: it is at the newest event.
        next_seq: the number of the first event that is not shown, by rank; empty at the newest event.
    """

    internal = ("sentence",)

    sentence: str
    events_back: int = 0
    t_ns: int | None = None
    next_seq: Mapping[int, int] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return self.sentence

    def facts(self) -> list[tuple[str, str]]:
        """Return what that means."""
        return [("views", "show the record up to this event"), ("ranks", "stay where they are")]


def _with_ranks(groups: Mapping[str, Sequence[int]]) -> str:
    """Return each text with its ranks; a text that all ranks share without them."""
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{text} on {label(ranks)}" for text, ranks in groups.items() if text)


def _left_out(others: Sequence[int]) -> list[tuple[str, str]]:
    return [("not queried", f"{label(others)}: not held in the gate, see %fsdp where")] if others else []
