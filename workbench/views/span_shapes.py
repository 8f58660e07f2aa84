"""Rectangles for a screen: any number of spans become a few bars, with those narrower than a pixel merged.

Arrays: ``N`` rectangles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from workbench.base.text_formats import time_unit
from workbench.replay.arrivals import UNTOLD
from workbench.replay.spans import Ints

MAX_RECTANGLES = 2000
SCREEN_PIXELS = 1200
"""Expected width of a figure in pixels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rectangles:
    """Bars, each with a lane of the picture and a colour; arrays are ``[N]``.

    Attributes:
        lane: where it is drawn.
        colour: what it shows, a member of an IntEnum.
        begin_ns: its left end.
        end_ns: its right end.
        unit: its unit, -1 none or several.
        num_bytes: its payload.
        exposed_ns: how much of its time compute waited for it.
        waits_for: Kind of the collective that compute waits for; -1 if the bar is not a wait.
        duration_ns: time it represents.
        count: number of spans it represents.
        ended: 0 if it was still running when the trace ended.
        last: the last rank to issue the collective (:mod:`workbench.replay.arrivals`); UNTOLD, TOO_CLOSE.
        last_ns: how long after the previous rank.
    """

    lane: Ints
    colour: Ints
    begin_ns: Ints
    end_ns: Ints
    unit: Ints
    num_bytes: Ints
    exposed_ns: Ints
    waits_for: Ints
    duration_ns: Ints
    count: Ints
    ended: Ints
    last: Ints
    last_ns: Ints

    def __len__(self) -> int:
        return len(self.lane)

    def __getitem__(self, which: object) -> Rectangles:
        """The rectangles at some positions, with numpy's indexing."""
        return Rectangles(**{f.name: getattr(self, f.name)[which] for f in fields(self)})


def rectangles(lane: Ints, colour: Ints, begin_ns: Ints, end_ns: Ints, unit: Ints) -> Rectangles:
    """Return one rectangle per span, ended, without bytes or exposed time."""
    none = np.zeros(len(lane), np.int64)
    return Rectangles(
        lane=lane,
        colour=colour,
        begin_ns=begin_ns,
        end_ns=end_ns,
        unit=unit,
        num_bytes=none,
        exposed_ns=none,
        waits_for=none - 1,
        duration_ns=end_ns - begin_ns,
        count=none + 1,
        ended=none + 1,
        last=none + UNTOLD,
        last_ns=none,
    )


def joined(parts: Sequence[Rectangles]) -> Rectangles:
    """Return the rectangles of all ``parts``, at least one."""
    return Rectangles(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Rectangles)})


def for_screen(found: Rectangles, limit: int = MAX_RECTANGLES) -> Rectangles:
    """Return at most ``limit`` rectangles (or one per lane and colour, if those are more) by merging narrow ones.

    Rectangles narrower than a pixel are merged. If too many remain, the pixel size doubles until they do not.
    """
    if not len(found):
        return found
    width_ns = int(found.end_ns.max() - found.begin_ns.min())
    pixel_ns = max(width_ns / SCREEN_PIXELS, 1.0)
    merged = _merge(found, pixel_ns)
    while len(merged) > limit and pixel_ns <= width_ns:
        pixel_ns *= 2
        merged = _merge(merged, pixel_ns)
    return merged[np.lexsort((merged.begin_ns, merged.lane))]


def _merge(found: Rectangles, pixel_ns: float) -> Rectangles:
    """Merge rectangles that begin in the same pixel, are narrower than one, and share lane and colour.

    The result has their total width, so that each colour keeps its share of the picture.
    """
    pixel = ((found.begin_ns - found.begin_ns.min()) / pixel_ns).astype(np.int64)
    wide = np.flatnonzero(found.end_ns - found.begin_ns >= pixel_ns)
    pixel[wide] = -1 - wide  # each on its own
    order = np.lexsort((found.begin_ns, pixel, found.colour, found.lane))
    keys = np.stack([found.lane, found.colour, pixel])[:, order]
    first = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))
    there = found[order]
    width = np.add.reduceat(there.end_ns - there.begin_ns, first)
    same_unit = np.minimum.reduceat(there.unit, first) == np.maximum.reduceat(there.unit, first)
    sums = {n: np.add.reduceat(getattr(there, n), first) for n in ("num_bytes", "exposed_ns", "duration_ns", "count")}
    return replace(
        there[first],
        end_ns=there.begin_ns[first] + width,
        unit=np.where(same_unit, there.unit[first], -1),
        ended=np.minimum.reduceat(there.ended, first),
        **sums,
    )


def add_bars(
    fig: go.Figure,
    found: Rectangles,
    looks: Mapping[int, tuple[str, str]],
    middle: NDArray[np.float64],
    height: NDArray[np.float64],
    hover: Sequence[str],
    axis: TimeAxis,
) -> None:
    """Draw rectangles as horizontal bars, one trace (and legend entry) per colour.

    Args:
        fig: the figure; its layout should have ``barmode="overlay"``.
        found: ``N`` rectangles.
        looks: legend name and CSS colour of each ``colour``, in the order of the legend; others are not drawn.
        middle: middle of each rectangle on the y axis, ``[N]``.
        height: of each rectangle, ``[N]``.
        hover: hover text of each rectangle, ``N`` escaped texts.
        axis: the x axis.
    """
    texts = np.array(hover, object)
    for colour, (name, css) in looks.items():
        mine = np.flatnonzero(found.colour == colour)
        if len(mine):
            fig.add_bar(
                orientation="h",
                y=middle[mine],
                width=height[mine],
                base=axis(found.begin_ns[mine]),
                x=axis(found.end_ns[mine]) - axis(found.begin_ns[mine]),
                marker={"color": css, "line": {"width": 0}},
                hovertext=texts[mine],
                hoverinfo="text",
                name=name,
            )


@dataclass(frozen=True, kw_only=True)
class TimeAxis:
    """A time axis.

    Attributes:
        origin_ns: time at its zero, in nanoseconds.
        end_ns: time at its end, likewise.
        ns: nanoseconds in one of its units.
        unit: the unit's name.
    """

    origin_ns: int
    end_ns: int
    ns: int
    unit: str

    def __call__(self, t_ns: Ints) -> NDArray[np.float64]:
        """Places of times on the axis."""
        return np.asarray((t_ns - self.origin_ns) / self.ns)

    def at(self, t_ns: int) -> float:
        """Place of one time on the axis."""
        return (t_ns - self.origin_ns) / self.ns

    @property
    def layout(self) -> dict[str, Any]:
        """Title and range of a plotly axis."""
        return {"title_text": f"time from the start [{self.unit}]", "range": [0, self.at(self.end_ns)]}


def time_axis(extent_ns: tuple[int, int]) -> TimeAxis:
    """Return the axis from one time to another."""
    begin_ns, end_ns = extent_ns[0], max(extent_ns[1], extent_ns[0] + 1)
    ns, unit = time_unit(end_ns - begin_ns)
    return TimeAxis(origin_ns=begin_ns, end_ns=end_ns, ns=ns, unit=unit)
