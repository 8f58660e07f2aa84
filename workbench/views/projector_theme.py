"""Figures for a projector: everything 1.5 times as large, near black on white, on any page."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.views import theme

SCALE = 1.5

_PAPER = "#ffffff"
_COLOURS = {theme.INK: "#111111", theme.GRID: "rgba(0,0,0,0.32)", theme.FAINT: "rgba(0,0,0,0.07)"}

# fields of a figure in pixels; data (such as the width of a bar) is not included
_PIXELS = {"size", "minsize", "height", "arrowwidth", "ax", "ay", "xshift", "yshift", "shift", "ticklabelstandoff"}
_PIXELS |= {"below", "least"}  # of a page (workbench/views/responsive.py)
_PIXELS_WITHIN = {"line": {"width"}, "margin": {"l", "r", "t", "b"}, "pad": {"l", "r", "t", "b"}}


def for_talk(fig: go.Figure) -> go.Figure:
    """Return a figure for a projector: 1.5 times as large, on a white background."""
    larger = theme.Figure(_larger(fig.to_plotly_json(), ""))
    return larger.update_layout(paper_bgcolor=_PAPER, plot_bgcolor=_PAPER)


def _larger(value: Any, field: str, within: str = "") -> Any:  # noqa: ANN401 - any value in a figure
    if isinstance(value, dict):
        pixels = {"y0", "y1"} if value.get("ysizemode") == "pixel" else set()
        return {name: _scaled(item) if name in pixels else _larger(item, name, field) for name, item in value.items()}
    if field in _PIXELS or field in _PIXELS_WITHIN.get(within, ()):
        return _scaled(value)
    if isinstance(value, str):
        return _COLOURS.get(value, value)
    return [_larger(item, field, within) for item in value] if isinstance(value, list | tuple) else value


def _scaled(value: Any) -> Any:  # noqa: ANN401 - a number, or several
    if isinstance(value, list | tuple | np.ndarray):
        return [_scaled(item) for item in value]
    if isinstance(value, int):
        return round(value * SCALE)  # some fields accept only whole pixels
    return value * SCALE if isinstance(value, float) else value
