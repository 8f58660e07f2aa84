"""Training progress: the loss, the step time and other logged values over the steps, one panel each.

A line is the mean over ranks; the band around it reaches from the lowest to the highest rank. Lines are cut where
another model began; the title describes the current model.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from workbench.base.text_formats import format_duration, format_loss, plural, time_unit
from workbench.events import Kind
from workbench.replay.grouping import ranges, runs
from workbench.replay.paused_time import without_holds
from workbench.replay.training import LOSS, Series, Summary, summary
from workbench.trace.columns import Trace
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name
from workbench.views import theme
from workbench.views.rank_labels import MANY, who

MAX_PANELS = 12
MAX_POINTS = 400
"""Points of one line; with more steps, each point is the mean of several."""

_PANEL_HEIGHT = 250  # pixels
_MAX_RUNS = 4  # of steps that are listed


def training(trace: Trace) -> go.Figure:
    """Draw loss, step time and other logged metrics."""
    result = summary(without_holds(trace)[0], with_earlier=True)
    panels = _panels(result)
    if not panels:
        return theme.empty(theme.NO_STEP)
    shown = panels[:MAX_PANELS]
    num_columns = min(len(shown), 2)
    num_rows = -(-len(shown) // num_columns)
    fig = theme.figure(
        _title(result), _subtitle(result, len(panels) - len(shown), trace.header), height=110 + _PANEL_HEIGHT * num_rows
    )
    make_subplots(num_rows, num_columns, figure=fig, vertical_spacing=0.27 / num_rows, horizontal_spacing=0.14)
    for place, (series, axis) in enumerate(shown):
        _add_panel(fig, series, result.cuts, axis, row=place // num_columns + 1, col=place % num_columns + 1)
    return fig


def _panels(result: Summary) -> list[tuple[Series, dict[str, str]]]:
    """Return the series to draw, each with its vertical axis: the loss, the step time, everything else."""
    found = [(s, {"title_text": theme.escape(theme.shorten(name, 28))}) for name, s in result.metrics.items()]
    if len(result.step_times.steps):
        divisor, unit = time_unit(float(np.median(result.step_times.high)))
        times = _scaled(result.step_times, 1 / divisor), {"title_text": f"step time [{unit}]", "rangemode": "tozero"}
        found.insert(LOSS in result.metrics, times)
    return found


def _scaled(series: Series, factor: float) -> Series:
    return replace(series, mean=series.mean * factor, low=series.low * factor, high=series.high * factor)


def _title(result: Summary) -> str:
    steps = plural(result.num_steps, "step")
    losses = result.losses
    loss = f"Loss {_loss(losses[0])} → {_loss(losses[-1])} in {steps}" if len(losses) else f"{steps}, no loss logged"
    return f"{loss}, {format_duration(result.step_ns)} a step (median)" if result.num_steps else loss


def _loss(value: float) -> str:
    return format_loss(value, "#.4g")


def _subtitle(result: Summary, num_left_out: int, header: Header) -> str:
    num_ranks = max(series.num_ranks for series in (*result.metrics.values(), result.step_times))
    slowest = "; the title shows the step time of the slowest rank" if len(result.step_times.steps) else ""
    band = f"Mean over {num_ranks} ranks; the band spans the lowest to the highest rank{slowest}."
    sentences = [band if num_ranks > 1 else ""]
    sentences += [_not_finite(series, header) for series in result.metrics.values()]
    sentences.append(_without_loss(result))
    if result.every > 1:
        sentences.append(f"Before step {result.whole_from:,}, one of {result.every} steps is known.")
    bucket = -(-max(len(s.steps) for s in (*result.metrics.values(), result.step_times)) // MAX_POINTS)
    if bucket > 1:
        sentences.append(f"Each point is the mean of up to {bucket} steps; its band is their range.")
    if result.cuts:
        sentences.append(
            f"Dotted line: a new model begins, or a heal has made it again; the title describes the current one, "
            f"from step {result.cuts[-1]} on."
        )
    if result.behind and num_ranks > MANY:  # with few ranks this lasts only a moment
        last = step_name(int(result.step_times.steps[-1]))
        have = "have" if len(result.behind) > 1 else "has"
        sentences.append(f"{theme.begun(who(header, result.behind))} {have} not finished {last}.")
    clock = theme.host_clock_words(header)
    if len(result.step_times.steps) and clock:
        sentences.append(f"{theme.begun(clock)}.")
    if num_left_out:
        sentences.append(f"{plural(num_left_out, 'more metric')} not drawn.")
    return theme.joined(sentences, " ")


def _not_finite(series: Series, header: Header) -> str:
    bad = series.steps[~np.isfinite(series.mean)].tolist()
    if not bad:
        return ""
    first = series.first_not_finite
    began = f", first on {who(header, first)}" if len(first) < series.num_ranks else ""
    return f"{theme.shorten(series.name)} is NaN or infinite at {_some_steps(bad)}{began}."


def _without_loss(result: Summary) -> str:
    """Return which steps of the current model logged no loss, and how to log one, as text; empty if all have one."""
    lacking = result.steps_without_loss.tolist()
    if not lacking and len(result.losses):
        return ""
    which = f"No loss at {_some_steps(lacking)}. " if len(result.losses) else ""
    return (
        f"{which}To log a loss, return a number from train_step(), or in your own loop call "
        'log_metric("loss", loss.item()).'
    )


def _some_steps(steps: list[int]) -> str:
    """Return ``"step 3"``, ``"steps 3-5"`` or ``"12 steps, first at step 3"``."""
    if len(runs(steps)) > _MAX_RUNS:
        return f"{len(steps)} steps, first at step {steps[0]}"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {ranges(steps)}"


def _add_panel(
    fig: go.Figure, series: Series, cuts: tuple[int, ...], axis: dict[str, str], *, row: int, col: int
) -> None:
    points = _in_parts(series, cuts)
    colour = theme.KIND_COLOURS[Kind.METRIC]
    if np.any(points.high > points.low):
        x, y = _outline(points)
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        fig.add_scatter(x=x, y=y, **edge, fill="toself", fillcolor=theme.faded(colour), row=row, col=col)
    fig.add_scatter(
        x=points.steps,
        y=points.mean,
        mode="lines+markers" if len(points.steps) <= 60 else "lines",
        line={"color": colour, "width": 2},
        marker={"size": 5},
        customdata=np.stack([points.low, points.high], axis=1),
        hovertemplate="step %{x}: %{y:.5g}<br>lowest %{customdata[0]:.5g}, highest %{customdata[1]:.5g}<extra></extra>",
        showlegend=False,
        row=row,
        col=col,
    )
    for step in cuts:
        line = {"color": theme.INK, "width": 1, "dash": "dot"}
        fig.add_vline(step - 0.5, line=line, row=row, col=col)
    few = points.steps[-1] - points.steps[0] <= 10
    fig.update_xaxes(title_text="step", dtick=1 if few else None, row=row, col=col)
    fig.update_yaxes(**axis, row=row, col=col)


def _outline(points: Series) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the outline of the band as x and y, ``[2N + gaps]``: one closed outline per run of finite points."""
    known = np.flatnonzero(np.isfinite(points.low) & np.isfinite(points.high))
    parts = np.split(known, np.flatnonzero(np.diff(known) > 1) + 1)
    gap = np.full(1, np.nan)
    x = [np.concatenate([points.steps[part], points.steps[part[::-1]], gap]) for part in parts]
    y = [np.concatenate([points.high[part], points.low[part[::-1]], gap]) for part in parts]
    return np.concatenate(x)[:-1], np.concatenate(y)[:-1]


def _in_parts(series: Series, cuts: tuple[int, ...]) -> Series:
    """Return the points of a line with a gap, a NaN point, at each of ``cuts``."""
    edges = [0, *np.searchsorted(series.steps, cuts).tolist(), len(series.steps)]
    parts = [_thinned(_part(series, slice(a, b)), len(series.steps)) for a, b in pairwise(edges) if a < b]
    begins = np.cumsum([len(part.steps) for part in parts])[:-1]
    steps = np.concatenate([part.steps for part in parts])
    return replace(
        series,
        steps=np.insert(steps, begins, steps[begins]),
        mean=np.insert(np.concatenate([part.mean for part in parts]), begins, np.nan),
        low=np.insert(np.concatenate([part.low for part in parts]), begins, np.nan),
        high=np.insert(np.concatenate([part.high for part in parts]), begins, np.nan),
    )


def _part(series: Series, place: slice) -> Series:
    return replace(
        series, steps=series.steps[place], mean=series.mean[place], low=series.low[place], high=series.high[place]
    )


def _thinned(series: Series, num_steps: int) -> Series:
    """Return points that each average a run of steps, MAX_POINTS per ``num_steps``; values not finite become gaps."""
    bucket = max(-(-num_steps // MAX_POINTS), 1)
    starts = np.arange(0, len(series.steps), bucket)
    sizes = np.diff(np.append(starts, len(series.steps)))
    return replace(
        series,
        steps=series.steps[starts],
        mean=_finite(np.add.reduceat(series.mean, starts) / sizes),
        low=_finite(np.minimum.reduceat(series.low, starts)),
        high=_finite(np.maximum.reduceat(series.high, starts)),
    )


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(values), values, np.nan)
