"""Marks for time that is cut out of a picture's axis: a thin line where ranks were paused, with the duration.

A line at the right edge shows that ranks are held now.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from workbench.base.text_formats import format_duration
from workbench.events import Kind
from workbench.replay.paused_time import Cuts
from workbench.replay.spans import Ints
from workbench.views import theme
from workbench.views.span_shapes import TimeAxis

MAX_MARKS = 60
"""Lines of one picture; with more cuts, the longest are drawn."""

LEAST = 0.01
"""Cuts shorter than this fraction of the longest have no line, e.g. while ranks wait for the last one to be held."""

LEAST_NS = 1_000_000
"""Nor have shorter ones, e.g. of a gate that let its rank pass."""

NAME, HELD_NOW = "held or idle, cut out", "held now"
_POINTS = 9  # of a line, as hover targets


def _drawn(found: Cuts) -> Ints:
    """Return the places of the cuts with a line."""
    longest = np.sort(np.argsort(-found.lengths_ns, kind="stable")[:MAX_MARKS])
    least_ns = max(LEAST * found.lengths_ns.max(initial=0), LEAST_NS)
    return np.asarray(longest[found.lengths_ns[longest] >= least_ns])


def num_names(found: Cuts) -> int:
    """Return how many entries the lines have in a legend."""
    return (len(_drawn(found)) > 0) + found.is_held


def hold_words(found: Cuts) -> str:
    """Return how much held or idle time is cut out, and whether ranks are held now, as text; empty if neither."""
    long_ns = found.lengths_ns[found.lengths_ns >= LEAST_NS]
    cut = f"{format_duration(int(long_ns.sum()))} of held or idle time cut out" if len(long_ns) else ""
    return ", ".join(filter(None, (cut, "held now at the right edge" if found.is_held else "")))


def add_holds(fig: go.Figure, found: Cuts, axis: TimeAxis, span: tuple[float, float], **where: object) -> None:
    """Draw a thin line for each cut, with its duration as hover, and one where ranks are held now.

    Args:
        fig: a picture over time with these cuts.
        found: the cuts of its axis.
        axis: its time axis.
        span: the two ends of a line on the y axis.
        where: further fields of the trace, such as ``row`` and ``col``.
    """
    drawn = _drawn(found)
    places = axis(found.shown(found.begin_ns))[drawn].tolist()
    lengths = [format_duration(int(length)) for length in found.lengths_ns[drawn]]
    texts = [f"ranks held or idle for {length}: cut out" for length in lengths]
    _add_lines(fig, NAME, places, texts, span, where)
    if found.is_held:
        _add_lines(fig, HELD_NOW, [axis.at(axis.end_ns)], ["ranks are held now"], span, where)


def _add_lines(
    fig: go.Figure,
    name: str,
    places: list[float],
    texts: list[str],
    span: tuple[float, float],
    where: dict[str, object],
) -> None:
    if not places:
        return
    fig.add_scatter(
        x=[x for place in places for x in [*[place] * _POINTS, None]],
        y=[*np.linspace(*span, _POINTS).tolist(), None] * len(places),
        mode="lines",
        line={"color": theme.KIND_COLOURS[Kind.GATE], "width": 1.5, "dash": "dot"},
        text=[text for text in texts for _ in range(_POINTS + 1)],
        hovertemplate="%{text}<extra></extra>",
        name=name,
        **where,
    )
