"""A figure on a page that is narrower than figures are made for, as beside JupyterLab's panel, or much wider.

The ``meta`` of a figure's layout says how it is laid out there; ``widgets/static/figures.js`` does as it says, wherever
figures are shown. Its titles have more lines, and its legend lies under the plot in as many lines as it needs; what is
drawn keeps its height. What needs more room than there is, such as a table, is drawn as wide as it has to be, and the
page scrolls it sideways, with titles that are no wider than the page all the same. On wide pages titles have fewer
lines, and nothing else is other.
"""

from __future__ import annotations

import html
import re
from typing import Any

import plotly.graph_objects as go

from workbench.views import theme

WIDTHS = (1200, 900, theme.NARROWEST, 500, 400, 320, 250)
"""Pixels of pages for which figures are laid out apart; a page between two has what is for the narrower one."""

_WIDER = 100_000  # than any page

_SIDE = 24  # pixels beside what is drawn
_LETTER, _NARROW_LETTER, _WIDE_LETTER = 7.3, 4.6, 10.5  # pixels that a letter of a label is wide
_NARROW_LETTERS, _WIDE_LETTERS = frozenset(" !'()*,-./:;I[]fijlrt|"), frozenset("%@MWmw")
_NUMBER = "0.0000"  # as wide as what an axis says that names no places
_AXIS_TITLE = 24  # pixels beside the labels
_MARK = 45  # pixels before the words of an entry of a legend
_LEGEND_PADDING = 10  # pixels above and below the entries together
_LEAST_PLOT = 170  # pixels
_TAG = re.compile("<[^>]*>")


def with_narrow(fig: go.Figure) -> go.Figure:
    """Write into a finished figure how it is laid out on narrow pages; returns ``fig``."""
    least = _least(fig)
    narrow = [
        {"below": below, "layout": _layout(fig, width, max(width, least))}
        for width, below in zip(WIDTHS, (_WIDER, *WIDTHS), strict=False)
    ]
    return fig.update_layout(meta={"least": least, "narrow": narrow})


def _layout(fig: go.Figure, width: int, drawn: int) -> dict[str, Any]:
    """Return what is other in the layout on a page that is ``width`` pixels wide, of a figure so wide."""
    title, subtitle = theme.said(fig)
    if not fig.data:
        return {"annotations": [_wrapped(each, width) for each in fig.layout.annotations]}
    titles, top = theme.heading(title, subtitle, width)
    margin = theme.TEMPLATE.layout.margin.to_plotly_json() | fig.layout.margin.to_plotly_json()
    before = margin["t"] + margin["b"]
    found = {"title": titles, "margin": margin, "legend": fig.layout.legend.to_plotly_json()}
    margin["t"] += top - theme.heading(title, subtitle)[1]
    entries = legend_entries(fig).values()
    below = None
    if (
        width < theme.NARROWEST and entries and (fig.layout.legend.y is None or fig.layout.legend.yref == "container")
    ):  # beside the plot, or below
        below = theme.legend_below(len(entries), drawn - sum(_sides(fig)), _MARK + max(map(_width, entries)))
        margin["b"] = below["margin_b"]
        found["legend"] |= below["legend"] | {"x": 0.01, "xanchor": "left"}
    height = fig.layout.height + margin["t"] + margin["b"] - before
    if below is not None:  # right below the axis, also where its entries take fewer lines than they may
        found["legend"] |= {"y": (margin["b"] - theme.BELOW_AXIS + _LEGEND_PADDING) / height, "yanchor": "top"}
    return {**found, "height": height}


def _wrapped(annotation: go.layout.Annotation, width: int) -> dict[str, Any]:
    return {**annotation.to_plotly_json(), "text": theme.in_lines(theme.plain(annotation.text), width)}


def legend_entries(fig: go.Figure) -> dict[str, str]:
    """Return what a legend says, by what its entries stand for."""
    named = [trace for trace in fig.data if trace.type != "table" and trace.showlegend is not False]
    named += [shape for shape in fig.layout.shapes if shape.showlegend]
    return {entry.legendgroup or entry.name: entry.name for entry in named}


def _least(fig: go.Figure) -> int:
    """Return how many pixels a figure needs to be wide: all for which it was made, where there is a table."""
    if not fig.data:
        return min(WIDTHS)
    if any(trace.type == "table" for trace in fig.data):
        return theme.NARROWEST
    written = [trace.text for trace in fig.data if trace.type == "scatter" and trace.mode == "text"]
    plot = [_LEAST_PLOT, *map(_room, fig.layout.annotations), *(_width(line) for lines in written for line in lines)]
    return min(sum(_sides(fig)) + max(plot), theme.NARROWEST)


def _room(annotation: go.layout.Annotation) -> int:
    """Return how many pixels a plot is wide at least that has this written in it, or beside any point of it."""
    width = _width(annotation.text)
    return width if annotation.showarrow is False else 2 * (width + abs(annotation.ax or 0))


def _sides(fig: go.Figure) -> tuple[int, int]:
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
    return round(max(sum(map(_letter, html.unescape(_TAG.sub("", line)))) for line in text.split("<br>")))


def _letter(letter: str) -> float:
    return _NARROW_LETTER if letter in _NARROW_LETTERS else _WIDE_LETTER if letter in _WIDE_LETTERS else _LETTER
