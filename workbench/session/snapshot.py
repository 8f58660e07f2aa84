"""A snapshot of a cluster for live views: the trace so far, and the state of each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from workbench.events import Unit
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.rank_messages import Position
from workbench.reports.cursor import Cursor
from workbench.reports.step_progress import Progress
from workbench.reports.stop_positions import State, state_of
from workbench.trace.columns import Trace

Exchange = Literal["", "start", "stop", "open"]
"""The command that is replacing the ranks, or the record shown instead of them; empty: none."""


@dataclass(frozen=True, kw_only=True)
class ActiveRequest:
    """The request under way.

    Attributes:
        words: its name, such as ``%fsdp step 40``, or ``a cell``.
        is_stopped: whether the ranks are stopped inside it.
        stop: where they are stopped, in words; empty: not stopped.
        reasons: the breakpoints that stopped them, and the values that these met, in words.
        in_background: whether a thread waits for it instead of the notebook.
        progress: progress of its steps; None: it has none, or none is known yet.
    """

    words: str
    is_stopped: bool = False
    stop: str = ""
    reasons: tuple[str, ...] = ()
    in_background: bool = False
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class LastResult:
    """The result of the last request, from any caller.

    Attributes:
        count: number of requests that have ended; a new value means a new result.
        line: name of the request, such as ``%fsdp step 40``, or ``a cell``.
        text: its result or its error.
        is_error: whether it failed, was cancelled, or its report has a problem, such as a loss that is NaN.
    """

    count: int
    line: str
    text: str
    is_error: bool


@dataclass(frozen=True, kw_only=True)
class ActivePolicy:
    """A sharding of the models, and its first step.

    Attributes:
        from_step: the step under way when it took effect, or the next one.
        units: units in use.
    """

    from_step: int
    units: tuple[Unit, ...]


@dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    """The data of a live view.

    Attributes:
        trace: the trace so far.
        running: whether there are ranks.
        exchange: whether they are being started or stopped.
        waits_for: what a start or an attach waits for, such as ``starting 4 ranks, 12 s: importing torch``; empty: no
            wait, or a short one.
        states: state of each rank, by number; empty without ranks.
        positions: last known position of each rank.
        losses: how each lost rank was lost.
        output: version of the log of what the ranks printed.
        holder: the other notebook that controls the ranks, in words; empty: none.
        is_free: whether the holder has released them, so that they can be attached.
        cursor: end of the part of the trace that the views show; None: all of it.
        record: name of the file that the trace was loaded from; empty: recorded by ranks.
        is_live: whether the run of ``record`` still writes.
        under_way: the request under way; None: none.
        ended: the result of the last request; None: none has ended.
        breakpoints: breakpoints in the order they were added.
        policies: all policies so far, oldest first.
    """

    trace: Trace
    running: bool = False
    exchange: Exchange = ""
    waits_for: str = ""
    states: Mapping[int, State] = field(default_factory=dict)
    positions: Mapping[int, Position] = field(default_factory=dict)
    losses: Mapping[int, str] = field(default_factory=dict)
    output: int = 0
    holder: str = ""
    is_free: bool = False
    cursor: Cursor | None = None
    record: str = ""
    is_live: bool = False
    under_way: ActiveRequest | None = None
    ended: LastResult | None = None
    breakpoints: tuple[Breakpoint, ...] = ()
    policies: tuple[ActivePolicy, ...] = ()

    @property
    def fault(self) -> str:
        """Name of the fault that is injected, as :class:`Position` has it; empty: none is known."""
        return next((position.fault for position in self.positions.values() if position.fault), "")


def pulse(
    trace: Trace,
    alive: Sequence[bool],
    positions: Mapping[int, Position],
    state: Callable[[int, Position], State] = lambda rank, position: state_of(position),
) -> ClusterSnapshot:
    """Return the snapshot of running ranks.

    Args:
        trace: the trace so far.
        alive: for each rank, whether it can be reached.
        positions: last known positions, by rank.
        state: returns the state of a rank at a position.
    """
    return ClusterSnapshot(
        trace=trace,
        running=True,
        states={
            rank: "gone" if not is_alive else state(rank, positions[rank]) if rank in positions else "no answer"
            for rank, is_alive in enumerate(alive)
        },
        positions=dict(positions),
    )
