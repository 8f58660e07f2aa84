"""The part of a trace that a view shows: the last training step, a step by number, or several in a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from workbench.errors import UsageError
from workbench.events import COLLECTIVES, COPIES, WORK, Edge, Kind
from workbench.replay.device import ClockSource, on_device
from workbench.replay.grouping import ranges
from workbench.replay.paused_time import LEAST_IDLE_NS, Cuts, without_holds
from workbench.replay.spans import extent_ns, of_kind, rows_of, unfinished
from workbench.trace.columns import RankTrace, Trace, steps
from workbench.trace.schema import KeyFrame, Rows
from workbench.trace.step_names import step_name

_WORK = (*WORK, *COLLECTIVES, *COPIES)


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnSteps:
    """The rows to draw for some steps, with times on the drawn axis.

    Attributes:
        trace: the ranks' rows.
        cuts: the cuts of the time axis.
        clock: the clock of the times.
        extent_ns: first and last time of any rank: zero and end of the axis in every picture of the window.
        is_whole: whether all rows are included; False while devices have not reached some.
        host: for a device's times, the host's rows by rank; else empty.
        copies: for a device's times, the copies on streams other than compute by rank; else empty.
    """

    trace: Trace
    cuts: Cuts
    clock: ClockSource
    extent_ns: tuple[int, int]
    is_whole: bool = True
    host: Mapping[int, RankTrace] = field(default_factory=dict)
    copies: Mapping[int, Rows] = field(default_factory=dict)

    @property
    def host_trace(self) -> Trace:
        """The ranks' rows with the host's times."""
        return Trace(self.trace.header, tuple(self.host.values())) if self.host else self.trace


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some consecutive training steps, or a trace in which no step has begun yet.

    Attributes:
        first: first step, -1 if there is no step.
        last: last step, included.
    """

    first: int
    last: int

    def __str__(self) -> str:
        if self.last < 0:
            return "Before the first step"
        return step_name(self.first, self.last).capitalize()

    def places(self, rank_trace: RankTrace) -> tuple[int, int]:
        """Return ``(begin, end)``: the positions of a rank's rows in the window, rows between its steps included."""
        if self.last < 0:
            return 0, len(rank_trace.rows)
        return rank_trace.places_of(self.first, self.last)

    def stateless(self, rank_trace: RankTrace) -> RankTrace:
        """Return a rank's rows in the window without the state before them, which takes longer to find."""
        begin, end = self.places(rank_trace)
        return rank_trace.part(begin, end, KeyFrame(seq=rank_trace.start.seq + begin))

    def cut(self, rank_trace: RankTrace) -> RankTrace:
        """Return a rank's rows in the window with the exact state before them."""
        begin, end = self.places(rank_trace)
        return rank_trace.cut(rank_trace.start.seq + begin, rank_trace.start.seq + end)

    def shown(self, trace: Trace) -> tuple[Trace, Cuts]:
        """Return the ranks with rows in the window, with times on the cut axis, and the cuts.

        The state before the rows is left out.
        """
        parts = map(self.stateless, trace.ranks)
        return without_holds(Trace(trace.header, tuple(part for part in parts if len(part.rows))), LEAST_IDLE_NS)

    def drawn(self, trace: Trace) -> DrawnSteps:
        """Return the rows to draw for the window, with device times if there are any, else with host times.

        If some ranks have device times, ranks without them are left out.
        """
        host, cuts = self.shown(trace)
        parts = map(self.stateless, trace.ranks)
        found = [each for part in parts if (each := on_device(trace.rank(part.rank), part, trace.header)) is not None]
        if not found:
            clock = ClockSource.ENQUEUED if trace.header.is_enqueued else ClockSource.HOST
            return DrawnSteps(trace=host, cuts=cuts, clock=clock, extent_ns=extent_ns(host))
        ends = {part.rank: part.end_seq for part in host.ranks}
        moved = Trace(trace.header, tuple(replace(each.part, rows=cuts.rows(each.part.rows)) for each in found))
        begin_ns, end_ns = extent_ns(host)  # the host enqueues work before the device runs it
        return DrawnSteps(
            trace=moved,
            cuts=cuts,
            extent_ns=(begin_ns, max(end_ns, extent_ns(moved)[1])),
            clock=ClockSource.DEVICE,
            is_whole=len(found) == len(host.ranks) and all(each.end_seq == ends[each.part.rank] for each in found),
            host={part.rank: part for part in host.ranks},
            copies={each.part.rank: cuts.rows(each.copies) for each in found},
        )

    def has_ended(self, part: RankTrace) -> bool:
        """Whether a rank's rows in the window include the end of the last step."""
        rows = rows_of(part, (Kind.STEP,))
        return self.last < 0 or bool(((rows["edge"] == Edge.END) & (rows["step"] == self.last)).any())

    def unfinished(self, trace: Trace) -> str:
        """Return ``aborted`` or ``not ended`` if a rank that began the last step did not end it; otherwise empty."""
        return unfinished(trace, self.last)


def window(trace: Trace, step: int | None, count: int) -> Window:
    """Return the window of ``count`` steps up to and including ``step``.

    Args:
        trace: the trace.
        step: the last step to show; None: the last one in which any rank worked, whether or not it has ended.
        count: how many steps; a trace with fewer is shown whole.

    Raises:
        UsageError: the trace has nothing of ``step``, or ``count`` is not positive.
    """
    if count < 1:
        raise UsageError(f"at least one step must be shown, got steps={count}")
    last = _last_step(trace) if step is None else step
    if step is not None and not any(step in rank.steps for rank in trace.ranks):
        raise UsageError(f"the trace has no step {step}; its steps are: {ranges(steps(trace)) or 'none yet'}")
    return Window(first=max(last - count + 1, min(last, 0)), last=last)


def one_rank(trace: Trace, rank: int) -> RankTrace:
    """Return the trace of one rank, as recorded.

    Raises:
        UsageError: the trace has no such rank.
    """
    known = [r.rank for r in trace.ranks]
    if rank not in known:
        raise UsageError(f"the trace has no rank {rank}; its ranks are: {ranges(known) or 'none yet'}")
    return trace.rank(rank)


def _last_step(trace: Trace) -> int:
    """Return the last step with work of a unit or the optimizer, else the last step, else -1."""
    known = steps(trace)
    return next(
        (step for step in reversed(known) if any(_worked(rank, step) for rank in trace.ranks)), max(known, default=-1)
    )


def _worked(rank_trace: RankTrace, step: int) -> bool:
    rows = rank_trace.rows[slice(*rank_trace.places_of(step, step))]
    return bool((of_kind(rows, _WORK) & (rows["step"] == step)).any())
