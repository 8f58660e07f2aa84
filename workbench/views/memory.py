"""Bytes of each class on a rank over time, and what the rank does at the peak.

The bytes are those that the engine owns, and what autograd keeps for backward: exact, in the order in which the rank's
program allocated them. Bytes kept for reuse are hatched above the line of the total in use. There is one panel per
group of ranks with similar bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from workbench.base.text_formats import byte_unit, format_bytes, format_share, plural
from workbench.errors import UsageError
from workbench.events import Category, Edge, Kind, UnitState
from workbench.replay import activations
from workbench.replay import memory as live
from workbench.replay.event_marks import EventMark
from workbench.replay.grouping import label
from workbench.replay.memory import MemorySeries, MemoryState, Peak, describe_peak, moment
from workbench.replay.paused_time import Cuts
from workbench.replay.shards import shards, totals
from workbench.replay.spans import Ints, extent_ns, last_ns
from workbench.replay.units import engine_words, unit_name
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header, KeyFrame
from workbench.trace.step_names import step_name
from workbench.views import theme
from workbench.views.mark_buttons import NO_MARKS, MarkPlace, Marks, add_marks
from workbench.views.paused_time import add_holds, hold_words
from workbench.views.phases import STRIP_HEIGHT, add_phases, phases_within
from workbench.views.process import HEIGHT, add_process, process_words
from workbench.views.rank_labels import MANY, several, who
from workbench.views.responsive import SIDE, in_lines, legend_entries, legend_width, on_pages, sides
from workbench.views.span_shapes import TimeAxis, time_axis
from workbench.views.window import Window, one_rank, window

MAX_PANELS = 4
MAX_POINTS = 9_000
"""Points of all lines together; with more moments, each bin of time keeps its lowest and highest."""

ALIKE = 0.02
"""Ranks share a panel if no class differs by more than this fraction of the peak."""

_TIME_AXIS = 48  # pixels below the plot
_LINE_HEIGHT = 15  # pixels, of the text over a panel
_PANEL_HEIGHT = 330  # pixels
_HEADROOM = 1.35  # of the axis over the highest peak: room for its label
_FAR = 2.5  # an unsharded model beyond this many times the highest peak is not drawn: it would flatten the areas
_MAX_MARKED_STEPS = 12
_PART_HATCHES = ("", "\\", "x", "-", "|", ".")  # of the parts of the activations, the largest first
_MAX_KEPT = 3  # listed units that are full from before


@dataclass(frozen=True, kw_only=True)
class MemoryPanel:
    """The content of one panel.

    Attributes:
        ranks: the ranks it represents.
        shown: the drawn rank, the one with the highest peak; its rows in the window.
        peak: its peak.
        by: how its activations are split; None: they are not.
    """

    ranks: tuple[int, ...]
    shown: RankTrace
    peak: Peak
    by: str | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryAxis:
    """Unit of the memory axis (its size in bytes and its name), and the time axis."""

    num_bytes: int
    byte_unit: str
    time: TimeAxis


def memory(
    trace: Trace,
    *,
    step: int | None = None,
    steps: int = 1,
    rank: int | None = None,
    process: bool = False,
    by: str | None = None,
    marks: Marks = NO_MARKS,
) -> go.Figure:
    """Draw bytes by class over time, and name the peak.

    Args:
        trace: what happened.
        step: the last step to show; None: the newest.
        steps: how many steps, up to that one.
        rank: show this rank alone; None: one rank of each group of alike ones.
        process: show the memory of the whole process as well, where it was sampled.
        by: split the activations: by ``module`` that made them, or by ``op``.
        marks: events to mark, by the sentence that names them.

    Raises:
        UsageError: the trace has nothing of ``step``, or no such rank, or activations cannot be split so.
    """
    if by not in (None, *activations.GROUPINGS):
        raise UsageError(f"activations are split by {' or '.join(activations.GROUPINGS)}, not by {by!r}")
    shown = window(trace, step, steps)
    only = None if rank is None else one_rank(trace, rank).rank
    parts, cuts = shown.shown(trace)
    groups = _groups(trace, shown, [part for part in parts.ranks if only in (None, part.rank)])
    panels = [replace(_panel(trace, shown, group), by=by) for group in groups[:MAX_PANELS]]
    if not any(panel.peak.num_bytes for panel in panels):
        return theme.empty("No memory is recorded yet: %fsdp shard MODEL splits a model over the ranks.")
    unsharded = _unsharded(trace, shown, groups)
    is_sampled = process and any((panel.shown.rows["kind"] == Kind.RESIDENT).any() for panel in panels)
    header = _with_short_names(trace.header)
    in_host_order = "in host order and host time: the host allocates and frees the memory" if header.is_enqueued else ""
    more = [
        in_host_order,
        hold_words(cuts),
        process_words(
            header, [panel.shown for panel in panels], [each for each in trace.ranks if only in (None, each.rank)]
        )
        if process
        else "",
    ]
    fig = theme.figure(
        _title(header, shown, panels),
        _subtitle(header, panels, groups, unsharded, more),
        height=130 + (_PANEL_HEIGHT + (HEIGHT if is_sampled else 0)) * len(panels),
        hovermode="x unified",
        legend={"traceorder": "reversed"},
    )
    heights = [_PANEL_HEIGHT, HEIGHT] * len(panels) if is_sampled else [_PANEL_HEIGHT] * len(panels)
    spacing = (0.13 if is_sampled else 0.2) / len(panels)
    make_subplots(len(heights), 1, figure=fig, shared_xaxes=True, row_heights=heights, vertical_spacing=spacing)
    axis = time_axis(extent_ns(parts))
    _draw(fig, header, panels, sum(unsharded.values()), cuts, axis, is_sampled=is_sampled)
    add_marks(fig, marks, axis, lambda mark: _mark_place(mark, panels), above=STRIP_HEIGHT)
    legend = theme.LEGEND_LINE * (len(legend_entries(fig)) + 1)
    fig.update_layout(height=max(fig.layout.height, fig.layout.margin.t + legend + _TIME_AXIS))
    return on_pages(fig, lambda width: _on_page(fig, width))


def _mark_place(mark: EventMark, panels: Sequence[MemoryPanel]) -> MarkPlace | None:
    """Return the first panel, if it shows a mark's rank."""
    shown = panels[0].shown
    return MarkPlace(rows=shown.rows, y=(0, 1), yref="y domain") if shown.rank == mark.rank else None


# -- which ranks


def _groups(trace: Trace, shown: Window, parts: Sequence[RankTrace]) -> list[list[tuple[RankTrace, MemoryState]]]:
    """Return the ranks in groups of similar ones, each with its state after its rows."""
    groups: list[list[tuple[RankTrace, MemoryState]]] = []
    founders: list[Ints] = []
    for part in parts:
        whole = trace.rank(part.rank)
        before = whole.bytes_before(shown.places(whole)[0])
        state = live.advance(live.start(KeyFrame(seq=part.start.seq, bytes_by_category=before)), part.rows)
        marks = np.array([*before, *state.peak_bytes_by_category, *state.bytes_by_category])
        near = (i for i, f in enumerate(founders) if np.abs(marks - f).max() <= ALIKE * state.peak_bytes)
        place = next(near, len(groups))
        if place == len(groups):
            groups.append([])
            founders.append(marks)
        groups[place].append((part, state))
    return sorted(groups, key=lambda group: -len(group))


def _panel(trace: Trace, shown: Window, group: list[tuple[RankTrace, MemoryState]]) -> MemoryPanel:
    highest, _ = max(group, key=lambda entry: entry[1].peak_bytes)
    whole = trace.rank(highest.rank)
    highest = replace(highest, start=whole.state_before(shown.places(whole)[0]))
    return MemoryPanel(ranks=tuple(part.rank for part, _ in group), shown=highest, peak=live.peak(highest))


def _unsharded(
    trace: Trace, shown: Window, groups: Sequence[Sequence[tuple[RankTrace, MemoryState]]]
) -> dict[str, int]:
    """Return the bytes that training without sharding would keep on every rank, by name.

    Empty if no parameter is split: the whole parameters then do not say whether the optimizer's state is split, as in
    ZeRO-1. Otherwise the state of sharded parameters is estimated as the mean over the ranks times the number of ranks
    that share a copy. That of others, such as an unsharded model beside the sharded one, counts once.
    """
    split = shards(trace.header)
    if all(part.num_shards == 1 and part.bytes_unsharded == part.bytes_global for part in split):
        return {}
    found = [entry for group in groups for entry in group]
    state = sum(state.bytes_by_category[Category.OPTIMIZER_STATE] for _, state in found) / len(found)
    wholes = [trace.rank(part.rank) for part, _ in found]
    kept = sum(live.not_split(trace.header, each.rows[: shown.places(each)[1]]) for each in wholes) / len(found)
    num_shards = max((part.num_shards for part in split), default=0)
    sizes = {
        "parameters": totals(split).bytes_unsharded,
        "gradients": totals(part for part in split if part.param.trainable).bytes_unsharded,
        "optimizer state": round((state - kept) * num_shards + kept),
    }
    return {name: num_bytes for name, num_bytes in sizes.items() if num_bytes}


# -- words


def _title(header: Header, shown: Window, panels: Sequence[MemoryPanel]) -> str:
    top = max(panels, key=lambda panel: panel.peak.num_bytes)
    where = f" of {label([top.shown.rank])}" if len(panels) > 1 else ""
    amount = format_bytes(top.peak.num_bytes)
    return f"{shown}: memory{where} peaks at {amount} ({moment(header, top.peak)})"


def _with_short_names(header: Header) -> Header:
    return replace(header, units=tuple(replace(unit, name=theme.shorten(unit.name)) for unit in header.units))


def _subtitle(
    header: Header,
    panels: Sequence[MemoryPanel],
    groups: Sequence[Sequence[tuple[RankTrace, MemoryState]]],
    unsharded: dict[str, int],
    more: Sequence[str],
) -> str:
    measured = any(_has(panel.shown, Category.ACTIVATIONS) for panel in panels)
    reserved = max(live.most_reserved(panel.shown) for panel in panels)
    top = max(panels, key=lambda panel: panel.peak.num_bytes)
    sentences = [
        _who(header, panels[0], panels) if len(panels) == 1 else "",
        f"the peak: {describe_peak(header, top.peak)}",
        _unsharded_before(header, top.shown),
        f"exact bytes that the engine owns{' or keeps for backward' if measured else ''}, in program order",
        engine_words(header),
        _kept_for_backward(header, top) if measured else "activations are not measured",
        _left_out(header, groups[len(panels) :]),
        f"pools keep up to {format_bytes(reserved)} more for reuse" if reserved else "",
        _unsharded_words(unsharded, " besides activations" if measured else ""),
        *more,
    ]
    return theme.begun(theme.joined(sentences))


def _kept_for_backward(header: Header, panel: MemoryPanel) -> str:
    """Return whose activations there are at the peak, as text; empty if there are none."""
    total = panel.peak.bytes_by_category[Category.ACTIVATIONS]
    found = activations.grouped(activations.kept_at(header, panel.shown, panel.peak.seq), "module", total)
    parts = [f"{theme.shorten(name)} {format_bytes(num_bytes)}" for name, num_bytes in found.items()][:_MAX_KEPT]
    more = ", ..." if len(found) > _MAX_KEPT else ""
    return f"activations at the peak: {', '.join(parts)}{more}" if total else ""


def _unsharded_words(unsharded: dict[str, int], besides: str) -> str:
    """Return ``"without sharding, every rank would keep 8.00 MiB: parameters 2.00 MiB, ..."``."""
    parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in unsharded.items())
    whole = format_bytes(sum(unsharded.values()))
    return f"without sharding, every rank would keep {whole}{besides}: {parts}" if unsharded else ""


def _who(header: Header, panel: MemoryPanel, panels: Sequence[MemoryPanel]) -> str:
    if len(panel.ranks) == 1:
        return who(header, panel.ranks)
    named = who(header, panel.ranks, [rank for other in panels for rank in other.ranks])
    return f"{named} are alike within {format_share(ALIKE)}; showing {label([panel.shown.rank])}"


def _left_out(header: Header, groups: Sequence[Sequence[tuple[RankTrace, MemoryState]]]) -> str:
    if not groups:
        return ""
    ranks = [[part.rank for part, _ in group] for group in groups]
    named = f" ({several(header, ranks)}): draw one with --rank {ranks[0][0]}" if sum(map(len, ranks)) > MANY else ""
    return f"{plural(len(groups), 'more group')} of ranks not drawn{named}"


def _unsharded_before(header: Header, shown: RankTrace) -> str:
    """Return the units that are unsharded from before, such as the root after an evaluation, as text."""
    full = [unit for unit, state in shown.start.unit_states.items() if state == UnitState.UNSHARDED]
    names = [unit_name(header, unit) for unit in sorted(full)[:_MAX_KEPT]]
    more = ", ..." if len(full) > _MAX_KEPT else ""
    return f"already unsharded at the start: {', '.join(names)}{more}" if full else ""


def _has(shown: RankTrace, category: Category) -> bool:
    return bool(shown.start.bytes_by_category[category] or (shown.rows["category"] == category).any())


# -- the picture


def _draw(
    fig: go.Figure,
    header: Header,
    panels: Sequence[MemoryPanel],
    unsharded: int,
    cuts: Cuts,
    time: TimeAxis,
    *,
    is_sampled: bool,
) -> None:
    top = max(panel.peak.num_bytes for panel in panels)
    is_near = unsharded <= _FAR * top
    held = max(panel.peak.num_bytes + live.most_reserved(panel.shown) for panel in panels)
    high = max(top * _HEADROOM, held * 1.05, unsharded * 1.15 if is_near else 0)
    num_bytes, unit = byte_unit(high)
    scale = MemoryAxis(num_bytes=num_bytes, byte_unit=unit, time=time)
    classes = [c for c in Category if any(_has(panel.shown, c) for panel in panels)]
    max_moments = MAX_POINTS // (len(panels) * (len(classes) + 1))
    rows_each = 2 if is_sampled else 1
    for row, panel in zip(range(1, rows_each * len(panels) + 1, rows_each), panels, strict=True):
        series = live.series(panel.shown, max_moments)
        areas = [area for each in classes for area in _areas(header, panel, series, each)]
        _add_areas(fig, panel, series, areas, scale, row)
        fig.update_yaxes(title_text=f"memory [{scale.byte_unit}]", range=[0, high / scale.num_bytes], row=row, col=1)
        _add_peak(fig, header, panel, scale, row)
        add_phases(fig, panel.shown.rows, time, row=row, col=1)
        _add_steps(fig, panel, scale, row)
        span = 0.0, high / scale.num_bytes
        add_holds(fig, cuts, time, span, legendgroup="held", showlegend=row == 1, row=row, col=1)
        if unsharded and is_near:
            has_activations = Category.ACTIVATIONS in classes
            _add_unsharded(fig, unsharded, scale, row, has_activations=has_activations)
        if len(panels) > 1:
            annotation = {"text": theme.escape(_who(header, panel, panels)), "yshift": STRIP_HEIGHT, "showarrow": False}
            fig.add_annotation(**_place(row, 0, 1), yanchor="bottom", **annotation)
        if rows_each > 1:
            add_process(fig, header, panel.shown, time, row=row + 1)
    fig.update_xaxes(range=time.layout["range"])
    fig.update_xaxes(time.layout, row=rows_each * len(panels), col=1)
    fig.update_layout(margin_t=fig.layout.margin.t + STRIP_HEIGHT + (20 if len(panels) > 1 else 0))


def _on_page(fig: go.Figure, width: int) -> dict[str, object]:
    """Return the layout changes for a page ``width`` pixels wide: on narrow pages, text over panels has more lines."""
    if width >= theme.NARROWEST:
        return {"shapes": phases_within(fig, width - sum(sides(fig)) - legend_width(fig))}
    room, most = width - sides(fig)[0] - SIDE, 1
    found = [each.to_plotly_json() for each in fig.layout.annotations]
    for each in found:
        if each.get("showarrow") is False:
            lines = in_lines(theme.plain(each["text"]), room)
            each |= {"text": "<br>".join(map(theme.escape, lines)), "align": "left"}
            most = max(most, len(lines))
    shapes = phases_within(fig, room)
    return {"annotations": found, "shapes": shapes, "margin": {"r": SIDE}, "above": _LINE_HEIGHT * (most - 1)}


def _moments(panel: MemoryPanel, t_ns: Ints, scale: MemoryAxis) -> NDArray[np.float64]:
    """Times on the axis, ascending, followed by the panel's end."""
    return scale.time(np.maximum.accumulate(np.append(t_ns, last_ns(panel.shown.rows))))


@dataclass(frozen=True, kw_only=True)
class Area:
    """An area of the picture: a class of bytes, or a part of the activations.

    Attributes:
        name: in the legend.
        category: its class.
        num_bytes: live bytes at each moment, ``[N]``.
        hatch: pattern that tells it from the other parts; empty: plain.
    """

    name: str
    category: Category
    num_bytes: Ints
    hatch: str = ""


def _areas(header: Header, panel: MemoryPanel, series: MemorySeries, category: Category) -> list[Area]:
    """Return the areas of a class: one, or of activations the largest groups at their peak, and the others."""
    total, shown, by = series.num_bytes[:, category], panel.shown, panel.by
    if by is None or category is not Category.ACTIVATIONS:
        return [Area(name=category.words, category=category, num_bytes=total)]
    top = int(np.argmax(total))
    kept = activations.kept_at(header, shown, int(series.seq[top]))
    found = activations.grouped(kept, by, int(total[top]))
    names = [name for name in found if name != activations.UNKNOWN][: len(_PART_HATCHES) - 1]
    parts = activations.series(header, shown, series.seq, names, by)
    return [
        Area(name=f"{category.words}: {theme.shorten(name)}", category=category, num_bytes=parts[:, place], hatch=hatch)
        for place, (name, hatch) in enumerate(zip([*names, "others"], _PART_HATCHES, strict=False))
        if parts[:, place].any()
    ]


def _add_areas(
    fig: go.Figure, panel: MemoryPanel, series: MemorySeries, areas: Sequence[Area], scale: MemoryAxis, row: int
) -> None:
    """Stack the areas in order, the first at the bottom; RESERVED is last, above the line of the total in use."""
    common = {
        "x": _moments(panel, series.t_ns, scale),
        "mode": "lines",
        "showlegend": row == 1,
        "hovertemplate": f"%{{y:.4g}} {scale.byte_unit}",
    }
    for area in areas:
        colour, amount = theme.CATEGORY_COLOURS[area.category], area.num_bytes / scale.num_bytes
        fig.add_scatter(
            **common,
            y=np.append(amount, amount[-1]),
            name=theme.escape(area.name),
            legendgroup=f"{area.category.name} {area.name}",
            stackgroup="live",
            line={"shape": "hv", "width": 0, "color": colour},
            **_fill(area),
            row=row,
            col=1,
        )
    total = series.total / scale.num_bytes
    line = {"shape": "hv", "width": 1, "color": theme.INK}
    fig.add_scatter(
        **common, y=np.append(total, total[-1]), name="total in use", legendgroup="total", line=line, row=row, col=1
    )


def _fill(area: Area) -> dict[str, object]:
    """Return the fill of an area: plain, hatched like padding for unused bytes, or hatched as a part of a class."""
    colour = theme.CATEGORY_COLOURS[area.category]
    if area.category is Category.RESERVED:
        hatch = {"shape": "/", "fgcolor": colour, "bgcolor": theme.CLEAR, "size": 7, "solidity": 0.2}
        return {"fillcolor": theme.CLEAR, "fillpattern": hatch}
    if not area.hatch:
        return {"fillcolor": colour}
    hatch = {"shape": area.hatch, "fgcolor": theme.INK, "bgcolor": colour, "size": 8, "solidity": 0.12}
    return {"fillcolor": colour, "fillpattern": hatch}


def _place(row: int, x: float, y: float) -> dict[str, object]:
    """Return annotation fields for a point of a panel, given as fractions of its width and height."""
    return {"x": x, "y": y, "xref": "x domain", "yref": "y domain", "xanchor": "left", "row": row, "col": 1}


def _add_peak(fig: go.Figure, header: Header, panel: MemoryPanel, scale: MemoryAxis, row: int) -> None:
    """Mark the peak; the hover describes what the rank was doing."""
    x, y = max(scale.time.at(panel.peak.t_ns), 0.0), panel.peak.num_bytes / scale.num_bytes
    left = x > scale.time.at(scale.time.end_ns) / 2
    fig.add_annotation(
        x=x,
        y=y,
        ax=-28 if left else 28,
        ay=-20,
        xanchor="right" if left else "left",
        yanchor="bottom",
        align="right" if left else "left",
        text=f"<b>peak {format_bytes(panel.peak.num_bytes)}</b>",
        hovertext=theme.escape(describe_peak(header, panel.peak)),
        arrowcolor=theme.INK,
        arrowhead=6,
        arrowwidth=1,
        row=row,
        col=1,
    )


def _add_unsharded(fig: go.Figure, unsharded: int, scale: MemoryAxis, row: int, *, has_activations: bool) -> None:
    fig.add_scatter(
        x=scale.time.layout["range"],
        y=[unsharded / scale.num_bytes] * 2,
        mode="lines",
        line={"dash": "dash", "width": 2, "color": theme.INK},
        name="without sharding, besides activations" if has_activations else "without sharding",
        legendgroup="unsharded",
        showlegend=row == 1,
        hovertemplate=f"%{{y:.4g}} {scale.byte_unit}",
        row=row,
        col=1,
    )


def _add_steps(fig: go.Figure, panel: MemoryPanel, scale: MemoryAxis, row: int) -> None:
    """Mark where each step begins, if there are several steps but not many."""
    rows = panel.shown.rows
    begins = rows[(rows["kind"] == Kind.STEP) & (rows["edge"] == Edge.BEGIN)]
    for begin in begins if 1 < len(begins) <= _MAX_MARKED_STEPS else ():
        x = scale.time.at(int(begin["t_ns"]))
        fig.add_vline(x=x, line={"width": 1, "dash": "dot", "color": theme.INK}, row=row, col=1)
        text = {"text": step_name(int(begin["step"])), "font_size": 11, "showarrow": False}
        fig.add_annotation(**_place(row, 0, 1) | {"x": x, "xref": "x"}, yanchor="top", **text)
