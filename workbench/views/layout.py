"""Layout of parameters over ranks: one bar per parameter, one column per rank.

A column is a rank's storage for the parameter (``padded_rows``), so padding and empty shards appear where they are. A
flat parameter has a higher bar with the parameters it holds end to end, cut at column borders, and the padding at the
end. Copies of a replicated model share columns. The view needs only the header, so it works before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import plotly.graph_objects as go

from workbench.base.text_formats import format_bytes, format_share, plural
from workbench.events import FlatPart, Param, Unit, unit_words
from workbench.replay.grouping import by_value, join_names, label, ranges
from workbench.replay.shards import ParamShards, Piece, Totals, alike, at_rest, pieces, shards, totals, unit_shards
from workbench.replay.units import engine_words, model_order
from workbench.trace.columns import Trace
from workbench.trace.schema import Header
from workbench.views import theme
from workbench.views.responsive import LEAST, LETTER, SIDE, apart, in_lines, on_pages, sides
from workbench.views.unit_selection import meant

MAX_UNFOLDED = 32
"""Parameters drawn one by one; with more, those that differ only in a number share a bar."""

MAX_BARS = 60
MAX_SEGMENTS = 2000
MAX_COLUMNS = 64
"""Shard-ranks drawn one by one; with more, neighbours with equally many rows are drawn as one."""

_ROW_HEIGHT = 27  # pixels
_NAME_LETTERS = 40  # characters of a unit's name in a line over the bars
_LINE_HEIGHT, _BOLD_LETTER = 16, 7.4  # pixels
_LABEL_LETTERS = 34
_LABEL_SHARE, _SMALL_LETTER, _SMALL_LINE = 0.42, 6.1, 14  # share of a narrow page; pixels of its labels
_AXIS_LETTER, _STANDOFF = 7.2, 4  # pixels

_MAX_TICKS = 8
_MAX_COPIES = 3  # copies whose ranks a column names; with more, only those of the first copy
_MAX_CUTS = 3  # cut parameters of a flat one that are listed
_MAX_LINES = 8  # lines in the hover of a segment
_FIXED_SPACE = "\u00a0"  # prevents a line break
_BESIDE = "next to it: shape, bytes per rank"
_HATCH_COLOUR = "rgba(128,128,128,0.5)"

_BAR = 0.76  # rows
_FLAT_BAR = 1.6
_BEFORE, _AFTER = "… ", " …"  # of a cut parameter's name

Role = Literal["held", "padding", "empty shard"]
_HATCHES: dict[Role, str] = {"held": "", "padding": "/", "empty shard": "x"}
Group = tuple[ParamShards, ...]  # parameters that share a bar; the first one represents all


@dataclass(frozen=True)
class LabelRow:
    """A text over the bars of a unit, or an empty row; plain text."""

    text: str = ""
    is_heading: bool = False

    def lines(self, pixels: float) -> list[str]:
        """Return the text in lines of at most ``pixels`` pixels."""
        return in_lines(self.text, pixels, _BOLD_LETTER if self.is_heading else LETTER)

    @property
    def num_rows(self) -> int:
        """Number of picture rows that its lines take on the narrowest page."""
        return max(-(-(_LINE_HEIGHT * len(self.lines(LEAST - 2 * SIDE)) - _ROW_HEIGHT // 4) // _ROW_HEIGHT), 1)


Place = Group | LabelRow  # content of a row of the picture


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A piece of a bar.

    Attributes:
        role: what it shows.
        y: the bar's middle, in rows from the top.
        begin: its left end, in columns of the most finely split parameter.
        width: likewise.
        colours: fill and text colour.
        text: its label, escaped.
        hover: its hover text, escaped.
        height: of the bar, in rows.
    """

    role: Role
    y: float
    begin: float
    width: float
    colours: tuple[str, str]
    text: str
    hover: str
    height: float = _BAR


def layout(trace: Trace, *, unit: str | None = None, fold: bool | None = None) -> go.Figure:
    """Draw which rank holds which rows of each parameter.

    Args:
        trace: only its header is read.
        unit: draw this unit alone: a name, a pattern such as ``blocks.*``, or ``(root)``; None: all.
        fold: draw parameters that are alike in all but a number (``blocks.0-3``) as one bar; None: only if many.

    Raises:
        UsageError: there is no such unit; the message lists those there are, the nearest first.
    """
    header = trace.header if unit is None else _only(trace.header, unit)
    places_of = {unit: place for place, unit in enumerate(model_order(header))}
    split = sorted(shards(header), key=lambda part: places_of[part.unit.index])
    if not split and any(unit.in_use for unit in header.units):
        return theme.empty("The trace does not say which parameters the units have.")
    if not split:
        return theme.empty("Nothing is sharded yet: %fsdp shard MODEL splits a model over the ranks.")
    columns = max(part.num_shards for part in split)
    folded = len(split) > MAX_UNFOLDED if fold is None else fold
    groups, num_left_out = _largest(alike(split) if folded else [(part,) for part in split], columns)
    places = list(_places(groups, has_policy=bool(_policy_of_all(header))))
    finest = columns * len(groups) / MAX_SEGMENTS
    total = totals(split)
    fig = theme.figure(
        _title(header, total, "parameters" if unit is None else f"the parameters of {theme.shorten(unit)}"),
        _subtitle(header, total, num_left_out),
        height=220 + _ROW_HEIGHT * len(places),
        barmode="overlay",
        **theme.legend_below(2),
        uniformtext={"minsize": 9, "mode": "hide"},
    )
    _add_bars(fig, [segment for y, place in enumerate(places) for segment in _segments(y, place, columns, finest)])
    _add_labels(fig, places)
    _set_axes(fig, places, header, {part.num_shards for part in split})
    fig.update_layout(annotations=_over_bars(places, theme.NARROWEST - sum(sides(fig))))
    return on_pages(fig, lambda width: _on_page(fig, places, width))


def _only(header: Header, unit: str) -> Header:
    """Return ``header`` with only the units that ``unit`` selects."""
    return replace(header, units=meant([each for each in header.units if each.in_use], unit))


def _largest(groups: list[Group], columns: int) -> tuple[list[Group], int]:
    """Return the largest groups that fit into the picture, in their order, and the number of parameters left out."""
    limit = min(MAX_BARS, max(8, MAX_SEGMENTS // min(columns, MAX_COLUMNS)))
    by_size = sorted(range(len(groups)), key=lambda i: -totals(groups[i]).bytes_unsharded)
    return [groups[i] for i in sorted(by_size[:limit])], sum(len(groups[i]) for i in by_size[limit:])


def _title(header: Header, total: Totals, params: str) -> str:
    whole = format_bytes(total.bytes_unsharded)
    if header.world_size <= 1:
        return f"One rank keeps all {whole} of {params}"
    return f"Each of {header.world_size} ranks keeps {format_bytes(total.bytes_at_rest)} of {whole} of {params}"


def _subtitle(header: Header, total: Totals, num_left_out: int) -> str:
    live = [unit for unit in header.units if unit.in_use]
    copies = max(unit.replicate_size for unit in live)
    each = f" in each of {copies} copies" if copies > 1 else ""
    whole = max(total.bytes_unsharded, 1)
    wasted = format_share(total.bytes_wasted / whole, 2)
    waste = f"padding wastes {format_bytes(total.bytes_wasted)} ({wasted}){each}"
    sentences = [
        f"{plural(total.num_params, 'parameter')} in {plural(len(live), 'unit')}{_flat(total)}",
        engine_words(header),
        _policy_of_all(header).removeprefix(", "),
        f"each rank keeps {format_share(total.bytes_at_rest / whole, 1)} of the full parameters between uses",
        waste if total.bytes_wasted else "no padding",
        f"not counted, as they are in no unit: {theme.shorten(', '.join(header.unmanaged))}"
        if header.unmanaged
        else "",
        f"{plural(total.num_empty, 'empty shard')}{each}" if total.num_empty else "",
        _in_training(header),
        f"{plural(num_left_out, 'small parameter')} not drawn" if num_left_out else "",
    ]
    return theme.joined(sentences)


def _flat(total: Totals) -> str:
    """Return the number of flat parameters as text."""
    return f", packed into {plural(total.num_flat, 'flat parameter')}" if total.num_flat else ""


def _in_training(header: Header) -> str:
    """Return what training adds to the parameters on a rank, as text."""
    most = max((at_rest(header, rank) for rank in _fullest(header)), key=lambda held: held.total)
    amounts = format_bytes(most.grads), format_bytes(most.adam)
    return f"training adds {amounts[0]} of gradients and up to {amounts[1]} of Adam state" if most.grads else ""


def _fullest(header: Header) -> range:
    """Return shard-ranks that include the fullest: 0, which has most rows; all where some of its rows may be frozen."""
    params = [param for unit in header.units if unit.in_use for param in unit.params]
    return range(max(len(param.rows_per_rank) for param in params) if any(p.use_orig_params for p in params) else 1)


def _places(groups: list[Group], *, has_policy: bool) -> Iterator[Place]:
    """Yield the rows of the picture from the top: a heading per run of alike units, then its bars.

    Args:
        groups: parameters that share a bar.
        has_policy: whether the subtitle already has the policy of all units.
    """
    for _, run in groupby(groups, key=lambda group: group[0].unit.index):
        members = list(run)
        policy = "" if has_policy else _policy(members[0][0].unit)
        yield from _rows(LabelRow(_heading(members) + policy, is_heading=True))
        for member in members:
            if _is_flat(member) and (cuts := _cuts(member[0])):
                yield from _rows(LabelRow(cuts))
            yield member
            if _is_flat(member):
                yield LabelRow()  # its bar is higher


def _rows(line: LabelRow) -> Iterator[LabelRow]:
    """Yield a text row and the empty rows that its further lines need."""
    yield line
    yield from [LabelRow()] * (line.num_rows - 1)


def _cuts(flat: ParamShards) -> str:
    """Return which parameters of a flat one are split over ranks, as their pieces may be too small for a label."""
    found = by_value((piece.shard_rank, piece.part.fqn) for piece in pieces(flat.param))
    cut = [f"{_short(flat, fqn)} ({ranges(ranks)})" for fqn, ranks in found.items() if len(ranks) > 1]
    more = f" and {len(cut) - _MAX_CUTS} more" if len(cut) > _MAX_CUTS else ""
    whose = "ranks" if flat.unit.replicate_size == 1 else "shard-ranks"
    return f"cut between {whose}: {', '.join(cut[:_MAX_CUTS])}{more}" if cut else ""


def _short(flat: ParamShards, fqn: str) -> str:
    return theme.shorten(fqn.removeprefix(f"{flat.unit.name}."), _LABEL_LETTERS)


def _heading(members: list[Group]) -> str:
    units = {part.unit.index: part.unit for group in members for part in group}
    name = theme.shorten(join_names([unit_words(unit.name) for unit in units.values()]), _NAME_LETTERS)
    at_rest = format_bytes(totals(unit_shards(members[0][0].unit)).bytes_at_rest)
    return f"{name}: {at_rest}{' each' if len(units) > 1 else ''} on a rank"


def _policy_of_all(header: Header) -> str:
    """Return the policy that all units share; empty if it is the default or they differ."""
    policies = {_policy(unit) for unit in header.units if unit.in_use}
    return policies.pop() if len(policies) == 1 else ""


def _policy(unit: Unit) -> str:
    """Return what differs from the default in how a unit is stored and computed; plain text."""
    own, resharded = unit.params[0].dtype, unit.reshard_after_forward
    parts = [
        f"computes in {unit.compute_dtype}" if unit.compute_dtype != own else "",
        f"reduces in {unit.reduce_dtype}" if unit.reduce_dtype != unit.compute_dtype else "",
        "shards kept in host memory" if unit.offload else "",
        f"on {resharded} ranks after forward" if type(resharded) is int else "",
    ]
    return "".join(f", {theme.shorten(part)}" for part in parts if part)


def _segments(y: int, place: Place, columns: int, finest: float) -> Iterator[Segment]:
    """Yield the segments of one row, left to right; none for a heading."""
    if isinstance(place, LabelRow):
        return
    if _is_flat(place):
        yield from _flat_segments(y, place, columns, finest)
        return
    part, about = place[0], _about(place)
    colours = theme.rank_colours(part.num_shards)
    for first, last in _runs(part):
        for role, begin, width in _pieces(part, first, last, columns):
            text, hover = _words(role, part, first, last)
            look = colours[first] if role == "held" else (theme.CLEAR, theme.INK)
            yield Segment(role=role, y=y, begin=begin, width=width, colours=look, text=text, hover=about + hover)


def _pieces(part: ParamShards, first: int, last: int, columns: int) -> Iterator[tuple[Role, float, float]]:
    """Yield ``(role, begin, width)`` of the storage of some neighbouring shard-ranks."""
    held, padding = part.param.rows_per_rank[first], part.padding_rows[first]
    gap = min(0.1, 0.004 * columns)
    begin = first * columns / part.num_shards + gap / 2
    width = (last + 1 - first) * columns / part.num_shards - gap
    if held:
        yield "held", begin, width * held / (held + padding)
    if padding:
        share = padding / (held + padding)
        yield ("padding" if held else "empty shard"), begin + width * (1 - share), width * share


def _flat_segments(y: int, group: Group, columns: int, finest: float) -> Iterator[Segment]:
    """Yield the segments of a flat parameter, rank by rank, and its padding; narrow neighbours are merged."""
    flat = group[0]
    room, colours = flat.param.padded_rows, theme.rank_colours(flat.num_shards)
    gap = min(0.1, 0.004 * columns)
    scale = (columns / flat.num_shards - gap) / max(room, 1)

    def segment(role: Role, begin: int, end: int, rank: int, text: str, hover: str) -> Segment:
        left = rank * columns / flat.num_shards + gap / 2 + (begin - rank * room) * scale
        width = (end - begin) * scale
        look = colours[rank] if role == "held" else (theme.CLEAR, theme.INK)
        place = {"y": y + 0.5, "height": _FLAT_BAR, "begin": left, "width": width}
        return Segment(role=role, colours=look, text=text, hover=_about(group) + hover, **place)

    for several in _side_by_side(pieces(flat.param), finest / scale):
        first, last = several[0], several[-1]
        text = "" if len(several) > 1 else _cut_name(flat, first)
        hover = "<br>".join(_piece_words(flat, piece) for piece in several[:_MAX_LINES])
        more = f"<br>and {len(several) - _MAX_LINES} more" if len(several) > _MAX_LINES else ""
        yield segment("held", first.begin, last.end, first.shard_rank, text, hover + more)
    for rank, rows in enumerate(flat.padding_rows):
        if rows:
            role: Role = "padding" if rows < room else "empty shard"
            text, hover = _words(role, flat, rank, rank)
            yield segment(role, (rank + 1) * room - rows, (rank + 1) * room, rank, text, hover)


def _side_by_side(found: Sequence[Piece], finest: float) -> Iterator[list[Piece]]:
    """Yield each piece alone, but neighbours on one rank with less than ``finest`` elements each together."""
    for _, run in groupby(enumerate(found), key=lambda p: (p[1].shard_rank, p[0] if _numel(p[1]) >= finest else -1)):
        yield [piece for _, piece in run]


def _numel(piece: Piece) -> int:
    return piece.end - piece.begin


def _cut_name(flat: ParamShards, piece: Piece) -> str:
    name = theme.escape(_short(flat, piece.part.fqn))
    return f"{_BEFORE if piece.is_begun_before else ''}{name}{_AFTER if piece.goes_on else ''}"


def _piece_words(flat: ParamShards, piece: Piece) -> str:
    first, last = piece.own
    elements = (
        "all elements" if last - first + 1 == piece.part.numel else f"elements {first}-{last} of {piece.part.numel}"
    )
    size = format_bytes(_numel(piece) * flat.param.itemsize)
    name = theme.full(piece.part.fqn)
    shape = f"{list(piece.part.shape)}{_of_whole(piece.part)}"
    return f"{_who(piece.shard_rank, piece.shard_rank)}: {name} {shape}: {elements}, {size}"


def _of_whole(param: Param | FlatPart) -> str:
    """Return the global shape if tensor parallelism splits the parameter; else empty."""
    return f", this rank's part of {list(param.global_shape)}" if param.global_shape != param.shape else ""


def _runs(part: ParamShards) -> Iterator[tuple[int, int]]:
    """Yield first and last of the shard-ranks that share a segment."""
    if part.num_shards <= MAX_COLUMNS:
        yield from ((i, i) for i in range(part.num_shards))
        return
    for _, run in groupby(range(part.num_shards), key=lambda i: part.param.rows_per_rank[i]):
        members = list(run)
        yield members[0], members[-1]


def _about(group: Group) -> str:
    param = group[0].param
    names = theme.full(join_names([part.param.fqn for part in group]))
    trainable = "" if param.trainable else ", frozen"
    shape = f"{list(param.shape)} {theme.escape(theme.shorten(param.dtype))}{_of_whole(param)}"
    return f"<b>{names}</b><br>{shape}{trainable}<br>"


def _words(role: Role, part: ParamShards, first: int, last: int) -> tuple[str, str]:
    """Return the label of a segment, and what its hover adds."""
    param = part.param
    if role != "held":
        rows = part.padding_rows[first]
        nothing = "padding" if role == "padding" else "empty shard, all padding"
        wasted = format_bytes(rows * part.row_bytes)
        return ("empty" if role == "empty shard" else ""), f"{_who(first, last)}: {nothing}: {rows} rows, {wasted}"
    rows, begin = param.rows_per_rank[first], part.begin_rows[first]
    end = part.begin_rows[last] + rows - 1
    span = f"row {begin}" if begin == end else f"rows {begin}-{end}"
    local = [rows if dim == param.shard_dim else size for dim, size in enumerate(param.shape)]
    return span, (
        f"{_who(first, last)}: {span} of {sum(param.rows_per_rank)} along dim {param.shard_dim}<br>"
        f"a shard of {local}, {format_bytes(rows * part.row_bytes)}; "
        f"{format_bytes(part.bytes_at_rest)} kept between uses"
    )


def _who(first: int, last: int) -> str:
    return f"shard-{label(range(first, last + 1))}"


def _add_bars(fig: go.Figure, segments: list[Segment]) -> None:
    for role, hatch in _HATCHES.items():
        some = [segment for segment in segments if segment.role == role]
        if some:
            line = {"color": theme.GRID, "width": [int(bool(hatch) or s.height > _BAR) for s in some]}
            pattern = {"shape": hatch, "fgcolor": _HATCH_COLOUR, "bgcolor": theme.CLEAR, "size": 7, "solidity": 0.2}
            # plotly draws no pattern if each bar has its own colour
            marker = {"color": theme.CLEAR if hatch else [s.colours[0] for s in some], "line": line, "pattern": pattern}
            fig.add_bar(**_bar(some), marker=marker, name=role, showlegend=bool(hatch))


def _bar(segments: list[Segment]) -> dict[str, object]:
    return {
        "orientation": "h",
        "y": [s.y for s in segments],
        "base": [s.begin for s in segments],
        "x": [s.width for s in segments],
        "width": [s.height for s in segments],
        "text": [s.text for s in segments],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "insidetextfont": {"color": [s.colours[1] for s in segments]},
        "textangle": 0,
        "hovertext": [s.hover for s in segments],
        "hoverinfo": "text",
    }


def _add_labels(fig: go.Figure, places: list[Place]) -> None:
    """Label the right edge with the bytes that a rank keeps of each parameter."""
    sizes = {_middle(y, p): _size(p) for y, p in enumerate(places) if not isinstance(p, LabelRow)}
    fig.add_scatter(x=[None], y=[None], yaxis="y2", showlegend=False, hoverinfo="skip")
    fig.update_layout(
        yaxis2={
            "overlaying": "y",
            "side": "right",
            "range": [len(places) - 0.4, -0.6],
            "tickmode": "array",
            "tickvals": list(sizes),
            "ticktext": list(sizes.values()),
            "title": {"text": "bytes per rank", "standoff": 12},
            "showgrid": False,
            "showline": False,
        }
    )


def _size(group: Group) -> str:
    """Return the bytes that a rank keeps of a parameter; of several in a unit, ``"4.00 KiB each"``."""
    has_more = len({part.unit.index for part in group}) < len(group)
    return f"{format_bytes(group[0].bytes_at_rest)}{' each' if has_more else ''}"


def _over_bars(places: list[Place], pixels: float, left: int = 0) -> list[dict[str, object]]:
    """Return the texts above the bars as annotations.

    Args:
        places: the rows of the picture.
        pixels: maximum length of a line.
        left: pixels by which the lines begin left of the bars.
    """
    found = []
    for y, place in enumerate(places):
        if isinstance(place, LabelRow) and place.text:
            text = "<br>".join(map(theme.escape, place.lines(pixels)))
            found.append(
                {
                    "x": 0,
                    "xref": "paper",
                    "xanchor": "left",
                    "xshift": -left,
                    "y": y + (place.num_rows - 1) / 2,
                    "yref": "y",
                    "align": "left",
                    "text": f"<b>{text}</b>" if place.is_heading else text,
                    "showarrow": False,
                }
            )
    return found


def _on_page(fig: go.Figure, places: list[Place], width: int) -> dict[str, object]:
    """Return the layout changes for a page ``width`` pixels wide.

    On narrow pages the bytes on a rank are below the names, and the texts over the bars begin at the left edge.
    """
    x, y = fig.layout.xaxis.to_plotly_json(), fig.layout.yaxis.to_plotly_json()
    if width >= theme.NARROWEST:
        plot = width - sum(sides(fig))
        columns = apart(x["tickvals"], x["ticktext"], plot / x["range"][1])
        return {"annotations": _over_bars(places, plot), "xaxis": x | columns}
    left = round(_LABEL_SHARE * width)
    plot = width - left - SIDE
    groups = {y: place for y, place in enumerate(places) if not isinstance(place, LabelRow)}
    bars = {_middle(y, group): _small_tick(group, left) for y, group in groups.items()}
    high = max(_ROW_HEIGHT, _SMALL_LINE * max(text.count("<br>") + 1 for text in bars.values()) + 4)
    title = in_lines(theme.plain(x["title"]["text"]), plot + min(left, SIDE), _AXIS_LETTER)
    title += in_lines(_BESIDE, plot + min(left, SIDE), _AXIS_LETTER)
    columns = apart(x["tickvals"], x["ticktext"], plot / x["range"][1])
    return {
        "annotations": _over_bars(places, width - 2 * SIDE, left - SIDE),
        "margin": {"l": left, "r": SIDE},
        "drawn": high * len(places),
        "below": theme.LEGEND_LINE * (len(title) - 1),
        "yaxis": y | {"ticktext": list(bars.values()), "tickfont": {"size": 11}, "automargin": False},
        "yaxis2": fig.layout.yaxis2.to_plotly_json() | {"visible": False, "automargin": False},
        "xaxis": x | columns | {"title": {"text": "<br>".join(map(theme.escape, title)), "standoff": 8}},
    }


def _small_tick(group: Group, pixels: int) -> str:
    """Return the label of a bar on a narrow page: its name, and below it its shape and the bytes on a rank."""
    letters = int((pixels - 2 * _STANDOFF) / _SMALL_LETTER)
    name, shape = _name_and_shape(group)
    num_bytes = _size(group).replace(" ", _FIXED_SPACE)
    below = in_lines(f"{shape}, {num_bytes}", letters, 1)
    return "<br>".join(map(theme.escape, [theme.shorten(name, letters), *below]))


def _is_flat(place: Place) -> bool:
    return not isinstance(place, LabelRow) and bool(place[0].param.parts)


def _middle(y: int, group: Group) -> float:
    return y + 0.5 if _is_flat(group) else y


def _set_axes(fig: go.Figure, places: list[Place], header: Header, num_shards: set[int]) -> None:
    columns = max(num_shards)
    bars = {_middle(y, place): _tick(place) for y, place in enumerate(places) if not isinstance(place, LabelRow)}
    fig.update_layout(
        yaxis_ticklabelstandoff=_STANDOFF,
        yaxis_range=[len(places) - 0.4, -0.6],
        yaxis_tickmode="array",
        yaxis_tickvals=list(bars),
        yaxis_ticktext=list(bars.values()),
        yaxis_showgrid=False,
    )
    shown = range(0, columns, -(-columns // _MAX_TICKS)) if len(num_shards) == 1 else range(0)
    labels = _columns(header, columns, shown)
    copies = max(unit.replicate_size for unit in header.units if unit.in_use)
    whose = f"rank of the first of {copies} copies" if copies > _MAX_COPIES else "rank"
    room = "elements" if any(_is_flat(place) for place in places) else "rows"
    fig.update_xaxes(
        title_text=f"{whose} (column: its share of the {room})",
        range=[0, columns],
        tickmode="array",
        tickvals=[i + 0.5 for i in shown],
        ticktext=labels,
        tickangle=0,
        ticks="",
        showgrid=False,
        showline=False,
    )


def _columns(header: Header, columns: int, shown: range) -> list[str]:
    """Return the label of each column: the ranks with the same shard, or the shard-rank under tensor parallelism."""
    copies = max(unit.replicate_size for unit in header.units if unit.in_use)
    if columns * copies != max(header.world_size, columns):
        return [_who(i, i) for i in shown]
    # a mesh is (replicate, shard): shard-rank i of every copy is rank i, i + F, i + 2 F, ...
    ranks = [range(i, columns * copies, columns) for i in shown]
    if copies > _MAX_COPIES:
        return [f"{same[0]}" for same in ranks]
    return [label(same) if columns * copies <= 4 else ranges(same) for same in ranks]


def _tick(group: Group) -> str:
    name, shape = _name_and_shape(group)
    return theme.escape(f"{theme.shorten(name, max(_LABEL_LETTERS - len(shape) - 1, 18))} {shape}")


def _name_and_shape(group: Group) -> tuple[str, str]:
    if _is_flat(group):
        return plural(len(group[0].param.parts), "parameter"), f"[{group[0].param.shape[0]}]"
    names = join_names([part.param.fqn.removeprefix(f"{part.unit.name}.") for part in group])
    param = group[0].param
    whole = f" of {list(param.global_shape)}" if param.global_shape != param.shape else ""
    dim = f" by dim {param.shard_dim}" if param.shard_dim else ""
    return names, f"{list(param.shape)}{whole}{dim}"
