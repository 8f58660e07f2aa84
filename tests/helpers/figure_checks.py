"""What tests read from a figure: its text, its axes, its size."""

from __future__ import annotations

import json
from collections.abc import Iterator

import plotly.graph_objects as go


def strings(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (field name, text) of every string in a figure's JSON; keys count as text, as category names are keys."""
    if isinstance(value, str):
        if key != "bdata":  # an array of numbers
            yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield "", name
            yield from strings(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item, key)


def as_json(figure: go.Figure) -> dict[str, object]:
    """Return the figure as the browser gets it, without the template that all figures share."""
    content = json.loads(figure.to_json())
    content["layout"].pop("template", None)
    return content


def words(figure: go.Figure) -> str:
    """Return all text of a figure in one string."""
    return "\n".join(text for _, text in strings(as_json(figure)))


def title(figure: go.Figure) -> str:
    """Return a figure's title in one line."""
    return (figure.layout.title.text or "").replace("<br>", " ")


def subtitle(figure: go.Figure) -> str:
    """Return a figure's subtitle in one line."""
    return (figure.layout.title.subtitle.text or "").replace("<br>", " ")


def axes(figure: go.Figure) -> Iterator[object]:
    """Yield the visible axes."""
    yield from (axis for axis in (*figure.select_xaxes(), *figure.select_yaxes()) if axis.visible is not False)


def num_marks(figure: go.Figure) -> int:
    """Return how many bars, points, texts, shapes and annotations are drawn."""
    points = sum(max(_length(trace.x), _length(trace.y)) for trace in figure.data if hasattr(trace, "x"))
    return points + len(figure.layout.shapes) + len(figure.layout.annotations)


def _length(values: object) -> int:
    return 0 if values is None else len(values)
