"""Layouts of a figure for pages narrower than its default width, as next to JupyterLab's panel, or much wider.

The ``meta`` of a figure's layout holds these layouts, and the meanings of the terms in its legend and headings;
``widgets/static/figures.js`` applies them wherever figures are shown. On narrow pages titles have more lines, and the
legend is under the plot in as many lines as it needs. A view adds further changes with :func:`on_pages`, such as
shorter labels, or lines of text instead of table columns. Every figure fits on pages from ``LEAST`` pixels on; on
narrower pages the figure keeps that width and scrolls sideways, but its titles still fit the page. On wide pages titles
have fewer lines.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.base.glossary import explained
from workbench.views import theme

LEAST = 300
"""Pixels of the narrowest page into which every figure fits."""

WIDTHS = (1600, 1200, 900, 700, theme.NARROWEST, 500, 400, 350, LEAST, 250, 180)
"""Page widths in pixels with separate layouts; a page between two uses that of the narrower one."""

SIDE = 12
"""Pixels at the edge of a narrow page."""

LETTER = 6.8
"""Mean width of a character of a label, in pixels."""

_WIDER = 100_000  # than any page

_SIDE = 24  # pixels beside the plot
_NUMBER = "0.0000"  # as wide as the numbers on an axis without tick texts
_AXIS_TITLE = 24  # pixels beside the labels
_MARK = 45  # pixels before the text of a legend entry
_LEGEND_PADDING = 10  # pixels above and below the entries together
_LEAST_PLOT = 170  # pixels
_LEAST_BESIDE = 0.6  # of the page's width: a plot that a legend beside it makes narrower has it below
_TAG = re.compile("<[^>]*>")


def on_pages(fig: go.Figure, layout: Callable[[int], dict[str, Any]]) -> go.Figure:
    """Record the layout changes of a finished figure for each of ``WIDTHS``; return ``fig``.

    Args:
        fig: a view's figure, before :func:`with_narrow`.
        layout: maps the width of a page in pixels, at least ``LEAST``, to complete layout fields that replace the
            figure's. Extra keys, in pixels: ``drawn``, the height of the plot; ``above`` and ``below``, additional
            margin over and under it; ``l`` and ``r`` of ``margin``. Fields that are left out keep their values.
    """
    return fig.update_layout(meta={"pages": {str(width): layout(max(width, LEAST)) for width in WIDTHS}})


def with_narrow(fig: go.Figure) -> go.Figure:
    """Write the layouts for all page widths into a finished figure; return ``fig``."""
    own = (fig.layout.meta or {}).get("pages", {})
    least = min(_least(fig), LEAST) if own else _least(fig)
    narrow = [
        {"below": below, "layout": _layout(fig, width, max(width, least), dict(own.get(str(width), {})))}
        for width, below in zip(WIDTHS, (_WIDER, *WIDTHS), strict=False)
    ]
    return fig.update_layout(meta={"least": least, "narrow": narrow, "meanings": _meanings(fig)})


def _meanings(fig: go.Figure) -> dict[str, str]:
    """Return what the legend's entries and the headings mean, by their texts, for whom the pointer rests on them."""
    labels = [label for axis in fig.select_yaxes() for label in axis.ticktext or () if label.startswith("<b>")]
    texts = [*legend_entries(fig).values(), *labels, *(each.text for each in fig.layout.annotations)]
    found = {text: explained(_TAG.sub(" ", text)) for text in texts if text}
    return {text: meaning for text, meaning in found.items() if meaning}


def at_width(fig: go.Figure, width: int) -> go.Figure:
    """Return a finished figure as a page of ``width`` pixels shows it, for a picture that nothing adapts later."""
    narrow = (fig.layout.meta or {}).get("narrow", [])
    fitting = [each["layout"] for each in narrow if width < each["below"]]
    return go.Figure(fig).update_layout(fitting[-1]) if fitting else fig


def _layout(fig: go.Figure, width: int, drawn: int, own: dict[str, Any]) -> dict[str, Any]:
    """Return the layout changes for one page width.

    Args:
        fig: the figure.
        width: of the page, in pixels.
        drawn: width of the figure, in pixels.
        own: the view's changes for such a page, see :func:`on_pages`.
    """
    title, subtitle = theme.title_and_subtitle(fig)
    if not fig.data:
        return {"annotations": [_wrapped(each, width) for each in fig.layout.annotations]}
    titles, top = theme.heading(title, subtitle, width)
    margin = theme.TEMPLATE.layout.margin.to_plotly_json() | fig.layout.margin.to_plotly_json()
    plot_height = own.pop("drawn", fig.layout.height - margin["t"] - margin["b"])
    found = {"title": titles, "margin": margin, "legend": fig.layout.legend.to_plotly_json()}
    found["modebar"] = {"orientation": "v" if width < theme.TOOL_BAR_FROM else "h"}
    margin["t"] += top - theme.heading(title, subtitle)[1]
    margin |= own.pop("margin", {})
    beside = sum(sides(fig)) if own.get("yaxis", {}).get("automargin", True) else margin["l"] + margin["r"]
    entries = legend_entries(fig)
    below, entry = None, legend_width(fig)
    is_beside, is_below = fig.layout.legend.y is None, fig.layout.legend.yref == "container"
    is_tight = is_beside and drawn - beside - entry < _LEAST_BESIDE * width
    is_narrow = width < theme.NARROWEST
    if entries and (is_tight or is_below or (is_narrow and is_beside)):
        below = theme.legend_below(len(entries), drawn - beside, entry)
        margin["b"] = below["margin_b"]
        found["legend"] |= below["legend"] | ({} if is_below and not is_narrow else {"x": 0.01, "xanchor": "left"})
    under = margin["b"] - theme.BELOW_AXIS + _LEGEND_PADDING
    margin["t"] += own.pop("above", 0)
    margin["b"] += own.pop("below", 0)
    height = plot_height + margin["t"] + margin["b"]
    if below is not None:  # right below the axis, even if the entries take fewer lines than reserved
        found["legend"] |= {"y": under / height, "yanchor": "top"}
    return {**found, **own, "height": height}


def in_lines(text: str, pixels: float, letter: float = LETTER) -> list[str]:
    """Return plain text in lines of at most ``pixels`` pixels."""
    return textwrap.wrap(text, max(int(pixels / letter), 1), break_on_hyphens=False)


def apart(places: Sequence[float], texts: Sequence[str], pixels: float) -> dict[str, list[Any]]:
    """Return the labels of an axis that do not overlap, starting from its begin, as fields of the axis.

    Args:
        places: positions of the labels on the axis, ascending.
        texts: the labels; labels in different lines do not overlap.
        pixels: pixels per unit of the axis.
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
    """Return the texts of a legend's entries, by group or name."""
    named = [trace for trace in fig.data if trace.type != "table" and trace.showlegend is not False]
    named += [shape for shape in fig.layout.shapes if shape.showlegend]
    return {entry.legendgroup or entry.name: entry.name for entry in named}


def _least(fig: go.Figure) -> int:
    """Return the minimum width of a figure in pixels: its default width if the plot contains text."""
    if not fig.data:
        return min(WIDTHS)
    if any(trace.type == "table" or (trace.type == "scatter" and trace.mode == "text") for trace in fig.data):
        return theme.NARROWEST
    plot = max((_room(each) for each in fig.layout.annotations), default=0)
    return min(sum(sides(fig)) + max(plot, _LEAST_PLOT), theme.NARROWEST)


def _room(annotation: go.layout.Annotation) -> int:
    """Return the minimum width of a plot, in pixels, with this annotation in it, or next to any of its points."""
    width = _width(annotation.text)
    return width if annotation.showarrow is False else 2 * (width + abs(annotation.ax or 0))


def sides(fig: go.Figure) -> tuple[int, int]:
    """Return the approximate pixels left and right of the plot, which its axes' labels take."""
    margin = fig.layout.margin
    beside = {"left": margin.l or 0, "right": margin.r or 0}
    for axis in fig.select_yaxes():
        side = axis.side or "left"
        if axis.automargin is not False and axis.visible is not False:
            beside[side] = max(beside[side], _beside(axis))
    return beside["left"] or _SIDE, beside["right"] or _SIDE


def legend_width(fig: go.Figure) -> int:
    """Return the approximate pixels that the legend takes beside the plot, in which each entry has a line."""
    return _MARK + max(map(_width, legend_entries(fig).values()), default=0)


def _beside(axis: go.layout.YAxis) -> int:
    """Return the pixels that the labels of an axis and its title take."""
    return max(map(_width, axis.ticktext or (_NUMBER,))) + (_AXIS_TITLE if axis.title.text else 0) + _SIDE


def _width(text: str) -> int:
    """Return the approximate width of a label in pixels."""
    return round(LETTER * max(len(html.unescape(_TAG.sub("", line))) for line in text.split("<br>")))
