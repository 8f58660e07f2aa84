"""What changed from one trace to another, in a sentence and a picture: two memory curves over the same logical events.

The axis counts events, not time, so that a slower run does not look different. Below are the collectives that differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.base.text_formats import byte_unit, format_bytes, format_duration, format_loss, format_share, plural
from workbench.errors import UsageError
from workbench.events import WORK, Category, Edge, Kind
from workbench.replay.alignment import Alignment, ComparedRank
from workbench.replay.differences import CollectiveChange, Differences, PeakChange, TimeChange, differences
from workbench.replay.grouping import join_names, label, pattern, ranges
from workbench.replay.paused_time import without_holds
from workbench.replay.shards import Totals, totals_of_used
from workbench.replay.spans import Ints
from workbench.replay.units import by_number
from workbench.trace.columns import Trace
from workbench.trace.step_names import step_name
from workbench.views import theme
from workbench.views.projector_theme import for_talk
from workbench.views.responsive import LETTER, SIDE, apart, in_lines, on_pages, sides, with_narrow

MAX_POINTS = 4_000
"""Points of one curve; with more events, each bin keeps its highest value."""

MAX_ROWS = 9
NOTICED = 0.05
"""Smaller relative differences of the step time are not reported: steps of one run differ as much."""

_NOTICED_VALUE = 1e-3
"""Smaller relative differences of a logged number are not reported: another order of summation causes them."""

_COLOURS = (theme.CATEGORY_COLOURS[Category.SHARDED_PARAMS], theme.CATEGORY_COLOURS[Category.UNSHARDED_GRADS])
_PLOT_HEIGHT, _ROW_HEIGHT, _GAP, _LINE = 300, 46, 76, 22  # pixels; a row of the table has two lines
_BELOW_TABLE, _BELOW_PLOT = 24, 72  # pixels below table or plot; a plot has its axis there
_NARROW_ROW = 72  # pixels, of four lines
_KIND_LETTERS = 18  # characters of the longest kind of collective, plus the extra width of a bold name
_MAX_COSTS = 4  # changes of time in a sentence
_CELL_LEFT, _AXIS_LETTER = 6, 7.2  # pixels before a cell's text; of a title's character
_COLUMNS, _WIDTHS = ("unit", "collective", "calls", "payload", "exposed"), (2.2, 1.4, 0.9, 1.2, 1.2)
_BORDER = {"color": theme.GRID, "width": 1}
_MAX_TICKS, _MAX_DETAILED = 8, 2
_TICK_WIDTH = 0.16  # of the narrowest plot's width: "backward" and a gap


def draw(
    a: Trace, b: Trace, *, names: tuple[str, str] = ("A", "B"), rank: int | None = None, talk: bool = False
) -> go.Figure:
    """Return the figure of what changed from ``a`` to ``b``; its title is the sentence.

    Args:
        a: what happened before.
        b: what happened after.
        names: what a person calls the two.
        rank: compare this rank; None: the one whose peak differs most.
        talk: in sizes and colours for a projector.

    Raises:
        UsageError: one of them has no such rank.
    """
    for trace in (a, b):
        known = [r.rank for r in trace.ranks]
        if rank is not None and rank not in known:
            raise UsageError(f"the trace has no rank {rank}; its ranks are: {ranges(known) or 'none yet'}")
    found = differences(without_holds(a)[0], without_holds(b)[0], rank)
    names = tuple(theme.shorten(name) for name in names)  # type: ignore[assignment]
    if found is None or not len(found.aligned.in_a):
        return with_narrow(
            theme.empty(f"Nothing to compare: {names[0]} and {names[1]} have no events of the same rank.")
        )
    rows = sorted(found.collectives[:MAX_ROWS], key=lambda row: (row.kind, by_number(row.unit)))
    table = _table(rows)
    fig = theme.figure(
        sentence(found),
        _subtitle(found, names, theme.host_clock_words(a.header, b.header), (totals_of_used(a), totals_of_used(b))),
        legend={"x": 0, "xanchor": "left", "yanchor": "bottom", "bgcolor": theme.CLEAR},
        hovermode="x unified",
    )
    # between title and plot: two legend lines, and below them the mark
    top, bottom = fig.layout.margin.t + 2 * _LINE, _BELOW_TABLE if rows else _BELOW_PLOT
    fig.update_layout(margin_t=top, margin_b=bottom, height=top + _drawn(table, _GAP) + bottom)
    _add_curves(fig, found, names)
    marks = tuple(fig.layout.annotations), tuple(fig.layout.shapes)
    fig.update_layout(_with_table(fig, table, marks, _GAP))
    fig = with_narrow(on_pages(fig, lambda width: _on_page(fig, rows, marks, width)))
    return for_talk(fig) if talk else fig


# -- words


def sentence(found: Differences) -> str:
    """Return what changed as a sentence; plain text, names not escaped.

    Example: ``"peak +3.10 MiB: blocks.2 unsharded through backward; step time +12%: exposed all-gather of blocks.1
    +3.40 ms"``; ``"the same, event for event"``.
    """
    parts = [_peak_words(found.peak), _collective_words(found.collectives), _time_words(found), _value_words(found)]
    if found.aligned.first_difference < 0:
        fewer, more = sorted(found.num_steps)
        within = f" in the {plural(fewer, 'step')} that both have (of {more})" if fewer < more else ""
        return "; ".join([f"the same, event for event{within}", *filter(None, parts[2:])])
    if not any(parts[:2]):
        parts[0] = _event_words(found) if found.is_same_engine else "the same collectives a step, and the same peak"
    return "; ".join(filter(None, parts))


def _peak_words(peak: PeakChange) -> str:
    delta = peak.after - peak.before
    if not delta or peak.category is None:
        return ""
    amount = f"peak {_signed(format_bytes(abs(delta)), delta)}"
    if len(peak.parts) < 2:
        return f"{amount}: {_cause(peak, peak.category, is_more=delta > 0)}"
    causes = [
        f"{_cause(peak, category, is_more=num_bytes > 0)} ({_signed(format_bytes(abs(num_bytes)), num_bytes)})"
        for category, num_bytes in peak.parts
    ]
    return f"{amount}: {', '.join(causes)}"


def _cause(peak: PeakChange, category: Category, *, is_more: bool) -> str:
    """Return how a class of bytes causes the difference: ``"blocks.2 unsharded through backward"``."""
    who = _names(peak.units) if category is peak.category else ""
    if category in peak.left_over and category is not Category.OPTIMIZER_STATE:
        return f"{category.words} {'' if is_more else 'no longer '}left over from an earlier step"
    if category is Category.UNSHARDED_PARAMS:
        through = "backward" if Kind.BACKWARD in {phase.info.part for phase in peak.phases} else "forward"
        return f"{who or 'units'} {'' if is_more else 'no longer '}unsharded through {through}"
    return f"{'more' if is_more else 'less'} {category.words}{f' of {who}' if who else ''}"


def _collective_words(changes: Sequence[CollectiveChange]) -> str:
    """Return the change of the kind of collective that differs most: ``"3 fewer all-gathers a step (blocks.0-2)"``."""
    differ = [change for change in changes if change.differs]
    if not differ:
        return ""
    kinds = {change.kind: [c for c in differ if c.kind == change.kind] for change in differ}
    kind, most = max(kinds.items(), key=lambda item: len(item[1]))
    calls = [sum(change.calls[side] for change in most) for side in (0, 1)]
    who = _names([change.unit for change in most])
    who = f" of {who}" if "(" in who else f" ({who})" if who else ""
    more = calls[1] - calls[0]
    if more:
        noun = kind.words + ("" if abs(more) == 1 else "s")
        return f"{abs(more):.3g} {'more' if more > 0 else 'fewer'} {noun} a step{who}"
    payload = [sum(change.num_bytes[side] for change in most) for side in (0, 1)]
    return f"{kind.words} payload {format_bytes(payload[0])} -> {format_bytes(payload[1])} a step"


def _time_words(found: Differences) -> str:
    before, after = found.step_ns
    if not (before > 0 and after > 0) or abs(after - before) < NOTICED * before or found.is_chance:
        return ""
    change = _signed(format_share(abs(after / before - 1)), after - before)
    if not 0.1 < after / before < 10:
        change = f"{format_duration(before)} -> {format_duration(after)}"
    words = f"step time {change}"
    return f"{words}: {_cost_words(found.slower[0])}" if found.slower else words


def _value_words(found: Differences) -> str:
    """Return from which step on a logged number differs; empty if only its rounding does, or the steps are others."""
    value = found.first_value
    if value is None or value.steps[0] != value.steps[1] or math.isclose(*value.values, rel_tol=_NOTICED_VALUE):
        return ""
    before, after = (format_loss(each) for each in value.values)
    return f"{theme.shorten(value.name)} differs from {step_name(value.steps[0])} on ({before} -> {after})"


def _cost_words(change: TimeChange) -> str:
    of = f" of {theme.shorten(change.unit)}" if change.unit else ""
    what = "" if change.kind in WORK else "exposed "
    amount = _signed(format_duration(abs(change.delta_ns)), change.delta_ns)
    return f"{what}{change.kind.words}{of} {amount}"


def _event_words(found: Differences) -> str:
    """Return how the events differ, for traces with the same peak and collectives."""
    aligned = found.aligned
    alone = [int((side < 0).sum()) - aligned.num_moved for side in (aligned.in_b, aligned.in_a)]
    places = np.flatnonzero((aligned.in_a < 0) | (aligned.in_b < 0))
    place = int(places[0]) if len(places) else aligned.first_difference
    parts = [f"{plural(count, 'event')} {word}" for count, word in zip(alone, ("fewer", "more"), strict=True) if count]
    if aligned.num_moved:
        parts.append(f"{plural(aligned.num_moved, 'event')} in a different order")
    return f"{' and '.join(parts) or 'the same events with different byte counts'}, first at {_event(aligned, place)}"


def _event(aligned: Alignment, place: int) -> str:
    """Return the event at a place: ``"the start of all-gather of blocks.1, step 0"``; ``"the start of step 3 (8)"``."""
    side, number = (aligned.b, aligned.in_b) if aligned.in_a[place] < 0 else (aligned.a, aligned.in_a)
    event = int(number[place])
    row, unit = side.rows[side.place[event]], int(side.unit[event])
    edge = {Edge.INSTANT: "", Edge.BEGIN: "the start of ", Edge.END: "the end of "}[Edge(row["edge"])]
    of = f" {Kind(row['kind']).info.of} {theme.shorten(aligned.names[unit])}" if unit >= 0 else ""
    step = step_name(int(row["step"]))
    if row["step"] >= 0:
        step = " ".join(["step", *_step_numbers(aligned, place)])
    return f"{edge}{step}" if row["kind"] == Kind.STEP else f"{edge}{Kind(row['kind']).words}{of}, {step}"


def _first_words(aligned: Alignment) -> str:
    """Return the first difference, which may be just the bytes in use at the same event."""
    place = aligned.first_difference
    if place < 0:
        return ""
    is_same_event = aligned.in_a[place] >= 0 and aligned.in_b[place] >= 0
    return f"first difference: {'memory at ' if is_same_event else ''}{_event(aligned, place)}"


def _names(names: Sequence[str]) -> str:
    known = list(dict.fromkeys(name for name in names if name))
    if len({pattern(name) for name in known}) == 1:
        return theme.shorten(join_names(known))
    rest = f" and {len(known) - 2} more" if len(known) > 2 else ""
    return (" and " if not rest else ", ").join(theme.shorten(name) for name in known[:2]) + rest


def _signed(amount: str, delta: float) -> str:
    return f"{'+' if delta >= 0 else '-'}{amount}"


def _subtitle(found: Differences, names: tuple[str, str], clock: str, laid_out: tuple[Totals, Totals]) -> str:
    times = [f"{format_duration(ns)}" for ns in found.step_ns if not math.isnan(ns)]
    details = ", ".join(filter(None, ["within step-to-step variation" if found.is_chance else "", clock]))
    sentences = [
        f"{names[0]} -> {names[1]}",
        "" if found.is_same_engine else f"run by {found.engines[0]} -> by {found.engines[1]}",
        _steps_words(found.num_steps),
        _first_words(found.aligned) if found.is_same_engine else "",
        f"showing {label([found.rank])} of {label(found.ranks)}" if len(found.ranks) > 1 else label([found.rank]),
        *_layout_words(*laid_out),
        f"peak {format_bytes(found.peak.before)} -> {format_bytes(found.peak.after)}{_peak_step(found)}",
        f"a step takes {' -> '.join(times)}{f' ({details})' if details else ''}" if len(times) == 2 else "",
        "" if found.is_same_engine else ", ".join(map(_cost_words, found.slower[:_MAX_COSTS])),
        f"{plural(len(found.collectives) - MAX_ROWS, 'more row')} not drawn"
        if len(found.collectives) > MAX_ROWS
        else "",
    ]
    return theme.joined(sentences)


def _steps_words(num_steps: tuple[int, int]) -> str:
    """Return how many steps are compared: ``"only the first step of each compared (of 3 and 1)"``."""
    fewer, more = sorted(num_steps)
    if not fewer:
        return "before the first step"
    if fewer == more:
        return f"{plural(fewer, 'step')} of each compared"
    first = "step" if fewer == 1 else f"{fewer} steps"
    return f"only the first {first} of each compared (of {num_steps[0]} and {num_steps[1]})"


def _peak_step(found: Differences) -> str:
    """Return the step of the higher peak as text, if there are several steps."""
    step = found.peak.step
    return f", the higher in {step_name(step)}" if min(found.num_steps) > 1 and step >= 0 else ""


def _layout_words(before: Totals, after: Totals) -> list[str]:
    """Return what changed in the layout of parameters.

    Example: ``["53 parameters stored separately -> in 5 flat parameters", "padding 96 B -> 48 B"]``.
    """
    parts = []
    if before.num_flat != after.num_flat:
        ways = [
            f"in {plural(t.num_flat, 'flat parameter')}" if t.num_flat else "stored separately" for t in (before, after)
        ]
        parts.append(f"{plural(after.num_params, 'parameter')} {ways[0]} -> {ways[1]}")
    if before.bytes_wasted != after.bytes_wasted:
        amounts = [format_bytes(t.bytes_wasted) for t in (before, after)]
        parts.append(f"padding {amounts[0]} -> {amounts[1]}")
    return parts


# -- the picture


def _add_curves(fig: go.Figure, found: Differences, names: tuple[str, str]) -> None:
    aligned, curves = found.aligned, found.aligned.curves()
    num_bytes, unit = byte_unit(max(int(curve.max(initial=0)) for curve in curves))
    for curve, name, colour, dash in zip(curves, names, _COLOURS, ("solid", "dot"), strict=True):
        shown = _highest_of_bins(curve)
        fig.add_scatter(
            x=shown,
            y=curve[shown] / num_bytes,
            name=theme.escape(name),
            mode="lines",
            line={"shape": "hv", "color": colour, "width": 2, "dash": dash},
            hovertemplate=f"%{{y:.4g}} {unit}",
        )
    ticks = _ticks(aligned)
    fig.update_xaxes(
        title_text="events in order (same position = same event)",
        range=[0, max(len(aligned.in_a) - 1, 1)],
        tickmode="array",
        tickvals=list(ticks),
        ticktext=list(ticks.values()),
        tickangle=0,
        showgrid=False,
    )
    fig.update_yaxes(title_text=f"memory in use [{unit}]", rangemode="tozero")
    if aligned.first_difference >= 0 and found.is_same_engine:
        _mark(fig, aligned)


def _highest_of_bins(curve: Ints) -> Ints:
    """Places of all points, or of the first and highest point of each bin of a long curve."""
    size = -(-len(curve) // (MAX_POINTS // 2))
    if size <= 1:
        return np.arange(len(curve))
    starts = np.arange(0, len(curve), size)
    tops = [start + int(np.argmax(curve[start : start + size])) for start in starts.tolist()]
    return np.unique(np.concatenate([starts, tops, [len(curve) - 1]]))


def _ticks(aligned: Alignment) -> dict[int, str]:
    """Labels by place: where steps begin and, with few steps, on another line, where forward and backward begin."""
    found: dict[int, str] = {}
    steps = [place for place, _, _ in _begins(aligned, (Kind.STEP,))]
    for place in steps[:: -(-max(len(steps), 1) // _MAX_TICKS)]:
        found[place] = f"<br>step {' '.join(_step_numbers(aligned, place))}"
    if len(steps) <= _MAX_DETAILED:
        seen: set[tuple[int, Kind]] = set()
        apart, free = _TICK_WIDTH * len(aligned.in_a), 0.0
        for place, kind, step in _begins(aligned, (Kind.FORWARD, Kind.BACKWARD)):
            if (step, kind) not in seen and place >= free:
                found.setdefault(place, kind.words)
                free = place + apart
            seen.add((step, kind))
    return found


def _step_numbers(aligned: Alignment, place: int) -> list[str]:
    """Return ``["3"]``, or ``["3", "(8)"]`` if the sides number the step differently."""
    sides = ((aligned.a, int(aligned.in_a[place])), (aligned.b, int(aligned.in_b[place])))
    numbers = [side.rows["step"][side.place[event]] for side, event in sides if event >= 0]
    first, *other = dict.fromkeys(map(str, numbers))
    return [first, *(f"({number})" for number in other)]


def _begins(aligned: Alignment, kinds: Sequence[Kind]) -> list[tuple[int, Kind, int]]:
    """Return place, kind and step of every begin of ``kinds`` on side ``a``."""
    side: ComparedRank = aligned.a
    places = np.flatnonzero(aligned.in_a >= 0)
    rows = side.rows[side.place]
    wanted = np.isin(rows["kind"], kinds) & (rows["edge"] == Edge.BEGIN)
    kind, step = rows["kind"][wanted].tolist(), side.step[wanted].tolist()
    return [(p, Kind(k), s) for p, k, s in zip(places[wanted].tolist(), kind, step, strict=True)]


def _mark(fig: go.Figure, aligned: Alignment) -> None:
    place = aligned.first_difference
    fig.add_vline(x=place, line={"width": 1, "dash": "dash", "color": theme.WRONG})
    fig.add_annotation(
        x=place,
        y=1,
        yref="y domain",
        yanchor="bottom",
        xanchor="left" if place < len(aligned.in_a) / 2 else "right",
        text="first difference",
        hovertext=theme.escape(_event(aligned, place)),
        font={"color": theme.WRONG},
        showarrow=False,
    )


Marks = tuple[tuple[go.layout.Annotation, ...], tuple[go.layout.Shape, ...]]


@dataclass(frozen=True, kw_only=True)
class CompareTable:
    """Text below the plot.

    Attributes:
        lines: cells by row, HTML, of one or more lines.
        widths: relative widths of the columns.
        row_height: pixels of a row.
        left: pixels by which the table begins left of the plot.
    """

    lines: tuple[tuple[str, ...], ...]
    widths: tuple[float, ...] = (1.0,)
    row_height: int = _ROW_HEIGHT
    left: int = 0

    @property
    def height(self) -> int:
        """Pixels of all rows."""
        return self.row_height * len(self.lines)


def _table(rows: Sequence[CollectiveChange]) -> CompareTable:
    """Return the collectives of each side per step: a row for each unit and kind, a column for each number."""
    heading = [f"<b>{name}<br>a step</b>" if name == "calls" else f"<b>{name}</b>" for name in _COLUMNS]
    cells = [tuple(_cells(row, "<br>-> ", 24)) for row in rows]
    return CompareTable(lines=(tuple(heading), *cells) if rows else (), widths=_WIDTHS)


def _cells(row: CollectiveChange, between: str, letters: int) -> list[str]:
    """Return a row's cells, HTML, in the order of ``_COLUMNS``."""
    return [
        theme.escape(theme.shorten(row.unit, letters)) or "-",
        row.kind.words,
        _pair(between, *(f"{n:.3g}" for n in row.calls)),
        _pair(between, *(format_bytes(n) for n in row.num_bytes)),
        _pair(between, *(format_duration(n) for n in row.exposed_ns)),
    ]


def _narrow_table(rows: Sequence[CollectiveChange], width: int, left: int) -> CompareTable:
    """Return the table for a page ``width`` pixels wide, with a row's numbers as lines under its name."""
    letters = int((width - 3 * SIDE) / LETTER)
    found = []
    for row in rows:
        name, kind, calls, payload, exposed = _cells(row, " -> ", letters - _KIND_LETTERS)
        numbers = [f"calls a step {calls}", f"payload {payload}", f"exposed {exposed}"]
        found.append((f"<b>{name}</b> {kind}<br>{'<br>'.join(numbers)}",))
    return CompareTable(lines=tuple(found), row_height=_NARROW_ROW, left=left)


def _drawn(table: CompareTable, gap: int) -> int:
    """Return the height of plot and table in pixels, with a gap of ``gap`` pixels."""
    return _PLOT_HEIGHT + (table.height + gap if table.lines else 0)


def _with_table(fig: go.Figure, table: CompareTable, marks: Marks, gap: int) -> dict[str, Any]:
    """Return the layout fields that put a table below the plot.

    Args:
        fig: the curves.
        table: the table.
        marks: annotations and shapes of the curves.
        gap: pixels between plot and table.
    """
    annotations, shapes = ([each.to_plotly_json() for each in some] for some in marks)
    lefts = [0.0, *accumulate(table.widths)]
    place = {"xref": "paper", "yref": "paper", "y": 0, "xanchor": "left", "yanchor": "middle", "showarrow": False}
    for number, cells in enumerate(table.lines):
        high = table.height - table.row_height * number
        for x, text in zip(lefts, cells, strict=False):
            at = {"x": x / lefts[-1], "xshift": _CELL_LEFT - table.left, "yshift": high - table.row_height // 2}
            annotations.append({**place, **at, "text": text, "align": "left"})
        box = {"x0": 0, "x1": 1, "y0": high - table.row_height, "y1": high, "xref": "paper", "yref": "paper"}
        fill = theme.FAINT if len(cells) > 1 and not number else theme.CLEAR
        shapes.append({**box, "ysizemode": "pixel", "yanchor": 0, "fillcolor": fill, "line": _BORDER, "layer": "below"})
    below = 1 - _PLOT_HEIGHT / _drawn(table, gap)
    return {
        "annotations": annotations,
        "shapes": shapes,
        "yaxis": fig.layout.yaxis.to_plotly_json() | {"domain": [below, 1]},
        "legend": fig.layout.legend.to_plotly_json() | {"y": 1 + _LINE * (1 - below) / _PLOT_HEIGHT},
    }


def _on_page(fig: go.Figure, rows: Sequence[CollectiveChange], marks: Marks, width: int) -> dict[str, Any]:
    """Return the layout changes for a page ``width`` pixels wide: narrow pages have fewer ticks and no columns."""
    if width >= theme.NARROWEST:
        return {}
    left, right = sides(fig)
    plot = width - left - right
    axis = fig.layout.xaxis.to_plotly_json()
    title = in_lines(axis["title"]["text"], plot, _AXIS_LETTER)
    axis |= {"title": {"text": "<br>".join(title)}} | apart(axis["tickvals"], axis["ticktext"], plot / axis["range"][1])
    table, gap = _narrow_table(rows, width, 0), _GAP + _LINE * (len(title) - 1)
    below = 0 if rows else _LINE * (len(title) - 1)
    return {**_with_table(fig, table, marks, gap), "xaxis": axis, "drawn": _drawn(table, gap), "below": below}


def _pair(between: str, before: str, after: str) -> str:
    return before if before == after else f"{before}{between}{after}"
