"""The messages between a dashboard in the browser and the kernel: all questions and answers are declared here.

Every question names the ``view`` that asks, and every answer the ``view`` that it is for;
:class:`~workbench.widgets.dashboard.DashboardWidget` adds the latter. A question may omit fields that have a default.
Times are microseconds from the view's origin, without the time in which ranks were held or idle. Numbers are in a
buffer next to the message, in the order of :data:`workbench.live.packing.COLUMNS`.
``static/messages.d.ts`` has the same types for the front end; ``python -m workbench.widgets.generate_js`` writes it.

===================  =====================  ==============================================================
question             answer                 when
===================  =====================  ==============================================================
:class:`AskFeed`     :class:`FeedUpdate`    at once, or with ``wait`` as soon as there is something new
:class:`AskAt`       :class:`MomentReply`   at once
:class:`AskBeside`   :class:`MomentReply`   at once
:class:`AskWindow`   :class:`WindowDetail`  at once
:class:`RunButton`   :class:`ButtonResult`  when the command has finished
:class:`CloseView`   none                   the view is gone
any of them          :class:`QueryRefused`  the question is malformed or cannot be answered
===================  =====================  ==============================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from workbench.events import Kind, UnitState
from workbench.reports.stop_positions import State as Health

Panel = Literal["ranks", "memory", "units", "timeline"]

# ---- questions


@dataclass(frozen=True, kw_only=True)
class AskFeed:
    """Asks what is new.

    Attributes:
        view: who asks.
        wait: answer as soon as there is something, or after a while.
    """

    ask: Literal["feed"] = "feed"
    view: str = ""
    wait: bool = False


@dataclass(frozen=True, kw_only=True)
class AskAt:
    """Asks for all ranks at a time.

    Attributes:
        view: who asks.
        number: comes back with the answer.
        t_us: the time.
    """

    ask: Literal["at"] = "at"
    view: str = ""
    number: int = 0
    t_us: float | int  # JSON has no float that is whole

    def __post_init__(self) -> None:
        _require_finite(self.t_us)


@dataclass(frozen=True, kw_only=True)
class AskBeside:
    """Asks for all ranks some events after a row.

    Attributes:
        view: who asks.
        number: comes back with the answer.
        rank: whose row it is.
        seq: number of the row.
        by: how many events after it; negative: before it.
    """

    ask: Literal["beside"] = "beside"
    view: str = ""
    number: int = 0
    rank: int
    seq: int
    by: int


@dataclass(frozen=True, kw_only=True)
class AskWindow:
    """Asks for all that happened in a part of time.

    Attributes:
        view: who asks.
        number: comes back with the answer.
        from_us: where it begins.
        to_us: where it ends.
    """

    ask: Literal["window"] = "window"
    view: str = ""
    number: int = 0
    from_us: float | int
    to_us: float | int

    def __post_init__(self) -> None:
        _require_finite(self.from_us)
        _require_finite(self.to_us)


@dataclass(frozen=True, kw_only=True)
class RunButton:
    """Asks for what a button says.

    Attributes:
        view: who asks.
        word: of the button, one of ``InitialState.buttons``; or ``break on``, ``break off`` or ``break clear``.
        argument: up to the next what ``next`` goes; where ``break`` stops; which breakpoint, by number, is switched or
            taken away; else empty.
    """

    ask: Literal["do"] = "do"
    view: str = ""
    word: str
    argument: str = ""


@dataclass(frozen=True, kw_only=True)
class CloseView:
    """Says that a view is gone.

    Attributes:
        view: which.
    """

    ask: Literal["bye"] = "bye"
    view: str = ""


def _require_finite(time_us: float) -> None:
    if not math.isfinite(time_us):
        raise ValueError(f"a time is {time_us}, expected a finite number")


Question = AskFeed | AskAt | AskBeside | AskWindow | RunButton | CloseView

# ---- answers


@dataclass(frozen=True, kw_only=True)
class RankHealth:
    """Ranks that are alike now.

    Attributes:
        label: which, in words.
        ranks: which.
        state: what they are doing.
        where: before what they are held; empty: they are not.
    """

    label: str
    ranks: tuple[int, ...]
    state: Health
    where: str


@dataclass(frozen=True, kw_only=True)
class BreakpointState:
    """A breakpoint.

    Attributes:
        id: its number, which ``break clear``, ``break on`` and ``break off`` take.
        text: as it was written, such as ``all_gather:blocks.2 --rank 1``.
        is_on: whether it stops ranks.
    """

    id: int
    text: str
    is_on: bool


@dataclass(frozen=True, kw_only=True)
class RanksAt:
    """Ranks that were alike at a moment.

    Attributes:
        ranks: which.
        label: which, in words.
        doing: what they did last.
        units: state of each unit, by number.
        bytes: live bytes of each class, in the order of ``CATEGORIES``.
        in_use: these together, what is kept for reuse left out.
    """

    ranks: tuple[int, ...]
    label: str
    doing: str
    units: tuple[UnitState, ...]
    bytes: tuple[int, ...]
    in_use: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """All ranks at a moment.

    Attributes:
        t_us: when.
        rank: whose last event it is named after.
        seq: number of that event's row.
        step: in which it was, -1: in none.
        event: what it was, in words.
        ranks: all ranks, alike ones together.
    """

    t_us: float
    rank: int
    seq: int
    step: int
    event: str
    ranks: tuple[RanksAt, ...]


@dataclass(frozen=True, kw_only=True)
class PeakInfo:
    """The highest peak of memory so far of a group of ranks.

    Attributes:
        num_bytes: in use then.
        t_us: when.
        step: in which; -1: in none.
        text: what was going on, in words.
    """

    num_bytes: int
    t_us: float
    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class MovedCursor:
    """Where ``%fsdp back`` has put the cursor.

    Attributes:
        t_us: when that is.
        moment: all ranks there; None: nothing is recorded.
    """

    t_us: float
    moment: Moment | None


@dataclass(frozen=True, kw_only=True)
class OpenSpan:
    """Something that has begun and not ended.

    Attributes:
        track: number of its track.
        kind: of what.
        unit: -1: none.
        start: when it began.
        bytes: that it moves.
    """

    track: int
    kind: Kind
    unit: int
    start: float
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many entries each table in the buffer has.

    Attributes:
        spans, memory, states, steps: of this table.
    """

    spans: int
    memory: int
    states: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What the ranks do, in a word, and why.

    Attributes:
        word: ``empty``: nothing is recorded yet; ``over``: there are no ranks any more, and this is what they recorded.
        why: in words; empty: there is no more to say.
        can_go_on: whether the notebook knows of the stop, and ranks can be let go on; it learns of it after they stand.
    """

    word: Literal["training", "stuck", "stopped", "idle", "over", "dead", "empty"]
    why: str
    can_go_on: bool = False


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What some steps cost.

    Attributes:
        num_steps: how many.
        ms: of a step, in milliseconds, the median.
        exposed: share of it in which compute waited, the median.
        peak_bytes: most bytes in use in the last few of them.
    """

    num_steps: int
    ms: float
    exposed: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class KnobEffect:
    """What the last turn of a knob has changed.

    Attributes:
        what: was turned, in words.
        at_step: the first step after it.
        before: the last steps before it.
        after: the last steps since.
    """

    what: str
    at_step: int
    before: Costs
    after: Costs


@dataclass(frozen=True, kw_only=True)
class FeedUpdate:
    """What a view does not know yet. Its buffer has all tables.

    Attributes:
        view: whom it is for.
        restart: forget what was told before, but for the steps.
        another: these are other ranks than before: forget the steps as well.
        exact: every change is told, not extremes alone.
        groups: ranks, alike ones together; the first is drawn for all.
        tracks: the ranks with tracks in the timeline.
        open: what has not ended, in place of what was said to be so before.
        counts: of the tables.
        begin_us: where the record begins that the kernel has; negative where that is before the first step.
        health: how the ranks are, alike ones together; none without ranks.
        breakpoints: in the order they were added, but for that of ``step --until``.
        status: what they do, in a word, and why.
        whose: whose ranks these are, in words.
        late: which rank the others wait for in the newest finished step, in words; empty: none; None: no step has
            finished since the last time.
        change: what the last turn of a knob has changed, if that is known and new.
        said: a sentence about what there is to see; empty while ranks train.
        clock: whose times the timeline has, and whose the other panels; empty where there is one clock.
        units: names of the units, by number, if there are others than before.
        order: numbers of those that were not undone, from the top, together with ``units``.
        holds: where ranks were held or idle and for how long, ``[[at, length], ...]``, if there are others than before.
        now: all ranks at the newest event, if it is another one.
        peaks: of each group, if anything was recorded.
        has_moved: the cursor of ``%fsdp back`` is elsewhere than before.
        cursor: where it is then; None: at the newest event.
    """

    kind: Literal["feed"] = "feed"
    view: str = ""
    restart: bool
    another: bool
    exact: bool
    groups: tuple[tuple[int, ...], ...]
    tracks: tuple[int, ...]
    open: tuple[OpenSpan, ...]
    counts: Counts
    begin_us: float
    health: tuple[RankHealth, ...]
    breakpoints: tuple[BreakpointState, ...]
    status: RunStatus
    whose: str
    said: str
    clock: tuple[str, ...]
    units: tuple[str, ...] | None = None
    order: tuple[int, ...] | None = None
    holds: tuple[tuple[float, ...], ...] | None = None
    now: Moment | None = None
    peaks: tuple[PeakInfo, ...] | None = None
    late: str | None = None
    change: KnobEffect | None = None
    has_moved: bool = False
    cursor: MovedCursor | None = None


@dataclass(frozen=True, kw_only=True)
class MomentReply:
    """All ranks at a moment that was asked for.

    Attributes:
        view: whom it is for.
        number: of the question.
        moment: None: nothing is recorded there.
    """

    kind: Literal["moment"] = "moment"
    view: str = ""
    number: int
    moment: Moment | None


@dataclass(frozen=True, kw_only=True)
class WindowDetail:
    """What happened in a part of time. Its buffer has all tables; there are no steps in it.

    Attributes:
        view: whom it is for.
        number: of the question.
        from_us, to_us: as it was asked.
        exact: every change is told, not extremes alone.
        counts: of the tables.
    """

    kind: Literal["window"] = "window"
    view: str = ""
    number: int
    from_us: float
    to_us: float
    exact: bool
    counts: Counts


@dataclass(frozen=True, kw_only=True)
class ButtonResult:
    """What came of a button.

    Attributes:
        view: whom it is for.
        word: of the button.
        text: a line; empty: what came of it is seen.
    """

    kind: Literal["said"] = "said"
    view: str = ""
    word: str
    text: str


@dataclass(frozen=True, kw_only=True)
class QueryRefused:
    """A question that cannot be read or answered; nothing was done.

    Attributes:
        view: whom it is for.
        number: of the question; -1: it has none.
        text: why, in words.
    """

    kind: Literal["refused"] = "refused"
    view: str = ""
    number: int
    text: str


Answer = FeedUpdate | MomentReply | WindowDetail | ButtonResult | QueryRefused


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """What the browser has to know from the beginning.

    Attributes:
        buttons: that the ranks can be told things with.
        panels: to be shown.
        sizes: how far ``next`` can go.
    """

    buttons: tuple[str, ...]
    panels: tuple[Panel, ...]
    sizes: tuple[str, ...] = ()
