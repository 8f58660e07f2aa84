"""The strip under a memory picture: resident memory of the whole process, and how much of it is in no memory class.

It has a separate axis: compared with an interpreter and its libraries, a small model would be a thin line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.base.text_formats import byte_unit, format_bytes
from workbench.events import Colour
from workbench.replay.process import ProcessSeries, loading, series
from workbench.replay.spans import Ints, last_ns
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Header
from workbench.views import theme
from workbench.views.span_shapes import TimeAxis

HEIGHT = 150  # pixels
MAX_MOMENTS = 400

BASELINE = "before sharding"
NOT_OWNED = "not the engine's"
OWNED = "the engine's"

_LOOKS = {
    BASELINE: (theme.GRID, "."),
    NOT_OWNED: (theme.COLOURS[Colour.PLAIN], "\\"),
    OWNED: (theme.INK, ""),
}


def process_words(header: Header, shown: Sequence[RankTrace], whole: Sequence[RankTrace]) -> str:
    """Return the peak memory of the process, how much of it the engine does not own, and that of loading; plain text.

    Args:
        header: of the trace.
        shown: the rows that the picture shows, of each rank.
        whole: all rows of the same ranks.
    """
    found = [entry for entry in (series(header, rank_trace) for rank_trace in shown) if len(entry)]
    if not found:
        return "process memory was not sampled"
    highest = max(found, key=lambda entry: int(entry.resident.max()))
    place = int(np.argmax(highest.resident))
    most, owned = int(highest.resident[place]), int(highest.owned[place])
    before = int(highest.baseline[place])
    rest = int(highest.not_owned[place]) - before
    parts = [f"{format_bytes(owned)} {OWNED}", f"{format_bytes(rest)} {NOT_OWNED}"]
    parts += [f"{format_bytes(before)} from before sharding"] if before else []
    words = f"the whole process uses up to {format_bytes(most)}: {', '.join(parts)}"
    return "; ".join([words, *_loading_words(header, whole)])


def _loading_words(header: Header, whole: Sequence[RankTrace]) -> Iterator[str]:
    """Yield what the process that used most of its host's memory while it loaded used after each part."""
    found = {each.rank: used for each in whole if (used := loading(header, each))}
    if found:
        rank = max(found, key=lambda rank: max(found[rank].values()))
        parts = ", ".join(f"{format_bytes(num_bytes)} after {name}" for name, num_bytes in found[rank].items())
        yield f"rank {rank} used {parts}"


def add_process(fig: go.Figure, header: Header, shown: RankTrace, axis: TimeAxis, *, row: int) -> None:
    """Stack the baseline, memory that the engine does not own, and memory that it owns; the top is resident memory.

    Args:
        fig: a memory figure; the strip shares its time axis.
        header: of the trace.
        shown: the rank's rows that the picture shows.
        axis: the time axis.
        row: of the subplot.
    """
    found = series(header, shown, MAX_MOMENTS)
    num_bytes, unit = byte_unit(int(found.resident.max(initial=1)))
    ends = np.maximum.accumulate(np.append(found.t_ns, last_ns(shown.rows)))
    x = axis(ends)
    for name, amount in _parts(found).items():
        if not amount.any():
            continue
        colour, hatch = _LOOKS[name]
        pattern = {"shape": hatch, "fgcolor": colour, "bgcolor": theme.CLEAR, "size": 6, "solidity": 0.25}
        fig.add_scatter(
            x=x,
            y=np.append(amount, amount[-1:]) / num_bytes,
            name=name,
            legendgroup=name,
            showlegend=name not in [trace.name for trace in fig.data],
            mode="lines",
            stackgroup="process",
            line={"shape": "hv", "width": 0, "color": colour},
            **({"fillpattern": pattern, "fillcolor": theme.CLEAR} if hatch else {"fillcolor": colour}),
            hovertemplate=f"%{{y:.4g}} {unit}",
            row=row,
            col=1,
        )
    top = float(np.maximum(found.resident, found.owned).max(initial=1)) / num_bytes
    fig.update_yaxes(title_text=f"process [{unit}]", range=[0, top * 1.08], row=row, col=1)


def _parts(found: ProcessSeries) -> dict[str, Ints]:
    return {BASELINE: found.baseline, NOT_OWNED: found.not_owned - found.baseline, OWNED: found.owned}
