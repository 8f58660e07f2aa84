"""A figure on a page that is narrower than figures are made for, as beside JupyterLab's panel, or much wider.

The ``meta`` of a figure's layout says how it is laid out there; ``widgets/static/figures.js`` does as it says, wherever
figures are shown. Its titles have more lines, and its legend lies under the plot in as many lines as it needs. A view
adds with :func:`on_pages` what else is other in it, such as shorter labels, or a table whose columns are lines. So
every figure fits from ``LEAST`` pixels on; on a page that is narrower still it is as wide as that, and the page scrolls
it sideways, with titles that are no wider than the page all the same. On wide pages titles have fewer lines.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.views import theme

LEAST = 300
"""Pixels of the narrowest page into which every figure fits."""

WIDTHS = (1200, 900, theme.NARROWEST, 500, 400, 350, LEAST, 250)
"""Pixels of pages for which figures are laid out apart; a page between two has what is for the narrower one."""

SIDE = 12
"""Pixels at the edge of a narrow page beside what a view places by itself."""

LETTER = 6.8
"""Pixels that a character of a label is wide, in the mean."""

_WIDER = 100_000  # than any page

_SIDE = 24  # pixels beside what is drawn
_NUMBER = "0.0000"  # as wide as what an axis says that names no places
_AXIS_TITLE = 24  # pixels beside the labels
_MARK = 45  # pixels before the words of an entry of a legend
_LEGEND_PADDING = 10  # pixels above and below the entries together
_LEAST_PLOT = 170  # pixels
_TAG = re.compile("<[^>]*>")


def on_pages(fig: go.Figure, layout: Callable[[int], dict[str, Any]]) -> go.Figure:
    """Say what is other in a finished figure on pages of each of ``WIDTHS``; returns ``fig``.

    Args:
        fig: a view's, before :func:`with_narrow`.
        layout: turns the pixels of a page, ``LEAST`` at the fewest, into fields of the layout, whole as they are there,
            and besides ``drawn``, the pixels of the height of all that is drawn, ``above`` and ``below``, how many more
            lie over and under it, and ``margin``, of which ``l`` and ``r`` are pixels. What is left out is as ever.
    """
    return fig.update_layout(meta={"pages": {str(width): layout(max(width, LEAST)) for width in WIDTHS}})


def with_narrow(fig: go.Figure) -> go.Figure:
    """Write into a finished figure how it is laid out on narrow pages; returns ``fig``."""
    own = (fig.layout.meta or {}).get("pages", {})
    least = min(_least(fig), LEAST) if own else _least(fig)
    narrow = [
        {"below": below, "layout": _layout(fig, width, max(width, least), dict(own.get(str(width), {})))}
        for width, below in zip(WIDTHS, (_WIDER, *WIDTHS), strict=False)
    ]
    return fig.update_layout(meta={"least": least, "narrow": narrow})


def _layout(fig: go.Figure, width: int, drawn: int, own: dict[str, Any]) -> dict[str, Any]:
    """Return what is other in the layout on a page that is ``width`` pixels wide, of a figure so wide.

    Args:
        fig: the figure.
        width: of the page, in pixels.
        drawn: width of the figure, in pixels.
        own: what the view says of such a page, as :func:`on_pages` takes it.
    """
    title, subtitle = theme.said(fig)
    if not fig.data:
        return {"annotations": [_wrapped(each, width) for each in fig.layout.annotations]}
    titles, top = theme.heading(title, subtitle, width)
    margin = theme.TEMPLATE.layout.margin.to_plotly_json() | fig.layout.margin.to_plotly_json()
    plot_height = own.pop("drawn", fig.layout.height - margin["t"] - margin["b"])
    found = {"title": titles, "margin": margin, "legend": fig.layout.legend.to_plotly_json()}
    margin["t"] += top - theme.heading(title, subtitle)[1]
    margin |= own.pop("margin", {})
    beside = sum(sides(fig)) if own.get("yaxis", {}).get("automargin", True) else margin["l"] + margin["r"]
    entries = legend_entries(fig).values()
    below = None
    if (
        width < theme.NARROWEST and entries and (fig.layout.legend.y is None or fig.layout.legend.yref == "container")
    ):  # beside the plot, or below
        below = theme.legend_below(len(entries), drawn - beside, _MARK + max(map(_width, entries)))
        margin["b"] = below["margin_b"]
        found["legend"] |= below["legend"] | {"x": 0.01, "xanchor": "left"}
    under = margin["b"] - theme.BELOW_AXIS + _LEGEND_PADDING
    margin["t"] += own.pop("above", 0)
    margin["b"] += own.pop("below", 0)
    height = plot_height + margin["t"] + margin["b"]
    if below is not None:  # right below the axis, also where its entries take fewer lines than they may
        found["legend"] |= {"y": under / height, "yanchor": "top"}
    return {**found, **own, "height": height}


def in_lines(text: str, pixels: float, letter: float = LETTER) -> list[str]:
    """Return plain text in lines that are at most so many pixels long."""
    return textwrap.wrap(text, max(int(pixels / letter), 1), break_on_hyphens=False)


def apart(places: Sequence[float], texts: Sequence[str], pixels: float) -> dict[str, list[Any]]:
    """Return those labels of an axis that do not overlap, from its begin on, as fields of the axis.

    Args:
        places: of the labels on the axis, ascending.
        texts: the labels; such as are in different lines do not overlap.
        pixels: of the axis that are one apart on it.
    """
    free: dict[int, float] = {}
    kept = []
    for place, text in zip(places, texts, strict=True):
        line, half = text.count("<br>"), _width(text) / 2
        if place * pixels - half >= free.get(line, float("-inf")):
            kept.append((place, text))
            free[line] = place * pixels + half + LETTER
    return {"tickvals": [place for place, _ in kept], "ticktext": [text for _, text in kept]}


def _wrapped(annotation: go.layout.Annotation, width: int) -> dict[str, Any]:
    return {**annotation.to_plotly_json(), "text": theme.in_lines(theme.plain(annotation.text), width)}


def legend_entries(fig: go.Figure) -> dict[str, str]:
    """Return what a legend says, by what its entries stand for."""
    named = [trace for trace in fig.data if trace.type != "table" and trace.showlegend is not False]
    named += [shape for shape in fig.layout.shapes if shape.showlegend]
    return {entry.legendgroup or entry.name: entry.name for entry in named}


def _least(fig: go.Figure) -> int:
    """Return how many pixels a figure needs to be wide: all for which it was made, where there is text in the plot."""
    if not fig.data:
        return min(WIDTHS)
    if any(trace.type == "table" or (trace.type == "scatter" and trace.mode == "text") for trace in fig.data):
        return theme.NARROWEST
    plot = max((_room(each) for each in fig.layout.annotations), default=0)
    return min(sum(sides(fig)) + max(plot, _LEAST_PLOT), theme.NARROWEST)


def _room(annotation: go.layout.Annotation) -> int:
    """Return how many pixels a plot is wide at least that has this written in it, or beside any point of it."""
    width = _width(annotation.text)
    return width if annotation.showarrow is False else 2 * (width + abs(annotation.ax or 0))


def sides(fig: go.Figure) -> tuple[int, int]:
    """Return about how many pixels there are left and right of the plot: what is written at its axes."""
    margin = fig.layout.margin
    beside = {"left": margin.l or 0, "right": margin.r or 0}
    for axis in fig.select_yaxes():
        side = axis.side or "left"
        if axis.automargin is not False and axis.visible is not False:
            beside[side] = max(beside[side], _beside(axis))
    return beside["left"] or _SIDE, beside["right"] or _SIDE


def _beside(axis: go.layout.YAxis) -> int:
    """Return how many pixels are taken by the labels of an axis and its title."""
    return max(map(_width, axis.ticktext or (_NUMBER,))) + (_AXIS_TITLE if axis.title.text else 0) + _SIDE


def _width(text: str) -> int:
    """Return about how many pixels a label is wide."""
    return round(LETTER * max(len(html.unescape(_TAG.sub("", line))) for line in text.split("<br>")))
