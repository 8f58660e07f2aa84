"""The strip over a picture of time that says what the rank was doing: forward, backward, optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import plotly.graph_objects as go

from workbench.events import WORK, Kind
from workbench.replay.spans import closed, exclusive, spans
from workbench.trace.schema import Rows
from workbench.views import theme
from workbench.views.rectangles import TimeAxis

STRIP_HEIGHT = 20  # pixels over the plot, its distance from it included
MAX_PIECES = 40
"""Pieces of a strip; more would be a flicker, and nothing is drawn."""

_LETTER = 0.02  # of the narrowest plot's width


def add_phases(fig: go.Figure, rows: Rows, axis: TimeAxis, *, row: int | None = None, col: int | None = None) -> None:
    """Draw the strip over the plot, or over one subplot."""
    pieces = list(_pieces(rows))
    whole_ns = axis.end_ns - axis.origin_ns
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
            fillcolor=theme.KIND_COLOURS[kind],
            line_width=0,
            name=kind.words,
            showlegend=kind.words not in named,
            opacity=0.35,
            label={"text": text if (end_ns - begin_ns) / whole_ns > _LETTER * len(text) else "", "font": {"size": 11}},
            row=row,
            col=col,
        )
        named.add(kind.words)


def _pieces(rows: Rows) -> Iterator[tuple[Kind, int, int]]:
    """Yield ``(kind, begin_ns, end_ns)`` of forward, backward and optimizer of each step, units taken together."""
    found = closed(spans(rows, WORK), rows)
    owner, begin_ns, end_ns = exclusive(found)
    kind, step = found.kind[owner], found.step[owner]
    first = np.flatnonzero((np.diff(kind, prepend=-1) != 0) | (np.diff(step, prepend=-2) != 0))
    last = np.append(first[1:], len(kind))[: len(first)] - 1
    for number, begin, end in zip(kind[first].tolist(), begin_ns[first].tolist(), end_ns[last].tolist(), strict=True):
        yield Kind(number), begin, end
