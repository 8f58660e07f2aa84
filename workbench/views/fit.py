"""The policies under which a program was planned: bytes at the peak against the time of a step.

Hovering says a policy's classes, and the line that plans it. A line joins the policies of which none is better in both.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.base.text_formats import byte_unit, format_bytes, format_duration, time_unit
from workbench.events import Category
from workbench.protocol.planning import PlannedPolicy
from workbench.views import theme

_MAX_CLASSES = 4
_LOOKS = {
    "fits, and none is better": ("circle", theme.CATEGORY_COLOURS[Category.SHARDED_PARAMS]),
    "fits": ("circle-open", theme.CATEGORY_COLOURS[Category.SHARDED_PARAMS]),
    "does not fit": ("x", theme.CATEGORY_COLOURS[Category.ACTIVATIONS]),
}


def fit(policies: Sequence[PlannedPolicy], limit_bytes: int, title: str, time_error: str = "") -> go.Figure:
    """Return the figure of policies.

    Args:
        policies: the policies, on one number of ranks.
        limit_bytes: the most bytes that fit.
        title: what the search found.
        time_error: how far times are off, in words; empty: they are the least.
    """
    divisor, unit = byte_unit(max(limit_bytes, *(policy.peak_bytes for policy in policies)))
    time_divisor, time_name = time_unit(max(policy.step_ns for policy in policies))
    fig = theme.figure(title, height=460)
    best = sorted((policy for policy in policies if policy.is_best), key=lambda policy: policy.step_ns)
    fig.add_scatter(
        x=[policy.step_ns / time_divisor for policy in best],
        y=[policy.peak_bytes / divisor for policy in best],
        mode="lines",
        line={"color": _LOOKS["fits"][1], "width": 1, "shape": "hv"},
        hoverinfo="skip",
        showlegend=False,
    )
    for name, (symbol, colour) in _LOOKS.items():
        shown = [policy for policy in policies if _group(policy) == name]
        if shown:
            fig.add_scatter(
                x=[policy.step_ns / time_divisor for policy in shown],
                y=[policy.peak_bytes / divisor for policy in shown],
                mode="markers",
                marker={"symbol": symbol, "color": colour, "size": 11, "line": {"width": 2, "color": colour}},
                name=name,
                hovertext=[_hover(policy) for policy in shown],
                hoverinfo="text",
            )
    fig.add_hline(
        y=limit_bytes / divisor,
        line={"color": theme.INK, "width": 1, "dash": "dash"},
        annotation={"text": f"{format_bytes(limit_bytes)} fit", "font": {"color": theme.INK}},
    )
    fig.update_xaxes(title_text=f"step, {time_error or 'at least'} [{time_name}]", rangemode="tozero")
    fig.update_yaxes(title_text=f"peak of a rank [{unit}]", rangemode="tozero")
    fig.update_layout(**theme.legend_below(len(_LOOKS)), hovermode="closest")
    return fig


def _group(policy: PlannedPolicy) -> str:
    best, fits, rest = _LOOKS
    return best if policy.is_best else fits if policy.fits else rest


def _hover(policy: PlannedPolicy) -> str:
    classes = sorted(policy.peak_bytes_by_category.items(), key=lambda item: -item[1])[:_MAX_CLASSES]
    lines = [
        f"<b>{theme.escape(policy.words)}</b>",
        f"{format_bytes(policy.peak_bytes)} at the peak, {format_duration(policy.step_ns)} a step",
        *(f"{category.words}: {format_bytes(size)}" for category, size in classes if size),
        theme.escape(policy.line),
    ]
    return "<br>".join(lines)
