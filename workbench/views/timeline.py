"""Timeline of each rank: compute, all-gathers, reduce-scatters, and the waits of compute for them.

There is one block per rank. The bar of a collective runs from its launch to its true end; a thin arrow points from its
launch to the wait for it. Of many ranks that did the same, those that waited least and most are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from workbench.base.text_formats import format_bytes, format_duration, format_share, plural
from workbench.events import COLLECTIVES, Kind, Track
from workbench.replay.arrivals import TOO_CLOSE, LastArrivals, last_to_come, waits_least
from workbench.replay.clock_error import error_ns
from workbench.replay.collectives import table
from workbench.replay.device import ClockSource
from workbench.replay.event_marks import EventMark
from workbench.replay.grouping import activity_key, groups, label
from workbench.replay.paused_time import Cuts
from workbench.replay.spans import Ints, last_ns, rows_of, total_ns
from workbench.replay.tracks import DRAWN, NUMBER
from workbench.replay.training import summary
from workbench.replay.units import unit_name, unseen_words
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header
from workbench.views import theme
from workbench.views.mark_buttons import NO_MARKS, MarkPlace, Marks, add_marks
from workbench.views.paused_time import add_holds, hold_words, num_names
from workbench.views.rank_labels import MANY, several, who
from workbench.views.responsive import on_pages
from workbench.views.span_shapes import Rectangles, TimeAxis, add_bars, for_screen, joined, rectangles, time_axis
from workbench.views.tracks import LANES, Tracks, tracks
from workbench.views.window import DrawnSteps, Window, one_rank, window

MAX_RANKS = 8
"""Maximum blocks drawn; with more ranks, those that did the same share at most two."""

MAX_ARROWS = 48
_TRACKS = tuple(Track)
_OPEN = 0.04  # of the picture's width: how far running spans reach beyond the last row
_HEIGHT = 720  # pixels of all tracks together
_ROW_HEIGHTS = (15, 24)  # pixels of one track
_GAP = 0.7  # tracks between two ranks
_SHORT_NAME = 8  # characters of a block's name that fits beside its first track on every page
_NARROW_TICKS = 4  # ticks of the time axis beside long names
_NAME_ABOVE, _NAMED_ROW = 0.9, 20  # longer names on a narrow page: tracks above the first one; pixels of a track
_PLACES = np.array([0.0, -0.2, 0.2])  # of a lane within its track
_BAR_HEIGHTS = np.array([0.8, 0.38, 0.38])  # of a lane, in tracks


@dataclass(frozen=True, kw_only=True, eq=False)
class RankBlock:
    """A drawn rank: its label and its tracks."""

    name: str
    tracks: Tracks


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The y axis: blocks from the top, each with the tracks that are not empty in all blocks.

    A *lane* here counts over all blocks: ``LANES * (len(Track) * block + number of the track) + lane of the track``.
    """

    num_blocks: int
    tracks: tuple[int, ...]

    @property
    def num_rows(self) -> float:
        """Height of the picture, in tracks."""
        return self.num_blocks * (len(self.tracks) + _GAP)

    def top(self, block: int) -> float:
        """Return the upper end of a block on the y axis."""
        return block * (len(self.tracks) + _GAP) - 0.5

    def middle(self, lane: Ints) -> NDArray[np.float64]:
        """Return the middle of each lane on the y axis."""
        block, track = np.divmod(lane // LANES, len(_TRACKS))
        row = np.searchsorted(self.tracks, track)
        return np.asarray(block * (len(self.tracks) + _GAP) + row + _PLACES[lane % LANES])


def timeline(
    trace: Trace, *, step: int | None = None, steps: int = 1, rank: int | None = None, marks: Marks = NO_MARKS
) -> go.Figure:
    """Draw compute, collectives and waits of a step, per rank.

    Args:
        trace: what happened.
        step: the last step to show; None: the newest.
        steps: how many steps, up to that one.
        rank: show this rank alone; None: all of them, alike ones together if they are many.
        marks: events to mark, by the sentence that names them.

    Raises:
        UsageError: the trace has nothing of ``step``, or no such rank.
    """
    shown = window(trace, step, steps)
    only = None if rank is None else one_rank(trace, rank).rank
    drawn = shown.drawn(trace)
    cuts = drawn.cuts
    parts = [part for part in drawn.trace.ranks if only in (None, part.rank)]
    waited_ns = {part.rank: total_ns(part, Kind.WAIT) for part in parts}
    names, folded = _chosen(trace.header, parts, waited_ns)
    between_ns = error_ns(Trace(trace.header, tuple(map(shown.stateless, trace.ranks))))
    last = _last(drawn, between_ns)
    state = _state(trace, shown, parts)
    named = [part for part in parts if part.rank in names]
    blocks = _blocks(drawn, named, names, last, goes_on=state is _RUNS)
    bars = _bars(blocks)
    if not len(bars):
        return theme.empty(theme.NO_STEP)
    used = np.unique(bars.lane // LANES % len(_TRACKS)).tolist()
    grid = Grid(num_blocks=len(blocks), tracks=tuple(used))
    low, high = _ROW_HEIGHTS
    fig = theme.figure(
        _title(drawn, shown, state, parts, blocks, waited_ns),
        _subtitle(
            trace.header,
            drawn,
            folded,
            _longest(drawn, parts),
            between_ns if only is None else 0,
            has_collectives=len(grid.tracks) > 1,
        ),
        barmode="overlay",
        **theme.legend_below(len({*bars.colour.tolist()}) + 1 + num_names(cuts)),
    )
    rows = round(grid.num_rows * min(max(_HEIGHT / grid.num_rows, low), high))
    fig.update_layout(height=fig.layout.margin.t + rows + fig.layout.margin.b)
    begin_ns, end_ns = drawn.extent_ns
    axis = time_axis((begin_ns, max(end_ns, int(bars.end_ns.max()))))
    _draw(fig, blocks, grid, bars, cuts, _hovers(bars, trace.header, blocks, axis, between_ns), axis)
    add_marks(fig, marks, axis, lambda mark: _place(mark, drawn, blocks, grid))
    track_names = [_track_name(track, bars) for track in grid.tracks]
    return on_pages(fig, lambda width: _on_page(fig, blocks, grid, track_names, width))


def _last(drawn: DrawnSteps, between_ns: int) -> dict[int, LastArrivals]:
    """Return the last arrivals at the collectives of each rank; empty for many ranks, where it would take too long."""
    ranks = drawn.trace.ranks
    if len(ranks) > MAX_RANKS:
        return {}
    return last_to_come(drawn.trace.header, {part.rank: table(part) for part in ranks}, between_ns)


def _place(mark: EventMark, drawn: DrawnSteps, blocks: Sequence[RankBlock], grid: Grid) -> MarkPlace | None:
    """Return the block of a mark's rank; None if it is not drawn."""
    number = next((number for number, block in enumerate(blocks) if block.tracks.rank == mark.rank), None)
    if number is None:
        return None
    top = grid.top(number)
    return MarkPlace(rows=drawn.trace.rank(mark.rank).rows, y=(top, top + len(grid.tracks)))


# -- which ranks


def _chosen(header: Header, parts: Sequence[RankTrace], waited: Mapping[int, int]) -> tuple[dict[int, str], str]:
    """Return the ranks to draw with their names, and a sentence on the ranks they represent."""
    if len(parts) <= MAX_RANKS:
        return {part.rank: label([part.rank]) for part in parts}, ""
    alike = groups(Trace(header, tuple(parts)), lambda part: activity_key(header, rows_of(part, DRAWN)))
    names: dict[int, str] = {}
    for ranks in alike:
        least, most = min(ranks, key=lambda r: (waited[r], r)), max(ranks, key=lambda r: (waited[r], -r))
        if len(names) + (least != most) < MAX_RANKS:
            names |= {least: f"{label([least])}: waited least", most: f"{label([most])}: waited most"}
            if least == most:
                names[least] = label([least])
    everyone = [part.rank for part in parts]
    together = "; ".join(f"{who(header, ranks, everyone)} did the same" for ranks in alike[:3] if len(ranks) > 1)
    chosen = f"{together}; showing those that waited least and most" if together else ""
    odd = [rank for ranks in alike for rank in ranks if len(ranks) == 1 and rank in names]
    apart = f"different: {who(header, odd)}" if odd and together else ""
    left = [ranks for ranks in alike if not names.keys() & set(ranks)]
    num_left_out = sum(map(len, left))
    left_out = f"{plural(num_left_out, 'rank')} not drawn" if num_left_out else ""
    if left and len(parts) > MANY:
        left_out += f" ({several(header, left)}): draw one with --rank {left[0][0]}"
    return dict(sorted(names.items())), " · ".join(text for text in (chosen, apart, left_out) if text)


def _blocks(
    drawn: DrawnSteps,
    parts: Sequence[RankTrace],
    names: dict[int, str],
    last: dict[int, LastArrivals],
    *,
    goes_on: bool,
) -> list[RankBlock]:
    begin_ns = min((int(part.rows["t_ns"].min()) for part in parts), default=0)
    end_ns = max((last_ns(part.rows) for part in parts), default=0)
    if goes_on:
        end_ns += max(int(_OPEN * (end_ns - begin_ns)), 1)
    return [
        RankBlock(
            name=names[part.rank],
            tracks=tracks(
                part,
                end_ns,
                last=last.get(part.rank),
                copies=drawn.copies.get(part.rank),
                host=drawn.host.get(part.rank),
            ),
        )
        for part in parts
    ]


# -- words


def _state(trace: Trace, shown: Window, parts: Sequence[RankTrace]) -> str:
    """Return what follows the name of the steps in the title, with ``{}`` for the duration."""
    if all(shown.has_ended(part) for part in parts):
        return _ENDED
    whole = Trace(trace.header, tuple(trace.rank(part.rank) for part in parts))
    return _ABORTED if shown.unfinished(whole) == "aborted" else _RUNS


_APART = 1.05  # of the duration: a picture from which on it is explained
_ENDED, _ABORTED, _RUNS = ": {}", " was aborted: {} until then", " has not ended: {} so far"


def _title(
    drawn: DrawnSteps,
    shown: Window,
    state: str,
    parts: Sequence[RankTrace],
    blocks: Sequence[RankBlock],
    waited_ns: Mapping[int, int],
) -> str:
    shares = [block.tracks.wait_ns.sum() / max(block.tracks.total_ns, 1) for block in blocks]
    low, high = format_share(min(shares)), format_share(max(shares))
    share = low if low == high else f"{low.rstrip('%')} to {high}"
    waits = f"for communication {share} of the time" if any(shares) else "for no communication"
    duration = format_duration(_duration_ns(drawn, parts))
    begun = f"{shown}{state.format(duration)}"
    if drawn.clock is ClockSource.ENQUEUED:
        return f"{begun} on the host"
    least = waits_least(waited_ns, max(block.tracks.total_ns for block in blocks))
    longer = f"; {theme.waits_least(who(drawn.trace.header, [least[0]]), least[1])}" if least else ""
    return f"{begun}, compute waits {waits}{longer}"


def _duration_ns(drawn: DrawnSteps, parts: Sequence[RankTrace]) -> float:
    """Return the time of a finished step on its slowest rank, as ``%fsdp step`` counts it; else that of the picture."""
    times = summary(Trace(drawn.trace.header, tuple(parts))).step_times
    begin_ns, end_ns = drawn.extent_ns
    is_known = drawn.clock is not ClockSource.DEVICE and len(times.steps) == 1
    return float(times.high[0]) if is_known else end_ns - begin_ns


def _longest(drawn: DrawnSteps, parts: Sequence[RankTrace]) -> str:
    """Return that the duration is shorter than the picture, as text, if ranks began apart; else empty."""
    duration_ns, (begin_ns, end_ns) = _duration_ns(drawn, parts), drawn.extent_ns
    is_shorter = len(parts) > 1 and end_ns - begin_ns > _APART * duration_ns
    return f"{format_duration(duration_ns)} is the longest of the ranks' steps, which begin apart" if is_shorter else ""


def _subtitle(
    header: Header, drawn: DrawnSteps, folded: str, longest: str, between_ns: int, *, has_collectives: bool
) -> str:
    is_enqueued = drawn.clock is ClockSource.ENQUEUED
    end = "the host's wait for it" if is_enqueued else "its last byte; its arrow points to the wait for it"
    sentences = [
        theme.clock_words(header, drawn.clock),
        "host track: when it issued work" if drawn.clock is ClockSource.DEVICE else "",
        folded,
        f"a collective's bar runs from its launch to {end}" if has_collectives else "",
        "a unit's compute excludes the units inside it",
        longest,
        unseen_words(header),
        hold_words(drawn.cuts),
        theme.error_words(between_ns),
    ]
    return theme.begun(theme.joined(sentences))


def _hovers(
    bars: Rectangles, header: Header, blocks: Sequence[RankBlock], axis: TimeAxis, between_ns: int
) -> list[str]:
    ranks = [label([block.tracks.rank]) for block in blocks]
    names = {unit: _unit(header, unit) for unit in np.unique(bars.unit).tolist()}
    begin = axis(bars.begin_ns)
    texts = []
    for i, (lane, colour) in enumerate(zip(bars.lane.tolist(), bars.colour.tolist(), strict=True)):
        what = Kind(colour)
        text = f"{what.words}{names[int(bars.unit[i])]}"
        if what == Kind.WAIT:
            cause = int(bars.waits_for[i])
            text = f"wait{f' for {Kind(cause).words}' if cause >= 0 else ''}{names[int(bars.unit[i])]}"
        where = f"{ranks[lane // (LANES * len(_TRACKS))]}, from {begin[i]:.4g} {axis.unit}"
        lines = (f"<b>{text}</b>", _amount(bars, i), where, _last_words(bars, i, between_ns))
        texts.append("<br>".join(filter(None, lines)))
    return texts


def _last_words(bars: Rectangles, i: int, between_ns: int) -> str:
    """Return who came last to a collective, or that it is unknown, as text; empty for several merged ones."""
    last = int(bars.last[i])
    if last == TOO_CLOSE and bars.count[i] == 1:
        error = format_duration(between_ns)
        return f"last rank unknown: arrivals differ by less than the clock error of {error}"
    if last < 0 or bars.count[i] > 1:
        return ""
    return f"{label([last])} arrived last, by {format_duration(int(bars.last_ns[i]))}"


def _unit(header: Header, unit: int) -> str:
    return f" of {theme.full(unit_name(header, unit))}" if unit >= 0 else ""


def _amount(bars: Rectangles, i: int) -> str:
    """Return duration, bytes and exposed time of one bar as text."""
    duration_ns, exposed_ns, kind = int(bars.duration_ns[i]), int(bars.exposed_ns[i]), Kind(bars.colour[i])
    parts = [
        f"{bars.count[i]} of them" if bars.count[i] > 1 else "",
        format_bytes(int(bars.num_bytes[i])) if bars.num_bytes[i] else "",
        format_duration(duration_ns) + ("" if bars.ended[i] else " and not ended"),
    ]
    if kind == Kind.WAIT:
        parts.append("exposed")
    elif kind in COLLECTIVES:
        hidden_ns = max(duration_ns - exposed_ns, 0)
        parts.append(f"{format_duration(exposed_ns)} exposed, {format_duration(hidden_ns)} hidden")
    return ", ".join(part for part in parts if part)


# -- the picture


def _bars(blocks: Sequence[RankBlock]) -> Rectangles:
    """Return the rectangles of all blocks, merged for the screen, with lanes counted over all blocks."""
    per_block = LANES * len(_TRACKS)
    parts = [replace(b.tracks.bars, lane=b.tracks.bars.lane + per_block * i) for i, b in enumerate(blocks)]
    return for_screen(joined(parts)) if parts else rectangles(*[np.empty(0, np.int64)] * 5)


def _draw(
    fig: go.Figure,
    blocks: Sequence[RankBlock],
    grid: Grid,
    bars: Rectangles,
    cuts: Cuts,
    hovers: Sequence[str],
    axis: TimeAxis,
) -> None:
    looks = {int(kind): (_legend(kind), theme.KIND_COLOURS[kind]) for kind in DRAWN}
    add_bars(fig, bars, looks, grid.middle(bars.lane), _BAR_HEIGHTS[bars.lane % LANES], hovers, axis)
    _add_arrows(fig, blocks, grid, axis)
    add_holds(fig, cuts, axis, (-0.5, grid.num_rows - _GAP - 0.5))
    for block in range(grid.num_blocks):
        top = grid.top(block)
        span = {"y0": top, "y1": top + len(grid.tracks), "x0": 0, "x1": 1, "xref": "paper", "layer": "below"}
        fig.add_shape(**span, fillcolor=theme.FAINT, line_width=0)
    _set_axes(fig, blocks, grid, axis, [_track_name(track, bars) for track in grid.tracks])


def _track_name(track: int, bars: Rectangles) -> str:
    """Return the name of a track; that of other collectives is their kind if there is only one."""
    there = np.unique(bars.colour[bars.lane // LANES % len(_TRACKS) == track])
    is_one = _TRACKS[track] is Track.OTHER and len(there) == 1
    return Kind(int(there[0])).words if is_one else _TRACKS[track].value


def _legend(kind: Kind) -> str:
    return f"{kind.words} (exposed)" if kind is Kind.WAIT else kind.words


def _add_arrows(fig: go.Figure, blocks: Sequence[RankBlock], grid: Grid, axis: TimeAxis) -> None:
    """Add arrows from a collective's issue to the wait for it, for the longest waits of each block."""
    x: list[float] = []
    y: list[float] = []
    for number, block in enumerate(blocks):
        part, base = block.tracks, number * LANES * len(_TRACKS)
        longest = np.argsort(-part.wait_ns, kind="stable")[: MAX_ARROWS // len(blocks)]
        longest = longest[(part.wait_ns[longest] > 0) & (part.issued_ns[longest] >= 0)]
        for end in zip(axis(part.issued_ns[longest]), axis(part.waited_ns[longest]), strict=True):
            x += [*map(float, end), float("nan")]
        wait_lane = np.full(len(longest), base + LANES * NUMBER[Track.WAIT])
        for end in zip(grid.middle(base + part.issued_lane[longest]), grid.middle(wait_lane) - 0.3, strict=True):
            y += [*map(float, end), float("nan")]
    fig.add_scatter(
        x=x,
        y=y,
        mode="lines+markers",
        line={"color": theme.INK, "width": 1},
        marker={"symbol": "arrow", "size": [0, 7, 0] * (len(x) // 3), "angleref": "previous", "color": theme.INK},
        opacity=0.7,
        hoverinfo="skip",
        name="issue to wait",
    )


def _on_page(
    fig: go.Figure, blocks: Sequence[RankBlock], grid: Grid, tracks: Sequence[str], width: int
) -> dict[str, object]:
    """Return the layout changes for a page ``width`` pixels wide: on narrow pages, long names are above the blocks."""
    if width >= theme.NARROWEST or max(len(block.name) for block in blocks) <= _SHORT_NAME:
        return {}
    places, names = [], []
    for number, block in enumerate(blocks):
        top = number * (len(tracks) + _GAP)
        places += [top - _NAME_ABOVE, *(top + row for row in range(len(tracks)))]
        names += [f"<b>{theme.escape(block.name)}</b>", *tracks]
    axis = fig.layout.yaxis.to_plotly_json() | {"tickvals": places, "ticktext": names}
    axis["range"] = [grid.num_rows - _GAP - 0.4, -_NAME_ABOVE - 0.5]
    rows = grid.num_rows - _GAP + _NAME_ABOVE + 0.1
    fields = fig.layout
    high = (fields.height - fields.margin.t - fields.margin.b) / (grid.num_rows - _GAP + 0.2)
    time = fig.layout.xaxis.to_plotly_json() | {"nticks": _NARROW_TICKS, "tickangle": 0}
    return {"xaxis": time, "yaxis": axis, "drawn": round(rows * max(high, _NAMED_ROW))}


def _set_axes(fig: go.Figure, blocks: Sequence[RankBlock], grid: Grid, axis: TimeAxis, tracks: Sequence[str]) -> None:
    places, names = [], []
    for number, block in enumerate(blocks):
        for row, track in enumerate(tracks):
            places.append(number * (len(tracks) + _GAP) + row)
            names.append(("" if row else f"<b>{theme.escape(block.name)}</b>   ") + track)
    fig.update_yaxes(
        range=[grid.num_rows - _GAP - 0.4, -0.6],
        tickmode="array",
        tickvals=places,
        ticktext=names,
        ticklabelstandoff=4,
        showgrid=False,
    )
    fig.update_xaxes(axis.layout)
