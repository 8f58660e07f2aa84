"""What a picture of time says of what is cut out of its axis: a thin line where ranks stood still, and how long."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from workbench.events import Kind
from workbench.replay.paused_time import Cuts
from workbench.replay.spans import Ints
from workbench.views import theme

MAX_MARKS = 60
"""Lines of one picture; of more cuts the longest."""

LEAST = 0.01
"""Of the longest cut: shorter ones, such as of a rank that waited for the last one to be held, have no line."""

NAME = "stood still, cut out"
_POINTS = 9  # of a line, to hover over


def hold_words(found: Cuts) -> str:
    """Say how long ranks were held or idle; nothing if that is not cut out."""
    if not len(found):
        return ""
    return f"{theme.format_duration(int(found.lengths_ns.sum()))} in which ranks were held or idle are cut out"


def add_holds(
    fig: go.Figure,
    found: Cuts,
    place: Callable[[Ints], NDArray[np.float64]],
    span: tuple[float, float],
    **where: object,
) -> None:
    """Draw a thin line for each cut, which says how long it was.

    Args:
        fig: a picture of time without what is cut out.
        found: what is cut out of its axis.
        place: turns times as they are shown, in nanoseconds, into places on the axis.
        span: the two ends of a line on the y axis.
        where: further fields of the trace, such as ``row`` and ``col``.
    """
    if not len(found):
        return
    longest = np.sort(np.argsort(-found.lengths_ns, kind="stable")[:MAX_MARKS])
    longest = longest[found.lengths_ns[longest] >= LEAST * found.lengths_ns.max()]
    x, y, texts = [], [], []
    for at, length in zip(place(found.shown(found.begin_ns))[longest], found.lengths_ns[longest], strict=True):
        x += [float(at)] * _POINTS + [None]
        y += [*np.linspace(*span, _POINTS).tolist(), None]
        texts += [f"ranks stood still for {theme.format_duration(int(length))}: cut out"] * (_POINTS + 1)
    fig.add_scatter(
        x=x,
        y=y,
        mode="lines",
        line={"color": theme.KIND_COLOURS[Kind.GATE], "width": 1.5, "dash": "dot"},
        text=texts,
        hovertemplate="%{text}<extra></extra>",
        name=NAME,
        **where,
    )
