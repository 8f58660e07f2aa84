"""Marks for time that is cut out of a picture's axis: a thin line where ranks were paused, with the duration."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from workbench.base.text_formats import format_duration
from workbench.events import Kind
from workbench.replay.paused_time import Cuts
from workbench.replay.spans import Ints
from workbench.views import theme

MAX_MARKS = 60
"""Lines of one picture; with more cuts, the longest are drawn."""

LEAST = 0.01
"""Cuts shorter than this fraction of the longest have no line, e.g. while ranks wait for the last one to be held."""

NAME = "held or idle, cut out"
_POINTS = 9  # of a line, as hover targets


def hold_words(found: Cuts) -> str:
    """Return how much held or idle time is cut out, as text; empty if none."""
    if not len(found):
        return ""
    return f"{format_duration(int(found.lengths_ns.sum()))} of held or idle time cut out"


def add_holds(
    fig: go.Figure,
    found: Cuts,
    place: Callable[[Ints], NDArray[np.float64]],
    span: tuple[float, float],
    **where: object,
) -> None:
    """Draw a thin line for each cut, with its duration as hover.

    Args:
        fig: a picture over time with these cuts.
        found: the cuts of its axis.
        place: maps times with cuts removed, in nanoseconds, to places on the axis.
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
        texts += [f"ranks held or idle for {format_duration(int(length))}: cut out"] * (_POINTS + 1)
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
