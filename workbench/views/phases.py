"""The strip over a picture of time with the rank's phases: forward, backward, optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.events import WORK, Kind
from workbench.replay.spans import closed, exclusive, spans
from workbench.trace.schema import Rows
from workbench.views import theme
from workbench.views.span_shapes import TimeAxis

STRIP_HEIGHT = 20  # pixels over the plot, including the gap
MAX_PIECES = 40
"""Maximum pieces of a strip; with more, no strip is drawn."""

_LETTER, _NARROWEST_PLOT = 7, 350  # pixels: of a character, and of the plot width that figures are designed for


def add_phases(fig: go.Figure, rows: Rows, axis: TimeAxis, *, row: int | None = None, col: int | None = None) -> None:
    """Draw the strip over the plot, or over one subplot."""
    pieces = list(_pieces(rows))
    whole_ns, share = axis.end_ns - axis.origin_ns, _LETTER / _NARROWEST_PLOT
    named = {shape.name for shape in fig.layout.shapes}
    for kind, begin_ns, end_ns in pieces if len(pieces) <= MAX_PIECES else ():
        text = kind.words
        fig.add_shape(
            x0=axis.at(begin_ns),
            x1=axis.at(end_ns),
            y0=3,
            y1=STRIP_HEIGHT,
            xref="x",
            yref="y domain",
            yanchor=1,
            ysizemode="pixel",
            fillcolor=theme.faded(theme.KIND_COLOURS[kind]),
            line={"color": theme.KIND_COLOURS[kind], "width": 1},  # else a dark colour is hardly seen on a dark page
            name=kind.words,
            showlegend=kind.words not in named,
            label={"text": text if (end_ns - begin_ns) / whole_ns > share * len(text) else "", "font": {"size": 11}},
            row=row,
            col=col,
        )
        named.add(kind.words)


def phases_within(fig: go.Figure, pixels: float) -> list[dict[str, Any]]:
    """Return the shapes of a figure for a plot ``pixels`` wide: strip pieces that are wide enough have a label."""
    begin, end = fig.layout.xaxis.range
    found = [shape.to_plotly_json() for shape in fig.layout.shapes]
    for shape in found:
        if "label" in shape:
            text, wide = shape["name"], (shape["x1"] - shape["x0"]) / (end - begin) * pixels
            shape["label"] = {**shape["label"], "text": text if wide > _LETTER * len(text) else ""}
    return found


def _pieces(rows: Rows) -> Iterator[tuple[Kind, int, int]]:
    """Yield ``(kind, begin_ns, end_ns)`` of forward, backward and optimizer of each step, units merged."""
    found = closed(spans(rows, WORK), rows)
    owner, begin_ns, end_ns = exclusive(found)
    kind, step = found.kind[owner], found.step[owner]
    first = np.flatnonzero((np.diff(kind, prepend=-1) != 0) | (np.diff(step, prepend=-2) != 0))
    last = np.append(first[1:], len(kind))[: len(first)] - 1
    for number, begin, end in zip(kind[first].tolist(), begin_ns[first].tolist(), end_ns[last].tolist(), strict=True):
        yield Kind(number), begin, end
