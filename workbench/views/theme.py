"""The common look of all figures: colours, template, number formats, and escaping of text for HTML.

The background is transparent and all text is one mid grey with a contrast of more than 4 : 1 on white and on
JupyterLab's dark page, so one figure serves both. On JupyterLab pages with the panel and on exported pages, a style
sheet gives that text the page's own colour (``widgets/static/figures.css``). Data colours keep at least 1.8 : 1 on
both, those of events 3 : 1 on the dark page, where strips are thin. Colours that can meet in one figure stay distinct
for normal sight, protanopia, deuteranopia and tritanopia (a test measures CIEDE2000).

Names from users or ranks (unit, parameter, metric, host) go through :func:`escape` before they become part of a figure,
and never into a ``hovertemplate`` or ``texttemplate``, where ``%{...}`` would be expanded. :func:`figure` and
:func:`empty` escape their arguments; everything else takes ``escape(name)``.
"""

from __future__ import annotations

import html
import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.colors import sample_colorscale, sequential

from workbench.base.text_formats import UNITS, format_duration
from workbench.events import Category, Colour, Kind, UnitState
from workbench.replay.device import ClockSource
from workbench.trace.schema import Header

INK = "#757677"
"""Text and axis lines: legible on white and dark pages. The grey is unique, so that style sheets can select it."""

GRID = "rgba(128,128,128,0.22)"
FAINT = "rgba(128,128,128,0.14)"
"""Areas without data: empty tracks, table headers."""

PLOTLY_MIME = "application/vnd.plotly.v1+json"

CLEAR = "rgba(0,0,0,0)"
ACTIVE = "#2f8fd8"
"""Colour of a tool bar's button that is on: legible on white and dark pages."""

WRONG = "#d6336c"
"""Colour of values that differ from the expected; in tables used for nothing else."""

NARROWEST = 600
"""Minimum page width, in pixels, that figures are designed for; for narrower pages see :mod:`.responsive`."""

FONT_FAMILY = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

COLOURS: dict[Colour, str] = {
    Colour.SHARDED_PARAMS: "#5c70c6",
    Colour.UNSHARDED_PARAMS: "#5fb6f1",
    Colour.ALL_GATHER: "#1a969d",
    Colour.UNSHARDED_GRADS: "#b43806",
    Colour.REDUCE_SCATTER: "#eba51c",
    Colour.SHARDED_GRADS: "#dbafc7",
    Colour.OPTIMIZER_STATE: "#5740a6",
    Colour.ACTIVATIONS: "#968b35",
    Colour.SNAPSHOTS: "#3f7d4e",
    Colour.RESERVED: "#b8b8a4",
    Colour.FORWARD: "#69b0ee",
    Colour.BACKWARD: "#4860a8",
    Colour.OPTIMIZER: "#9870d0",
    Colour.COPY_IN: "#8d8929",
    Colour.COPY_OUT: "#a9a96b",
    Colour.OFFLOAD: "#6b6b1f",
    Colour.RECEIVED: "#a8c09c",
    Colour.WAIT: "#c2185b",
    Colour.READERS: "#94647c",
    Colour.GIVEN_UP: WRONG,
    Colour.PLAIN: "#8a8c83",
}
"""Blues: parameters; reds: gradients; teal and amber: communication buffers; pale: unused bytes. Exposed communication
has a separate colour."""

CATEGORY_COLOURS = {category: COLOURS[category.info.colour] for category in Category}
UNIT_STATE_COLOURS = {state: COLOURS[state.info.colour] for state in UnitState}
"""A state has the colour of the memory class it brings to life."""

KIND_COLOURS = {kind: COLOURS[kind.info.colour] for kind in Kind}


@cache
def rank_colours(num_ranks: int) -> list[tuple[str, str]]:
    """Return ``(fill, text on it)`` per rank, in order from dark blue for rank 0 to light green."""
    points = [0.2 + 0.6 * (0.5 if num_ranks == 1 else i / (num_ranks - 1)) for i in range(num_ranks)]
    fills = sample_colorscale(sequential.Viridis, points)
    return [(fill, "#ffffff" if point <= 0.5 else "#111111") for fill, point in zip(fills, points, strict=True)]


def faded(colour: str) -> str:
    """Return a colour ``#rrggbb`` as one that the page shines through, for areas that must not hide what they cover."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.3)"


def escape(text: str) -> str:
    """Return ``text`` escaped so that plotly shows it literally: no tags, no entities, no TeX between dollars."""
    return html.escape(text, quote=True).replace("&quot;", "&#34;").replace("$", "&#36;")  # plotly knows no &quot;


def shorten(text: str, width: int = 32) -> str:
    """Return plain ``text``, cut at its start if it is longer than ``width`` characters.

    Names in a model start alike and differ at the end: ``"base_model.model.model.layers.11.mlp"`` in 24 characters is
    ``"….model.model.layers.11.mlp"``. Escape afterwards; otherwise half an entity may remain.
    """
    return text if len(text) <= width else f"…{text[1 - width :]}"


HOVER_WIDTH = 120
"""Maximum characters of a name in a hover; only malicious names are longer."""


def full(text: str) -> str:
    """Return a plain name for a hover, escaped."""
    return escape(shorten(text, HOVER_WIDTH))


LEGEND_LINE = 19  # pixels
BELOW_AXIS = 60
"""Pixels of the labels and title of an axis."""


def legend_below(num_entries: int, plot_width: int = 430, entry_width: int = 142) -> dict[str, Any]:
    """Return the layout fields for a legend under the plot, with room for it.

    Args:
        num_entries: entries of the legend, or their maximum.
        plot_width: pixels of the plot on the narrowest page, the maximum length of the legend's lines.
        entry_width: pixels of an entry, its mark included.
    """
    in_a_line = max(plot_width // entry_width, 1)
    legend = {
        "orientation": "h",
        "xref": "container",
        "x": 0.99,
        "xanchor": "right",
        "yref": "container",
        "y": 0,
        "yanchor": "bottom",
        "bgcolor": CLEAR,
        "traceorder": "normal",
        "entrywidth": 0,
    }
    return {"legend": legend, "margin_b": BELOW_AXIS + LEGEND_LINE * max(-(-num_entries // in_a_line), 1)}


def waits_least(rank: str, longer_ns: float) -> str:
    """Return that a rank waits least for others, and how much longer the others wait."""
    return f"{rank} waits least, others up to {format_duration(longer_ns)} longer"


def _template() -> go.layout.Template:
    axis = {
        "gridcolor": GRID,
        "linecolor": INK,
        "tickcolor": INK,
        "zeroline": False,
        "automargin": True,
        "exponentformat": "power",
        "minexponent": 4,
        "title": {"font": {"size": 13}},
    }
    table = {
        "header": {"fill": {"color": FAINT}, "line": {"color": GRID}, "font": {"color": INK}},
        "cells": {"fill": {"color": CLEAR}, "line": {"color": GRID}, "font": {"color": INK}},
    }
    return go.layout.Template(
        layout={
            "paper_bgcolor": CLEAR,
            "plot_bgcolor": CLEAR,
            "font": {"family": FONT_FAMILY, "size": 12, "color": INK},
            "title": {"x": 0, "xref": "container", "xanchor": "left", "pad": {"l": 16}},
            "colorway": list(CATEGORY_COLOURS.values()),
            "hoverlabel": {"align": "left", "namelength": -1, "font": {"family": FONT_FAMILY, "size": 13}},
            "legend": {"x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top"},
            "modebar": {"bgcolor": CLEAR, "color": INK, "activecolor": ACTIVE, "remove": ["sendChartToCloud"]},
            "margin": {"l": 24, "r": 24, "t": 84, "b": 36},
            "xaxis": {**axis, "showline": True, "ticks": "outside"},
            "yaxis": axis,
        },
        data={"table": [go.Table(table)]},
    )


TEMPLATE = _template()
"""The plotly template of every figure; passed to each one, so that no global default changes."""

_TITLE_LINE, _SUBTITLE_LINE = 24, 17  # pixels
_TITLE_SIZE, _SMALL_TITLE_SIZE, _SMALL_PAGE = 17, 15, 300  # pixels: fonts; pages that use the small one
_TITLE_LETTER, _SUBTITLE_LETTER = 0.546, 7.38  # mean width of a character: relative to its size; pixels
_EMPTY_LETTER = 9.2  # pixels, in empty figures
_BESIDE_TITLE = 24  # pixels
_TOOL_BAR = 230  # pixels of a horizontal one
TOOL_BAR_FROM = 700
"""Pixels of pages on which the tool bar is horizontal, and right of the title; it is vertical on narrower ones."""

_UNBROKEN = "\u00a0"  # a space at which no line ends
_TOGETHER = re.compile(rf" (?=·)|(?<=\d) (?=(?:{'|'.join(UNITS)})\b)")
"""Spaces before a dot between two sentences, and between a number and its unit."""
_WIDE, _NO_WIDTH = re.compile("[mwMW]"), "\u2060"
"""Letters twice as wide as the mean, and a character without width that is counted after each of them."""
_FIRST_OF_MANY = 12  # pixels by which the first of several lines is higher than a single one


def heading(title: str, subtitle: str, width: int = NARROWEST) -> tuple[dict[str, Any], int]:
    """Return title and subtitle of a layout, wrapped for a page, and the pixels they take at its top.

    Args:
        title: plain text (escaped here).
        subtitle: plain text (escaped here).
        width: of the page, in pixels.
    """
    size = _SMALL_TITLE_SIZE if width < _SMALL_PAGE else _TITLE_SIZE
    room = width - _BESIDE_TITLE
    beside_bar = room - _TOOL_BAR * (width >= TOOL_BAR_FROM)
    titles = _wrapped(title, int(beside_bar / (size * _TITLE_LETTER)))
    subtitles = _wrapped(subtitle, int(room / _SUBTITLE_LETTER))
    found: dict[str, Any] = {
        "text": _lines(titles),
        "font": {"size": size},
        "y": 1,
        "yref": "container",
        "yanchor": "top",
        "pad": {"t": 14 + _FIRST_OF_MANY * (len(titles) > 1)},
    }
    if subtitles:
        found["subtitle"] = {"text": _lines(subtitles), "font": {"size": 13}}
    return found, 38 + _TITLE_LINE * len(titles) + _SUBTITLE_LINE * len(subtitles)


def _wrapped(text: str, width: int) -> list[str]:
    """Return plain text in lines of at most ``width`` mean characters; a number and its unit are in one line."""
    counted = _WIDE.sub(rf"\g<0>{_NO_WIDTH}", _TOGETHER.sub(_UNBROKEN, text))
    return [line.replace(_NO_WIDTH, "") for line in textwrap.wrap(counted, width, break_on_hyphens=False)]


def figure(title: str, subtitle: str = "", *, height: int = 460, **layout: object) -> go.Figure:
    """Return an empty figure in the theme, with room at the top for its title and subtitle.

    Args:
        title: plain text (escaped here): what the picture answers, as a sentence where it can.
        subtitle: plain text (escaped here), wrapped for the narrowest page.
        height: of the whole figure, in pixels; the width follows the page.
        layout: further ``go.Layout`` fields.
    """
    titles, top = heading(title, subtitle)
    fig = Figure(layout={"template": TEMPLATE, "height": height, "title": titles})
    fig.update_layout(margin_t=top, **layout)
    return fig


CONFIG = {"displaylogo": False, "showSendToCloud": False}
"""Plotly's configuration of a figure: no link to plotly's site, and no button that uploads the figure there."""


class Figure(go.Figure):  # type: ignore[misc] # plotly has no types
    """A figure that notebooks draw when a cell returns it, with its title as plain text elsewhere.

    It has no HTML representation, because plotly's loads scripts from the network. Everything that shows or writes it
    passes :data:`CONFIG`; the template removes the upload as well, for programs that read only the figure.
    """

    _ipython_display_ = None
    _repr_html_ = None

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        words = " - ".join(filter(None, title_and_subtitle(self)))
        page = json.loads(self.to_json()) | {"config": CONFIG}
        return {PLOTLY_MIME: page, "text/plain": words or "figure"}

    def show(self, renderer: str | None = None, *, config: Mapping[str, Any] | None = None, **options: object) -> None:
        """Show the figure now; in a notebook like a cell's result, unless another ``renderer`` is named.

        Args:
            renderer: name of a plotly renderer.
            config: plotly's configuration, besides :data:`CONFIG`.
            options: the renderer's options.
        """
        if renderer is None and "plotly_mimetype" in plotly.io.renderers.default:
            renderer = "plotly_mimetype"
        super().show(renderer=renderer, config=CONFIG | dict(config or {}), **options)

    def to_html(self, config: Mapping[str, Any] | None = None, **options: object) -> str:
        """Return plotly's page of the figure, with :data:`CONFIG`."""
        return str(super().to_html(config=CONFIG | dict(config or {}), **options))

    def write_html(self, file: object, config: Mapping[str, Any] | None = None, **options: object) -> None:
        """Write plotly's page of the figure, with :data:`CONFIG`."""
        super().write_html(file, config=CONFIG | dict(config or {}), **options)


def title_and_subtitle(fig: go.Figure) -> tuple[str, str]:
    """Return title and subtitle of a figure as plain text without line breaks; empty where there is none."""
    return plain(fig.layout.title.text or ""), plain(fig.layout.title.subtitle.text or "")


def plain(text: str) -> str:
    """Return wrapped and escaped text as plain text in one line."""
    return html.unescape(text.replace("<br>", " "))


def add_sentence(fig: go.Figure, sentence: str) -> go.Figure:
    """Append a sentence, plain text (escaped here), to a figure's subtitle; return ``fig``."""
    title, subtitle = title_and_subtitle(fig)
    titles, top = heading(title, f"{subtitle} · {sentence}" if subtitle else sentence)
    return fig.update_layout(title=titles, margin_t=fig.layout.margin.t + top - heading(title, subtitle)[1])


def _lines(lines: list[str]) -> str:
    return "<br>".join(escape(line.replace(_UNBROKEN, " ")) for line in lines)


NO_STEP = "No training step is recorded yet: %fsdp step 10 calls train_step() on every rank."
"""Sentence of a picture of steps without any."""


def joined(sentences: Iterable[str], between: str = " · ") -> str:
    """Return those of some sentences that are not empty as one text."""
    return between.join(filter(None, sentences))


def begun(text: str) -> str:
    """Return ``text`` with a capital first letter; the others stay as they are."""
    return text[:1].upper() + text[1:]


def empty(sentence: str, title: str = "") -> go.Figure:
    """Return a figure with one plain sentence on why there is nothing to draw and what to do about it."""
    fig = figure(title, height=200, xaxis_visible=False, yaxis_visible=False)
    text = in_lines(sentence)
    fig.add_annotation(text=text, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font_size=15)
    return fig


def in_lines(sentence: str, width: int = NARROWEST) -> str:
    """Return the sentence of an empty figure, plain text (escaped here), wrapped for a page ``width`` pixels wide."""
    return _lines(textwrap.wrap(sentence, int((width - _BESIDE_TITLE) / _EMPTY_LETTER)))


def host_clock_words(*headers: Header) -> str:
    """Return a note on step times where a device computes: views of many steps use the host's times."""
    enqueued = any(header.is_enqueued for header in headers)
    return "step times are the host's, which enqueues GPU work without waiting for it" if enqueued else ""


def error_words(error_ns: int) -> str:
    """Return a note on the clock error between ranks on different hosts; empty for an error of 0."""
    return f"differences below {format_duration(error_ns)} between hosts are within the clock error" if error_ns else ""


def clock_words(header: Header, clock: ClockSource) -> str:
    """Return a note on the meaning of times where a device computes; empty on the CPU."""
    if clock is ClockSource.ENQUEUED:
        return "times are when the host enqueued work; GPU times were not recorded"
    if clock is ClockSource.DEVICE:
        error_ns = max((info.device_error_ns for info in header.ranks), default=0)
        return f"times are measured on the GPU{f', within {format_duration(error_ns)}' if error_ns else ''}"
    return ""
