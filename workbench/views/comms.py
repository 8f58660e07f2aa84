"""Communication of a step by unit and kind, next to what is expected; differences are marked.

Payload is the logical size of a collective. Bytes sent are those of a ring over the participating ranks, computed from
the payload: the actual traffic depends on the backend and is not in a trace. With several hosts, the view shows instead
the bytes that a host sends to others, computed from the algorithm of the unit's backend.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import plotly.graph_objects as go

from workbench.base.text_formats import format_bytes, format_duration, plural, time_unit
from workbench.events import REDUCTIONS, Kind
from workbench.replay.collectives import Comparison, compare, ring_bytes
from workbench.replay.device import ClockSource
from workbench.replay.grouping import by_value, join_names, label, pattern
from workbench.replay.units import engine_words, model_order, unit_name, unmanaged_notes, unseen_words
from workbench.trace.columns import Trace
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name
from workbench.views import theme
from workbench.views.responsive import SIDE, on_pages
from workbench.views.unit_selection import meant
from workbench.views.window import window

MAX_UNFOLDED = 24
"""Rows drawn one by one; with more, units that differ only in a number share a row."""

MAX_ROWS = 60

_BAR_GAP = 0.4  # of a row
_ROW_HEIGHT, _HIGHER_ROW = 38, 54  # pixels: two lines, and three
_LINE_HEIGHT, _LINE_LETTER, _BAR_HEIGHT, _SPACE = 15, 6.5, 16, 8  # pixels, where the lines are above the bar
_LABEL_LETTERS = 20  # characters of a name left of the table
_LINE_LETTERS = 25  # characters of a line below it
_LABEL_WIDTH = 150  # pixels of name and lines
_RANKS_LETTERS = 10  # characters of a list of ranks; longer ones become a count


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the picture.

    Attributes:
        said: measured and expected values; times are means over the units.
        units: the units that share the row.
    """

    comparison: Comparison
    units: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table.

    Attributes:
        heading: heading of two lines.
        width: in pixels.
        text: returns the text of a row.
        is_time: whether it shows times.
        is_of_hosts: True: only with several hosts; False: only with one; None: always.
    """

    heading: str
    width: int
    text: Callable[[Comparison], str]
    is_time: bool = False
    is_of_hosts: bool | None = None


def comms(trace: Trace, *, step: int | None = None, unit: str | None = None) -> go.Figure:
    """Count collectives of a step per unit: calls, bytes (also between hosts) and time, next to the expected numbers.

    Args:
        trace: what happened.
        step: which step; None: the last one that ended.
        unit: count those of this unit alone: a name, a pattern such as ``blocks.*``, or ``(root)``; None: all.

    Raises:
        UsageError: the trace has nothing of this step, or no such unit.
    """
    wanted = {each.index for each in meant(trace.header.units, unit)}
    if window(trace, step, 1).last < 0:
        return theme.empty(theme.NO_STEP)
    shown, rows, clock = comparisons(trace, step)
    rows = tuple(row for row in rows if unit is None or row.unit in wanted)
    if not rows:
        why = unseen_words(trace.header) or "with one rank per shard there is nothing to send"
        whom = "" if unit is None else f" for {theme.shorten(unit)}"
        return theme.empty(f"No rank communicated in {step_name(shown)}{whom}: {why}.")
    drawn, num_left_out = _most_telling(_fold(trace.header, _in_order(trace.header, rows)))
    whose = "" if unit is None else f", {theme.shorten(unit)}"
    fig = theme.figure(
        f"{step_name(shown).capitalize()}{whose}: {_verdict(trace.header, rows)}",
        _subtitle(trace.header, shown, rows, num_left_out, clock),
        barmode="stack",
        bargap=_BAR_GAP,
        **theme.legend_below(len({row.comparison.kind for row in drawn}) + 1, 130),
    )
    has_times = clock is not ClockSource.ENQUEUED
    each = _HIGHER_ROW if any(tick.count("<br>") > 1 for tick in _ticks(trace.header, drawn)) else _ROW_HEIGHT
    fig.update_layout(height=fig.layout.margin.t + fig.layout.margin.b + each * (len(drawn) + 1))
    columns = [
        column
        for column in _COLUMNS
        if (has_times or not column.is_time) and column.is_of_hosts in {None, _are_on_several_hosts(rows)}
    ]
    _add_table(fig, trace.header, drawn, columns)
    if has_times:
        _add_bars(fig, trace.header, drawn)
    title = f"issue to end [{_scale(drawn)[1]}]"
    fig.update_xaxes(rangemode="tozero", title_text=title, nticks=6, visible=has_times)
    return on_pages(fig, lambda width: _on_page(fig, trace.header, drawn, columns, width))


def comparisons(trace: Trace, step: int | None) -> tuple[int, tuple[Comparison, ...], ClockSource]:
    """Return the step to show, its rows, and the clock of its times.

    The times are the device's once the device has finished the step.

    Args:
        trace: what happened; some step has begun.
        step: which step; None: the last one with expected numbers (a running step has none), or else the last one.

    Raises:
        UsageError: the trace has nothing of ``step``.
    """
    chosen = window(trace, step, 2 if step is None else 1)
    drawn = chosen.drawn(trace)
    part, shown = drawn.host_trace, chosen.last
    rows = compare(part, shown)
    for earlier in range(chosen.last - 1, chosen.first - 1, -1):
        before = () if any(row.expected for row in rows) else compare(part, earlier)
        if any(row.expected for row in before):
            shown, rows = earlier, before
    if drawn.clock is ClockSource.DEVICE and shown != chosen.last:
        drawn = replace(chosen, last=shown).drawn(trace)
    if drawn.clock is ClockSource.DEVICE and drawn.is_whole:
        return shown, compare(drawn.trace, shown), ClockSource.DEVICE
    return shown, rows, ClockSource.ENQUEUED if trace.header.is_enqueued else ClockSource.HOST


def _in_order(header: Header, rows: Sequence[Comparison]) -> list[Comparison]:
    places = {unit: place for place, unit in enumerate(model_order(header))}
    return sorted(rows, key=lambda row: places.get(row.unit, len(places)))


def _fold(header: Header, rows: Sequence[Comparison]) -> list[Row]:
    if len(rows) <= MAX_UNFOLDED:
        return [Row(comparison=row, units=(row.unit,)) for row in rows]
    found: dict[Hashable, list[Comparison]] = {}
    for row in rows:
        expected = row.expected and (row.expected.calls, row.expected.num_bytes)
        alike = (pattern(unit_name(header, row.unit)), row.kind, row.num_ranks)
        crossing = None if row.crossing is None else tuple(row.crossing.items())
        key = (alike, row.ranks, row.calls, row.num_bytes, expected, crossing)
        found.setdefault(key, []).append(row)
    return [_together(rows) for rows in found.values()]


def _together(alike: list[Comparison]) -> Row:
    time_ns = sum(row.time_ns for row in alike) / len(alike)
    exposed_ns = sum(row.exposed_ns for row in alike) / len(alike)
    total = replace(alike[0], time_ns=time_ns, exposed_ns=exposed_ns)
    return Row(comparison=total, units=tuple(row.unit for row in alike))


def _most_telling(rows: list[Row]) -> tuple[list[Row], int]:
    """Return the rows that fit into the picture (differences first, then most bytes), and how many are left out."""
    by_weight = sorted(range(len(rows)), key=lambda i: (not rows[i].comparison.differs, -rows[i].comparison.num_bytes))
    return [rows[i] for i in sorted(by_weight[:MAX_ROWS])], len(by_weight[MAX_ROWS:])


def _verdict(header: Header, rows: Sequence[Comparison]) -> str:
    """Return what was issued against what was expected, in one sentence."""
    expected = [row for row in rows if row.expected]
    if not expected and not any(unit.params for unit in header.units):
        return "no parameters are known, so there are no expected numbers to compare with"
    if not expected and all(row.unit < 0 for row in rows):
        return "collectives of no unit, so there are no expected numbers to compare with"
    if not expected:
        return "only partly recorded, so there are no expected numbers to compare with"
    sets = list(dict.fromkeys(row.ranks for row in expected))
    members = [frozenset(ranks) for ranks in sets]
    everyone = sorted(frozenset().union(*members))
    issued = by_value((rank, tuple(rank in ranks for ranks in members)) for rank in everyone)  # by the rows they are in
    alike: dict[str, list[int]] = {}
    for is_in, ranks in issued.items():
        chosen = {some for some, here in zip(sets, is_in, strict=True) if here}
        alike.setdefault(_totals([row for row in expected if row.ranks in chosen]), []).extend(ranks)
    if len(alike) > 1:
        return "ranks differ: " + "; ".join(f"{label(same)}: {text}" for text, same in list(alike.items())[:3])
    (text,) = alike
    if any(row.differs for row in expected):
        return f"{_passes(expected)}{text}: not as expected"
    return _accumulated(expected) or f"{_passes(expected)}{text}: as expected"


def _passes(rows: Sequence[Comparison]) -> str:
    """Return ``"3 forward/backward passes: "`` unless there was one of each; empty also if models differ."""
    found = {row.expected.num_passes for row in rows if row.expected}
    if found == {(1, 1)} or len(found) > 1:
        return ""
    ((forward, backward),) = found
    if forward == backward:
        return f"{forward} forward/backward passes: "
    return f"{forward} forward and {backward} backward passes: "


def _accumulated(rows: Sequence[Comparison]) -> str:
    """Return ``"3 forward/backward passes: 27 = 3 x 9 all-gathers, 5 reduce-scatters (gradients accumulated)"``.

    For rows that are as expected; empty where :func:`_passes` is empty.
    """
    passes = _passes(rows)
    if not passes:
        return ""
    forward, backward = next(row.expected.num_passes for row in rows if row.expected)
    parts = []
    for kind in sorted({row.kind for row in rows}):
        calls = [row.calls for row in rows if row.kind == kind]
        is_in_each = forward == backward and not any(count % forward for count in calls)
        factors = f" = {forward} x {sum(calls) // forward}" if is_in_each else ""
        parts.append(f"{sum(calls)}{factors} {kind.words}{'s' if sum(calls) != 1 else ''}")
    accumulates = any(row.kind in REDUCTIONS and row.calls < backward for row in rows if row.calls)
    return f"{passes}{', '.join(parts)}{' (gradients accumulated)' if accumulates else ''}"


def _totals(rows: Sequence[Comparison]) -> str:
    """Return calls of one rank and expected calls: ``"all-gathers 7 of 7, reduce-scatters 4 of 4"``."""
    parts = []
    for kind in sorted({row.kind for row in rows}):
        some = [row for row in rows if row.kind == kind]
        expected = sum(row.expected.calls for row in some if row.expected)
        parts.append(f"{kind.words}s {sum(row.calls for row in some)} of {expected}")
    return ", ".join(parts)


def _subtitle(header: Header, shown: int, rows: Sequence[Comparison], num_left_out: int, clock: ClockSource) -> str:
    rank = min(row.ranks[0] for row in rows)
    own = [row for row in rows if rank in row.ranks]
    payload, sent = sum(row.num_bytes for row in own), sum(sent_bytes(row) for row in own)
    time_ns, exposed_ns = sum(row.time_ns for row in own), sum(row.exposed_ns for row in own)
    crosses = _crossing(rows) if _are_on_several_hosts(rows) else ""
    sentences = [
        f"{label([rank]).capitalize()}: {format_bytes(payload)} of data"
        f"{'' if crosses else f'; a ring would send {format_bytes(sent)} per rank'}{_carriers(header, own)}",
        crosses,
        engine_words(header),
        unseen_words(header),
        "no times are shown: GPU times were not recorded, and host times say little about collectives"
        if clock is ClockSource.ENQUEUED
        else f"compute waited {format_duration(exposed_ns)} of the {format_duration(time_ns)} that collectives took"
        f"{_whose_times(own)}",
        theme.clock_words(header, clock) if clock is ClockSource.DEVICE else "",
        _differing(header, shown, rows),
        *unmanaged_notes(header),
        f"{plural(num_left_out, 'more row')} not drawn: select units with --unit NAME" if num_left_out else "",
    ]
    return theme.joined(sentences)


def _differing(header: Header, shown: int, rows: Sequence[Comparison]) -> str:
    """Return what a difference from the expected numbers of a step means; empty without one."""
    units = {row.unit for row in rows if row.differs}
    if not units:
        return ""
    if any(header.units[unit].at_step(shown).since_step < 0 for unit in units):
        return "≠: the policy of that step is not recorded, so these are the expected numbers of the newest one"
    return "≠ is expected where units are skipped or unsharded by hand; otherwise it is a bug"


def _whose_times(rows: Sequence[Comparison]) -> str:
    """Return over which ranks the times of rows are means, as text; empty for one rank."""
    num_ranks = {len(row.ranks) for row in rows}
    if num_ranks == {1}:
        return ""
    whose = plural(num_ranks.pop(), "rank") if len(num_ranks) == 1 else "the ranks of each row"
    return f"; times: mean of {whose}"


def _carriers(header: Header, rows: Sequence[Comparison]) -> str:
    """Return the transport of the units' bytes: ``"; transport: shared memory"``; empty if unknown."""
    units = {row.unit for row in rows if 0 <= row.unit < len(header.units)}
    names = dict.fromkeys(header.units[unit].comm for unit in sorted(units) if header.units[unit].comm)
    return f"; transport: {' and '.join(names)}" if names else ""


def sent_bytes(row: Comparison) -> float:
    """Return the bytes that a rank sends on a ring for a row's collectives."""
    return ring_bytes(row.kind, row.num_bytes, max(row.num_ranks, 1))


def _crossing(rows: Sequence[Comparison]) -> str:
    """Return the bytes that hosts send to others for all rows: ``"each of 3 hosts sends 52.8 MiB to others"``."""
    total = Counter[str]()
    for row in rows:
        total.update(row.crossing or {})
    if not total:
        return "hosts send nothing to each other"
    most, hosts = max(total, key=total.__getitem__), plural(len(total), "host")
    sent = format_bytes(total[most])
    if min(total.values()) == total[most]:
        return f"each of {hosts} sends {sent} to others"
    return f"{theme.shorten(most)} sends {sent} to others, the most of {hosts}"


def _are_on_several_hosts(rows: Sequence[Comparison]) -> bool:
    return any(row.crossing is not None for row in rows)


def _crossing_of_one(row: Comparison) -> str:
    """Return the bytes sent to other hosts by the host that sends most."""
    return "-" if row.crossing is None else format_bytes(max(row.crossing.values(), default=0))


def _expected(row: Comparison) -> str:
    """Return ``"= 2 x 193 KiB"``; ``"≠ none"`` for unexpected communication."""
    if row.expected is None:
        return "-"
    calls = row.expected.calls
    form = f"{calls} x {format_bytes(row.expected.num_bytes / calls)}" if calls else "none"
    return f"{'≠' if row.differs else '='} {form}"


_COLUMNS = (
    Column(heading="calls", width=42, text=lambda row: f"{row.calls}"),
    Column(
        heading="payload<br>a ring sends",
        width=96,
        text=lambda row: f"{format_bytes(row.num_bytes)}<br>{format_bytes(sent_bytes(row))}",
        is_of_hosts=False,
    ),
    Column(
        heading="payload<br>crosses",
        width=68,
        text=lambda row: f"{format_bytes(row.num_bytes)}<br>{_crossing_of_one(row)}",
        is_of_hosts=True,
    ),
    Column(heading="expected", width=106, text=_expected),
    Column(
        heading="time<br>exposed",
        width=68,
        text=lambda row: f"{format_duration(row.time_ns)}<br>{format_duration(row.exposed_ns)}",
        is_time=True,
    ),
)


def _add_table(fig: go.Figure, header: Header, rows: list[Row], columns: Sequence[Column]) -> None:
    """Add the table left of the bars: each column is an extra y axis, as only axes can be placed by pixels."""
    whole = sum(column.width for column in columns)
    right = whole
    labels = {"range": [len(rows) - 0.4, -1.6], "tickmode": "array", "tickvals": list(range(-1, len(rows)))}
    plain = {"showgrid": False, "ticks": "", "showline": False, "automargin": False}
    fig.update_layout(yaxis={**labels, **plain, "ticktext": ["", *_ticks(header, rows)], "ticklabelshift": 0})
    fig.update_layout(yaxis_anchor="free", yaxis_position=0, yaxis_shift=-whole)
    for number, column in enumerate(columns, start=2):
        right -= column.width
        texts = [f"<b>{column.heading}</b>", *(_marked(row, column.text(row.comparison)) for row in rows)]
        axis = {"overlaying": "y", "side": "left", "anchor": "free", "position": 0, "shift": -right - 6}
        fig.update_layout({f"yaxis{number}": {**labels, **plain, **axis, "ticktext": texts}})
        fig.add_scatter(x=[None], y=[None], yaxis=f"y{number}", showlegend=False, hoverinfo="skip")
    fig.update_layout(margin_l=whole + _LABEL_WIDTH + 12)


def _marked(row: Row, text: str) -> str:
    return f'<span style="color:{theme.WRONG}">{text}</span>' if row.comparison.differs else text


def _on_page(
    fig: go.Figure, header: Header, rows: list[Row], columns: Sequence[Column], width: int
) -> dict[str, object]:
    """Return the layout changes for a page ``width`` pixels wide: on narrow pages, columns become lines of text.

    The lines are above the row's bar, which takes the width of the page.
    """
    if width >= theme.NARROWEST:
        return {}
    names = [tick.replace("<br>", ", ") for tick in _ticks(header, rows)]
    texts = [
        [f"<b>{line}</b>" for line in _in_lines(name.split(", "), width)]
        + [_marked(row, line) for line in _in_lines(_phrases(row.comparison, columns), width)]
        for name, row in zip(names, rows, strict=True)
    ]
    lines = _LINE_HEIGHT * max(map(len, texts))
    bar = _BAR_HEIGHT if fig.layout.xaxis.visible else 0
    high = lines + bar + 3 * _SPACE
    place = {"x": 0, "xref": "paper", "xanchor": "left", "yref": "y", "yanchor": "bottom", "showarrow": False}
    above = (bar / 2 + _SPACE / 2) / high
    axis = {"range": [len(rows) - 1 + 2 * above, -above - (lines + _SPACE) / high], "showticklabels": False}
    axis |= {"anchor": "x", "position": 0, "shift": 0}
    hidden = {
        f"yaxis{number}": fig.layout[f"yaxis{number}"].to_plotly_json() | {"visible": False}
        for number in range(2, len(columns) + 2)
    }
    return {
        **hidden,
        "annotations": [
            {**place, "y": y - above, "align": "left", "text": "<br>".join(text)} for y, text in enumerate(texts)
        ],
        "yaxis": fig.layout.yaxis.to_plotly_json() | axis,
        "xaxis": fig.layout.xaxis.to_plotly_json() | {"showgrid": False},  # text covers it
        "bargap": 1 - bar / high,
        "margin": {"l": SIDE, "r": 2 * SIDE},
        "drawn": high * len(rows),
    }


def _phrases(comparison: Comparison, columns: Sequence[Column]) -> list[str]:
    """Return the columns of a row as phrases: ``["calls 2", "payload 385 KiB", "a ring sends 289 KiB", ...]``."""
    pairs = [(column.heading.split("<br>"), column.text(comparison).split("<br>")) for column in columns]
    return [f"{name} {text}" for names, texts in pairs for name, text in zip(names, texts, strict=True)]


def _in_lines(phrases: Sequence[str], width: int) -> list[str]:
    """Return escaped phrases, separated by commas, in lines for a page ``width`` pixels wide."""
    room = int((width - 3 * SIDE) / _LINE_LETTER)
    lines = [""]
    for phrase in phrases:
        longer = f"{lines[-1]}, {phrase}" if lines[-1] else phrase
        if len(html.unescape(longer)) < room:
            lines[-1] = longer
        else:
            lines.append(phrase)
    last = len(lines) - 1
    return [line if place == last else f"{line}," for place, line in enumerate(lines)]


def _ticks(header: Header, rows: list[Row]) -> list[str]:
    ranks = {rank for row in rows for rank in row.comparison.ranks}
    several_sizes = len({row.comparison.num_ranks for row in rows}) > 1
    return [_tick(header, row, all_ranks=len(row.comparison.ranks) == len(ranks), size=several_sizes) for row in rows]


def _add_bars(fig: go.Figure, header: Header, rows: list[Row]) -> None:
    divisor, unit = _scale(rows)
    all_ranks = {rank for row in rows for rank in row.comparison.ranks}
    names = {
        y: theme.full(_name(header, row))
        + (f"<br>{theme.full(label(row.comparison.ranks))}" if len(row.comparison.ranks) < len(all_ranks) else "")
        for y, row in enumerate(rows)
    }
    for kind in sorted({row.comparison.kind for row in rows}):
        some = {y: row.comparison for y, row in enumerate(rows) if row.comparison.kind == kind}
        hidden = {y: max(comparison.time_ns - comparison.exposed_ns, 0) / divisor for y, comparison in some.items()}
        _add_bar(fig, hidden, names, (kind.words, theme.KIND_COLOURS[kind], unit))
    exposed = {y: row.comparison.exposed_ns / divisor for y, row in enumerate(rows)}
    _add_bar(fig, exposed, names, ("exposed", theme.KIND_COLOURS[Kind.WAIT], unit))


def _add_bar(fig: go.Figure, lengths: dict[int, float], names: dict[int, str], look: tuple[str, str, str]) -> None:
    name, colour, unit = look
    fig.add_bar(
        y=list(lengths),
        x=list(lengths.values()),
        orientation="h",
        name=name,
        marker_color=colour,
        text=[f"{names[y]}<br>{name}: {length:.3g} {unit}" for y, length in lengths.items()],
        textposition="none",
        hovertemplate="%{text}<extra></extra>",
    )


def _scale(rows: list[Row]) -> tuple[int, str]:
    return time_unit(max(row.comparison.time_ns for row in rows))


def _tick(header: Header, row: Row, *, all_ranks: bool, size: bool) -> str:
    """Return ``"blocks.0"`` and below it ``"all-gather"``; the number of ranks if ``size``, the ranks if not all.

    Text that is too long goes to a third line.
    """
    name = theme.escape(theme.shorten(_name(header, row), _LABEL_LETTERS))
    over = f" over {row.comparison.num_ranks}" if size else ""
    what = f"{row.comparison.kind.words}{over}"
    more = [f"{len(row.units)} x"] if len(row.units) > 1 else []
    more += [] if all_ranks else [_few_letters(row.comparison.ranks)]
    together = ", ".join([what, *more])
    below = together if len(together) <= _LINE_LETTERS else "<br>".join([what, ", ".join(more)])
    return f"{name}<br>{below}"


def _few_letters(ranks: Sequence[int]) -> str:
    named = label(ranks)
    return named if len(named) <= _RANKS_LETTERS else plural(len(ranks), "rank")


def _name(header: Header, row: Row) -> str:
    return join_names(["no unit" if unit < 0 else unit_name(header, unit) for unit in row.units])
