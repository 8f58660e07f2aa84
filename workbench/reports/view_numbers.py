"""The numbers behind the figures of views, as reports: what ``--json`` prints for a command that draws. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import plotly.graph_objects as go

from workbench.errors import UsageError
from workbench.events import Activation, Category, Kind, Phase, Unit, UnitState, unit_words
from workbench.replay import activations, memory, process, states, training
from workbench.replay.clock_error import error_ns
from workbench.replay.collectives import Comparison
from workbench.replay.device import ClockSource
from workbench.replay.differences import CollectiveChange, FirstEventChange, FirstValueChange, TimeChange, differences
from workbench.replay.paused_time import without_holds
from workbench.replay.shards import Totals, shards, totals
from workbench.replay.spans import end_aborted, spans, total_ns
from workbench.replay.tracks import DRAWN
from workbench.replay.training import Series
from workbench.replay.units import model_order, unit_name
from workbench.reports.report import Report
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header
from workbench.views import draw
from workbench.views.comms import comparisons, sent_bytes
from workbench.views.compare import draw as draw_compared
from workbench.views.states import rows_of_rank, units_of_rank
from workbench.views.theme import plain, title_and_subtitle
from workbench.views.unit_selection import meant
from workbench.views.window import window


@dataclass(frozen=True, kw_only=True)
class ViewReport(Report):
    """Base of the numbers behind a figure.

    Attributes:
        title: the figure's title, or if there is nothing to draw, why.
        subtitle: the figure's subtitle, sentences between middle dots.
    """

    internal = ("title",)

    title: str
    subtitle: str

    @property
    def headline(self) -> str:
        """The figure's title."""
        return self.title


@dataclass(frozen=True, kw_only=True)
class WindowReport(ViewReport):
    """Base of the numbers behind a figure of some steps.

    Attributes:
        first_step: first step; -1: no step has begun.
        last_step: last step, included.
    """

    first_step: int
    last_step: int


def numbers(name: str, trace: Trace, **options: Any) -> ViewReport:  # noqa: ANN401 - of the view
    """Return the numbers behind the figure that :func:`workbench.views.draw` draws; it takes the same arguments.

    Raises:
        UsageError: as for the figure, or the view only draws.
    """
    words = _words(draw(name, trace, **options))
    if name not in _MAKERS:
        raise UsageError(f"{name} only draws: it has no numbers as JSON")
    return _MAKERS[name](trace, words, **options)


def _words(fig: go.Figure) -> dict[str, str]:
    title, subtitle = title_and_subtitle(fig)
    sentence = "" if title or not fig.layout.annotations else plain(fig.layout.annotations[0].text)
    return {"title": title or sentence, "subtitle": subtitle}


# ---- layout


@dataclass(frozen=True, kw_only=True)
class LayoutReport(ViewReport):
    """Which rank holds which rows of each parameter.

    Attributes:
        world_size: number of ranks.
        totals: sums over the parameters of ``units``.
        units: the units in use, from the top of the model; their names as in other reports, ``(root)`` included.
    """

    world_size: int
    totals: Totals
    units: tuple[Unit, ...]


def _layout(trace: Trace, words: dict[str, str], *, unit: str | None = None, **_: object) -> LayoutReport:
    header = trace.header
    chosen = meant([each for each in header.units if each.in_use], unit)
    listed = [header.units[index] for index in model_order(header) if header.units[index] in chosen]
    return LayoutReport(
        **words,
        world_size=header.world_size,
        totals=totals(shards(replace(header, units=chosen))),
        units=tuple(replace(each, name=unit_words(each.name)) for each in listed),
    )


# ---- memory


@dataclass(frozen=True, kw_only=True)
class KeptBytes:
    """Activations of one owner.

    Attributes:
        owner: the owner.
        num_bytes: its bytes.
    """

    owner: Activation
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank in some steps: bytes that the engine owns, and of the whole process if it was sampled.

    Attributes:
        rank: the rank.
        peak_bytes: most bytes in use at once; memory that pools reserve is not in use.
        peak_bytes_by_category: bytes of each class at that moment.
        peak_activations: activations at that moment by their owner, the largest first; what was kept from before the
            trace's first event is not among them.
        peak_step: its step; None: outside.
        peak_phase: its phase.
        peak_unit: the unit at work; None: none.
        unsharded_units: units whose full parameters were in memory at that moment.
        gathering_units: units whose all-gather was under way.
        reducing_units: units whose gradients were being reduced.
        last_bytes_by_category: bytes of each class at the end.
        max_reserved_bytes: most bytes that pools held unused.
        max_process_bytes: most memory of the whole process; None: it was not sampled.
        loading_process_bytes: most memory of the whole process after each part of loading, before or in these steps.
    """

    rank: int
    peak_bytes: int
    peak_bytes_by_category: Mapping[Category, int]
    peak_activations: tuple[KeptBytes, ...]
    peak_step: int | None
    peak_phase: Phase
    peak_unit: str | None
    unsharded_units: tuple[str, ...]
    gathering_units: tuple[str, ...]
    reducing_units: tuple[str, ...]
    last_bytes_by_category: Mapping[Category, int]
    max_reserved_bytes: int
    max_process_bytes: int | None
    loading_process_bytes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class MemoryReport(WindowReport):
    """Bytes by class on each rank.

    Attributes:
        ranks: all ranks, or the chosen one.
    """

    ranks: tuple[RankMemory, ...]


def _memory(
    trace: Trace,
    words: dict[str, str],
    *,
    step: int | None = None,
    steps: int = 1,
    rank: int | None = None,
    **_: object,
) -> MemoryReport:
    shown = window(trace, step, steps)
    found = tuple(
        _rank_memory(trace.header, each, shown.cut(each)) for each in trace.ranks if rank in (None, each.rank)
    )
    return MemoryReport(**words, first_step=shown.first, last_step=shown.last, ranks=found)


def _rank_memory(header: Header, whole: RankTrace, part: RankTrace) -> RankMemory:
    peak, sampled = memory.peak(part), process.series(header, part)
    last = memory.advance(memory.start(part.start), part.rows)

    def names(units: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(unit_name(header, unit) for unit in units)

    return RankMemory(
        rank=part.rank,
        peak_bytes=peak.num_bytes,
        peak_bytes_by_category=dict(zip(Category, peak.bytes_by_category, strict=True)),
        peak_activations=tuple(
            KeptBytes(owner=owner, num_bytes=num_bytes)
            for owner, num_bytes in activations.kept_at(header, whole, peak.seq).items()
        ),
        peak_step=_step(peak.step),
        peak_phase=peak.phase,
        peak_unit=_name(header, peak.unit),
        unsharded_units=names(peak.unsharded_units),
        gathering_units=names(peak.in_flight),
        reducing_units=names(peak.reducing),
        last_bytes_by_category=dict(zip(Category, last.bytes_by_category, strict=True)),
        max_reserved_bytes=memory.most_reserved(part),
        max_process_bytes=int(sampled.resident.max()) if len(sampled) else None,
        loading_process_bytes=process.loading(header, whole),
    )


def _name(header: Header, unit: int) -> str | None:
    return unit_name(header, unit) if unit >= 0 else None


def _step(step: int) -> int | None:
    return step if step >= 0 else None


# ---- timeline


@dataclass(frozen=True, kw_only=True)
class TimelineSpan:
    """What a rank did from when to when.

    Attributes:
        kind: forward, backward, a collective, a wait for one, ...
        unit: name of its unit; None: none.
        step: the step it began in; None: outside.
        begin_ns: begin, in nanoseconds from the left edge of the figure.
        end_ns: end, of a collective when its last byte arrived; None: it has not ended.
        num_bytes: payload.
        comm_group: index of the communication group of a collective or wait; None: none.
        comm_seq: number of the collective within its group, equal on all of its ranks; None: none.
    """

    kind: Kind
    unit: str | None
    step: int | None
    begin_ns: int
    end_ns: int | None
    num_bytes: int
    comm_group: int | None
    comm_seq: int | None


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """The timeline of one rank.

    Attributes:
        rank: the rank.
        waited_ns: time that compute waited for collectives.
        spans: in the order in which they began.
    """

    rank: int
    waited_ns: int
    spans: tuple[TimelineSpan, ...]


@dataclass(frozen=True, kw_only=True)
class TimelineReport(WindowReport):
    """What each rank did over time. Time at a breakpoint, and long idle time, is cut out as in the figure.

    Attributes:
        clock: the clock of the times: of the host, of the host when it enqueued the work, or of the device.
        clock_error_ns: maximum error between times of different hosts; 0 for one host.
        ranks: all ranks, or the chosen one.
    """

    clock: ClockSource
    clock_error_ns: int
    ranks: tuple[RankTimeline, ...]


def _timeline(
    trace: Trace,
    words: dict[str, str],
    *,
    step: int | None = None,
    steps: int = 1,
    rank: int | None = None,
) -> TimelineReport:
    shown = window(trace, step, steps)
    drawn = shown.drawn(trace)
    parts = [part for part in drawn.trace.ranks if rank in (None, part.rank)]
    return TimelineReport(
        **words,
        first_step=shown.first,
        last_step=shown.last,
        clock=drawn.clock,
        clock_error_ns=error_ns(Trace(trace.header, tuple(map(shown.stateless, trace.ranks)))),
        ranks=tuple(_rank_timeline(trace.header, part, drawn.extent_ns[0]) for part in parts),
    )


def _rank_timeline(header: Header, part: RankTrace, zero_ns: int) -> RankTimeline:
    found = end_aborted(spans(part.rows, DRAWN), part.rows)
    columns = (found.kind, found.unit, found.step, found.begin_ns, found.end_ns, found.num_bytes)
    rows = zip(*(column.tolist() for column in (*columns, found.comm_group, found.comm_seq)), strict=True)
    return RankTimeline(
        rank=part.rank,
        waited_ns=total_ns(part, Kind.WAIT),
        spans=tuple(
            TimelineSpan(
                kind=Kind(kind),
                unit=_name(header, unit),
                step=_step(step),
                begin_ns=begin_ns - zero_ns,
                end_ns=None if end_ns < 0 else end_ns - zero_ns,
                num_bytes=num_bytes,
                comm_group=None if group < 0 else group,
                comm_seq=None if seq < 0 else seq,
            )
            for kind, unit, step, begin_ns, end_ns, num_bytes, group, seq in rows
        ),
    )


# ---- states


@dataclass(frozen=True, kw_only=True)
class StateSpan:
    """A state of a unit over some time.

    Attributes:
        unit: name of the unit.
        state: its state.
        begin_ns: begin, in nanoseconds from the left edge of the figure.
        end_ns: end, where the next state begins, or the rows end.
    """

    unit: str
    state: UnitState
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class RankStates:
    """The states of the units of one rank.

    Attributes:
        rank: the rank.
        clock: the clock of the times.
        spans: unit by unit, each without a gap.
    """

    rank: int
    clock: ClockSource
    spans: tuple[StateSpan, ...]


@dataclass(frozen=True, kw_only=True)
class StatesReport(WindowReport):
    """Which unit is sharded, gathering, unsharded or reducing, over time.

    Attributes:
        ranks: all ranks, or the chosen one.
    """

    ranks: tuple[RankStates, ...]


def _states(
    trace: Trace,
    words: dict[str, str],
    *,
    step: int | None = None,
    steps: int = 1,
    rank: int | None = None,
    unit: str | None = None,
) -> StatesReport:
    chosen = {each.index for each in meant(trace.header.units, unit)}
    shown = window(trace, step, steps)
    seen = shown.drawn(trace)
    found = []
    for whole in trace.ranks:
        if rank in (None, whole.rank):
            part, clock = rows_of_rank(trace, shown, seen, whole)
            units = [each for each in units_of_rank(trace.header, part) if unit is None or each in chosen]
            own = _state_spans(trace.header, part, units, seen.extent_ns[0])
            found.append(RankStates(rank=whole.rank, clock=clock, spans=own))
    return StatesReport(**words, first_step=shown.first, last_step=shown.last, ranks=tuple(found))


def _state_spans(header: Header, part: RankTrace, units: list[int], zero_ns: int) -> tuple[StateSpan, ...]:
    found = states.spans(part, units)
    columns = (found.unit, found.state, found.begin_ns, found.end_ns)
    return tuple(
        StateSpan(
            unit=unit_name(header, unit), state=UnitState(state), begin_ns=begin_ns - zero_ns, end_ns=end_ns - zero_ns
        )
        for unit, state, begin_ns, end_ns in zip(*(column.tolist() for column in columns), strict=True)
        if unit in units
    )


# ---- collectives


@dataclass(frozen=True, kw_only=True)
class CollectiveCount:
    """The collectives of one kind for one unit in one step, of ranks with equal counts; numbers of one rank.

    Attributes:
        unit: name of the unit; None: none.
        kind: the kind.
        ranks: the ranks.
        num_ranks: ranks that take part in each collective.
        calls: how many.
        num_bytes: sum of their payloads.
        sent_bytes: what a rank sends for them on a ring.
        crossing_bytes: bytes that each host sends to others, by host; None: one host, or unknown.
        time_ns: sum of their times, mean over the ranks.
        exposed_ns: time that compute waited for them, mean over the ranks.
        expected_calls: as the sharding makes necessary; None: there is no expected number.
        expected_bytes: likewise.
    """

    computed = ("as_expected",)

    unit: str | None
    kind: Kind
    ranks: tuple[int, ...]
    num_ranks: int
    calls: int
    num_bytes: int
    sent_bytes: float
    crossing_bytes: Mapping[str, float] | None
    time_ns: float
    exposed_ns: float
    expected_calls: int | None
    expected_bytes: int | None

    @property
    def as_expected(self) -> bool | None:
        """Whether calls and bytes equal the expected ones; None: there are none."""
        if self.expected_calls is None:
            return None
        return (self.calls, self.num_bytes) == (self.expected_calls, self.expected_bytes)


@dataclass(frozen=True, kw_only=True)
class CollectiveTotal:
    """All collectives of one kind that a rank took part in, of ranks with the same numbers.

    Attributes:
        kind: the kind.
        ranks: the ranks.
        calls: how many.
        num_bytes: sum of their payloads.
        sent_bytes: what a rank sends for them on a ring.
        expected_calls: as the sharding makes necessary; those without an expected number do not count.
        expected_bytes: likewise.
    """

    kind: Kind
    ranks: tuple[int, ...]
    calls: int
    num_bytes: int
    sent_bytes: float
    expected_calls: int
    expected_bytes: int


def _totals_of(rows: Sequence[CollectiveCount]) -> tuple[CollectiveTotal, ...]:
    """Return the sums over the units, by kind and ranks."""
    alike: dict[tuple[Kind, int, int, float, int, int], list[int]] = {}
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        for rank in sorted({rank for row in own for rank in row.ranks}):
            of_rank = [row for row in own if rank in row.ranks]
            sums = (
                sum(row.calls for row in of_rank),
                sum(row.num_bytes for row in of_rank),
                sum(row.sent_bytes for row in of_rank),
                sum(row.expected_calls or 0 for row in of_rank),
                sum(row.expected_bytes or 0 for row in of_rank),
            )
            alike.setdefault((kind, *sums), []).append(rank)
    return tuple(
        CollectiveTotal(
            kind=kind,
            ranks=tuple(ranks),
            calls=calls,
            num_bytes=num_bytes,
            sent_bytes=sent,
            expected_calls=expected_calls,
            expected_bytes=expected_bytes,
        )
        for (kind, calls, num_bytes, sent, expected_calls, expected_bytes), ranks in alike.items()
    )


@dataclass(frozen=True, kw_only=True)
class CommsReport(ViewReport):
    """The collectives of a step, measured and expected.

    Attributes:
        step: the step; None: no step has begun.
        clock: the clock of the times.
        rows: from the top of the model; a unit has several rows for a kind if ranks differ.
        totals: their sums over the units.
    """

    computed = (*ViewReport.computed, "as_expected")

    step: int | None
    clock: ClockSource
    rows: tuple[CollectiveCount, ...]
    totals: tuple[CollectiveTotal, ...]

    @property
    def as_expected(self) -> bool | None:
        """Whether all rows with expected numbers equal them; None: there are none."""
        found = [row.as_expected for row in self.rows if row.as_expected is not None]
        return all(found) if found else None


def _comms(trace: Trace, words: dict[str, str], *, step: int | None = None, unit: str | None = None) -> CommsReport:
    header = trace.header
    if window(trace, step, 1).last < 0:
        return CommsReport(**words, step=None, clock=ClockSource.HOST, rows=(), totals=())
    shown, found, clock = comparisons(trace, step)
    places = {index: place for place, index in enumerate(model_order(header))}
    chosen = {each.index for each in meant(header.units, unit)}
    rows = sorted(found, key=lambda row: places.get(row.unit, len(places)))
    counts = tuple(_count(header, row) for row in rows if unit is None or row.unit in chosen)
    return CommsReport(**words, step=shown, clock=clock, rows=counts, totals=_totals_of(counts))


def _count(header: Header, row: Comparison) -> CollectiveCount:
    return CollectiveCount(
        unit=_name(header, row.unit),
        kind=row.kind,
        ranks=row.ranks,
        num_ranks=row.num_ranks,
        calls=row.calls,
        num_bytes=row.num_bytes,
        sent_bytes=sent_bytes(row),
        crossing_bytes=row.crossing,
        time_ns=row.time_ns,
        exposed_ns=row.exposed_ns,
        expected_calls=None if row.expected is None else row.expected.calls,
        expected_bytes=None if row.expected is None else row.expected.num_bytes,
    )


# ---- training


@dataclass(frozen=True, kw_only=True)
class TrainingReport(ViewReport):
    """What was logged, and the time of each step.

    Attributes:
        metrics: a series for each logged name, the loss first.
        step_times_ns: time of each finished step without time at a breakpoint, in nanoseconds.
        cuts: steps at which another model began.
        behind: ranks that have not finished the last step that others have.
        num_steps: finished steps of the current model.
        median_step_ns: median time of its steps on their slowest ranks; nan without a finished step.
    """

    metrics: tuple[Series, ...]
    step_times_ns: Series
    cuts: tuple[int, ...]
    behind: tuple[int, ...]
    num_steps: int
    median_step_ns: float


def _training(trace: Trace, words: dict[str, str]) -> TrainingReport:
    found = training.summary(trace, with_earlier=True)
    return TrainingReport(
        **words,
        metrics=tuple(found.metrics.values()),
        step_times_ns=found.step_times,
        cuts=found.cuts,
        behind=found.behind,
        num_steps=found.num_steps,
        median_step_ns=found.step_ns,
    )


_MAKERS: dict[str, Callable[..., ViewReport]] = {
    "layout": _layout,
    "memory": _memory,
    "timeline": _timeline,
    "states": _states,
    "comms": _comms,
    "training": _training,
}


# ---- compare


@dataclass(frozen=True, kw_only=True)
class TraceChange:
    """What changed on one rank from trace A to trace B; pairs are (A, B).

    Attributes:
        rank: the rank compared.
        ranks: the ranks that both have.
        num_steps: steps of each side; the smaller number is compared.
        same_events: whether both have the same events, with the same bytes, in the same order.
        peak_bytes: most bytes in use at once.
        peak_change_by_category: for each class that makes a good part of the change, its bytes.
        peak_units: units that hold the change; empty if no particular units do.
        peak_phases: the phases in which they do.
        peak_step: step of the higher peak; None: outside, or the peaks are equal.
        step_ns: median step time; nan without a finished step.
        is_chance: whether the difference in step time may be chance.
        collectives: those that differ, numbers per step.
        slower: what took longer, or shorter if the step became shorter, the most first.
        first_event: the first event that differs; null: none does.
        first_value: the first logged number that differs; null: none does.
    """

    rank: int
    ranks: tuple[int, ...]
    num_steps: tuple[int, int]
    same_events: bool
    peak_bytes: tuple[int, int]
    peak_change_by_category: Mapping[Category, int]
    peak_units: tuple[str, ...]
    peak_phases: tuple[Phase, ...]
    peak_step: int | None
    step_ns: tuple[float, float]
    is_chance: bool
    collectives: tuple[CollectiveChange, ...]
    slower: tuple[TimeChange, ...]
    first_event: FirstEventChange | None = None
    first_value: FirstValueChange | None = None


@dataclass(frozen=True, kw_only=True)
class CompareReport(ViewReport):
    """What changed from one trace to another.

    Attributes:
        names: names of both.
        change: what changed; None: they have no events of the same rank.
    """

    names: tuple[str, str]
    change: TraceChange | None


def compared(a: Trace, b: Trace, *, names: tuple[str, str], rank: int | None = None) -> CompareReport:
    """Return what changed from ``a`` to ``b``, with the arguments of :func:`workbench.views.compare.draw`.

    Raises:
        UsageError: one of them has no such rank.
    """
    words = _words(draw_compared(a, b, names=names, rank=rank))
    found = differences(without_holds(a)[0], without_holds(b)[0], rank)
    if found is None:
        return CompareReport(**words, names=names, change=None)
    change = TraceChange(
        rank=found.rank,
        ranks=found.ranks,
        num_steps=found.num_steps,
        same_events=found.aligned.first_difference < 0,
        peak_bytes=(found.peak.before, found.peak.after),
        peak_change_by_category=dict(found.peak.parts),
        peak_units=found.peak.units,
        peak_phases=found.peak.phases,
        peak_step=_step(found.peak.step),
        step_ns=found.step_ns,
        is_chance=found.is_chance,
        collectives=found.collectives,
        slower=found.slower,
        first_event=found.first_event,
        first_value=found.first_value,
    )
    return CompareReport(**words, names=names, change=change)
