"""States of units over time (sharded, gathering, unsharded, reducing): one row per unit, the root on top.

A sharded unit is a thin line, because it takes little memory; states that take more than the shards are full bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go

from workbench.base.text_formats import format_duration, plural
from workbench.events import WORK, Kind, UnitState
from workbench.replay.device import ClockSource, on_device
from workbench.replay.event_marks import EventMark
from workbench.replay.grouping import activity_key, groups
from workbench.replay.paused_time import Cuts
from workbench.replay.spans import of_kind, rows_of
from workbench.replay.states import CHANGING_KINDS, StateSpans, spans
from workbench.replay.units import model_order, unit_name
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header
from workbench.views import theme
from workbench.views.mark_buttons import NO_MARKS, MarkPlace, Marks, add_marks
from workbench.views.paused_time import add_holds, hold_words, num_names
from workbench.views.phases import STRIP_HEIGHT, add_phases, phases_within
from workbench.views.rank_labels import several, who
from workbench.views.responsive import LETTER, SIDE, on_pages
from workbench.views.span_shapes import Rectangles, TimeAxis, add_bars, for_screen, rectangles, time_axis
from workbench.views.unit_selection import meant
from workbench.views.window import DrawnSteps, Window, one_rank, window

MAX_UNITS = 200
_HEIGHT = 900  # pixels of all rows together
_ROW_HEIGHTS = (8, 28)  # pixels of one row
_LABEL_HEIGHT = 14  # pixels
_LEAST_HEIGHT = 90  # pixels of the plot: on a narrow page, the legend takes some before it is laid out
_NAME_LETTERS, _NAME_SHARE = 28, 0.4  # maximum characters of a unit's name, and its share of a narrow page
_NOTHING = "No unit is recorded yet: %fsdp shard MODEL splits a model over the ranks."


def states(
    trace: Trace,
    *,
    step: int | None = None,
    steps: int = 1,
    rank: int | None = None,
    unit: str | None = None,
    marks: Marks = NO_MARKS,
) -> go.Figure:
    """Draw which unit is sharded, gathering, unsharded or reducing, over time.

    Args:
        trace: what happened.
        step: the last step to show; None: the newest.
        steps: how many steps, up to that one.
        rank: the rank to show; None: one of the largest group of alike ones.
        unit: draw this unit alone: a name, a pattern such as ``blocks.*``, or ``(root)``; None: all.
        marks: events to mark, by the sentence that names them.

    Raises:
        UsageError: the trace has nothing of ``step``, no such rank, or no such unit.
    """
    chosen = {each.index for each in meant(trace.header.units, unit)}
    shown = window(trace, step, steps)
    seen = shown.drawn(trace)
    alike = groups(seen.trace, lambda part: activity_key(trace.header, rows_of(part, CHANGING_KINDS)))
    if rank is None and not alike:
        return theme.empty(_NOTHING)
    drawn, clock = rows_of_rank(trace, shown, seen, one_rank(trace, alike[0][0] if rank is None else rank))
    units = [each for each in units_of_rank(trace.header, drawn) if unit is None or each in chosen]
    if not units or not len(drawn.rows):
        return theme.empty(_NOTHING)
    found = spans(drawn, units)
    fig = theme.figure(
        _title(trace.header, shown, found, units),
        _subtitle(trace.header, drawn.rank, alike, units, seen.cuts, clock),
        barmode="overlay",
        **theme.legend_below(len(UnitState) + len(WORK) + num_names(seen.cuts)),
    )
    axis = time_axis(seen.extent_ns)
    _draw(fig, trace.header, drawn, units[:MAX_UNITS], found, axis)
    add_holds(fig, seen.cuts, axis, (-0.5, len(units[:MAX_UNITS]) - 0.5))
    rows = max(_row_height(units) * len(units[:MAX_UNITS]), _LEAST_HEIGHT)
    fig.update_layout(height=fig.layout.margin.t + rows + fig.layout.margin.b)
    add_marks(fig, marks, axis, lambda mark: _mark_place(mark, drawn, units[:MAX_UNITS]), above=STRIP_HEIGHT)
    return on_pages(fig, lambda width: _on_page(fig, trace.header, units[:MAX_UNITS], width))


def _mark_place(mark: EventMark, drawn: RankTrace, units: Sequence[int]) -> MarkPlace | None:
    """Return the row of a mark's unit on the drawn rank; None if it is not drawn."""
    if mark.rank != drawn.rank or mark.unit not in units:
        return None
    lane = units.index(mark.unit)
    return MarkPlace(rows=drawn.rows, y=(lane - 0.5, lane + 0.5))


def rows_of_rank(trace: Trace, shown: Window, seen: DrawnSteps, whole: RankTrace) -> tuple[RankTrace, ClockSource]:
    """Return one rank's rows, with the exact state before them and times on the drawn axis, and their clock."""
    part = shown.cut(whole)
    converted = on_device(whole, part, trace.header)
    clock = ClockSource.ENQUEUED if converted is None and seen.clock is ClockSource.DEVICE else seen.clock
    part = part if converted is None else converted.part
    return replace(part, rows=seen.cuts.rows(part.rows)), clock


def units_of_rank(header: Header, drawn: RankTrace) -> list[int]:
    """Return the units to draw from the top of the model; retired ones only if they did anything."""
    did = drawn.rows["unit"][of_kind(drawn.rows, (*CHANGING_KINDS, Kind.FORWARD)) & (drawn.rows["unit"] >= 0)]
    wanted = {*did.tolist(), *(unit.index for unit in header.units if unit.in_use)}
    known = [unit for unit in model_order(header) if unit in wanted]
    return [*known, *sorted(wanted - set(known))]


def _title(header: Header, shown: Window, found: StateSpans, units: Sequence[int]) -> str:
    most, num_units = _most_at_once(found, units), len(units)
    if num_units == 1 and _is_split(header, units):
        return f"{shown}: {_one(header, found, units[0])}"
    some = f"all {num_units} units" if most == num_units > 1 else f"at most {most} of {plural(num_units, 'unit')}"
    if not _is_split(header, units):
        return f"{shown}: nothing is sharded; {some} in use at once"
    return f"{shown}: {some} unsharded at once"


def _one(header: Header, found: StateSpans, unit: int) -> str:
    """Return how long a unit was unsharded, as text."""
    full = (found.state == UnitState.UNSHARDED) & (found.unit == unit)
    total_ns = int((found.end_ns - found.begin_ns)[full].sum())
    how = f"unsharded for {format_duration(total_ns)}" if total_ns else "never unsharded"
    return f"{theme.shorten(unit_name(header, unit), _NAME_LETTERS)} {how}"


def _is_split(header: Header, units: Sequence[int]) -> bool:
    """Whether any of the units is split over several ranks."""
    return any(unit.index in units and unit.shard_size > 1 for unit in header.units)


def _most_at_once(found: StateSpans, units: Sequence[int]) -> int:
    full = (found.state == UnitState.UNSHARDED) & (found.end_ns > found.begin_ns) & np.isin(found.unit, units)
    times = np.concatenate([found.end_ns[full], found.begin_ns[full]])  # ends first, where they are equal
    moves = np.repeat([-1, 1], full.sum())
    return int(np.cumsum(moves[np.argsort(times, kind="stable")]).max(initial=0))


def _subtitle(
    header: Header, rank: int, alike: Sequence[tuple[int, ...]], units: Sequence[int], cuts: Cuts, clock: ClockSource
) -> str:
    group = next((ranks for ranks in alike if rank in ranks), (rank,))
    others = [ranks for ranks in alike if ranks is not group]
    same = who(header, group, [rank for ranks in alike for rank in ranks])
    sentences = [
        f"{theme.begun(same)}{f' did the same; showing rank {rank}' if len(group) > 1 else ''}",
        f"different: {several(header, others)}" if others else "",
        "thin line: each rank holds only its shard"
        if _is_split(header, units)
        else "each rank holds every unit in full; thin line: not in use",
        theme.clock_words(header, clock),
        hold_words(cuts),
        f"{plural(len(units) - MAX_UNITS, 'more unit')} not drawn: select units with --unit NAME"
        if len(units) > MAX_UNITS
        else "",
    ]
    return theme.joined(sentences)


def _row_height(units: Sequence[int]) -> int:
    low, high = _ROW_HEIGHTS
    return min(max(_HEIGHT // len(units), low), high)


def _draw(
    fig: go.Figure, header: Header, drawn: RankTrace, units: Sequence[int], found: StateSpans, axis: TimeAxis
) -> None:
    bars = for_screen(_bars(found, units))
    whole = {unit: theme.full(unit_name(header, unit)) for unit in units}
    looks = {int(state): (state.words, theme.UNIT_STATE_COLOURS[state]) for state in UnitState}
    height = np.where(bars.colour == UnitState.SHARDED, 0.16, 0.74)
    add_bars(fig, bars, looks, bars.lane.astype(np.float64), height, _hovers(bars, whole, axis), axis)
    add_phases(fig, drawn.rows, axis)
    fig.update_layout(margin_t=fig.layout.margin.t + STRIP_HEIGHT)
    fig.update_xaxes(axis.layout)
    every = -(-_LABEL_HEIGHT // _row_height(units))
    fig.update_yaxes(
        range=[len(units) - 0.4, -0.6],
        tickmode="array",
        tickvals=list(range(len(units)))[::every],
        ticktext=_names(header, units),
        ticklabelstandoff=4,
        showgrid=False,
    )


def _on_page(fig: go.Figure, header: Header, units: Sequence[int], width: int) -> dict[str, object]:
    """Return the layout changes for a page ``width`` pixels wide: names are shorter on narrow pages."""
    letters = min(int(_NAME_SHARE * width / LETTER), _NAME_LETTERS)
    axis = fig.layout.yaxis.to_plotly_json() | {"ticktext": _names(header, units, letters)}
    return {"yaxis": axis, "shapes": phases_within(fig, (1 - _NAME_SHARE) * width - 2 * SIDE)}


def _names(header: Header, units: Sequence[int], letters: int = _NAME_LETTERS) -> list[str]:
    """Return the names of the labelled rows."""
    every = -(-_LABEL_HEIGHT // _row_height(units))
    return [theme.escape(theme.shorten(unit_name(header, unit), letters)) for unit in units][::every]


def _bars(found: StateSpans, units: Sequence[int]) -> Rectangles:
    place = {unit: lane for lane, unit in enumerate(units)}
    lane = np.array([place.get(unit, -1) for unit in found.unit.tolist()], np.int64)
    bars = rectangles(lane, found.state, found.begin_ns, found.end_ns, found.unit)
    return bars[(lane >= 0) & (found.end_ns > found.begin_ns)]


def _hovers(bars: Rectangles, names: dict[int, str], axis: TimeAxis) -> list[str]:
    texts = []
    for i in range(len(bars)):
        times = f"{bars.count[i]} times, together " if bars.count[i] > 1 else ""
        begin, end = axis(bars.begin_ns[i : i + 1])[0], axis(bars.end_ns[i : i + 1])[0]
        texts.append(
            f"<b>{names[int(bars.unit[i])]}</b> {UnitState(bars.colour[i]).words}<br>"
            f"{times}{format_duration(bars.duration_ns[i])}, from {begin:.4g} to {end:.4g} {axis.unit}"
        )
    return texts
