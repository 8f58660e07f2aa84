"""Events marked in a picture of time: a row of buttons over the plot outlines each of them and zooms to it.

The buttons and outlines are plotly's own, so they work wherever a figure does: also in a saved notebook, without a
kernel. A text beside the figure reaches a mark by pressing its button, see :func:`marked`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import plotly.graph_objects as go

from workbench.replay.event_marks import EventMark
from workbench.trace.schema import Rows
from workbench.views import theme
from workbench.views.span_shapes import TimeAxis

Marks = Mapping[str, EventMark]
"""Events to mark, by the sentence that names them."""

NO_MARKS: Marks = MappingProxyType({})

_MENU_HEIGHT = 40  # pixels of the buttons, including the gap
_AROUND = 1.5  # of a mark's width: what a zoom shows on each side of it
_LEAST_AROUND, _LEAST_WIDTH = 0.02, 0.004  # of the axis
_LINE = {"color": theme.WRONG, "width": 3}


@dataclass(frozen=True, kw_only=True)
class MarkPlace:
    """Where the events of a mark are drawn: the rank's rows with the times of the axis, and the y range.

    Attributes:
        rows: the rank's rows.
        y: both ends on the y axis.
        yref: plotly's name of the y axis.
    """

    rows: Rows
    y: tuple[float, float]
    yref: str = "y"


def add_marks(
    fig: go.Figure, marks: Marks, axis: TimeAxis, place: Callable[[EventMark], MarkPlace | None], above: int = 0
) -> None:
    """Add a button and an outline for each mark that the picture shows; no-op without one.

    Args:
        fig: a view's figure, whose height includes its margins.
        marks: events by the sentence that names them.
        axis: the time axis.
        place: returns where a mark is drawn, or None if the picture does not show it.
        above: pixels over the plot that are taken.
    """
    found = {sentence: ends for sentence, mark in marks.items() if (ends := _ends(place(mark), mark, axis))}
    if not found:
        return
    first, whole = len(fig.layout.shapes), axis.at(axis.end_ns)
    for where, (begin, end) in found.values():
        y0, y1 = where.y
        fig.add_shape(x0=begin, x1=end, y0=y0, y1=y1, xref="x", yref=where.yref, line=_LINE, visible=False)
    ranges = [[0.0, whole], *(_around(begin, end, whole) for _, (begin, end) in found.values())]
    buttons = [
        {
            "label": str(number) if number else "whole",
            "name": theme.escape(sentence),
            "method": "relayout",
            "args": [
                {f"shapes[{first + each}].visible": each == number - 1 for each in range(len(found))}
                | {"xaxis.range": ranges[number]}
            ],
        }
        for number, sentence in enumerate(["", *found])
    ]
    menu = {"type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
    look = {"bgcolor": theme.CLEAR, "bordercolor": theme.GRID, "font": {"size": 12}}
    fig.update_layout(updatemenus=[{**menu, **look, "pad": {"b": 6 + above}, "buttons": buttons}])
    fig.update_layout(margin_t=fig.layout.margin.t + _MENU_HEIGHT, height=fig.layout.height + _MENU_HEIGHT)


def marked(fig: go.Figure) -> dict[str, int]:
    """Return the place among the buttons of each sentence whose events are marked, the sentences as plain text."""
    buttons = [button for menu in fig.layout.updatemenus for button in menu.buttons]
    return {theme.plain(button.name): place for place, button in enumerate(buttons) if button.name}


def _ends(where: MarkPlace | None, mark: EventMark, axis: TimeAxis) -> tuple[MarkPlace, tuple[float, float]] | None:
    """Return where a mark is drawn, and its ends on the time axis, far enough apart to be seen."""
    times = None if where is None else mark.times_ns(where.rows)
    if where is None or times is None:
        return None
    begin, end = map(axis.at, times)
    least = max(_LEAST_WIDTH * axis.at(axis.end_ns) - (end - begin), 0) / 2
    return where, (begin - least, end + least)


def _around(begin: float, end: float, whole: float) -> list[float]:
    """Return the range of the time axis that shows a mark and what is around it."""
    more = max(_AROUND * (end - begin), _LEAST_AROUND * whole)
    return [max(begin - more, min(0.0, begin)), min(end + more, max(whole, end))]
