"""Views of a trace: pure functions from a Trace to a plotly figure; nothing here displays or awaits anything.

:data:`VIEWS` names them; :func:`draw` finds one by name. Each answers one question about the whole trace, or about the
step or rank selected by its options. Views send nothing to ranks and change nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import plotly.graph_objects as go

from workbench.errors import UsageError
from workbench.trace.columns import Trace, steps
from workbench.views import theme

# under other names, so that each module keeps its name in this package
from workbench.views.comms import comms as _comms
from workbench.views.layout import layout as _layout
from workbench.views.mark_buttons import NO_MARKS, Marks
from workbench.views.memory import memory as _memory
from workbench.views.projector_theme import for_talk
from workbench.views.responsive import with_narrow
from workbench.views.states import states as _states
from workbench.views.timeline import timeline as _timeline
from workbench.views.training import training as _training

View = Callable[..., go.Figure]
"""``view(trace, **options) -> Figure``."""

VIEWS: dict[str, View] = {
    "layout": _layout,
    "memory": _memory,
    "timeline": _timeline,
    "states": _states,
    "comms": _comms,
    "training": _training,
}

_MARKING = frozenset({"memory", "timeline", "states"})  # the views of events; the others draw totals, or no time


def draw(name: str, trace: Trace, *, talk: bool = False, marks: Marks = NO_MARKS, **options: object) -> go.Figure:
    """Return the figure that the view called ``name`` draws of ``trace``.

    Args:
        name: a key of :data:`VIEWS`.
        trace: what happened so far; left as it is.
        talk: in sizes and colours for a projector.
        marks: events to mark, by the sentence that names them; a view without events leaves them out.
        options: of that view, for example ``step=3``.

    Raises:
        UsageError: no such view; the message names the nearest one.
    """
    if name not in VIEWS:
        near = difflib.get_close_matches(name, VIEWS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"there is no view {name!r}; {hint}the views are: {', '.join(VIEWS)}")
    marked = {"marks": marks} if name in _MARKING else {}
    fig = VIEWS[name](trace, **options, **marked)
    if name != "layout":
        fig = _with_left_edge(fig, trace)
    fig = with_narrow(fig)
    return for_talk(fig) if talk else fig


def _with_left_edge(fig: go.Figure, trace: Trace) -> go.Figure:
    """Add a note if older events are not in the trace, and so neither drawn nor counted."""
    first = max(trace.ranks, key=lambda r: r.start.seq, default=None)
    if first is None or not first.start.seq or not fig.data:
        return fig
    known = steps(trace)
    since = f" before step {known[0]}" if known else ""
    return theme.add_sentence(
        fig, f"Older events{since} are not in the record ({first.start.seq:,} of rank {first.rank})."
    )


__all__ = ["VIEWS", "View", "draw"]
